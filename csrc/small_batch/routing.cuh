// Of small_batch.cu: the arguments, and which expert gets which pairs.
//
// Terms. A pair is one (token, slot) that routes to a local expert. Active experts (those with
// pairs) are numbered by rank, in ascending order of expert; pairs are sorted by rank, then by
// token and slot, and a pair's place in that order is its position. A chunk is up to kColumns
// pairs of one expert: the columns of one product.

#ifndef MEGAMOE_SMALL_BATCH_ROUTING_CUH
#define MEGAMOE_SMALL_BATCH_ROUTING_CUH

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "../cuda/ptx.cuh"

namespace small_batch {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kGroups = 2;   // that multiply, in turns
constexpr int kMathThreads = kGroups * kGroup;
constexpr int kThreads = kMathThreads + 64;  // one warp loads weights, one loads rows
constexpr int kBlock = 128;                  // columns of a scale of weights and of x
constexpr int kFine = 32;                    // columns of a scale of the intermediate rows
constexpr int kTileRows = 64;                // weight rows of one product
constexpr int kTileBytes = kTileRows * kBlock;
constexpr int kMaxExperts = 1024;
constexpr int kMaxPairs = 1024;
static_assert(kMaxPairs / (kMathThreads / 32) <= 255, "a part's count is a byte");
constexpr int kQueue = 64;  // units of a block that its warps may be apart: see kMaxStages
constexpr uint16_t kNone = 0xffff;

// Byte offsets of everything in shared memory; the ring of stages is at 0.
struct Layout {
    int x, x_scale;                      // of all tokens, where x is resident
    int weight_scale, row_scale;         // of the stages
    int results;                         // of a unit of GEMM 1, per group
    int barriers, queue;                 // of the ring
    int counts, pair_weight, weight_of;  // of Tables
    int part_counts;
    int scan;  // sums of warps; behind the scan, a flag per group
    int pair_expert, position, token_of, rank_of, expert_of, first, first_chunk, chunk_rank;
    int total;  // bytes
};

// What blocks tell each other. Zeros before and after a launch: whoever is the last to read a count
// leaves 0, so that nothing is left to do when y is written.
struct Counters {
    int taken;   // units beyond the first of each block
    int staged;  // blocks that have written their part of the rows of x
    int pad[2];
    int ready[kMaxExperts + kMaxPairs / 8];  // tiles of GEMM 1, per rank or per chunk
    int done[1];  // chunks of GEMM 2, per tile of y: as many as there are tiles, hidden / 64
};

struct Args {
    const void* x;        // bf16 [tokens, hidden]; strides in elements, between rows
    const void* ids;      // [tokens, top_k]
    const void* routing;  // [tokens, top_k]
    int64_t x_stride, ids_stride, routing_stride;
    const int32_t* num_valid;
    int32_t* launch_count;
    int32_t* invalid_count;  // or null
    const float* w13_scale;  // [num_local, 2 * intermediate / 128, hidden / 128]; gates before ups
    const float* w2_scale;   // [num_local, hidden / 128, intermediate / 128]
    // Workspaces. x_rows, rows: per chunk and 128 columns, the swizzled image of its rows in e4m3,
    // of x and of the intermediate; x_row_scale [chunks, hidden / 128, columns], row_scale [chunks,
    // intermediate / 32, columns]. results: bf16 [positions, hidden].
    uint8_t *x_rows, *rows;
    float *x_row_scale, *row_scale;
    __nv_bfloat16* results;
    Counters* counters;
    __nv_bfloat16* y;                 // [tokens, hidden]
    int tokens, top_k, slots, pairs;  // slots = top_k + shared experts, pairs = tokens * slots
    int part;                         // pairs that one warp counts, a multiple of 32
    int num_experts, first_expert, num_routed, num_local;  // all; ours: first, routed, and shared
    int wide_ids, bf16_routing, aligned_x;
    float swiglu_limit, routed_scaling_factor;
    int hidden, intermediate;
    int stages, window1, window2;  // of the ring; under way at a time, of w13 and of w2
    Layout at;
    // Of the general flavour. Last, so that the rest stands where it stood.
    const float* w13_bias;  // [num_local, 2 * intermediate] in the order of w13's rows, or null
    const float* w2_bias;   // [num_local, hidden], or null
    float swiglu_alpha, swiglu_beta;
};

__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

template <typename T>
__device__ __forceinline__ T* shared_at(int offset) {
    return reinterpret_cast<T*>(ptx::shared_memory() + offset);
}

struct Tables {
    int* counts;            // [num_local]: pairs
    float* pair_weight;     // [pairs]
    float* weight_of;       // [positions]
    uint8_t* part_counts;   // [parts of the pairs, num_local]: pairs; all 0 at first, as counts
    uint16_t* pair_expert;  // [pairs], kNone where the slot is not routed here
    uint16_t* position;     // [pairs], or kNone
    uint16_t* token_of;     // [positions]
    uint16_t* rank_of;      // [num_local], of active experts
    uint16_t* expert_of;    // [ranks]
    uint16_t* first;        // [ranks + 1]: position of the rank's first pair
    uint16_t* first_chunk;  // [ranks + 1]
    uint16_t* chunk_rank;   // [chunks]

    __device__ explicit Tables(const Layout& at)
        : counts(shared_at<int>(at.counts)),
          pair_weight(shared_at<float>(at.pair_weight)),
          weight_of(shared_at<float>(at.weight_of)),
          part_counts(shared_at<uint8_t>(at.part_counts)),
          pair_expert(shared_at<uint16_t>(at.pair_expert)),
          position(shared_at<uint16_t>(at.position)),
          token_of(shared_at<uint16_t>(at.token_of)),
          rank_of(shared_at<uint16_t>(at.rank_of)),
          expert_of(shared_at<uint16_t>(at.expert_of)),
          first(shared_at<uint16_t>(at.first)),
          first_chunk(shared_at<uint16_t>(at.first_chunk)),
          chunk_rank(shared_at<uint16_t>(at.chunk_rank)) {}
};

// Fills pair_expert and pair_weight, and counts pairs. A load of what another kernel wrote goes to
// L2 (__ldcg): with programmatic launch a line can be stale in L1.
__device__ __forceinline__ void read_pairs(const Args& args, const Tables& tables,
                                           int valid_tokens) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < args.pairs; pair += kThreads) {
        const int token = pair / args.slots;
        const int slot = pair - token * args.slots;
        float weight = 1.0f;
        int expert = -1;
        if (slot < args.top_k) {
            const int64_t at = token * args.ids_stride + slot;
            const int64_t id = args.wide_ids ? __ldcg(static_cast<const long long*>(args.ids) + at)
                                             : __ldcg(static_cast<const int*>(args.ids) + at);
            const int64_t from = token * args.routing_stride + slot;
            weight =
                args.bf16_routing
                    ? __uint_as_float(
                          uint32_t{__ldcg(static_cast<const unsigned short*>(args.routing) + from)}
                          << 16)
                    : __ldcg(static_cast<const float*>(args.routing) + from);
            weight = __fmul_rn(weight, args.routed_scaling_factor);
            const bool known = id >= 0 && id < args.num_experts;
            const int64_t local = id - args.first_expert;
            if (known && local >= 0 && local < args.num_routed) expert = static_cast<int>(local);
            const bool invalid = !known && id != -1 && token < valid_tokens;
            if (invalid && blockIdx.x == 0 && args.invalid_count) atomicAdd(args.invalid_count, 1);
        } else {
            expert = args.num_routed + slot - args.top_k;  // a shared expert takes every row
        }
        if (token >= valid_tokens) expert = -1;
        tables.pair_expert[pair] = expert < 0 ? kNone : static_cast<uint16_t>(expert);
        tables.pair_weight[pair] = weight;
        if (expert >= 0) atomicAdd(tables.counts + expert, 1);
    }
}

struct Active {
    int ranks, chunks;
};

// Fills rank_of, expert_of, first, first_chunk and chunk_rank from counts.
template <int kColumns>
__device__ __forceinline__ Active rank_experts(const Args& args, const Tables& tables) {
    // Three counts in one word: pairs, chunks, active experts.
    using Counts = unsigned long long;
    constexpr int kBits = 20;
    constexpr Counts kMask = (1 << kBits) - 1;
    const auto of = [](int pairs) {
        const int chunks = (pairs + kColumns - 1) / kColumns;
        return Counts{static_cast<unsigned>(pairs)} << 2 * kBits |
               Counts{static_cast<unsigned>(chunks)} << kBits | Counts{pairs > 0};
    };
    Counts* warp_sums = shared_at<Counts>(args.at.scan);
    const int per_thread = (args.num_local + kThreads - 1) / kThreads;
    const int begin = threadIdx.x * per_thread;
    const int end = min(begin + per_thread, args.num_local);
    Counts mine = 0;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) mine += of(tables.counts[expert]);
    Counts upto = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const Counts below = __shfl_up_sync(0xffffffffu, upto, offset);
        if (lane_index() >= offset) upto += below;
    }
    if (lane_index() == 31) warp_sums[warp_index()] = upto;
    __syncthreads();
    Counts before = upto - mine, total = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) {
        if (warp < warp_index()) before += warp_sums[warp];
        total += warp_sums[warp];
    }
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        const int count = tables.counts[expert];
        if (count == 0) continue;
        const int rank = static_cast<int>(before & kMask);
        const int chunk = static_cast<int>(before >> kBits & kMask);
        const int position = static_cast<int>(before >> 2 * kBits);
        tables.rank_of[expert] = rank;
        tables.expert_of[rank] = expert;
        tables.first[rank] = position;
        tables.first_chunk[rank] = chunk;
        for (int i = 0; i * kColumns < count; ++i) tables.chunk_rank[chunk + i] = rank;
        before += of(count);
    }
    const Active active = {static_cast<int>(total & kMask),
                           static_cast<int>(total >> kBits & kMask)};
    if (threadIdx.x == 0) {
        tables.first[active.ranks] = static_cast<int>(total >> 2 * kBits);
        tables.first_chunk[active.ranks] = active.chunks;
    }
    __syncthreads();
    return active;
}

// The place of a pair is the number of earlier pairs of its expert, so that every block finds the
// same. Each warp that multiplies counts within its part of the pairs; a barrier; then each pair
// adds up the parts before its own.
__device__ __forceinline__ void count_within_parts(const Args& args, const Tables& tables) {
    const int lane = lane_index();
    const int begin = warp_index() * args.part, end = min(begin + args.part, args.pairs);
    uint8_t* counts = tables.part_counts + warp_index() * args.num_local;
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
        const int pair = first + lane;
        const uint32_t expert = pair < end ? tables.pair_expert[pair] : kNone;
        const uint32_t equal = __match_any_sync(0xffffffffu, expert);
        const int earlier = __popc(equal & ((1u << lane) - 1));
        if (expert != kNone) tables.position[pair] = counts[expert] + earlier;
        __syncwarp();
        if (expert != kNone && earlier == 0) counts[expert] += __popc(equal);
        __syncwarp();
    }
}

// Fills position, token_of and weight_of.
__device__ __forceinline__ void place_pairs(const Args& args, const Tables& tables) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < args.pairs; pair += kMathThreads) {
        const uint32_t expert = tables.pair_expert[pair];
        if (expert == kNone) {
            tables.position[pair] = kNone;
            continue;
        }
        int position = tables.first[tables.rank_of[expert]] + tables.position[pair];
        const int parts = pair / args.part;
        for (int part = 0; part < parts; ++part)
            position += tables.part_counts[part * args.num_local + expert];
        tables.token_of[position] = pair / args.slots;
        tables.weight_of[position] = tables.pair_weight[pair];
        tables.position[pair] = position;
    }
}

}  // namespace small_batch

#endif  // MEGAMOE_SMALL_BATCH_ROUTING_CUH
