// FP8 mixture-of-experts layer of one rank for small batches on SM90, in one kernel.
//
// At small batch the time is that of reading the weights of the touched experts. So each of their
// bytes is read once, in a stream that nothing interrupts, and the rest is arranged around it:
//
// - One block per multiprocessor. One warp does nothing but ask for weights, a ring of stages
//   ahead, through both GEMMs: w2 does not depend on what GEMM 1 computes, so that its first tiles
//   arrive while other blocks are still at GEMM 1, and the wait between the GEMMs costs nothing.
// - Weights are the A operand (64 rows) of wgmma, tokens the columns of B: e4m3 goes from shared
//   memory into the matrix units as it is, without an instruction per byte. Each token has its own
//   column, so a NaN stays in its row.
// - No staging kernel. Up to 16 tokens, each block quantizes all rows of x while its first weights
//   are under way, and GEMM 1 multiplies by all of them, also those that another expert takes:
//   columns are free up to the rate of the units. For more tokens, each block quantizes a part,
//   into images of shared memory in global memory, which GEMM 1 copies as they are: "staged" below.
// - GEMM 1 applies SwiGLU and the routing weight and quantizes per pair and 32 columns, into such
//   images, for GEMM 2. 32 and not 128 columns, because a tile of 64 rows has 32 intermediate
//   columns, and no block waits for another's.
// - Two warpgroups take turns in multiplying: while one does, the other writes its results and
//   tells other blocks. With one group the stream would stop for that after every tile.
// - The last tile of GEMM 2 for a group of output rows sums the slots, in slot order. No atomics on
//   data, no order that depends on timing: results are the same bits in every run, and a token's
//   result does not depend on the other tokens of the call. Where they change the variant of the
//   kernel this rests on wgmma, which adds up a column alike for every number of columns.
//
// Blocks wait for each other, so all of them must come to run: there are no more than
// multiprocessors, and what runs before them or beside them must come to its end without them. Two
// launches beside each other can each have half of the multiprocessors, and wait for ever.

#include <cmath>
#include <type_traits>

#include "../cuda/library.cuh"
#include "kernel.cuh"
#include "plan.cuh"

namespace small_batch {

// Named barriers of a block.
enum { kSetUp = 1, kTurn = 2, kGroupOnly = kTurn + kGroups };  // kTurn, kGroupOnly: + group

__device__ __forceinline__ int group_index() { return threadIdx.x / kGroup; }
__device__ __forceinline__ void group_barrier() {
    ptx::group_sync(kGroupOnly + group_index(), kGroup);
}

// Results of one unit of GEMM 1 -> SwiGLU, routing weight, e4m3, for each of its pairs.
template <typename S>
__device__ __forceinline__ void write_rows(const Args& args, const Tables& tables, const Unit& unit,
                                           const float2& biases,
                                           const float (&total)[S::kUpColumns / 2]) {
    const int lane = lane_index(), warp = warp_index() % 4;
    float* results =
        shared_at<float>(args.at.results) + group_index() * S::kUpColumns * S::kRowStride;
#pragma unroll
    for (int j = 0; j < S::kUpColumns / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // row g of the tile is a gate row, row g + 8 its up row
            const int column = 8 * j + lane % 4 * 2 + i;
            float gate = total[4 * j + i], up = total[4 * j + 2 + i];
            if constexpr (S::kGeneral) {
                gate += biases.x;
                up += biases.y;
            }
            results[column * S::kRowStride + warp * 8 + lane / 4] =
                swiglu<S::kGeneral>(args, gate, up);
        }
    group_barrier();
    int low = tables.first[unit.rank], count = tables.first[unit.rank + 1] - low;
    int64_t first_chunk = tables.first_chunk[unit.rank];
    if constexpr (!S::kResident) {
        const int before = (unit.chunk - static_cast<int>(first_chunk)) * S::kColumns;
        low += before;
        count = min(S::kColumns, count - before);
        first_chunk = unit.chunk;
    }
    const int column = unit.tile * kFine + lane;
#pragma unroll 1
    for (int pair = warp; pair < count; pair += 4) {
        const int from = S::kResident ? int{tables.token_of[low + pair]} : pair;
        const float value = results[from * S::kRowStride + lane] * tables.weight_of[low + pair];
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
    ptx::fence_async_global();  // the copy engines of all multiprocessors read the rows
    group_barrier();
    if (threadIdx.x % kGroup == 0)
        ptx::add_release(args.counters->ready + (S::kResident ? unit.rank : unit.chunk), 1);
}

// y of 64 columns, all tokens: the sum over slots, in fp32 and in slot order. The few blocks that
// end up with this have nothing else to do meanwhile: what counts is how many loads are under way.
__device__ __forceinline__ void combine(const Args& args, const Tables& tables, int tile) {
    constexpr int kItems = 2, kLoads = 8;  // of a thread at a time: eight columns of y, slots
    constexpr int kPerRow = kTileRows / 8;
    const __nv_bfloat16* results = args.results + tile * kTileRows;
    const int items = args.tokens * kPerRow;
#pragma unroll 1
    for (int first = threadIdx.x % kGroup; first < items; first += kItems * kGroup) {
        float sum[kItems][8] = {};
#pragma unroll 1
        for (int slot = 0; slot < args.slots; slot += kLoads) {
            uint4 pieces[kItems][kLoads];
#pragma unroll
            for (int n = 0; n < kItems; ++n) {
                const int item = first + n * kGroup, token = item / kPerRow;
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    int at = kNone;
                    if (item < items && slot + i < args.slots)
                        at = tables.position[token * args.slots + slot + i];
                    pieces[n][i] = make_uint4(0, 0, 0, 0);  // adds nothing
                    if (at != kNone)
                        pieces[n][i] = __ldcg(reinterpret_cast<const uint4*>(
                            results + int64_t{at} * args.hidden + item % kPerRow * 8));
                }
            }
#pragma unroll
            for (int n = 0; n < kItems; ++n)
#pragma unroll
                for (int i = 0; i < kLoads; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t two = word_of(pieces[n][i], j);
                        sum[n][2 * j] += __uint_as_float(two << 16);
                        sum[n][2 * j + 1] += __uint_as_float(two & 0xffff0000u);
                    }
        }
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
            const int item = first + n * kGroup;
            if (item >= items) break;
            __nv_bfloat162 out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                out[j] = __floats2bfloat162_rn(sum[n][2 * j], sum[n][2 * j + 1]);
            auto* y = reinterpret_cast<uint2*>(args.y + int64_t{item / kPerRow} * args.hidden +
                                               tile * kTileRows + item % kPerRow * 8);
            y[0] = reinterpret_cast<const uint2*>(out)[0];
            y[1] = reinterpret_cast<const uint2*>(out)[1];
        }
    }
}

// Results of one unit of GEMM 2, and y where this unit is the last of its rows.
template <typename S>
__device__ __forceinline__ void write_results(const Args& args, const Tables& tables,
                                              const Unit& unit, const Active& active,
                                              const float2& biases,
                                              const float (&total)[S::kColumns / 2]) {
    const int lane = lane_index(), warp = warp_index() % 4;
    const int low =
        tables.first[unit.rank] + (unit.chunk - tables.first_chunk[unit.rank]) * S::kColumns;
    const int count = min(S::kColumns, tables.first[unit.rank + 1] - low);
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int pair = 8 * j + lane % 4 * 2 + i;
            if (pair >= count) continue;
            __nv_bfloat16* to = args.results + int64_t{low + pair} * args.hidden +
                                unit.tile * kTileRows + warp * 16 + lane / 4;
            float upper = total[4 * j + i], lower = total[4 * j + 2 + i];
            if constexpr (S::kGeneral) {
                const float weight = tables.weight_of[low + pair];
                upper += weight * biases.x;
                lower += weight * biases.y;
            }
            to[0] = __float2bfloat16_rn(upper);
            to[8] = __float2bfloat16_rn(lower);
        }
    group_barrier();
    static_assert(kGroups * sizeof(int) <= kThreads / 32 * 8, "flags in the place of the scan");
    int* last = shared_at<int>(args.at.scan) + group_index();
    if (threadIdx.x % kGroup == 0)
        *last =
            ptx::count_up(args.counters->done + unit.tile, active.chunks - 1) == active.chunks - 1;
    group_barrier();
    if (*last) combine(args, tables, unit.tile);
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
    for (int expert = threadIdx.x; expert < args.num_local; expert += kThreads) {
        tables.counts[expert] = 0;
        for (int first = 0, part = 0; first < args.pairs; first += args.part, ++part)
            tables.part_counts[part * args.num_local + expert] = 0;
    }
    if (threadIdx.x < args.stages) {
        ptx::barrier_init(ring.full + threadIdx.x, Ring<S>::kFullArrivals);
        ptx::barrier_init(ring.rows_in + threadIdx.x, Ring<S>::kRowsArrivals);
        ptx::barrier_init(ring.empty + threadIdx.x, Ring<S>::kEmptyArrivals);
    }
    ptx::fence_barrier_init();
    if (threadIdx.x == 0) {
        *ring.published = 0;
        ptx::prefetch_map(&w13);
        ptx::prefetch_map(&w2);
    }
    __syncthreads();

    // 2. The routing. x goes first: once weights are asked for, it would queue behind them.
    ptx::wait_for_predecessor();
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(args.launch_count, 1);
    ptx::allow_successor();  // it waits for this grid's end before it reads or writes anything
    using Rows = std::conditional_t<S::kResident, RowsOfX<S::kTokens>, StagedRows<S>>;
    Rows rows(args);
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

    // 3. One warp asks for weights, one for rows.
    const Work<S> work(args, active);
    if (warp == kMathThreads / 32) {
        load_weights<S>(args, tables, work, &w13, &w2);
        return;
    }
    if (warp > kMathThreads / 32) {
        if (lane_index() == 0) load_rows<S>(args, tables, work);
        return;
    }

    // 4. The rows of x.
    count_within_parts(args, tables);
    ptx::group_sync(kSetUp, kMathThreads);
    place_pairs(args, tables);
    if constexpr (S::kResident) {
        rows.finish(args, min(args.tokens, max(valid_tokens, 0)));
        ptx::fence_async_shared();  // the matrix units read what was written
        ptx::group_sync(kSetUp, kMathThreads);
    } else {
        ptx::group_sync(kSetUp, kMathThreads);
        rows.write(args, tables);
        ptx::fence_async_global();  // the copy engines of all multiprocessors read it
        ptx::group_sync(kSetUp, kMathThreads);
        if (threadIdx.x == 0) ptx::add_release(&args.counters->staged, 1);
    }

    // 5. The groups take units in turns. The compiler must see that whole warps take every branch
    // from here on: else it lets one wgmma wait for the other.
    const int group = __shfl_sync(0xffffffffu, group_index(), 0);
    const int after = (group + 1) % kGroups;  // its turn is the next
    constexpr int kPair = 2 * kGroup;
    if (group == kGroups - 1) ptx::group_arrive(kTurn + after, kPair);
    Place place;
#pragma unroll 1
    for (int turn = group, behind = 0;; turn += kGroups) {
        ptx::group_sync(kTurn + group, kPair);
        for (; behind < turn; ++behind) {  // units of the other groups
            const int number = __shfl_sync(0xffffffffu, ring.units[behind % kQueue], 0);
            if (number == Ring<S>::kNoUnit) {
                if (behind + kGroups > turn + 1) ptx::group_arrive(kTurn + after, kPair);
                return;
            }
            place.skip(ring.stages_of(work.down(number)), args.stages);
        }
        ++behind;
        ptx::barrier_wait(ring.full + place.slot, place.parity);
        const int number = __shfl_sync(0xffffffffu, ring.units[turn % kQueue], 0);
        if (number == Ring<S>::kNoUnit) {
            ptx::group_arrive(kTurn + after, kPair);
            return;
        }
        float2 biases;  // of the general flavour
        if constexpr (S::kGeneral) biases = load_biases(args, tables, work, number);
        if (work.down(number)) {
            float total[S::kColumns / 2];
            multiply_down<S>(args, place, total);
            ptx::group_arrive(kTurn + after, kPair);
            write_results<S>(args, tables, work(number, tables), active, biases, total);
        } else {
            float total[S::kUpColumns / 2];
            multiply_up<S>(args, place, total);
            ptx::group_arrive(kTurn + after, kPair);
            write_rows<S>(args, tables, work(number, tables), biases, total);
        }
    }
}

// -- host ----------------------------------------------------------------------------------------

using Kernel = void (*)(Args, CUtensorMap, CUtensorMap);

struct Variant {
    int tokens, columns, slabs;  // tokens: 0 where x is not resident
    Kernel plain, general;

    Kernel kernel(const MegaMoESmallBatchConfig& config) const {
        const bool is_plain = config.swiglu_alpha == 1.0f && config.swiglu_beta == 0.0f;
        return is_plain && !config.expert_bias ? plain : general;
    }
};

// The first that fits is taken. Columns are at most MAX_COLUMNS of
// custom_ops/small_batch/kernel.py, which has room for images of so many rows.
#define MEGAMOE_VARIANT(tokens, columns, slabs)                                        \
    {tokens, columns, slabs, small_batch_kernel<Shape<tokens, columns, slabs, false>>, \
     small_batch_kernel<Shape<tokens, columns, slabs, true>>}
const Variant kVariants[] = {
    MEGAMOE_VARIANT(8, 8, 2),   MEGAMOE_VARIANT(8, 8, 1),  MEGAMOE_VARIANT(16, 16, 2),
    MEGAMOE_VARIANT(16, 16, 1), MEGAMOE_VARIANT(0, 8, 2),  MEGAMOE_VARIANT(0, 8, 1),
    MEGAMOE_VARIANT(0, 16, 2),  MEGAMOE_VARIANT(0, 16, 1), MEGAMOE_VARIANT(0, 32, 1)};

// Columns that hold an expert's pairs as a rule: the mean of even routing and two standard
// deviations. More pairs make another chunk, for which the expert's weights are read again.
inline int columns_for(const Args& args) {
    const float mean = static_cast<float>(args.pairs) / args.num_experts;
    const float many = mean + 2.0f * std::sqrt(mean);
    return many <= 8 ? 8 : many <= 16 ? 16 : 32;
}

inline bool fits(const Variant& variant, const MegaMoESmallBatchConfig& config, Args& args) {
    const bool right =
        variant.tokens > 0 ? args.tokens <= variant.tokens : variant.columns == columns_for(args);
    return right && plan(args, config, variant.tokens, variant.columns, variant.slabs);
}

// Fills in the sizes of `args`, its layout included. Returns the variant, or null if none fits.
inline const Variant* choose(const MegaMoESmallBatchConfig& config, int tokens, Args& args) {
    args.tokens = tokens;
    args.top_k = config.top_k;
    args.slots = config.top_k + config.num_shared;
    args.pairs = tokens * args.slots;
    args.num_experts = config.num_experts;
    args.first_expert = config.first_expert;
    args.num_routed = config.num_routed;
    args.num_local = config.num_routed + config.num_shared;
    args.hidden = config.hidden_size;
    args.intermediate = config.intermediate_size;
    for (const Variant& variant : kVariants)
        if (fits(variant, config, args)) return &variant;
    return nullptr;
}

}  // namespace small_batch

extern "C" {

// Checks `config`, loads every kernel of its flavour onto the current device, lets it use all
// shared memory, and sets config->max_tokens: the most tokens of one launch, 0 if none fits.
int megamoe_prepare(MegaMoESmallBatchConfig* config) {
    using namespace small_batch;
    const int local = config->num_routed + config->num_shared;
    const int slots = config->top_k + config->num_shared;
    config->max_tokens = 0;
    if (config->hidden_size % kBlock != 0 || config->intermediate_size % kBlock != 0 ||
        config->hidden_size < kBlock || config->intermediate_size < kBlock || config->top_k < 1 ||
        config->num_shared < 0 || config->num_experts < 1 || local < 1 || local > kMaxExperts ||
        config->num_sms < 1 || !(config->swiglu_alpha > 0.0f))
        return cudaErrorInvalidValue;
    for (const Variant& variant : kVariants) {
        const cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(variant.kernel(*config)),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
        if (error != cudaSuccess) return library::returned(error);
    }
    // Every number of tokens up to it must fit.
    for (int tokens = 1; tokens * slots <= kMaxPairs; ++tokens) {
        Args args = {};
        if (!choose(*config, tokens, args)) break;
        config->max_tokens = tokens;
    }
    return cudaSuccess;
}

// The layer on `stream` of the current device. x: bf16 rows; strides in elements. `dtypes`: bit 1
// for int64 ids, bit 0 for bf16 weights. w13_bias, w2_bias: both where config->expert_bias, else
// null. launch_count grows by one, also where num_tokens is 0. Returns a cudaError_t.
int megamoe_small_batch(const MegaMoESmallBatchConfig* config, const void* x, int64_t x_stride,
                        const void* ids, int64_t ids_stride, const void* weights,
                        int64_t weights_stride, const void* num_valid, void* launch_count,
                        const void* w13, const void* w13_scale, const void* w2,
                        const void* w2_scale, const void* w13_bias, const void* w2_bias, void* y,
                        int32_t num_tokens, int32_t dtypes, void* stream) {
    using namespace small_batch;
    const bool has_bias = config->expert_bias != 0;
    if (num_tokens < 0 || num_tokens > config->max_tokens || dtypes < 0 || dtypes > 3 ||
        has_bias != (w13_bias != nullptr) || has_bias != (w2_bias != nullptr))
        return cudaErrorInvalidValue;
    Args args = {};
    const Variant* chosen = choose(*config, num_tokens, args);
    if (!chosen) return cudaErrorInvalidConfiguration;
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
    args.w13_bias = static_cast<const float*>(w13_bias);
    args.w2_bias = static_cast<const float*>(w2_bias);
    args.x_rows = config->x_rows;
    args.rows = config->rows;
    args.x_row_scale = config->x_row_scale;
    args.row_scale = config->row_scale;
    args.results = static_cast<__nv_bfloat16*>(config->results);
    args.counters = static_cast<Counters*>(config->counters);
    args.y = static_cast<__nv_bfloat16*>(y);
    args.wide_ids = dtypes >> 1;
    args.bf16_routing = dtypes & 1;
    // A single row's stride is arbitrary, and not used.
    args.aligned_x =
        reinterpret_cast<uintptr_t>(x) % 16 == 0 && (num_tokens <= 1 || x_stride % 8 == 0);
    args.swiglu_limit = config->swiglu_limit;
    args.swiglu_alpha = config->swiglu_alpha;
    args.swiglu_beta = config->swiglu_beta;
    args.routed_scaling_factor = config->routed_scaling_factor;

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
    return library::returned(cudaLaunchKernelExC(
        &shape, reinterpret_cast<const void*>(chosen->kernel(*config)), parameters));
}

}  // extern "C"
