// Stages one rank's tokens into the symmetric input buffer of the mega kernel.
//
// Per row: quantize bf16 to e4m3 with one fp32 scale per 128 columns, map expert ids to the
// buffer's numbering, scale the routing weights. The recipe is that of `stage` in
// custom_ops/reference/recipe.py, bit for bit, hence the IEEE intrinsics (`__fdiv_rn`,
// `__fmul_rn`): no compiler flag can change them.
//
// One thread owns 8 columns, so 16 neighbouring lanes own one scale. A row is split over
// `gridDim.y` blocks, which shortens the only latency that is ours when there are few tokens.
// The library has a C interface and no torch dependency: one build serves every torch version.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../cuda/library.cuh"

namespace {

constexpr int kGroup = 128;                     // columns per scale
constexpr int kColumns = 8;                     // columns per thread: 16 bytes in, 8 bytes out
constexpr int kGroupLanes = kGroup / kColumns;  // lanes per scale
constexpr int kMinThreads = 64;                 // one thread per slot in the first block of a row
constexpr int kMaxTopK = 32;
constexpr int kMaxThreads = 512;
constexpr int kSplitThreads = 128;            // block size while the grid fits in one wave
constexpr int64_t kWaveThreads = 132 * 2048;  // resident threads of an H200
constexpr float kAmaxFloor = 1e-10f;
constexpr float kFp8Max = 448.0f;

}  // namespace

extern "C" {

// What does not change between launches. `custom_ops/staging/pre_dispatch.py` mirrors the field
// order.
struct MegaMoEPreDispatchConfig {
    uint8_t* buf_x;          // [capacity, hidden] e4m3
    float* buf_scale;        // [capacity, hidden / 128]
    int64_t* buf_ids;        // [capacity, top_k + num_shared_experts]
    float* buf_weights;      // [capacity, top_k + num_shared_experts]
    int32_t* invalid_count;  // [1]
    int32_t capacity;
    int32_t hidden;
    int32_t top_k;
    int32_t num_experts;
    int32_t num_local_experts;
    int32_t num_shared_experts;
    int32_t rank;
    float routed_scaling_factor;
    int32_t pdl;            // launch with programmatic stream serialization
    int32_t early_trigger;  // dependents start at once; they must execute griddepcontrol.wait
};

}  // extern "C"

namespace {

struct Call {
    const uint16_t* x;  // [num_tokens, hidden] bf16 bits
    int64_t x_stride;   // strides are in elements, between rows; columns are dense
    const void* ids;    // [num_tokens, top_k]
    int64_t ids_stride;
    const void* weights;  // [num_tokens, top_k]
    int64_t weights_stride;
    const int32_t* num_valid;
    int32_t* launch_count;
    int32_t num_tokens;
};

struct Args {
    MegaMoEPreDispatchConfig config;
    Call call;
};

// No pointer here is `const __restrict__`: with PDL a predecessor may still be writing the inputs
// while this grid is resident, which rules out the non-coherent load path.
template <bool kAligned>
__device__ __forceinline__ uint4 load_columns(const uint16_t* source) {
    if constexpr (kAligned) {
        return *reinterpret_cast<const uint4*>(source);
    } else {
        const auto pair = [source](int i) { return source[i] | uint32_t{source[i + 1]} << 16; };
        return make_uint4(pair(0), pair(2), pair(4), pair(6));
    }
}

__device__ __forceinline__ __nv_bfloat162 magnitudes(uint32_t pair) {
    const uint32_t bits = pair & 0x7fff7fffu;
    return reinterpret_cast<const __nv_bfloat162&>(bits);
}

// max |x| over the 16 lanes of a group. bf16 max is exact and drops a NaN operand, as the recipe
// wants; a group of NaN alone stays NaN and gives way to the floor in `fmaxf`.
__device__ __forceinline__ float group_amax(uint4 columns) {
    __nv_bfloat162 best = __hmax2(__hmax2(magnitudes(columns.x), magnitudes(columns.y)),
                                  __hmax2(magnitudes(columns.z), magnitudes(columns.w)));
#pragma unroll
    for (int offset = kGroupLanes / 2; offset > 0; offset /= 2)
        best = __hmax2(best, __shfl_xor_sync(0xffffffffu, best, offset));
    return fmaxf(__low2float(best), __high2float(best));
}

// Two bf16 -> two e4m3 bytes: nearest even, saturating, NaN stays NaN.
__device__ __forceinline__ uint32_t quantize_pair(uint32_t pair, float inverse) {
    const float low = __fmul_rn(__uint_as_float(pair << 16), inverse);
    const float high = __fmul_rn(__uint_as_float(pair & 0xffff0000u), inverse);
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Id, typename Weight, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    pre_dispatch_kernel(const __grid_constant__ Args args) {
    const auto& config = args.config;
    const auto& call = args.call;
    const int row = blockIdx.x;
    const int chunk = blockIdx.y * blockDim.x + threadIdx.x;
    const bool has_columns = chunk < config.hidden / kColumns;
    const int slot = threadIdx.x;
    const int num_slots = config.top_k + config.num_shared_experts;
    const bool has_slot = blockIdx.y == 0 && slot < num_slots;
    const bool has_routed_slot = has_slot && slot < config.top_k;
    int64_t at_x = row * call.x_stride + chunk * kColumns;
    int64_t at_ids = row * call.ids_stride + slot;
    int64_t at_weights = row * call.weights_stride + slot;

    // The trigger may precede the wait: a dependent's own wait lasts until this grid has completed,
    // and this grid completes after everything it waited for. The offsets pass through the wait, so
    // that they are computed before it, while the predecessor runs.
    if (config.early_trigger) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" : "+l"(at_x), "+l"(at_ids), "+l"(at_weights)::"memory");

    if (row == 0 && chunk == 0) atomicAdd(call.launch_count, 1);
    if (call.num_tokens == 0) return;  // a single block that only counts the launch

    // All loads are issued before the first use, so that their latencies overlap. That reads rows
    // at or above num_valid too, and drops what was read.
    Id id = -1;
    Weight weight = 0.0f;
    if (has_routed_slot) {
        id = static_cast<const Id*>(call.ids)[at_ids];
        weight = static_cast<const Weight*>(call.weights)[at_weights];
    }
    uint4 columns = make_uint4(0, 0, 0, 0);
    if (has_columns) columns = load_columns<kAligned>(call.x + at_x);
    const bool valid = row < *call.num_valid;

    if (valid) {  // uniform in the block: the shuffles stay converged
        const float scale = __fdiv_rn(fmaxf(group_amax(columns), kAmaxFloor), kFp8Max);
        const float inverse = __fdiv_rn(1.0f, scale);
        if (has_columns) {
            const uint2 packed = make_uint2(
                quantize_pair(columns.x, inverse) | quantize_pair(columns.y, inverse) << 16,
                quantize_pair(columns.z, inverse) | quantize_pair(columns.w, inverse) << 16);
            const int64_t offset = static_cast<int64_t>(row) * config.hidden + chunk * kColumns;
            *reinterpret_cast<uint2*>(config.buf_x + offset) = packed;
            if (threadIdx.x % kGroupLanes == 0) config.buf_scale[offset / kGroup] = scale;
        }
    }

    if (has_slot) {
        const int num_local = config.num_local_experts;
        const int num_shared = config.num_shared_experts;
        int buffer_id = -1;
        float buffer_weight = 0.0f;
        if (valid && slot >= config.top_k) {  // shared experts stand behind the rank's routed ones
            buffer_id = config.rank * (num_local + num_shared) + num_local + slot - config.top_k;
            buffer_weight = 1.0f;
        } else if (valid && id >= 0 && id < config.num_experts) {
            buffer_id = static_cast<int>(id);
            if (num_shared > 0) buffer_id += buffer_id / num_local * num_shared;
            buffer_weight = __fmul_rn(to_float(weight), config.routed_scaling_factor);
        } else if (valid && id != -1) {
            atomicAdd(config.invalid_count, 1);
        }
        const int64_t offset = static_cast<int64_t>(row) * num_slots + slot;
        config.buf_ids[offset] = buffer_id;
        config.buf_weights[offset] = buffer_weight;
    }
}

using Kernel = void (*)(Args);

// Indexed by 4 * (ids are int64) + 2 * (weights are bf16) + (16-byte loads).
const Kernel kKernels[] = {
    pre_dispatch_kernel<int32_t, float, false>,
    pre_dispatch_kernel<int32_t, float, true>,
    pre_dispatch_kernel<int32_t, __nv_bfloat16, false>,
    pre_dispatch_kernel<int32_t, __nv_bfloat16, true>,
    pre_dispatch_kernel<int64_t, float, false>,
    pre_dispatch_kernel<int64_t, float, true>,
    pre_dispatch_kernel<int64_t, __nv_bfloat16, false>,
    pre_dispatch_kernel<int64_t, __nv_bfloat16, true>,
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

extern "C" {

// Also checks `config`.
int megamoe_prepare(const MegaMoEPreDispatchConfig* config) {
    const int num_slots = config->top_k + config->num_shared_experts;
    if (config->hidden <= 0 || config->hidden % kGroup != 0 || config->top_k < 1 ||
        config->top_k > kMaxTopK || config->num_shared_experts < 0 || num_slots > kMinThreads ||
        config->num_local_experts < 1 || reinterpret_cast<uintptr_t>(config->buf_x) % 8 != 0)
        return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    for (const Kernel kernel : kKernels)
        if (error == cudaSuccess) error = library::load(reinterpret_cast<const void*>(kernel));
    return library::returned(error);
}

// One launch on `stream` of the current device. `variant`: bit 1 for int64 ids, bit 0 for bf16
// weights. Returns a cudaError_t; cudaErrorInvalidValue where num_tokens is out of range.
int megamoe_pre_dispatch(const MegaMoEPreDispatchConfig* config, const void* x, int64_t x_stride,
                         const void* ids, int64_t ids_stride, const void* weights,
                         int64_t weights_stride, const void* num_valid, void* launch_count,
                         int32_t num_tokens, int32_t variant, void* stream) {
    if (num_tokens < 0 || num_tokens > config->capacity || variant < 0 || variant > 3)
        return cudaErrorInvalidValue;

    Args args = {
        *config,
        {static_cast<const uint16_t*>(x), x_stride, ids, ids_stride, weights, weights_stride,
         static_cast<const int32_t*>(num_valid), static_cast<int32_t*>(launch_count), num_tokens}};

    // The stride of a single row is arbitrary, and not used.
    const bool aligned =
        reinterpret_cast<uintptr_t>(x) % 16 == 0 && (num_tokens <= 1 || x_stride % kColumns == 0);

    const int chunks = config->hidden / kColumns;
    const bool one_wave = static_cast<int64_t>(num_tokens) * chunks <= kWaveThreads;
    const int splits = ceil_div(chunks, one_wave ? kSplitThreads : kMaxThreads);
    const int threads = ceil_div(ceil_div(chunks, splits), 32) * 32;

    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = num_tokens == 0 ? dim3(1) : dim3(num_tokens, splits);
    launch.blockDim = num_tokens == 0 ? 32 : threads < kMinThreads ? kMinThreads : threads;
    launch.stream = static_cast<cudaStream_t>(stream);
    launch.attrs = &attribute;
    launch.numAttrs = config->pdl ? 1 : 0;

    void* parameters[] = {&args};
    const auto kernel = reinterpret_cast<const void*>(kKernels[2 * variant + aligned]);
    return library::returned(cudaLaunchKernelExC(&launch, kernel, parameters));
}

}  // extern "C"
