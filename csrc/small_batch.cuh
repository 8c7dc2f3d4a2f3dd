// Of small_batch.cu: the order of the work, the ring of weights, the rows of x, the two products.

#ifndef MEGAMOE_SMALL_BATCH_CUH
#define MEGAMOE_SMALL_BATCH_CUH

#include "small_batch_routing.cuh"

namespace small_batch {

// What one instance of the kernel is compiled for: rows of x, columns of a product of GEMM 2, and
// the 128-column slabs of weights in one stage of the ring.
template <int kTokens_, int kColumns_, int kSlabs_>
struct Shape {
    static constexpr int kTokens = kTokens_, kColumns = kColumns_, kSlabs = kSlabs_;
    static constexpr int kSlabRows = kColumns * kBlock;  // bytes of intermediate rows per slab
    static constexpr int kScales = kSlabs * (kBlock / kFine) * kColumns;  // per stage
    static constexpr int kStageBytes = kSlabs * (kTileBytes + kSlabRows);
    static constexpr int kRowStride = 33;  // of results of GEMM 1: no bank conflicts
};

// -- the work ------------------------------------------------------------------------------------

// 64 weight rows of one active expert: of w13 for all tokens, or of w2 for one chunk of pairs.
struct Unit {
    bool down;
    int rank, chunk, tile;
};

// This block's units: those of GEMM 1 first, then those of GEMM 2. Units of GEMM 1 go round; where
// they do not come out even, blocks that got one less get more of GEMM 2, by its bytes. A unit of
// GEMM 2 waits for GEMM 1 of its expert, whose weights are asked for long before.
struct Work {
    int block, blocks, tiles1, tiles2, units2;
    int own1, own2;           // units of this block
    int light, head, rounds;  // light blocks, and what they take first of GEMM 2

    __device__ Work(const Args& args, const Active& active)
        : block(blockIdx.x),
          blocks(gridDim.x),
          tiles1(2 * args.intermediate / kTileRows),
          tiles2(args.hidden / kTileRows),
          units2(active.chunks * tiles2) {
        const int units1 = active.ranks * tiles1;
        const int heavy = units1 % blocks;  // the first blocks have one unit more
        own1 = units1 / blocks + (block < heavy);
        light = blocks - heavy;
        rounds = heavy > 0 ? args.hidden / args.intermediate : 0;
        head = rounds * light;
        own2 = 0;
        if (block >= heavy) {
            block -= heavy;
            own2 = min(rounds, (units2 - block + light - 1) / light);
            if (units2 <= block) own2 = 0;
        } else {
            block += light;
        }
        const int left = units2 - head - block;
        if (left > 0) own2 += (left + blocks - 1) / blocks;
    }

    // `block` is from here on the place in the order of GEMM 2, light blocks first.
    __device__ int total() const { return own1 + own2; }

    __device__ Unit operator()(int i, const Tables& tables) const {
        if (i < own1) {
            const int unit = i * blocks + static_cast<int>(blockIdx.x);
            const int rank = unit / tiles1;
            return {false, rank, 0, unit - rank * tiles1};
        }
        const int turn = i - own1, first = block < light ? rounds : 0;
        const int unit =
            turn < first ? turn * light + block : head + (turn - first) * blocks + block;
        const int chunk = unit / tiles2;
        return {true, tables.chunk_rank[chunk], chunk, unit - chunk * tiles2};
    }
};

// -- the ring ------------------------------------------------------------------------------------

// A stage: kSlabs tiles of 64 weight rows x 128 columns, in GEMM 2 as many slabs of intermediate
// rows, and the scales of both.
template <typename S>
struct Ring {
    const Args& args;
    uint64_t *full, *empty;

    // Arrivals at a full barrier: the scales of 32 lanes, the weights, the intermediate rows.
    static constexpr int kFullArrivals = 34, kEmptyArrivals = kGroup / 32;

    __device__ explicit Ring(const Args& args_)
        : args(args_),
          full(shared_at<uint64_t>(args_.at.barriers)),
          empty(full + args_.stages) {}

    __device__ uint8_t* weights(int slot) const {
        return ptx::shared_memory() + slot * S::kStageBytes;
    }
    __device__ uint8_t* rows(int slot) const { return weights(slot) + S::kSlabs * kTileBytes; }
    __device__ float* weight_scale(int slot) const {
        return shared_at<float>(args.at.weight_scale) + slot * 2 * S::kSlabs;
    }
    __device__ float* row_scale(int slot) const {
        return shared_at<float>(args.at.row_scale) + slot * S::kScales;
    }
};

// A place in the stream of stages.
struct Place {
    int slot = 0, parity = 0;

    __device__ void next(int stages) {
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    __device__ void skip(int count, int stages) {
        const int at = slot + count, turns = at / stages;
        slot = at - turns * stages;
        parity ^= turns & 1;
    }
};

__device__ __forceinline__ int slabs_of(const Args& args, bool down) {
    return (down ? args.intermediate : args.hidden) / kBlock;
}

// S::kSlabs divides the slabs of both GEMMs.
template <typename S>
__device__ __forceinline__ int stages_of(const Args& args, bool down) {
    return slabs_of(args, down) / S::kSlabs;
}

// The warp that streams the weights of all units, in order, as far ahead as the ring allows.
template <typename S>
__device__ __forceinline__ void load_weights(const Args& args, const Tables& tables,
                                             const Work& work, const CUtensorMap* w13,
                                             const CUtensorMap* w2) {
    const Ring<S> ring(args);
    const int lane = lane_index();
    Place place;
#pragma unroll 1
    for (int i = 0; i < work.total(); ++i) {
        const Unit unit = work(i, tables);
        const int expert = tables.expert_of[unit.rank];
        const int slabs = slabs_of(args, unit.down);
        const int tiles = unit.down ? work.tiles2 : work.tiles1;
        const CUtensorMap* map = unit.down ? w2 : w13;
        const int row = (expert * tiles + unit.tile) * kTileRows;
        // GEMM 1: a tile has 32 gate rows and 32 up rows, each with scales of their own.
        const float* scale;
        if (unit.down)
            scale = args.w2_scale +
                    (int64_t{expert} * (args.hidden / kBlock) + unit.tile / 2) * slabs + lane;
        else
            scale = args.w13_scale + (int64_t{expert} * (args.intermediate / kTileRows) +
                                      lane % 2 * (args.intermediate / kBlock) + unit.tile / 4) *
                                         slabs + lane / 2;
        const int lanes = unit.down ? S::kSlabs : 2 * S::kSlabs;
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab += S::kSlabs) {
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            uint64_t* full = ring.full + place.slot;
            if (lane < lanes) ptx::copy4(ring.weight_scale(place.slot) + lane, scale + slab);
            ptx::copies_arrive(full);
            if (lane == 0) {
                ptx::arrive_expect(full, S::kSlabs * kTileBytes);
#pragma unroll
                for (int s = 0; s < S::kSlabs; ++s)
                    ptx::copy_box(ring.weights(place.slot) + s * kTileBytes, map,
                                  (slab + s) * kBlock, row, full);
            }
            place.next(args.stages);
        }
    }
}

// The warp that loads the intermediate rows for GEMM 2, when all of an expert's are written.
template <typename S>
__device__ __forceinline__ void load_rows(const Args& args, const Tables& tables,
                                          const Work& work) {
    if (lane_index() != 0) return;
    const Ring<S> ring(args);
    const int slabs = args.intermediate / kBlock;
    Place place;
    // It walks over the stages of GEMM 1 too: a barrier's parity tells neighbouring turns apart,
    // and no more.
    const int before = work.own1 * stages_of<S>(args, false);
#pragma unroll 1
    for (int i = 0; i < before; ++i, place.next(args.stages)) {
        ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
        ptx::arrive(ring.full + place.slot);
    }
#pragma unroll 1
    for (int i = work.own1; i < work.total(); ++i) {
        const Unit unit = work(i, tables);
        while (ptx::load_acquire(args.counters + unit.rank) < work.tiles1) continue;
        ptx::fence_async_proxy();
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab += S::kSlabs) {
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            uint64_t* full = ring.full + place.slot;
            constexpr int kRowBytes = S::kSlabs * S::kSlabRows;
            constexpr int kScaleBytes = S::kScales * sizeof(float);
            const int64_t at = int64_t{unit.chunk} * slabs + slab;
            ptx::arrive_expect(full, kRowBytes + kScaleBytes);
            ptx::copy_bytes(ring.rows(place.slot), args.rows + at * S::kSlabRows, kRowBytes, full);
            ptx::copy_bytes(ring.row_scale(place.slot),
                            args.row_scale + at * (kBlock / kFine) * S::kColumns, kScaleBytes,
                            full);
            place.next(args.stages);
        }
    }
}

// -- rows of x -----------------------------------------------------------------------------------

// Byte of column `column` of row `row` in the swizzled image of `rows` rows.
__device__ __forceinline__ int image_at(int row, int column, int rows) {
    const int piece = column % kBlock / 16 ^ row % 8;
    return column / kBlock * rows * kBlock + row * kBlock + piece * 16 + column % 16;
}

// Out of line: rows that are not aligned are rare, and eight loads are much code.
static __device__ __noinline__ uint4 load_unaligned(const uint16_t* from) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = __ldcg(from + 2 * i) | uint32_t{__ldcg(from + 2 * i + 1)} << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ float scale_of(float amax) {
    return __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f);
}

__device__ __forceinline__ uint32_t quantize(float first, float second, float inverse) {
    const float2 two = make_float2(__fmul_rn(first, inverse), __fmul_rn(second, inverse));
    return uint32_t{__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)};
}

// Quantizes rows 0 ... count - 1 of x into shared memory, as `quantize_rows` of
// custom_ops/reference.py does, bit for bit. A thread takes eight columns at a time, and has four
// loads under way; 16 neighbouring lanes have one scale.
template <int kTokens>
struct RowsOfX {
    static constexpr int kPieces = 4;
    uint4 pieces[kPieces];
    int per_row;

    __device__ explicit RowsOfX(const Args& args) : per_row(args.hidden / 8) {}

    __device__ void load(const Args& args, int i, int at, int count) {
        const int row = at / per_row;
        if (row >= count) return;
        const auto* from = static_cast<const uint16_t*>(args.x) + row * args.x_stride +
                           (at - row * per_row) * 8;
        pieces[i] =
            args.aligned_x ? __ldcg(reinterpret_cast<const uint4*>(from)) : load_unaligned(from);
    }

    __device__ void start(const Args& args, int count) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            load(args, i, threadIdx.x + i * kMathThreads, count);
    }

    // All lanes of the warp call it.
    __device__ void store(const Args& args, const uint4& piece, int at, int count) {
        float values[8];
        float amax = 0.0f;  // fmaxf drops NaN, as the recipe wants
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t two = word_of(piece, i / 2);
            values[i] = __uint_as_float(i % 2 ? two & 0xffff0000u : two << 16);
            amax = fmaxf(amax, fabsf(values[i]));
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
        const float scale = scale_of(amax);
        const float inverse = __fdiv_rn(1.0f, scale);
        const auto bytes = make_uint2(quantize(values[0], values[1], inverse) |
                                          quantize(values[2], values[3], inverse) << 16,
                                      quantize(values[4], values[5], inverse) |
                                          quantize(values[6], values[7], inverse) << 16);
        const int row = at / per_row, column = (at - row * per_row) * 8;
        if (row >= count) return;
        uint8_t* image = shared_at<uint8_t>(args.at.x) + image_at(row, column, kTokens);
        *reinterpret_cast<uint2*>(image) = bytes;
        if (column % kBlock == 0)
            shared_at<float>(args.at.x_scale)[column / kBlock * kTokens + row] = scale;
    }

    // `loaded`: rows that `start` was called for; `count`, at most that: rows that are wanted.
    __device__ void finish(const Args& args, int count) {
        const int end = count * per_row;
#pragma unroll 1
        for (int begin = 0; begin < end; begin += kPieces * kMathThreads) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int at = begin + i * kMathThreads + static_cast<int>(threadIdx.x);
                store(args, pieces[i], at, count);
                load(args, i, at + kPieces * kMathThreads, count);
            }
        }
    }
};

// -- the products --------------------------------------------------------------------------------

// total [64 x tokens] of one unit of GEMM 1. A product of 128 columns has one scale.
template <typename S>
__device__ __forceinline__ void multiply_up(const Args& args, Place& place,
                                            float (&total)[S::kTokens / 2]) {
    const Ring<S> ring(args);
    const uint8_t* x = shared_at<uint8_t>(args.at.x);
    const float* x_scale = shared_at<float>(args.at.x_scale) + lane_index() % 4 * 2;
    const int slabs = args.hidden / kBlock;
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab += S::kSlabs) {
        ptx::barrier_wait(ring.full + place.slot, place.parity);
        const uint8_t* weights = ring.weights(place.slot);
        float part[S::kSlabs][S::kTokens / 2];
        ptx::multiply_begin();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
#pragma unroll
            for (int k = 0; k < kBlock; k += 32)
                ptx::multiply(part[s], weights + s * kTileBytes,
                              x + (slab + s) * S::kTokens * kBlock, k, k > 0);
        }
        ptx::multiply_commit();
        const float* of_stage = ring.weight_scale(place.slot);
        float scale[2 * S::kSlabs];
#pragma unroll
        for (int i = 0; i < 2 * S::kSlabs; ++i) scale[i] = of_stage[i];
        ptx::multiply_wait();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) ptx::hold(part[s]);
        __syncwarp();  // all lanes have read the scales
        if (lane_index() == 0) ptx::arrive(ring.empty + place.slot);
        place.next(args.stages);
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
#pragma unroll
            for (int j = 0; j < S::kTokens / 8; ++j) {
                const float2 of_row = *reinterpret_cast<const float2*>(
                    x_scale + (slab + s) * S::kTokens + j * 8);
                total[4 * j] += part[s][4 * j] * (scale[2 * s] * of_row.x);
                total[4 * j + 1] += part[s][4 * j + 1] * (scale[2 * s] * of_row.y);
                total[4 * j + 2] += part[s][4 * j + 2] * (scale[2 * s + 1] * of_row.x);
                total[4 * j + 3] += part[s][4 * j + 3] * (scale[2 * s + 1] * of_row.y);
            }
        }
    }
}

// total [64 x columns] of one unit of GEMM 2. A product of 32 columns has one scale.
template <typename S>
__device__ __forceinline__ void multiply_down(const Args& args, Place& place,
                                              float (&total)[S::kColumns / 2]) {
    constexpr int kParts = kBlock / kFine;
    const Ring<S> ring(args);
    const int slabs = args.intermediate / kBlock;
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab += S::kSlabs) {
        ptx::barrier_wait(ring.full + place.slot, place.parity);
        const uint8_t* weights = ring.weights(place.slot);
        const uint8_t* rows = ring.rows(place.slot);
        float part[S::kSlabs][kParts][S::kColumns / 2];
        float2 scale[S::kSlabs][kParts][S::kColumns / 8];
        ptx::multiply_begin();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
#pragma unroll
            for (int k = 0; k < kParts; ++k)
                ptx::multiply(part[s][k], weights + s * kTileBytes, rows + s * S::kSlabRows,
                              k * kFine, false);
        }
        ptx::multiply_commit();
        const float* of_rows = ring.row_scale(place.slot) + lane_index() % 4 * 2;
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
            const float of_weights = ring.weight_scale(place.slot)[s];
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int j = 0; j < S::kColumns / 8; ++j) {
                    const float2 two = *reinterpret_cast<const float2*>(
                        of_rows + (s * kParts + k) * S::kColumns + j * 8);
                    scale[s][k][j] = make_float2(of_weights * two.x, of_weights * two.y);
                }
        }
        ptx::multiply_wait();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
#pragma unroll
            for (int k = 0; k < kParts; ++k) ptx::hold(part[s][k]);
        __syncwarp();  // all lanes have read the scales
        if (lane_index() == 0) ptx::arrive(ring.empty + place.slot);
        place.next(args.stages);
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int j = 0; j < S::kColumns / 8; ++j) {
                    total[4 * j] += part[s][k][4 * j] * scale[s][k][j].x;
                    total[4 * j + 1] += part[s][k][4 * j + 1] * scale[s][k][j].y;
                    total[4 * j + 2] += part[s][k][4 * j + 2] * scale[s][k][j].x;
                    total[4 * j + 3] += part[s][k][4 * j + 3] * scale[s][k][j].y;
                }
        }
    }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + __expf(-gate)) * up;
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_CUH
