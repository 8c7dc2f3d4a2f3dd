// Of small_batch.cu: the order of the work, the ring of weights, the rows of x, the two products.

#ifndef MEGAMOE_SMALL_BATCH_CUH
#define MEGAMOE_SMALL_BATCH_CUH

#include "routing.cuh"

namespace small_batch {

// What one instance of the kernel is compiled for: columns of a product, and the 128-column slabs
// of weights in one stage of the ring. Where x is resident, GEMM 1 multiplies by all tokens of the
// batch, at most kTokens, from shared memory; else by one chunk of pairs, whose rows come with the
// weights, as they do in GEMM 2. The general flavour has alpha and beta of SwiGLU, and biases; the
// other has no instruction for them.
template <int kTokens_, int kColumns_, int kSlabs_, bool kGeneral_>
struct Shape {
    static constexpr int kTokens = kTokens_, kColumns = kColumns_, kSlabs = kSlabs_;
    static constexpr bool kGeneral = kGeneral_;
    static constexpr bool kResident = kTokens > 0;
    static constexpr int kUpColumns = kResident ? kTokens : kColumns;
    static constexpr int kParts = kBlock / kFine;
    static constexpr int kSlabRows = kColumns * kBlock;  // bytes of rows per slab
    static constexpr int kStageBytes = kSlabs * (kTileBytes + kSlabRows);
    static constexpr int kRowStride = kFine + 1;  // of results of GEMM 1: no bank conflicts
};

// -- the work ------------------------------------------------------------------------------------

// 64 weight rows of one active expert, for all tokens or for one chunk of pairs.
struct Unit {
    bool down;        // of GEMM 2
    int rank, chunk;  // a unit for all tokens has no chunk
    int tile;         // which 64 rows of the expert
};

// Units are numbered: all of GEMM 1, then all of GEMM 2, both expert by expert. A block begins with
// the unit of its own number, and then takes the next one that is free whenever it can ask for more
// weights: all blocks end together, though some are farther from memory. A unit of GEMM 2 waits for
// GEMM 1 of its pairs, long after its weights were asked for.
template <typename S>
struct Work {
    int tiles1, tiles2, units1, units;

    __device__ Work(const Args& args, const Active& active)
        : tiles1(2 * args.intermediate / kTileRows),
          tiles2(args.hidden / kTileRows),
          units1((S::kResident ? active.ranks : active.chunks) * tiles1),
          units(units1 + active.chunks * tiles2) {}

    __device__ bool down(int unit) const { return unit >= units1; }

    __device__ Unit operator()(int unit, const Tables& tables) const {
        const bool is_down = down(unit);
        if (is_down) unit -= units1;
        const int tiles = is_down ? tiles2 : tiles1;
        const int chunk = unit / tiles;
        const bool by_rank = S::kResident && !is_down;
        return {is_down, by_rank ? chunk : tables.chunk_rank[chunk], chunk, unit - chunk * tiles};
    }

    // Takes a unit. The blocks together ask once per unit, so that the counter ends at 0.
    __device__ int take(const Args& args) const {
        return gridDim.x + ptx::take_next(&args.counters->taken, units - 1);
    }
};

// -- the ring ------------------------------------------------------------------------------------

// A stage: kSlabs tiles of 64 weight rows x 128 columns, as many slabs of rows of a chunk, and the
// scales of both.
template <typename S>
struct Ring {
    const Args& args;
    uint64_t *full, *rows_in, *empty;  // what was asked for is there; so are rows; all was read
    int* units;              // [kQueue]: the block's units, in order, and kNoUnit behind them
    int *published, *start;  // turns whose units load_rows can see; where it starts

    // Where x is resident, rows have a barrier of their own, at which stages without rows arrive by
    // themselves. Else they arrive at the full barrier: one wait per stage, which counts there.
    // Arrivals at a full barrier: the scales of 32 lanes, the weights, the rows.
    static constexpr int kFullArrivals = S::kResident ? 33 : 34;
    static constexpr int kRowsArrivals = 1, kEmptyArrivals = kGroup / 32;
    static constexpr int kNoUnit = 1 << 30;

    __device__ explicit Ring(const Args& args_)
        : args(args_),
          full(shared_at<uint64_t>(args_.at.barriers)),
          rows_in(full + args_.stages),
          empty(rows_in + args_.stages),
          units(shared_at<int>(args_.at.queue)),
          published(units + kQueue),
          start(published + 1) {}

    __device__ uint8_t* weights(int slot) const {
        return ptx::shared_memory() + slot * S::kStageBytes;
    }
    __device__ uint64_t* rows_barrier(int slot) const {
        return (S::kResident ? rows_in : full) + slot;
    }
    __device__ uint8_t* rows(int slot) const { return weights(slot) + S::kSlabs * kTileBytes; }
    __device__ float* weight_scale(int slot) const {
        return shared_at<float>(args.at.weight_scale) + slot * 2 * S::kSlabs;
    }
    __device__ float* row_scale(int slot) const {
        return shared_at<float>(args.at.row_scale) + slot * S::kSlabs * S::kParts * S::kColumns;
    }
    // S::kSlabs divides the slabs of both GEMMs.
    __device__ int stages_of(bool down) const {
        return (down ? args.intermediate : args.hidden) / (kBlock * S::kSlabs);
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
        // Few turns, in less time than a division: the next unit waits for it.
        for (slot += count; slot >= stages; slot -= stages) parity ^= 1;
    }
};

// The warp that streams the weights of all units, in order, as far ahead as the ring allows, but
// with no more than a window of stages under way at a time. That many keep the memory busy; what is
// asked for beyond them only queues in front of everything else that a block reads, writes or waits
// for.
template <typename S>
__device__ __forceinline__ void load_weights(const Args& args, const Tables& tables,
                                             const Work<S>& work, const CUtensorMap* w13,
                                             const CUtensorMap* w2) {
    const Ring<S> ring(args);
    const int lane = lane_index();
    Place place, landing;
    int under_way = 0;
    int number = blockIdx.x;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        const bool end = number >= work.units;
        int after = 0;
        if (lane == 0) {
            // Asked for now, needed when this unit's loads are under way.
            if (!end) after = work.take(args);
            ring.units[turn % kQueue] = end ? Ring<S>::kNoUnit : number;
            if (end || !S::kResident || work.down(number)) {
                if (*ring.published == 0) {
                    ring.start[0] = turn;
                    ring.start[1] = place.slot;
                    ring.start[2] = place.parity;
                }
                ptx::store_release_shared(ring.published, turn + 1);
            }
        }
        if (end) {
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            ptx::copies_arrive(ring.full + place.slot);
            if (lane == 0) ptx::arrive(ring.full + place.slot);
            return;
        }
        const Unit unit = work(number, tables);
        const int expert = tables.expert_of[unit.rank];
        const int slabs = (unit.down ? args.intermediate : args.hidden) / kBlock;
        const int tiles = unit.down ? work.tiles2 : work.tiles1;
        const CUtensorMap* map = unit.down ? w2 : w13;
        const int row = (expert * tiles + unit.tile) * kTileRows;
        // GEMM 1: a tile has 32 gate rows and 32 up rows, each with scales of their own.
        const float* scale;
        if (unit.down)
            scale = args.w2_scale +
                    (int64_t{expert} * (args.hidden / kBlock) + unit.tile / 2) * slabs + lane;
        else
            scale = args.w13_scale +
                    (int64_t{expert} * (2 * args.intermediate / kBlock) +
                     lane % 2 * (args.intermediate / kBlock) + unit.tile / 4) *
                        slabs +
                    lane / 2;
        const int lanes = unit.down ? S::kSlabs : 2 * S::kSlabs;
        const int window = unit.down ? args.window2 : args.window1;
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab += S::kSlabs) {
            if constexpr (S::kResident) {
                for (; under_way >= window; --under_way, landing.next(args.stages))
                    ptx::barrier_wait(ring.full + landing.slot, landing.parity);
                ++under_way;
            }
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            uint64_t* full = ring.full + place.slot;
            if (lane == 0) {
                if (S::kResident && !unit.down) ptx::arrive(ring.rows_in + place.slot);
                ptx::arrive_expect(full, S::kSlabs * kTileBytes);
#pragma unroll
                for (int s = 0; s < S::kSlabs; ++s)
                    ptx::copy_box(ring.weights(place.slot) + s * kTileBytes, map,
                                  (slab + s) * kBlock, row, full);
            }
            if (lane < lanes) ptx::copy4(ring.weight_scale(place.slot) + lane, scale + slab);
            ptx::copies_arrive(full);
            place.next(args.stages);
        }
        number = __shfl_sync(0xffffffffu, after, 0);
    }
}

// Waits until `writers` have counted up. Each of the `readers` counts on, and the last one leaves
// 0.
__device__ __forceinline__ void await(int* count, int writers, int readers) {
    while (ptx::load_acquire(count) < writers) continue;
    ptx::check_off(count, writers + readers - 1);
}

// The thread that loads the rows of chunks, when they are all written.
template <typename S>
__device__ __forceinline__ void load_rows(const Args& args, const Tables& tables,
                                          const Work<S>& work) {
    const Ring<S> ring(args);
    while (ptx::load_acquire_shared(ring.published) == 0) continue;
    Place place{ring.start[1], ring.start[2]};
    bool staged = S::kResident;
#pragma unroll 1
    for (int turn = ring.start[0];; ++turn) {
        while (ptx::load_acquire_shared(ring.published) <= turn) continue;
        const int number = ring.units[turn % kQueue];
        if (number == Ring<S>::kNoUnit) {
            if (S::kResident) return;
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            ptx::arrive(ring.full + place.slot);
            return;
        }
        const bool down = work.down(number);
        const int stages = ring.stages_of(down);
        const Unit unit = work(number, tables);
        if (!staged) {
            const int blocks = gridDim.x;
            await(&args.counters->staged, blocks, min(blocks, work.units));
        }
        staged = true;
        if (down) {
            const int chunks =
                S::kResident ? tables.first_chunk[unit.rank + 1] - tables.first_chunk[unit.rank]
                             : 1;
            await(args.counters->ready + (S::kResident ? unit.rank : unit.chunk), work.tiles1,
                  chunks * work.tiles2);
        }
        ptx::fence_async_global();
        const int parts = down ? S::kParts : 1;
        const int64_t first = int64_t{unit.chunk} * stages * S::kSlabs;
        const uint8_t* rows = (down ? args.rows : args.x_rows) + first * S::kSlabRows;
        const float* scale =
            (down ? args.row_scale : args.x_row_scale) + first * parts * S::kColumns;
        const int row_bytes = S::kSlabs * S::kSlabRows;
        const int scales = S::kSlabs * parts * S::kColumns;
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
            ptx::barrier_wait(ring.empty + place.slot, place.parity ^ 1);
            uint64_t* full = ring.rows_barrier(place.slot);
            ptx::arrive_expect(full, row_bytes + scales * sizeof(float));
            ptx::copy_bytes(ring.rows(place.slot), rows + i * row_bytes, row_bytes, full);
            ptx::copy_bytes(ring.row_scale(place.slot), scale + i * scales, scales * sizeof(float),
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

// Eight columns of bf16, quantized as `quantize_rows` of custom_ops/reference/recipe.py does, bit
// for bit. All lanes of the warp call it; 16 neighbouring lanes have one scale.
struct Quantized {
    uint2 bytes;
    float scale;
};

__device__ __forceinline__ Quantized quantize_eight(const uint4& piece) {
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
    return {make_uint2(quantize(values[0], values[1], inverse) |
                           quantize(values[2], values[3], inverse) << 16,
                       quantize(values[4], values[5], inverse) |
                           quantize(values[6], values[7], inverse) << 16),
            scale};
}

__device__ __forceinline__ uint4 load_eight(const Args& args, int row, int column) {
    const auto* from = static_cast<const uint16_t*>(args.x) + row * args.x_stride + column;
    return args.aligned_x ? __ldcg(reinterpret_cast<const uint4*>(from)) : load_unaligned(from);
}

// All rows of x into shared memory, by the math threads of this block. A thread has eight loads
// under way; the first are asked for before any weights, or they would queue behind them.
template <int kTokens>
struct RowsOfX {
    static constexpr int kPieces = 8;
    uint4 pieces[kPieces];
    int per_row;

    __device__ explicit RowsOfX(const Args& args) : per_row(args.hidden / 8) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            load(args, i, threadIdx.x + i * kMathThreads, args.tokens * per_row);
    }

    __device__ void load(const Args& args, int i, int at, int end) {
        if (at >= end) return;
        const int row = at / per_row;
        pieces[i] = load_eight(args, row, (at - row * per_row) * 8);
    }

    __device__ void store(const Args& args, const uint4& piece, int at, int end) {
        const Quantized made = quantize_eight(piece);
        if (at >= end) return;
        const int row = at / per_row, column = (at - row * per_row) * 8;
        uint8_t* image = shared_at<uint8_t>(args.at.x) + image_at(row, column, kTokens);
        *reinterpret_cast<uint2*>(image) = made.bytes;
        if (column % kBlock == 0)
            shared_at<float>(args.at.x_scale)[column / kBlock * kTokens + row] = made.scale;
    }

    // `count` rows, at most args.tokens.
    __device__ void finish(const Args& args, int count) {
        const int end = count * per_row;
#pragma unroll 1
        for (int begin = 0; begin < end; begin += kPieces * kMathThreads) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int first = begin + i * kMathThreads;  // the same for all threads
                if (first >= end) break;
                const int at = first + static_cast<int>(threadIdx.x);
                store(args, pieces[i], at, end);
                load(args, i, at + kPieces * kMathThreads, end);
            }
        }
    }
};

// The rows of x that pairs need, into the images of their chunks: each block its share, 16 lanes
// one row and 128 columns at a time.
template <typename S>
struct StagedRows {
    int slabs, items, first, step;
    uint4 piece;

    // Asks for the first piece: before any weights, or it would queue behind them.
    __device__ explicit StagedRows(const Args& args)
        : slabs(args.hidden / kBlock),
          items(args.tokens * slabs),
          first(blockIdx.x * (kMathThreads / 16) + threadIdx.x / 16),
          step(gridDim.x * (kMathThreads / 16)),
          piece(load(args, first)) {}

    __device__ uint4 load(const Args& args, int item) const {
        if (item >= items) return uint4{};
        const int row = item / slabs;
        const int column = (item - row * slabs) * kBlock + threadIdx.x % 16 * 8;
        return load_eight(args, row, column);
    }

    __device__ void write(const Args& args, const Tables& tables) {
        const int lane = threadIdx.x % 16;
#pragma unroll 1
        for (int item = first; __any_sync(0xffffffffu, item < items); item += step) {
            const Quantized made = quantize_eight(piece);
            piece = load(args, item + step);
            if (item >= items) continue;
            const int row = item / slabs, slab = item - row * slabs;
#pragma unroll 2
            for (int slot = 0; slot < args.slots; ++slot) {
                const int pair = row * args.slots + slot;
                const int position = tables.position[pair];
                if (position == kNone) continue;  // those of rows beyond num_valid too
                const int rank = tables.rank_of[tables.pair_expert[pair]];
                const int in_expert = position - tables.first[rank];
                const int64_t chunk = tables.first_chunk[rank] + in_expert / S::kColumns;
                const int to = in_expert % S::kColumns;
                uint8_t* image = args.x_rows + (chunk * slabs + slab) * S::kSlabRows;
                *reinterpret_cast<uint2*>(image + image_at(to, lane * 8, S::kColumns)) = made.bytes;
                if (lane == 0)
                    args.x_row_scale[(chunk * slabs + slab) * S::kColumns + to] = made.scale;
            }
        }
    }
};

// The same value in all lanes, and the compiler knows it: it computes addresses from it once per
// warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// -- the products --------------------------------------------------------------------------------

// Waits for the products of a stage, and gives its slot back.
template <typename S, typename Products>
__device__ __forceinline__ void leave_stage(const Ring<S>& ring, Place& place, int slot,
                                            Products& products) {
    ptx::multiply_wait();
    ptx::hold(products);
    __syncwarp();  // all lanes have read the scales
    if (lane_index() == 0) ptx::arrive(ring.empty + slot);
    place.next(ring.args.stages);
}

// total [64 x columns] of one unit of GEMM 1. A product of 128 columns has one scale.
template <typename S>
__device__ __forceinline__ void multiply_up(const Args& args, Place& place,
                                            float (&total)[S::kUpColumns / 2]) {
    constexpr int kColumns = S::kUpColumns;
    const Ring<S> ring(args);
    const int slabs = args.hidden / kBlock;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab += S::kSlabs) {
        ptx::barrier_wait(ring.full + place.slot, place.parity);
        const int slot = uniform(place.slot);
        const uint8_t* weights = ring.weights(slot);
        const uint8_t* x = S::kResident ? shared_at<uint8_t>(args.at.x) + slab * kColumns * kBlock
                                        : ring.rows(slot);
        const float* x_scale = S::kResident ? shared_at<float>(args.at.x_scale) + slab * kColumns
                                            : ring.row_scale(slot);
        float part[S::kSlabs][kColumns / 2];
        ptx::multiply_begin();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
#pragma unroll
            for (int k = 0; k < kBlock; k += 32)
                ptx::multiply(part[s], weights + s * kTileBytes, x + s * kColumns * kBlock, k,
                              k > 0);
        ptx::multiply_commit();
        const float* of_stage = ring.weight_scale(slot);
        float2 up_scale[S::kSlabs][kColumns / 8], gate_scale[S::kSlabs][kColumns / 8];
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                const float2 of_row = *reinterpret_cast<const float2*>(
                    x_scale + s * kColumns + j * 8 + lane_index() % 4 * 2);
                const float gate = of_stage[2 * s], up = of_stage[2 * s + 1];
                gate_scale[s][j] = make_float2(gate * of_row.x, gate * of_row.y);
                up_scale[s][j] = make_float2(up * of_row.x, up * of_row.y);
            }
        leave_stage(ring, place, slot, part);
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                total[4 * j] += part[s][4 * j] * gate_scale[s][j].x;
                total[4 * j + 1] += part[s][4 * j + 1] * gate_scale[s][j].y;
                total[4 * j + 2] += part[s][4 * j + 2] * up_scale[s][j].x;
                total[4 * j + 3] += part[s][4 * j + 3] * up_scale[s][j].y;
            }
    }
}

// total [64 x columns] of one unit of GEMM 2. A product of 32 columns has one scale.
template <typename S>
__device__ __forceinline__ void multiply_down(const Args& args, Place& place,
                                              float (&total)[S::kColumns / 2]) {
    constexpr int kParts = S::kParts;
    const Ring<S> ring(args);
    const int slabs = args.intermediate / kBlock;
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab += S::kSlabs) {
        ptx::barrier_wait(ring.full + place.slot, place.parity);
        if constexpr (S::kResident) ptx::barrier_wait(ring.rows_in + place.slot, place.parity);
        const int slot = uniform(place.slot);
        const uint8_t* weights = ring.weights(slot);
        const uint8_t* rows = ring.rows(slot);
        float part[S::kSlabs][kParts][S::kColumns / 2];
        float2 scale[S::kSlabs][kParts][S::kColumns / 8];
        ptx::multiply_begin();
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
#pragma unroll
            for (int k = 0; k < kParts; ++k)
                ptx::multiply(part[s][k], weights + s * kTileBytes, rows + s * S::kSlabRows,
                              k * kFine, false);
        ptx::multiply_commit();
        const float* of_rows = ring.row_scale(slot) + lane_index() % 4 * 2;
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s) {
            const float of_weights = ring.weight_scale(slot)[s];
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int j = 0; j < S::kColumns / 8; ++j) {
                    const float2 two = *reinterpret_cast<const float2*>(
                        of_rows + (s * kParts + k) * S::kColumns + j * 8);
                    scale[s][k][j] = make_float2(of_weights * two.x, of_weights * two.y);
                }
        }
        leave_stage(ring, place, slot, part);
#pragma unroll
        for (int s = 0; s < S::kSlabs; ++s)
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

// Biases of the two weight rows of a unit of which a thread has results (see ptx::multiply); zeros
// where there are none. Asked for before the products, which take longer than the load.
template <typename S>
__device__ __forceinline__ float2 load_biases(const Args& args, const Tables& tables,
                                              const Work<S>& work, int number) {
    const float* biases = work.down(number) ? args.w2_bias : args.w13_bias;
    if (!biases) return make_float2(0.0f, 0.0f);
    const Unit unit = work(number, tables);
    const int tiles = unit.down ? work.tiles2 : work.tiles1;
    const int64_t tile = int64_t{tables.expert_of[unit.rank]} * tiles + unit.tile;
    biases += tile * kTileRows + warp_index() % 4 * 16 + lane_index() / 4;
    return make_float2(__ldcg(biases), __ldcg(biases + 8));
}

// gate sigmoid(alpha gate) (up + beta), of what was clamped; alpha is 1 and beta 0 in the plain
// flavour.
template <bool kGeneral>
__device__ __forceinline__ float swiglu(const Args& args, float gate, float up) {
    const float limit = args.swiglu_limit;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    if constexpr (kGeneral)
        return gate / (1.0f + __expf(-args.swiglu_alpha * gate)) * (up + args.swiglu_beta);
    else
        return gate / (1.0f + __expf(-gate)) * up;
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_CUH
