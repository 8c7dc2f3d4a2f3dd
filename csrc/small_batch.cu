// FP8 mixture-of-experts layer of one rank for small batches on SM90, in one kernel.
//
// At small batch the time is that of reading the weights of the touched experts. So each of their
// bytes is read once, in a stream that nothing interrupts, and the rest is arranged around it:
//
// - One block per multiprocessor. One warp does nothing but ask for weights, a ring of stages
//   ahead, through both GEMMs: w2 does not depend on what GEMM 1 computes, so that its first tiles
//   arrive while other blocks are still at GEMM 1, and the wait between the GEMMs costs nothing.
// - Weights are the A operand (64 rows) of wgmma, tokens the columns of B: e4m3 goes from shared
//   memory into the matrix units as it is, without an instruction per byte. GEMM 1 multiplies by
//   all tokens of the batch, also those that another expert takes: columns are free up to the rate
//   of the units. Each token has its own column, so a NaN stays in its row.
// - No staging kernel: each block quantizes all rows of x while its first weights are under way,
//   and finds the routing itself, from the ids.
// - GEMM 1 applies SwiGLU and the routing weight and quantizes per pair and 32 columns, into an
//   image of shared memory in global memory, which GEMM 2 copies as it is. 32 and not 128 columns,
//   because a tile of 64 rows has 32 intermediate columns, and no block waits for another's.
// - Two warpgroups take turns in multiplying: while one writes its results, the other multiplies.
// - The last tile of GEMM 2 for a group of output rows sums the slots, in slot order. No atomics on
//   data, no order that depends on timing: results are the same bits in every run, and a token's
//   result does not depend on the other tokens.
//
// Blocks wait for each other's GEMM 1, but never before they have done their own share of it, so
// that any order of starting them comes to an end.

#include "small_batch.cuh"
#include "small_batch_plan.cuh"

namespace small_batch {

// Named barriers of a block.
enum { kSetUp = 1, kTurn = 2, kGroupOnly = 4, kEnd = 6 };  // kTurn, kGroupOnly: + group

__device__ __forceinline__ int group_index() { return threadIdx.x / kGroup; }
__device__ __forceinline__ void group_barrier() {
    ptx::group_sync(kGroupOnly + group_index(), kGroup);
}

// Results of one unit of GEMM 1 -> SwiGLU, routing weight, e4m3, for each pair of the expert.
template <typename S>
__device__ __forceinline__ void write_rows(const Args& args, const Tables& tables, const Unit& unit,
                                           const float (&total)[S::kTokens / 2]) {
    const int lane = lane_index(), warp = warp_index() % 4;
    float* results =
        shared_at<float>(args.at.results) + group_index() * S::kTokens * S::kRowStride;
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // row g of the tile is a gate row, row g + 8 its up row
            const int token = 8 * j + lane % 4 * 2 + i;
            results[token * S::kRowStride + warp * 8 + lane / 4] =
                swiglu(total[4 * j + i], total[4 * j + 2 + i], args.swiglu_limit);
        }
    group_barrier();
    const int low = tables.first[unit.rank], count = tables.first[unit.rank + 1] - low;
    const int first_chunk = tables.first_chunk[unit.rank];
    const int column = unit.tile * kFine + lane;
#pragma unroll 1
    for (int pair = warp; pair < count; pair += 4) {
        const float value =
            results[tables.token_of[low + pair] * S::kRowStride + lane] * tables.weight_of[low + pair];
        float amax = fmaxf(0.0f, fabsf(value));  // drops NaN
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
        const float scale = scale_of(amax);
        const int64_t chunk = first_chunk + pair / S::kColumns;
        const int row = pair % S::kColumns;
        args.rows[chunk * S::kColumns * args.intermediate + image_at(row, column, S::kColumns)] =
            static_cast<uint8_t>(quantize(value, 0.0f, __fdiv_rn(1.0f, scale)));
        if (lane == 0)
            args.row_scale[(chunk * (args.intermediate / kFine) + unit.tile) * S::kColumns + row] =
                scale;
    }
    // The rows are read by the copy engines of all multiprocessors.
    ptx::fence_device();
    ptx::fence_async_proxy();
    group_barrier();
    if (threadIdx.x % kGroup == 0) ptx::add_acquire_release(args.counters + unit.rank, 1);
}

// y of 64 columns, all tokens: the sum over slots, in fp32 and in slot order.
__device__ __forceinline__ void combine(const Args& args, const Tables& tables, int tile) {
#pragma unroll 1
    for (int item = threadIdx.x % kGroup; item < args.tokens * (kTileRows / 4); item += kGroup) {
        const int token = item / (kTileRows / 4);
        const int column = tile * kTileRows + item % (kTileRows / 4) * 4;
        float sum[4] = {};
#pragma unroll 4
        for (int slot = 0; slot < args.slots; ++slot) {
            const int pair = token * args.slots + slot;
            if (tables.pair_expert[pair] == kNone) continue;
            const uint2 four = __ldcg(reinterpret_cast<const uint2*>(
                args.results + int64_t{tables.position[pair]} * args.hidden + column));
            sum[0] += __uint_as_float(four.x << 16);
            sum[1] += __uint_as_float(four.x & 0xffff0000u);
            sum[2] += __uint_as_float(four.y << 16);
            sum[3] += __uint_as_float(four.y & 0xffff0000u);
        }
        __nv_bfloat162 out[2] = {__floats2bfloat162_rn(sum[0], sum[1]),
                                 __floats2bfloat162_rn(sum[2], sum[3])};
        *reinterpret_cast<uint2*>(args.y + int64_t{token} * args.hidden + column) =
            *reinterpret_cast<const uint2*>(out);
    }
}

// Results of one unit of GEMM 2, and y where this unit is the last of its rows.
template <typename S>
__device__ __forceinline__ void write_results(const Args& args, const Tables& tables,
                                              const Unit& unit, int chunks,
                                              const float (&total)[S::kColumns / 2]) {
    const int lane = lane_index(), warp = warp_index() % 4;
    const int low = tables.first[unit.rank] +
                    (unit.chunk - tables.first_chunk[unit.rank]) * S::kColumns;
    const int count = min(S::kColumns, tables.first[unit.rank + 1] - low);
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int pair = 8 * j + lane % 4 * 2 + i;
            if (pair >= count) continue;
            __nv_bfloat16* to = args.results + int64_t{low + pair} * args.hidden +
                                unit.tile * kTileRows + warp * 16 + lane / 4;
            to[0] = __float2bfloat16_rn(total[4 * j + i]);
            to[8] = __float2bfloat16_rn(total[4 * j + 2 + i]);
        }
    ptx::fence_device();
    group_barrier();
    int* last = shared_at<int>(args.at.scan) + group_index();
    if (threadIdx.x % kGroup == 0)
        *last = ptx::add_acquire_release(args.counters + kMaxExperts + unit.tile, 1) == chunks - 1;
    group_barrier();
    if (*last) {
        ptx::fence_device();
        combine(args, tables, unit.tile);
    }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    small_batch_kernel(const __grid_constant__ Args args, const __grid_constant__ CUtensorMap w13,
                       const __grid_constant__ CUtensorMap w2) {
    const Tables tables(args.at);
    const Ring<S> ring(args);
    const int warp = warp_index();

    // 1. What needs no input.
#pragma unroll 1
    for (int expert = threadIdx.x; expert < args.num_local; expert += kThreads)
        tables.counts[expert] = 0;
    if (threadIdx.x < args.stages) {
        ptx::barrier_init(ring.full + threadIdx.x, Ring<S>::kFullArrivals);
        ptx::barrier_init(ring.empty + threadIdx.x, Ring<S>::kEmptyArrivals);
    }
    ptx::fence_barrier_init();
    if (threadIdx.x == 0) {
        ptx::prefetch_map(&w13);
        ptx::prefetch_map(&w2);
    }
    __syncthreads();

    // 2. The routing. x goes first: once weights are asked for, it would queue behind them.
    ptx::wait_for_predecessor();
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(args.launch_count, 1);
    RowsOfX<S::kTokens> rows(args);
    if (warp < kMathThreads / 32) rows.start(args, args.tokens);
    const int valid_tokens = __ldcg(args.num_valid);
    read_pairs(args, tables, valid_tokens);
    __syncthreads();
    const Active active = rank_experts<S::kColumns>(args, tables);
    if (active.ranks == 0) {
        const int64_t count = int64_t{args.tokens} * args.hidden;
        for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
             i += int64_t{gridDim.x} * kThreads)
            args.y[i] = __float2bfloat16_rn(0.0f);
        return;
    }

    // 3. One warp asks for weights, one for intermediate rows.
    const Work work(args, active);
    if (warp == kMathThreads / 32) {
        load_weights<S>(args, tables, work, &w13, &w2);
        return;
    }
    if (warp > kMathThreads / 32) {
        sort_pairs(args, tables);
        ptx::group_arrive(kSetUp, kMathThreads + 32);
        load_rows<S>(args, tables, work);
        return;
    }

    // 4. Two groups take units in turns.
    rows.finish(args, min(args.tokens, max(valid_tokens, 0)));
    ptx::fence_async_proxy();  // the matrix units read what was written
    ptx::group_sync(kSetUp, kMathThreads + 32);
    // The compiler must see that whole warps take every branch from here on: else it lets one wgmma
    // wait for the other.
    const int group = __shfl_sync(0xffffffffu, group_index(), 0), other = 1 - group;
    const int own1 = __shfl_sync(0xffffffffu, work.own1, 0);
    const int total = __shfl_sync(0xffffffffu, work.total(), 0);
    if (group == 1 && total > 0) ptx::group_arrive(kTurn + other, kMathThreads);
    Place place;
    int i = group;
    if (group == 1) place.skip(stages_of<S>(args, own1 == 0), args.stages);
#pragma unroll 1
    for (; i < own1; i += 2) {
        float sums[S::kTokens / 2];
        ptx::group_sync(kTurn + group, kMathThreads);
        multiply_up<S>(args, place, sums);
        if (i + 1 < total) ptx::group_arrive(kTurn + other, kMathThreads);
        if (i + 1 < total) place.skip(stages_of<S>(args, i + 1 >= own1), args.stages);
        write_rows<S>(args, tables, work(i, tables), sums);
    }
#pragma unroll 1
    for (; i < total; i += 2) {
        float sums[S::kColumns / 2];
        ptx::group_sync(kTurn + group, kMathThreads);
        multiply_down<S>(args, place, sums);
        if (i + 1 < total) ptx::group_arrive(kTurn + other, kMathThreads);
        place.skip(stages_of<S>(args, true), args.stages);
        write_results<S>(args, tables, work(i, tables), active.chunks, sums);
    }

    // 5. The last block to end leaves the counters as it found them.
    ptx::group_sync(kEnd, kMathThreads);
    int* last = shared_at<int>(args.at.scan);
    int* ended = args.counters + kMaxExperts + work.tiles2;
    if (threadIdx.x == 0)
        *last = ptx::add_acquire_release(ended, 1) == static_cast<int>(gridDim.x) - 1;
    ptx::group_sync(kEnd, kMathThreads);
    if (!*last) return;
    for (int i = threadIdx.x; i < active.ranks; i += kMathThreads) args.counters[i] = 0;
    for (int i = threadIdx.x; i <= work.tiles2; i += kMathThreads)
        args.counters[kMaxExperts + i] = 0;
}

// -- host ----------------------------------------------------------------------------------------

using Kernel = void (*)(Args, CUtensorMap, CUtensorMap);

struct Variant {
    int tokens, columns, slabs;
    Kernel kernel;
};

// Few tokens leave room for long stages; many need it for x. The first that fits is taken.
#define MEGAMOE_VARIANT(tokens, columns, slabs) \
    {tokens, columns, slabs, small_batch_kernel<Shape<tokens, columns, slabs>>}
const Variant kVariants[] = {MEGAMOE_VARIANT(8, 8, 2),   MEGAMOE_VARIANT(8, 8, 1),
                             MEGAMOE_VARIANT(16, 16, 2), MEGAMOE_VARIANT(16, 16, 1),
                             MEGAMOE_VARIANT(32, 16, 1), MEGAMOE_VARIANT(64, 16, 1)};

inline bool fits(const Variant& variant, const MegaMoESmallBatchConfig& config, Args& args) {
    return args.tokens <= variant.tokens &&
           plan(args, config, variant.tokens, variant.columns, variant.slabs);
}

}  // namespace small_batch

extern "C" {

const char* megamoe_error_string(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// Checks `config`, loads every kernel onto the current device, lets it use all shared memory, and
// sets config->max_tokens: the most tokens of one launch, 0 if none fits.
int megamoe_small_batch_prepare(MegaMoESmallBatchConfig* config) {
    using namespace small_batch;
    const int local = config->num_routed + config->num_shared;
    const int slots = config->top_k + config->num_shared;
    config->max_tokens = 0;
    if (config->hidden_size % kBlock != 0 || config->intermediate_size % kBlock != 0 ||
        config->hidden_size < kBlock || config->intermediate_size < kBlock || config->top_k < 1 ||
        config->num_shared < 0 || local < 1 || local > kMaxExperts || config->num_sms < 1)
        return cudaErrorInvalidValue;
    for (const Variant& variant : kVariants) {
        Args args = {};
        args.slots = slots;
        args.num_local = local;
        args.hidden = config->hidden_size;
        args.intermediate = config->intermediate_size;
        args.tokens = variant.tokens;
        if (variant.tokens * slots > kMaxPairs) args.tokens = kMaxPairs / slots;
        args.pairs = args.tokens * slots;
        if (args.tokens > 0 && fits(variant, *config, args) && args.tokens > config->max_tokens)
            config->max_tokens = args.tokens;
        const cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(variant.kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
        if (error != cudaSuccess) {
            cudaGetLastError();  // the caller has it
            return error;
        }
    }
    return cudaSuccess;
}

// The layer on `stream` of the current device. x: bf16 rows; strides in elements. `variant`: bit 1
// for int64 ids, bit 0 for bf16 weights. launch_count grows by one, also where num_tokens is 0.
// Returns a cudaError_t.
int megamoe_small_batch(const MegaMoESmallBatchConfig* config, const void* x, int64_t x_stride,
                        const void* ids, int64_t ids_stride, const void* weights,
                        int64_t weights_stride, const void* num_valid, void* launch_count,
                        const void* w13, const void* w13_scale, const void* w2,
                        const void* w2_scale, void* y, int32_t num_tokens, int32_t variant,
                        void* stream) {
    using namespace small_batch;
    if (num_tokens < 0 || num_tokens > config->max_tokens || variant < 0 || variant > 3)
        return cudaErrorInvalidValue;
    Args args = {};
    args.x = x;
    args.ids = ids;
    args.routing = weights;
    args.x_stride = x_stride;
    args.ids_stride = ids_stride;
    args.routing_stride = weights_stride;
    args.num_valid = static_cast<const int32_t*>(num_valid);
    args.launch_count = static_cast<int32_t*>(launch_count);
    args.invalid_count = config->invalid_count;
    args.w13_scale = static_cast<const float*>(w13_scale);
    args.w2_scale = static_cast<const float*>(w2_scale);
    args.rows = config->rows;
    args.row_scale = config->row_scale;
    args.results = static_cast<__nv_bfloat16*>(config->results);
    args.counters = config->counters;
    args.y = static_cast<__nv_bfloat16*>(y);
    args.tokens = num_tokens;
    args.top_k = config->top_k;
    args.slots = config->top_k + config->num_shared;
    args.pairs = num_tokens * args.slots;
    args.num_experts = config->num_experts;
    args.first_expert = config->first_expert;
    args.num_routed = config->num_routed;
    args.num_local = config->num_routed + config->num_shared;
    args.wide_ids = variant >> 1;
    args.bf16_routing = variant & 1;
    // A single row's stride is arbitrary, and not used.
    args.aligned_x =
        reinterpret_cast<uintptr_t>(x) % 16 == 0 && (num_tokens <= 1 || x_stride % 8 == 0);
    args.swiglu_limit = config->swiglu_limit;
    args.routed_scaling_factor = config->routed_scaling_factor;
    args.hidden = config->hidden_size;
    args.intermediate = config->intermediate_size;

    const Variant* chosen = nullptr;
    for (const Variant& candidate : kVariants)
        if (!chosen && fits(candidate, *config, args)) chosen = &candidate;
    if (!chosen) return cudaErrorInvalidConfiguration;
    CUtensorMap map13 = {}, map2 = {};
    cudaError_t error = encode(map13, w13, args.num_local * 2 * args.intermediate, args.hidden);
    if (error == cudaSuccess)
        error = encode(map2, w2, args.num_local * args.hidden, args.intermediate);
    if (error != cudaSuccess) return error;

    cudaLaunchAttribute programmatic = {};
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t shape = {};
    shape.gridDim = dim3(num_tokens > 0 ? config->num_sms : 1);
    shape.blockDim = dim3(kThreads);
    shape.dynamicSmemBytes = args.at.total;
    shape.stream = static_cast<cudaStream_t>(stream);
    shape.attrs = &programmatic;
    shape.numAttrs = config->pdl ? 1 : 0;
    void* parameters[] = {&args, &map13, &map2};
    error = cudaLaunchKernelExC(
        &shape, reinterpret_cast<const void*>(chosen->kernel), parameters);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

}  // extern "C"
