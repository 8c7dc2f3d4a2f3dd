// Of small_batch.cu: the walk over units, the stream of weights, the activations, the product.

#ifndef MEGAMOE_SMALL_BATCH_CUH
#define MEGAMOE_SMALL_BATCH_CUH

#include <cuda_fp8.h>

#include "small_batch_routing.cuh"

namespace small_batch {

// -- the walk over units, and the stream of weights ----------------------------------------------

// Units [begin, end) in order; an expert with more than max_columns pairs is walked several times,
// once per chunk of its pairs.
struct Walk {
    const uint16_t* first;
    int begin, end, units, max_columns;
    int unit, rank, chunk, stop;

    __device__ Walk(const Args& args, const Tables& tables, int units_, int begin_, int end_)
        : first(tables.first),
          begin(begin_),
          end(end_),
          units(units_),
          max_columns(args.max_columns),
          unit(begin_),
          rank(begin_ / units_),
          chunk(0),
          stop(min(end_, (rank + 1) * units_)) {}

    __device__ bool done() const { return unit >= end; }

    __device__ int unit_of_expert() const { return unit - rank * units; }

    __device__ void next() {
        if (++unit < stop) return;
        if ((chunk + 1) * max_columns < first[rank + 1] - first[rank]) {
            ++chunk;
            unit = max(begin, rank * units);
        } else {
            chunk = 0;
            ++rank;
            stop = min(end, stop + units);
        }
    }
};

// A warp's ring of stages. One stage is 16 weight rows x 128 columns, 2 KB, and its two scales.
// Every warp runs its ring alone: block barriers stop the products, not the loads. A 16-byte piece
// c of row r lies at piece c ^ (r % 8), which is also what the tensor copy's 128-byte swizzle does.
template <int kPhase, int kLoader>
struct Stream {
    static constexpr int kArrivals = kLoader == kLoadThreads ? 32 : 3;  // 3: box and two scales

    const Args& args;
    const CUtensorMap* map;
    const uint16_t* expert_of;
    Walk walk;
    int first_unit;  // of the block's group of rows
    uint8_t* stages;
    float2* scales;
    uint64_t* barriers;
    int slot = 0, parity = 0;  // of the stage to be consumed next
    int block = 0;             // of this warp's blocks, in the stage to be loaded next
    bool triggered = false;
    const uint8_t* source = nullptr;
    const float* scale_source = nullptr;
    int box_row = 0;

    __device__ Stream(const Args& args_, const CUtensorMap* map_, const Tables& tables,
                      const Walk& walk_, int first_unit_)
        : args(args_),
          map(map_),
          expert_of(tables.expert_of),
          walk(walk_),
          first_unit(first_unit_),
          stages(shared_at<uint8_t>(warp_index() * args_.stages * kStageBytes)),
          scales(shared_at<float2>(args_.at.stage_scale) + warp_index() * args_.stages),
          barriers(shared_at<uint64_t>(args_.at.barriers) + warp_index() * args_.stages) {
        if (!walk.done()) aim();
    }

    // The first block of depth that this warp takes of every unit, and the step to the next: warps
    // that share rows read neighbouring blocks at a time, which memory likes better than far ones.
    __device__ int first_block() const { return warp_index() & (block_step() - 1); }
    __device__ int block_step() const { return 1 << args.log_split; }

    __device__ void aim() {
        constexpr int kScaleTiles = kGatesUp<kPhase> ? 16 : 8;  // K1: 8 gate rows, 8 up rows
        const int expert = expert_of[walk.rank];
        const int tile =
            ((first_unit + walk.unit_of_expert()) * kWarps + warp_index()) >> args.log_split;
        const int scale_rows = args.rows / kBlock;
        const int lane = lane_index();
        box_row = expert * args.rows + tile * kTileRows;
        source = args.weight + static_cast<int64_t>(box_row + lane / 8) * args.depth +
                 first_block() * kBlock + lane % 8 * 16;
        int scale_row = expert * scale_rows + tile / kScaleTiles;
        if (kGatesUp<kPhase> && lane == 1) scale_row += scale_rows / 2;
        scale_source = args.weight_scale + scale_row * args.blocks + first_block();
    }

    // Starts the load of the next stage into `target`, if one is left.
    __device__ void load(int target) {
        if (walk.done()) {
            if (!triggered) ptx::allow_successor();
            triggered = true;
            return;
        }
        const int lane = lane_index();
        uint8_t* stage = stages + target * kStageBytes;
        if (lane < 2) ptx::copy4(reinterpret_cast<float*>(scales + target) + lane, scale_source);
        if constexpr (kLoader == kLoadThreads) {
            const int even = lane / 8 * kBlock + ((lane % 8 ^ lane / 8) << 4);  // rows 0-3, 8-11
            const int odd = (even ^ 64) + 4 * kBlock;                           // rows 4-7, 12-15
            const int64_t four_rows = 4 * static_cast<int64_t>(args.depth);
            ptx::copy16(stage + even, source);
            ptx::copy16(stage + odd, source + four_rows);
            ptx::copy16(stage + even + 8 * kBlock, source + 2 * four_rows);
            ptx::copy16(stage + odd + 8 * kBlock, source + 3 * four_rows);
            ptx::copies_arrive(barriers + target);
            source += kBlock << args.log_split;
        } else {
            if (lane < 2) ptx::copies_arrive(barriers + target);
            if (lane == 0)
                ptx::copy_box(stage, map, (first_block() + (block << args.log_split)) * kBlock,
                              box_row, barriers + target, kStageBytes);
        }
        scale_source += block_step();
        if (++block == args.warp_blocks) {
            block = 0;
            walk.next();
            if (!walk.done()) aim();
        }
    }

    __device__ void fill() {
#pragma unroll 1
        for (int target = 0; target < args.stages; ++target) load(target);
    }

    // The stage that is next: waits for it, takes this lane's part of it, and reloads its slot.
    // weight[half][i]: 32 columns of row lane / 4 + 8 * half, from column lane % 4 * 32 on.
    __device__ void take(uint4 (&weight)[2][2], float2& scale) {
        ptx::barrier_wait(barriers + slot, parity);
        const int row = lane_index() / 4;
        const int at = row * kBlock + ((2 * (lane_index() % 4) ^ row) << 4);
        const uint8_t* stage = stages + slot * kStageBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weight[half][0] = *reinterpret_cast<const uint4*>(stage + half * 8 * kBlock + at);
            weight[half][1] =
                *reinterpret_cast<const uint4*>(stage + half * 8 * kBlock + (at ^ 16));
        }
        scale = scales[slot];
        __syncwarp();  // all lanes have read the slot
        load(slot);
        if (++slot == args.stages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// -- activations ---------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Eight columns of a row.
struct Piece {
    uint4 data[2];  // 8 fp32 (K2), or 8 bf16 in data[0], or 8 e4m3 in its x and y
    float scale;
};

// Out of line: rows that are not aligned are rare, and eight loads are much code.
static __device__ __noinline__ uint4 load_unaligned(const uint16_t* from) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = __ldcg(from + 2 * i) | uint32_t{__ldcg(from + 2 * i + 1)} << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <int kPhase>
__device__ __forceinline__ Piece load_piece(const Args& args, int64_t row, int column) {
    Piece piece = {};
    if constexpr (kPhase == kDown) {
        const auto* from = reinterpret_cast<const uint4*>(args.hidden + row * args.depth + column);
        piece.data[0] = __ldcg(from);
        piece.data[1] = __ldcg(from + 1);
    } else if constexpr (kPhase == kGateUpStaged) {
        const auto* from = static_cast<const uint8_t*>(args.x) + row * args.x_stride + column;
        const uint2 bytes = __ldcg(reinterpret_cast<const uint2*>(from));
        piece.data[0] = make_uint4(bytes.x, bytes.y, 0, 0);
        piece.scale = __ldcg(args.x_scale + row * args.blocks + column / kBlock);
    } else {
        const auto* from = static_cast<const uint16_t*>(args.x) + row * args.x_stride + column;
        piece.data[0] =
            args.aligned_x ? __ldcg(reinterpret_cast<const uint4*>(from)) : load_unaligned(from);
    }
    return piece;
}

// Quantizes as `quantize_rows` of custom_ops/reference.py does, bit for bit. All lanes of the warp
// call it; 16 neighbouring lanes have one scale.
template <int kPhase>
__device__ __forceinline__ void store_piece(const Args& args, const Piece& piece, int row,
                                            int column, bool inside) {
    uint2 bytes = make_uint2(piece.data[0].x, piece.data[0].y);
    float scale = piece.scale;
    if constexpr (kPhase != kGateUpStaged) {
        float values[8];
        float amax = 0.0f;  // fmaxf drops NaN, as the recipe wants
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if constexpr (kPhase == kDown) {
                values[i] = __uint_as_float(word_of(piece.data[i / 4], i % 4));
            } else {
                const uint32_t two = word_of(piece.data[0], i / 2);
                values[i] = __uint_as_float(i % 2 ? two & 0xffff0000u : two << 16);
            }
            amax = fmaxf(amax, fabsf(values[i]));
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
        scale = __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f);
        const float inverse = __fdiv_rn(1.0f, scale);
        const auto quantized = [&](int i) {
            const float2 two =
                make_float2(__fmul_rn(values[i], inverse), __fmul_rn(values[i + 1], inverse));
            return uint32_t{__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)};
        };
        bytes.x = quantized(0) | quantized(2) << 16;
        bytes.y = quantized(4) | quantized(6) << 16;
    }
    if (!inside) return;
    uint8_t* act = shared_at<uint8_t>(args.at.act) + row * (args.depth + kActPad) + column;
    *reinterpret_cast<uint2*>(act) = bytes;
    if (column % kBlock == 0)
        shared_at<float>(args.at.act_scale)[row * args.blocks + column / kBlock] = scale;
}

// The pieces of rows 0, 1, ... that one thread takes: every kThreads-th.
struct PieceCursor {
    int row, column;

    __device__ explicit PieceCursor(const Args& args)
        : row(threadIdx.x * 8 / args.depth), column(threadIdx.x * 8 - row * args.depth) {}

    __device__ void next(const Args& args) {
        row += args.row_step;
        column += args.column_step;
        if (column >= args.depth) {
            column -= args.depth;
            ++row;
        }
    }
};

// Moves rows 0 ... count - 1 into shared memory, with kPieces loads per thread under way: start,
// then finish. row_of gives the source of a row.
template <int kPhase, int kPieces>
struct RowLoad {
    Piece pieces[kPieces];
    PieceCursor next_load;

    __device__ explicit RowLoad(const Args& args) : next_load(args) {}

    template <typename RowOf>
    __device__ __forceinline__ void load(const Args& args, int i, int count, RowOf row_of) {
        if (next_load.row < count)
            pieces[i] = load_piece<kPhase>(args, row_of(next_load.row), next_load.column);
        next_load.next(args);
    }

    template <typename RowOf>
    __device__ __forceinline__ void start(const Args& args, int count, RowOf row_of) {
        next_load = PieceCursor(args);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) load(args, i, count, row_of);
    }

    template <typename RowOf>
    __device__ __forceinline__ void finish(const Args& args, int count, RowOf row_of) {
        PieceCursor at(args);
#pragma unroll 1
        while (__any_sync(0xffffffffu, at.row < count)) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                store_piece<kPhase>(args, pieces[i], at.row, at.column, at.row < count);
                at.next(args);
                load(args, i, count, row_of);
            }
        }
    }
};

// -- the product ---------------------------------------------------------------------------------

// Where a lane finds the activations of its columns, per tile of 8: column lane / 4 of the operand
// and columns lane % 4 * 2, + 1 of the result.
template <int kMaxTiles>
struct Columns {
    int act[kMaxTiles];       // byte offset of the row, or -1: no such column
    int scale[kMaxTiles][2];  // index of the row's scales
};

// This warp's share of one unit: 16 rows x its blocks of depth, for `tiles` x 8 columns, into
// partial[tile * 32 + lane].
template <int kPhase, int kLoader, int kMaxTiles>
__device__ __forceinline__ void multiply(const Args& args, Stream<kPhase, kLoader>& stream,
                                         const Columns<kMaxTiles>& columns, int tiles,
                                         float4* partial) {
    const uint8_t* act = shared_at<uint8_t>(args.at.act) + lane_index() % 4 * 32;
    const float* act_scale = shared_at<float>(args.at.act_scale);
    float total[kMaxTiles][4] = {};
    int block = stream.first_block();
#pragma unroll 1
    for (int i = 0; i < args.warp_blocks; ++i, block += stream.block_step()) {
        uint4 weight[2][2];
        float2 weight_scale;
        stream.take(weight, weight_scale);

        // The order of products in a dot product is free: lane % 4 owns 32 columns of the block,
        // 4 of them per mma, the same in both operands. Two chains of mma per tile, for latency;
        // in every variant, so that all give the same bits.
        float sum[kMaxTiles][2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 a[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint2 low = ptx::e4m3_to_f16(word_of(weight[0][half], j));
                const uint2 high = ptx::e4m3_to_f16(word_of(weight[1][half], j));
                a[j] = make_uint4(low.x, high.x, low.y, high.y);
            }
#pragma unroll
            for (int tile = 0; tile < kMaxTiles; ++tile) {
                if (tile > 0 && tile >= tiles) break;
                uint4 b = make_uint4(0, 0, 0, 0);
                if (columns.act[tile] >= 0)
                    b = *reinterpret_cast<const uint4*>(act + columns.act[tile] + block * kBlock +
                                                        half * 16);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    ptx::mma(sum[tile][half], a[j], ptx::e4m3_to_f16(word_of(b, j)));
            }
        }
#pragma unroll
        for (int tile = 0; tile < kMaxTiles; ++tile) {
            if (tile > 0 && tile >= tiles) break;
            const float left = act_scale[columns.scale[tile][0] + block];
            const float right = act_scale[columns.scale[tile][1] + block];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float value = sum[tile][0][j] + sum[tile][1][j];
                const float scale =
                    (j < 2 ? weight_scale.x : weight_scale.y) * (j % 2 ? right : left);
                total[tile][j] += value * scale;
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < kMaxTiles; ++tile) {
        if (tile > 0 && tile >= tiles) break;
        partial[tile * 32 + lane_index()] =
            make_float4(total[tile][0], total[tile][1], total[tile][2], total[tile][3]);
    }
}

// silu(gate) * up with the recipe's clamps; a comparison, since fminf would drop NaN.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + __expf(-gate)) * up;
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_CUH
