// Of small_batch.cu: the arguments, and which expert gets which pairs.
//
// Terms. A pair is one (token, slot) that routes to a local expert. Active experts (those with
// pairs) are numbered by rank, in ascending order of expert; pairs are sorted by rank, then by
// token and slot, and a pair's place in that order is its position. A unit is the weight rows that
// a block's 8 warps work on together: 16 rows per warp, where `split` warps share the same rows and
// divide their depth. All units of an expert follow one another, so a block's share of the work is
// one contiguous range of units, of few experts.

#ifndef MEGAMOE_SMALL_BATCH_ROUTING_CUH
#define MEGAMOE_SMALL_BATCH_ROUTING_CUH

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "ptx.cuh"

namespace small_batch {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlock = 128;      // columns of a scale, activations and weights
constexpr int kTileRows = 16;    // weight rows of one mma
constexpr int kTileColumns = 8;  // pairs of one mma
constexpr int kStageBytes = kTileRows * kBlock;
constexpr int kActPad = 16;  // bytes behind a row of activations, against bank conflicts
constexpr int kMaxExperts = 1024;
constexpr int kMaxPairs = 2048;
constexpr int kMaxCluster = 8;
constexpr uint16_t kNone = 0xffff;

enum Phase { kGateUp, kGateUpStaged, kDown };  // Staged: rows come quantized
enum Loader { kLoadThreads, kLoadTensor };     // cp.async of all lanes, or one tensor copy

template <int kPhase>
constexpr bool kGatesUp = kPhase != kDown;

// Byte offsets of everything in shared memory; the stages are at 0.
struct Layout {
    int act, act_scale, partial, slots, stage_scale, barriers, counts, pair_weight, scan, starts;
    int rank_of, expert_of, first, pair_expert, position, token_of, weight_of, total;
};

struct Args {
    // Rows [row0, row0 + tokens) of the call; strides in elements, between rows.
    const void* x;  // bf16 [tokens, hidden], or e4m3 with x_scale [tokens, hidden / 128]
    const float* x_scale;
    const void* ids;      // [tokens, top_k]
    const void* routing;  // [tokens, top_k]
    int64_t x_stride, ids_stride, routing_stride;
    const int32_t* num_valid;
    int32_t* launch_count;   // or null
    int32_t* invalid_count;  // or null
    float* hidden;           // [pairs, intermediate], by position: K1 writes, K2 reads
    float* spill;            // [pairs * hidden_size]: results of K2 that shared memory can't hold
    __nv_bfloat16* y;        // [tokens, hidden_size]
    int row0, tokens, top_k, slots,
        pairs;  // slots = top_k + shared experts, pairs = tokens * slots
    int num_experts, first_expert, num_routed, num_local;  // all; ours: first, routed, and shared
    int wide_ids, bf16_routing, aligned_x;
    float swiglu_limit, routed_scaling_factor;

    // The product of this kernel: weight [num_local, rows, depth] times activations [depth].
    const uint8_t* weight;
    const float* weight_scale;  // [num_local, rows / 128, blocks]; K1: gate blocks, then up blocks
    int rows, depth, blocks;    // blocks = depth / 128
    int log_split;              // 1 << log_split warps share rows and divide their depth
    int warp_blocks;            // blocks of depth per warp
    int log_unit_rows;          // of 16 * kWarps >> log_split
    int row_step, column_step;  // kThreads pieces further on in rows of `depth`
    int units;                  // K1: units per expert. K2: the same per group of rows, at most
    int row_units;              // units per expert
    int stages, act_rows, all_tokens, max_columns, slot_columns, early_trigger;
    Layout at;
};

__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

template <typename T>
__device__ __forceinline__ T* shared_at(int offset) {
    return reinterpret_cast<T*>(ptx::shared_memory() + offset);
}

// -- routing -------------------------------------------------------------------------------------

struct Tables {
    int* counts;            // [num_local]: pairs; after rank_experts: the next free position
    uint16_t* rank_of;      // [num_local]: of active experts
    uint16_t* expert_of;    // [ranks]
    uint16_t* first;        // [ranks + 1]: position of the rank's first pair
    uint16_t* pair_expert;  // [pairs], kNone where the slot is not routed here
    float* pair_weight;     // [pairs], K1
    uint16_t* position;     // [pairs], K2
    uint16_t* token_of;     // [positions], K1
    float* weight_of;       // [positions], K1

    __device__ explicit Tables(const Layout& at)
        : counts(shared_at<int>(at.counts)),
          rank_of(shared_at<uint16_t>(at.rank_of)),
          expert_of(shared_at<uint16_t>(at.expert_of)),
          first(shared_at<uint16_t>(at.first)),
          pair_expert(shared_at<uint16_t>(at.pair_expert)),
          pair_weight(shared_at<float>(at.pair_weight)),
          position(shared_at<uint16_t>(at.position)),
          token_of(shared_at<uint16_t>(at.token_of)),
          weight_of(shared_at<float>(at.weight_of)) {}

    __device__ int columns(int rank) const { return first[rank + 1] - first[rank]; }
};

// Every load of what another kernel wrote goes to L2 (__ldcg): with programmatic launch a line can
// be stale in L1.
template <int kPhase>
__device__ __forceinline__ void read_pairs(const Args& args, const Tables& tables) {
    const int valid_tokens = __ldcg(args.num_valid) - args.row0;
#pragma unroll 1
    for (int pair = threadIdx.x; pair < args.pairs; pair += kThreads) {
        const int token = pair / args.slots;
        const int slot = pair - token * args.slots;
        int64_t id = -1;
        float weight = 1.0f;
        int expert = -1;
        if (slot < args.top_k) {
            const int64_t at = token * args.ids_stride + slot;
            id = args.wide_ids ? __ldcg(static_cast<const long long*>(args.ids) + at)
                               : __ldcg(static_cast<const int*>(args.ids) + at);
            if constexpr (kGatesUp<kPhase>) {
                const int64_t from = token * args.routing_stride + slot;
                weight = args.bf16_routing
                             ? __uint_as_float(
                                   uint32_t{__ldcg(
                                       static_cast<const unsigned short*>(args.routing) + from)}
                                   << 16)
                             : __ldcg(static_cast<const float*>(args.routing) + from);
                weight = __fmul_rn(weight, args.routed_scaling_factor);
            }
            const bool known = id >= 0 && id < args.num_experts;
            const int64_t local = id - args.first_expert;
            if (known && local >= 0 && local < args.num_routed) expert = static_cast<int>(local);
            if constexpr (kGatesUp<kPhase>) {
                const bool invalid = !known && id != -1 && token < valid_tokens;
                if (invalid && blockIdx.x == 0 && args.invalid_count)
                    atomicAdd(args.invalid_count, 1);
            }
        } else {
            expert = args.num_routed + slot - args.top_k;  // a shared expert takes every row
        }
        if (token >= valid_tokens) expert = -1;
        tables.pair_expert[pair] = expert < 0 ? kNone : static_cast<uint16_t>(expert);
        if constexpr (kGatesUp<kPhase>) tables.pair_weight[pair] = weight;
        if (expert >= 0) atomicAdd(tables.counts + expert, 1);
    }
}

// Fills rank_of, expert_of and first from counts, and returns the number of active experts.
__device__ __forceinline__ int rank_experts(const Args& args, const Tables& tables) {
    int* warp_sums = shared_at<int>(args.at.scan);
    const int per_thread = (args.num_local + kThreads - 1) / kThreads;
    const int begin = threadIdx.x * per_thread;
    const int end = min(begin + per_thread, args.num_local);
    int mine = 0;  // pairs in the upper half, active experts in the lower
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        const int count = tables.counts[expert];
        if (count > 0) mine += count << 16 | 1;
    }
    int upto = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, upto, offset);
        if (lane_index() >= offset) upto += below;
    }
    if (lane_index() == 31) warp_sums[warp_index()] = upto;
    __syncthreads();
    int before = upto - mine, total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < warp_index()) before += warp_sums[warp];
        total += warp_sums[warp];
    }
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        const int count = tables.counts[expert];
        if (count == 0) continue;
        const int rank = before & 0xffff;
        tables.rank_of[expert] = rank;
        tables.expert_of[rank] = expert;
        tables.first[rank] = before >> 16;
        tables.counts[expert] = before >> 16;
        before += count << 16 | 1;
    }
    if (threadIdx.x == 0) tables.first[total & 0xffff] = total >> 16;
    __syncthreads();
    return total & 0xffff;
}

// A stable counting sort by one warp: 32 pairs at a time, so that the order is always the same.
template <int kPhase>
__device__ __forceinline__ void sort_pairs(const Args& args, const Tables& tables) {
    const int lane = lane_index();
#pragma unroll 1
    for (int begin = 0; begin < args.pairs; begin += 32) {
        const int pair = begin + lane;
        const int expert = pair < args.pairs ? tables.pair_expert[pair] : kNone;
        const uint32_t peers = __match_any_sync(0xffffffffu, expert);
        const int earlier = __popc(peers & ((1u << lane) - 1));
        int position = 0;
        if (expert != kNone) {
            position = tables.counts[expert] + earlier;
            if constexpr (kGatesUp<kPhase>) {
                tables.token_of[position] = pair / args.slots;
                tables.weight_of[position] = tables.pair_weight[pair];
            } else {
                tables.position[pair] = position;
            }
        }
        __syncwarp();
        if (expert != kNone && earlier == 0) tables.counts[expert] = position + __popc(peers);
        __syncwarp();
    }
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_ROUTING_CUH
