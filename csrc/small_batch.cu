// FP8 mixture-of-experts layer of one rank for small batches on SM90, in two kernels.
//
// At small batch the time is that of reading the weights of the touched experts. So both kernels
// read each of their bytes once, in one stream per warp that nothing interrupts, and the rest is
// arranged around that stream:
//
// - K1 (gate_up) quantizes the rows of x that it needs, multiplies by w13, applies SwiGLU and the
//   routing weight, and writes fp32 [pairs, intermediate]. K2 (down) quantizes those, multiplies by
//   w2, and sums the slots of a token in slot order, in fp32. There is no staging kernel: a block
//   needs few rows, and quantizes them while its first weights are under way.
// - Weights are the A operand (16 rows), pairs of one expert the 8 columns of B. SM90 has no
//   warp-level e4m3 mma: e4m3 becomes f16, whose products are exact in fp32. One fp32 accumulation
//   per 128 columns is scaled and added, as in the recipe. Each pair has its own column, so a NaN
//   stays in its row.
// - Every block finds the routing itself, from the ids. Its work is one contiguous range of units.
//   K1: 1/132 of all units. K2: a cluster owns a group of output rows for all experts, and divides
//   their units among its blocks; then it sums over the slots through distributed shared memory. No
//   atomics on data, no order that depends on timing: results are the same bits in every run, and a
//   token's result does not depend on the other tokens.
// - Programmatic launch: K1 lets K2 start when it has asked for its last weights. K2 then finds its
//   routing and fills its ring of stages while K1 drains, and only then waits for K1. The ids that
//   it reads before that wait are complete, since K1 waited for whatever wrote them.
//   A kernel that is launched programmatically behind K2 must execute griddepcontrol.wait before it
//   reads y or writes any input; an ordinary launch is always safe.

#include "small_batch.cuh"
#include "small_batch_plan.cuh"

namespace small_batch {

// The first of a unit's columns among all columns (one per unit and pair) of a group of rows.
__device__ __forceinline__ int first_column(const Tables& tables, int units, int rank, int unit) {
    return tables.first[rank] * units + unit * tables.columns(rank);
}

// Sums the slots of every token for this cluster's rows, in slot order.
__device__ __forceinline__ void combine(const Args& args, const Tables& tables, int first_unit,
                                        int units, int total_units, float* spill) {
    const int cluster = ptx::cluster_size();
    const int group_rows = units << args.log_unit_rows;
    const float* slots = shared_at<float>(args.at.slots);
    const int* starts = shared_at<int>(args.at.starts);
#pragma unroll 1
    for (int item = ptx::cluster_rank() * kThreads + threadIdx.x; item < args.tokens * group_rows;
         item += cluster * kThreads) {
        const int token = item / group_rows;
        const int row = item - token * group_rows;
        const int unit = row >> args.log_unit_rows;
        float sum = 0.0f;
#pragma unroll 4
        for (int slot = 0; slot < args.slots; ++slot) {
            const int pair = token * args.slots + slot;
            const int expert = tables.pair_expert[pair];
            if (expert == kNone) continue;
            const int rank = tables.rank_of[expert];
            const int column = first_column(tables, units, rank, unit) + tables.position[pair] -
                               tables.first[rank];
            // The inverse of begin = block * total_units / cluster.
            const int owner = ((rank * units + unit + 1) * cluster - 1) / total_units;
            const int local = column - starts[owner];
            const int in_unit = row - (unit << args.log_unit_rows);
            const float* from = local < args.slot_columns
                                    ? ptx::in_block(slots, owner) + (local << args.log_unit_rows)
                                    : spill + (static_cast<int64_t>(column) << args.log_unit_rows);
            sum += from[in_unit];
        }
        const int64_t at =
            static_cast<int64_t>(token) * args.rows + (first_unit << args.log_unit_rows);
        args.y[at + row] = __float2bfloat16_rn(sum);
    }
}

template <int kPhase, int kMaxTiles, int kLoader>
__global__ void __launch_bounds__(kThreads, kMaxTiles < 4 ? 2 : 1)
    small_batch_kernel(const __grid_constant__ Args args, const __grid_constant__ CUtensorMap map) {
    constexpr bool kFirst = kGatesUp<kPhase>;
    using Weights = Stream<kPhase, kLoader>;
    const Tables tables(args.at);
    const int warp = warp_index(), lane = lane_index();

    // 1. What needs no input.
#pragma unroll 1
    for (int expert = threadIdx.x; expert < args.num_local; expert += kThreads)
        tables.counts[expert] = 0;
    uint64_t* barriers = shared_at<uint64_t>(args.at.barriers);
    if (threadIdx.x < kWarps * args.stages)
        ptx::barrier_init(barriers + threadIdx.x, Weights::kArrivals);
    ptx::fence_barrier_init();
    if (kLoader == kLoadTensor && threadIdx.x == 0) ptx::prefetch_map(&map);
    __syncthreads();

    RowLoad<kPhase, (kFirst && kMaxTiles > 1 ? 8 : 4)> loads(args);
    if constexpr (kFirst) {
        ptx::wait_for_predecessor();
        if (blockIdx.x == 0 && threadIdx.x == 0 && args.launch_count)
            atomicAdd(args.launch_count, 1);
        if (args.tokens == 0) return;
        // x goes first: once the weights are asked for, it would queue behind them.
        if (args.all_tokens) loads.start(args, args.tokens, [](int row) { return row; });
    }

    // 2. The routing, this block's units, and the first loads.
    read_pairs<kPhase>(args, tables);
    __syncthreads();
    const int active = rank_experts(args, tables);
    int units = args.units, first_unit = 0, block = blockIdx.x, blocks = gridDim.x;
    if constexpr (!kFirst) {
        block = ptx::cluster_rank();
        blocks = ptx::cluster_size();
        first_unit = blockIdx.x / blocks * args.units;
        units = min(units, args.row_units - first_unit);
    }
    const int total_units = active * units;
    const int begin = block * total_units / blocks;
    const int end = (block + 1) * total_units / blocks;
    Walk walk(args, tables, units, begin, end);
    Weights weights(args, &map, tables, walk, first_unit);
    weights.fill();
    if (args.early_trigger) ptx::allow_successor();
    if (warp == 0) sort_pairs<kPhase>(args, tables);
    int* starts = shared_at<int>(args.at.starts);
    if constexpr (!kFirst) {
        if (threadIdx.x < blocks) {
            const int unit = threadIdx.x * total_units / blocks;
            starts[threadIdx.x] =
                unit < total_units ? first_column(tables, units, unit / units, unit % units) : 0;
        }
        ptx::wait_for_predecessor();
    }
    __syncthreads();

    // 3. The units. One block barrier each: partial results are in two buffers by turns, so a warp
    // that still sums one unit keeps no other from the next.
    float* slots = shared_at<float>(args.at.slots);
    float* spill = nullptr;
    if constexpr (!kFirst)
        spill = args.spill + (static_cast<int64_t>(args.pairs) * first_unit << args.log_unit_rows);
    float4* partials = shared_at<float4>(args.at.partial);
    const int log_row_tiles = args.log_unit_rows - 4;  // tiles of 16 rows in a unit
    Columns<kMaxTiles> columns;
    int rank = -1, chunk = 0;              // that `columns` is for
    int low = 0, count = 0;                // their positions: [low, low + count)
    int window_begin = 0, window_end = 0;  // positions whose activations are in shared memory
#pragma unroll 1
    for (int turn = 0; !walk.done(); walk.next(), ++turn) {
        if (walk.rank != rank || walk.chunk != chunk) {
            rank = walk.rank;
            chunk = walk.chunk;
            low = tables.first[rank] + chunk * args.max_columns;
            count = min(args.max_columns, tables.first[rank + 1] - low);
            if (low < window_begin || low + count > window_end) {
                const bool all = args.all_tokens;  // then it happens once
                const int last = tables.first[(end - 1) / units + 1];
                window_begin = all ? 0 : low;
                window_end = all ? last : min(low + args.act_rows, last);
                const int rows = all ? args.tokens : window_end - window_begin;
                const auto source = [&](int row) {
                    if (all) return row;
                    return kFirst ? int{tables.token_of[window_begin + row]} : window_begin + row;
                };
                // All warps have passed the barrier of the last unit: the old window is free.
                if (!all) loads.start(args, rows, source);
                loads.finish(args, rows, source);
                __syncthreads();
            }
            const auto row_of = [&](int column) {
                if (column >= count) return -1;
                return args.all_tokens ? int{tables.token_of[low + column]}
                                       : low + column - window_begin;
            };
#pragma unroll
            for (int tile = 0; tile < kMaxTiles; ++tile) {
                const int row = row_of(tile * kTileColumns + lane / 4);
                columns.act[tile] = row < 0 ? -1 : row * (args.depth + kActPad);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    columns.scale[tile][i] =
                        max(row_of(tile * kTileColumns + lane % 4 * 2 + i), 0) * args.blocks;
            }
        }

        const int tiles = (count + kTileColumns - 1) / kTileColumns;
        float4* buffer = partials + turn % 2 * (kWarps * kMaxTiles * 32);
        multiply(args, weights, columns, tiles, buffer + warp * kMaxTiles * 32);
        __syncthreads();

        // Sum over the warps that shared rows: one warp per tile of 16 rows x 8 columns.
#pragma unroll 1
        for (int job = (warp + turn) % kWarps; job < tiles << log_row_tiles; job += kWarps) {
            const int tile = job >> log_row_tiles;
            const int row_tile = job - (tile << log_row_tiles);
            float4 sum = make_float4(0, 0, 0, 0);
            const float4* from = buffer + ((row_tile << args.log_split) * kMaxTiles + tile) * 32;
#pragma unroll 2
            for (int part = 0; part < 1 << args.log_split; ++part) {
                const float4 value = from[part * kMaxTiles * 32 + lane];
                sum =
                    make_float4(sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w);
            }
            const float upper[2] = {sum.x, sum.y}, lower[2] = {sum.z, sum.w};  // rows g, g + 8
            const int unit = walk.unit_of_expert();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = tile * kTileColumns + lane % 4 * 2 + i;
                if (column >= count) continue;
                if constexpr (kFirst) {  // row g is a gate row, row g + 8 its up row
                    const float value = swiglu(upper[i], lower[i], args.swiglu_limit) *
                                        tables.weight_of[low + column];
                    const int at = ((unit << log_row_tiles) + row_tile) * 8 + lane / 4;
                    args.hidden[static_cast<int64_t>(low + column) * (args.rows / 2) + at] = value;
                } else {
                    const int global =
                        first_column(tables, units, rank, unit) + chunk * args.max_columns + column;
                    const int local = global - starts[block];
                    float* to = local < args.slot_columns
                                    ? slots + (local << args.log_unit_rows)
                                    : spill + (static_cast<int64_t>(global) << args.log_unit_rows);
                    to += row_tile * kTileRows + lane / 4;
                    to[0] = upper[i];
                    to[8] = lower[i];
                }
            }
        }
    }

    if constexpr (!kFirst) {
        ptx::cluster_barrier();
        combine(args, tables, first_unit, units, total_units, spill);
        ptx::cluster_barrier_relaxed();  // nobody leaves while its shared memory is read
    }
}

// -- host ----------------------------------------------------------------------------------------

using Kernel = void (*)(Args, CUtensorMap);

#define MEGAMOE_KERNELS(phase, loader)                                           \
    {small_batch_kernel<phase, 1, loader>, small_batch_kernel<phase, 2, loader>, \
     small_batch_kernel<phase, 4, loader>}

// [phase][loader][log2 of tiles]
const Kernel kKernels[3][2][3] = {
    {MEGAMOE_KERNELS(kGateUp, kLoadThreads), MEGAMOE_KERNELS(kGateUp, kLoadTensor)},
    {MEGAMOE_KERNELS(kGateUpStaged, kLoadThreads), MEGAMOE_KERNELS(kGateUpStaged, kLoadTensor)},
    {MEGAMOE_KERNELS(kDown, kLoadThreads), MEGAMOE_KERNELS(kDown, kLoadTensor)},
};

cudaError_t launch(const MegaMoESmallBatchConfig& config, Args& args, Phase phase, int tiles,
                   void* stream) {
    CUtensorMap map = {};
    if (config.loader == kLoadTensor && args.tokens > 0) {
        const cudaError_t error = encode(map, args);
        if (error != cudaSuccess) return error;
    }
    const int cluster = phase == kDown ? config.cluster : 1;
    const int clusters = phase == kDown ? ceil_div(args.row_units, args.units) : config.num_sms;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t shape = {};
    shape.gridDim = dim3(args.tokens > 0 ? clusters * cluster : 1);
    shape.blockDim = dim3(kThreads);
    shape.dynamicSmemBytes = args.at.total;
    shape.stream = static_cast<cudaStream_t>(stream);
    shape.attrs = attributes;
    shape.numAttrs = config.pdl ? 2 : 1;
    void* parameters[] = {&args, &map};
    const Kernel kernel = kKernels[phase][config.loader][tiles / 2];
    return cudaLaunchKernelExC(&shape, reinterpret_cast<const void*>(kernel), parameters);
}

}  // namespace small_batch

extern "C" {

const char* megamoe_error_string(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// Loads every kernel onto the current device and lets it use all shared memory, checks `config`,
// and decides `cluster` and `max_clusters` where they are 0.
int megamoe_small_batch_prepare(MegaMoESmallBatchConfig* config) {
    using namespace small_batch;
    const int slots = config->top_k + config->num_shared;
    const int local = config->num_routed + config->num_shared;
    if (config->hidden_size % kBlock != 0 || config->intermediate_size % kBlock != 0 ||
        config->hidden_size < kBlock || config->intermediate_size < kBlock || config->top_k < 1 ||
        config->num_shared < 0 || local < 1 || local > kMaxExperts || config->max_pairs < slots ||
        config->max_pairs > kMaxPairs || config->loader < 0 || config->loader > 1 ||
        config->num_sms < 1 || config->min_blocks < 1)
        return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    for (const auto& phase : kKernels)
        for (const auto& loader : phase)
            for (const Kernel kernel : loader) {
                const auto* function = reinterpret_cast<const void*>(kernel);
                if (error == cudaSuccess)
                    error = cudaFuncSetAttribute(
                        function, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
                if (error == cudaSuccess)  // or K1's split of L1 would keep K2 from its side
                    error = cudaFuncSetAttribute(function,
                                                 cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared);
            }
    // Clusters live inside a GPC, whose number of multiprocessors varies: take the largest size
    // that still reaches nearly all of them. The fewer row groups, the less K2 reads activations.
    for (int cluster = kMaxCluster; error == cudaSuccess && cluster >= 1; cluster /= 2) {
        if (config->cluster != 0 && config->cluster != cluster) continue;
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = cluster;
        attribute.val.clusterDim.y = 1;
        attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t shape = {};
        shape.gridDim = dim3(cluster * config->num_sms);
        shape.blockDim = dim3(kThreads);
        shape.dynamicSmemBytes = kMaxShared;  // one block per multiprocessor
        shape.attrs = &attribute;
        shape.numAttrs = 1;
        int clusters = 0;
        error = cudaOccupancyMaxActiveClusters(
            &clusters, reinterpret_cast<const void*>(kKernels[kDown][0][0]), &shape);
        const int wanted = config->num_sms / cluster;
        if (clusters > wanted) clusters = wanted;
        if (clusters < 1) continue;
        if (config->cluster == 0 && cluster > 1 && clusters * cluster < config->num_sms * 0.95)
            continue;
        config->cluster = cluster;
        if (config->max_clusters == 0) config->max_clusters = clusters;
        break;
    }
    if (error == cudaSuccess && (config->cluster < 1 || config->max_clusters < 1))
        error = cudaErrorInvalidValue;
    if (error != cudaSuccess) cudaGetLastError();  // the caller has it
    return error;
}

// The layer on `stream` of the current device. x: bf16 rows, or e4m3 rows with x_scale where
// config->staged; strides in elements. `variant`: bit 1 for int64 ids, bit 0 for bf16 weights.
// launch_count grows by one, also where num_tokens is 0. `phases`: bit 0 runs K1, bit 1 K2.
// Returns a cudaError_t.
int megamoe_small_batch(const MegaMoESmallBatchConfig* config, const void* x, int64_t x_stride,
                        const void* x_scale, const void* ids, int64_t ids_stride,
                        const void* weights, int64_t weights_stride, const void* num_valid,
                        void* launch_count, const void* w13, const void* w13_scale, const void* w2,
                        const void* w2_scale, void* y, int32_t num_tokens, int32_t variant,
                        int32_t phases, void* stream) {
    using namespace small_batch;
    if (num_tokens < 0 || variant < 0 || variant > 3) return cudaErrorInvalidValue;
    const int hidden = config->hidden_size, intermediate = config->intermediate_size;
    const int slots = config->top_k + config->num_shared;
    const int chunk = config->max_pairs / slots;
    const int id_bytes = variant & 2 ? 8 : 4, weight_bytes = variant & 1 ? 2 : 4;
    const int x_bytes = config->staged ? 1 : 2;

    Args args = {};
    args.num_valid = static_cast<const int32_t*>(num_valid);
    args.x_stride = x_stride;
    args.ids_stride = ids_stride;
    args.routing_stride = weights_stride;
    args.invalid_count = config->invalid_count;
    args.hidden = config->hidden;
    args.spill = config->spill;
    args.top_k = config->top_k;
    args.slots = slots;
    args.num_experts = config->num_experts;
    args.first_expert = config->first_expert;
    args.num_routed = config->num_routed;
    args.num_local = config->num_routed + config->num_shared;
    args.wide_ids = variant >> 1;
    args.bf16_routing = variant & 1;
    args.swiglu_limit = config->swiglu_limit;
    args.routed_scaling_factor = config->routed_scaling_factor;
    args.early_trigger = config->early_trigger;
    // A single row's stride is arbitrary, and not used.
    args.aligned_x =
        reinterpret_cast<uintptr_t>(x) % 16 == 0 && (num_tokens <= 1 || x_stride % 8 == 0);

    cudaError_t error = cudaSuccess;
    int row0 = 0;
    do {
        const int left = num_tokens - row0;
        args.row0 = row0;
        args.tokens = left < chunk ? left : chunk;
        args.pairs = args.tokens * slots;
        args.launch_count = row0 == 0 ? static_cast<int32_t*>(launch_count) : nullptr;
        args.x = static_cast<const char*>(x) + row0 * x_stride * x_bytes;
        args.x_scale = static_cast<const float*>(x_scale);
        if (args.x_scale) args.x_scale += static_cast<int64_t>(row0) * (hidden / kBlock);
        args.ids = static_cast<const char*>(ids) + row0 * ids_stride * id_bytes;
        args.routing = static_cast<const char*>(weights) + row0 * weights_stride * weight_bytes;
        args.y = static_cast<__nv_bfloat16*>(y) + static_cast<int64_t>(row0) * hidden;

        // Columns for the pairs that an expert should get: all tokens, or three standard
        // deviations over the mean of even routing. More pairs are walked in chunks.
        const float mean = static_cast<float>(args.pairs) / config->num_experts;
        const float many = mean + 3.0f * sqrtf(mean);
        const int tiles = args.tokens <= 8 ? 1 : args.tokens <= 16 || many <= 16 ? 2 : 4;

        Args first = args, second = args;
        first.weight = static_cast<const uint8_t*>(w13);
        first.weight_scale = static_cast<const float*>(w13_scale);
        second.weight = static_cast<const uint8_t*>(w2);
        second.weight_scale = static_cast<const float*>(w2_scale);
        if (!plan(first, *config, true, tiles, hidden, 2 * intermediate) ||
            !plan(second, *config, false, tiles, intermediate, hidden))
            return cudaErrorInvalidConfiguration;
        if (phases & 1)
            error = launch(*config, first, config->staged ? kGateUpStaged : kGateUp, tiles, stream);
        if (error == cudaSuccess && (phases & 2) && args.tokens > 0)
            error = launch(*config, second, kDown, tiles, stream);
        row0 += args.tokens;
    } while (error == cudaSuccess && row0 < num_tokens);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

}  // extern "C"
