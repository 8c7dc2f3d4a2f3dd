// Of small_batch.cu, on the host: the configuration, and what lies where in shared memory.

#ifndef MEGAMOE_SMALL_BATCH_PLAN_CUH
#define MEGAMOE_SMALL_BATCH_PLAN_CUH

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernel.cuh"

extern "C" {

// What does not change between launches. `custom_ops/small_batch/kernel.py` mirrors the field
// order.
struct MegaMoESmallBatchConfig {
    uint8_t *x_rows, *rows;  // workspaces: see Args of small_batch_routing.cuh
    float *x_row_scale, *row_scale;
    void *results, *counters;
    int32_t* invalid_count;  // [1], or null
    int32_t hidden_size, intermediate_size;
    int32_t top_k, num_shared;         // num_shared: experts that stand behind the routed ones
    int32_t num_experts;               // valid ids are below it
    int32_t first_expert, num_routed;  // this rank's routed experts
    float swiglu_limit;                // infinity: no clamp
    float swiglu_alpha, swiglu_beta;
    int32_t expert_bias;  // whether every call has biases; else none has
    float routed_scaling_factor;
    int32_t num_sms;                 // blocks; all of them run at once
    int32_t pdl;                     // launch with programmatic stream serialization
    int32_t stages;                  // most stages of the ring, at least 2; 0: as many as fit
    int32_t in_flight1, in_flight2;  // KiB of weights under way per block; 0: as kInFlight says
    int32_t max_tokens;              // of one launch; `prepare` sets it
};

}  // extern "C"

namespace small_batch {

constexpr int kMaxShared = 227 * 1024;            // of one block
constexpr int kLeastBytes = 40 * 1024;            // of weights under way, or a variant is not taken
constexpr int kInFlight1 = 128, kInFlight2 = 64;  // KiB of w13, w2 under way: see load_weights
constexpr int kMaxStages = 32;
// The warp that loads weights is up to all stages and one unit ahead of the group that multiplies,
// which also reads which units the other groups had before it.
static_assert(kMaxStages + 1 + kGroups <= kQueue);

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Fills args.at and args.stages for a variant of the kernel; tokens: 0 where x is not resident.
// Returns whether it fits.
inline bool plan(Args& args, const MegaMoESmallBatchConfig& config, int tokens, int columns,
                 int slabs) {
    if (args.hidden / kBlock % slabs != 0 || args.intermediate / kBlock % slabs != 0) return false;
    const int stage_bytes = slabs * (kTileBytes + columns * kBlock);
    const int scales = slabs * (kBlock / kFine) * columns;
    const int slabs_of_x = args.hidden / kBlock;
    const int ranks = args.num_local < args.pairs ? args.num_local : args.pairs;
    args.part = args.pairs > 0 ? ceil_div(args.pairs, kMathThreads) * 32 : 32;
    const int chunks = ranks + args.pairs / columns;  // at most: one of each that is not full
    const auto place = [&](int stages) {
        int at = stages * stage_bytes;
        const auto next = [&at](int bytes) {
            const int offset = at;
            at += ceil_div(bytes, 16) * 16;
            return offset;
        };
        args.stages = stages;
        args.at.x = next(slabs_of_x * tokens * kBlock);  // 1024-byte aligned, as stages are
        args.at.x_scale = next(slabs_of_x * tokens * 4);
        args.at.weight_scale = next(stages * 2 * slabs * 4);
        args.at.row_scale = next(stages * scales * 4);
        args.at.results = next(kGroups * (tokens > 0 ? tokens : columns) * (kFine + 1) * 4);
        args.at.barriers = next(3 * stages * 8);
        args.at.queue = next((kQueue + 4) * 4);
        args.at.counts = next(args.num_local * 4);
        args.at.pair_weight = next(args.pairs * 4);
        args.at.weight_of = next(args.pairs * 4);
        args.at.scan = next(kThreads / 32 * 8);
        args.at.part_counts = next(ceil_div(args.pairs, args.part) * args.num_local);
        args.at.pair_expert = next(args.pairs * 2);
        args.at.position = next(args.pairs * 2);
        args.at.token_of = next(args.pairs * 2);
        args.at.rank_of = next(args.num_local * 2);
        args.at.expert_of = next(ranks * 2);
        args.at.first = next((ranks + 1) * 2);
        args.at.first_chunk = next((ranks + 1) * 2);
        args.at.chunk_rank = next(chunks * 2);
        args.at.total = at;
        return at <= kMaxShared;
    };
    const int least = config.stages > 0 ? 2 : ceil_div(kLeastBytes, slabs * kTileBytes);
    int stages = config.stages > 0 && config.stages < kMaxStages ? config.stages : kMaxStages;
    while (stages >= least && !place(stages)) --stages;
    const auto window = [&](int asked, int standard) {
        const int bytes = (asked > 0 ? asked : standard) * 1024;
        return std::max(2, std::min(stages, ceil_div(bytes, slabs * kTileBytes)));
    };
    args.window1 = window(config.in_flight1, kInFlight1);
    args.window2 = window(config.in_flight2, kInFlight2);
    return stages >= least;
}

// Bytes [rows, depth], in boxes of 64 rows x 128 bytes.
inline cudaError_t encode(CUtensorMap& map, const void* weight, int rows, int depth) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = nullptr;
    if (!encode_tiled) {
        cudaDriverEntryPointQueryResult found;
        void* entry = nullptr;
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
        const cudaError_t error =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
        if (error != cudaSuccess) return error;
        if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode_tiled = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
    }
    const cuuint64_t size[2] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(rows)};
    const cuuint64_t stride[1] = {static_cast<cuuint64_t>(depth)};
    const cuuint32_t box[2] = {kBlock, kTileRows}, step[2] = {1, 1};
    const CUresult result =
        encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(weight), size,
                     stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_PLAN_CUH
