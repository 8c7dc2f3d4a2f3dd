// Of small_batch.cu, on the host: the configuration, and from it the shape of each kernel's work.

#ifndef MEGAMOE_SMALL_BATCH_PLAN_CUH
#define MEGAMOE_SMALL_BATCH_PLAN_CUH

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "small_batch_routing.cuh"

extern "C" {

// What does not change between launches. `custom_ops/small_batch_cuda.py` mirrors the field order.
struct MegaMoESmallBatchConfig {
    float* hidden;           // workspace: [max_pairs, intermediate_size]
    float* spill;            // workspace: [max_pairs, hidden_size]
    int32_t* invalid_count;  // [1], or null
    int32_t hidden_size, intermediate_size;
    int32_t top_k, num_shared;         // num_shared: experts that stand behind the routed ones
    int32_t num_experts;               // valid ids are below it
    int32_t first_expert, num_routed;  // this rank's routed experts
    int32_t max_pairs;                 // of one pair of launches; larger calls are divided
    float swiglu_limit;                // infinity: no clamp
    float routed_scaling_factor;
    int32_t staged;   // x is e4m3 with scales
    int32_t num_sms;  // blocks of K1, and about as many of K2
    int32_t pdl, early_trigger;
    int32_t loader;            // small_batch::Loader
    int32_t stages1, stages2;  // of each warp's ring; 0: as many as fit well
    int32_t min_blocks;        // least blocks of depth per warp and unit
    int32_t cluster;           // blocks of a cluster of K2: 1, 2, 4 or 8
    int32_t max_clusters;      // that run at once
};

}  // extern "C"

namespace small_batch {

constexpr int kMaxShared = 227 * 1024;   // of one block
constexpr int kHalfShared = 113 * 1024;  // of each of two blocks on one multiprocessor
constexpr int kStageCost = kWarps * (kStageBytes + sizeof(float2) + sizeof(uint64_t));
constexpr int kActBytes = 34 * 1024;  // K1: x of up to this size goes in whole

// Shared memory of K2 for activations and for results. With one tile of columns, little enough that
// K2 fits beside K1.
constexpr int down_act_bytes(int tiles) { return (tiles == 1 ? 17 : 34) * 1024; }
constexpr int down_slot_bytes(int tiles) { return (tiles == 1 ? 8 : 32) * 1024; }

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline int log2_of(int power) {
    int log = 0;
    while (1 << log < power) ++log;
    return log;
}

// Fills args.at for args.stages stages and args.act_rows rows.
inline void place(Args& args, bool first, int tiles) {
    int at = kWarps * args.stages * kStageBytes;
    const auto next = [&at](int bytes) {
        const int offset = at;
        at += ceil_div(bytes, 16) * 16;
        return offset;
    };
    const int ranks = args.num_local < args.pairs ? args.num_local : args.pairs;
    args.at.act = next(args.act_rows * (args.depth + kActPad));
    args.at.act_scale = next(args.act_rows * args.blocks * 4);
    args.at.partial = next(2 * kWarps * tiles * 32 * sizeof(float4));
    args.at.slots = next(args.slot_columns * 4 << args.log_unit_rows);
    args.at.stage_scale = next(kWarps * args.stages * sizeof(float2));
    args.at.barriers = next(kWarps * args.stages * sizeof(uint64_t));
    args.at.counts = next(args.num_local * 4);
    args.at.pair_weight = next(first ? args.pairs * 4 : 0);
    args.at.scan = next(kWarps * 4);
    args.at.starts = next(kMaxCluster * 4);
    args.at.rank_of = next(args.num_local * 2);
    args.at.expert_of = next(ranks * 2);
    args.at.first = next((ranks + 1) * 2);
    args.at.pair_expert = next(args.pairs * 2);
    args.at.position = next(first ? 0 : args.pairs * 2);
    args.at.token_of = next(first ? args.pairs * 2 : 0);
    args.at.weight_of = next(first ? args.pairs * 4 : 0);
    args.at.total = at;
}

// The shape of one kernel's work. Returns whether it fits.
inline bool plan(Args& args, const MegaMoESmallBatchConfig& config, bool first, int tiles,
                 int depth, int rows) {
    args.depth = depth;
    args.rows = rows;
    args.blocks = depth / kBlock;
    int split = kWarps;
    while (args.blocks % split != 0 || (split > 1 && args.blocks / split < config.min_blocks))
        split /= 2;
    args.log_split = log2_of(split);
    args.warp_blocks = args.blocks / split;
    const int unit_rows = kTileRows * kWarps / split;
    args.log_unit_rows = log2_of(unit_rows);
    args.row_step = kThreads * 8 / depth;
    args.column_step = kThreads * 8 % depth;
    args.row_units = rows / unit_rows;
    args.units = first ? args.row_units : ceil_div(args.row_units, config.max_clusters);
    const int columns = tiles * kTileColumns;
    args.all_tokens = 0;
    args.slot_columns = 0;
    if (first) {
        args.all_tokens = args.tokens * (depth + kActPad) <= kActBytes;
        args.act_rows = args.all_tokens ? args.tokens : columns;
    } else {
        const int fitting = down_act_bytes(tiles) / (depth + kActPad);
        args.act_rows = fitting > columns ? fitting : columns;
        if (args.act_rows > args.pairs) args.act_rows = args.pairs;
        const int wanted = args.pairs * args.units;
        const int most = down_slot_bytes(tiles) / (unit_rows * 4);
        args.slot_columns = wanted < most ? wanted : most;
    }

    const int stages = first ? config.stages1 : config.stages2;
    for (;; --args.act_rows) {  // deep products of many tokens: smaller windows, not shallow rings
        args.stages = 0;
        place(args, first, tiles);
        const int fixed = args.at.total;
        int fitting = (kHalfShared - fixed) / kStageCost;
        if (fitting < 4) fitting = (kMaxShared - fixed) / kStageCost;
        args.stages = stages > 0 ? stages : fitting < 6 ? fitting : 6;
        place(args, first, tiles);
        const int least = stages > 0 || args.act_rows <= kTileColumns ? 2 : 4;
        if (args.stages >= least && args.at.total <= kMaxShared) break;
        if (args.all_tokens || args.act_rows <= 1) return false;
    }
    args.max_columns = args.all_tokens || columns < args.act_rows ? columns : args.act_rows;
    return kWarps * args.stages <= kThreads;
}

// Bytes [rows, depth], in boxes of 16 rows x 128 bytes.
inline cudaError_t encode(CUtensorMap& map, const Args& args) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = nullptr;
    if (!encode_tiled) {
        cudaDriverEntryPointQueryResult found;
        void* entry = nullptr;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        if (error != cudaSuccess) return error;
        if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode_tiled = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
    }
    const cuuint64_t size[2] = {static_cast<cuuint64_t>(args.depth),
                                static_cast<cuuint64_t>(args.rows) * args.num_local};
    const cuuint64_t stride[1] = {static_cast<cuuint64_t>(args.depth)};
    const cuuint32_t box[2] = {kBlock, kTileRows}, step[2] = {1, 1};
    const CUresult result = encode_tiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(args.weight), size, stride,
        box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_PLAN_CUH
