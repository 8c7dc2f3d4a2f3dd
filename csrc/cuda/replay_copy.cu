// Copies the inputs of a replay into the graph's static buffers and writes the number of real
// tokens, in one launch: the host then pays for one kernel, however many inputs there are.
//
// The library has a C interface and no torch dependency: one build serves every torch version.

#include <cuda_runtime.h>

#include <cstdint>

#include "library.cuh"

namespace {

constexpr int kMaxRanges = 16;
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 2 * 132;  // per range: what an H200 runs at once

}  // namespace

extern "C" {

// `custom_ops/cuda/replay_copy.py` mirrors the field order. A range that is empty is skipped.
struct MegaMoEReplayCopy {
    const void* sources[kMaxRanges];
    void* targets[kMaxRanges];
    int64_t bytes[kMaxRanges];
    int32_t* num_valid;  // [1]
    int32_t value;       // what to write there
    int32_t count;       // of ranges
};
static_assert(sizeof(MegaMoEReplayCopy) == 24 * kMaxRanges + 16);

}  // extern "C"

namespace {

// Copies what fits into whole words of one range; returns how many bytes that was.
template <typename Word>
__device__ int64_t copy_words(const void* source, void* target, int64_t bytes) {
    const auto* from = static_cast<const Word*>(source);
    auto* to = static_cast<Word*>(target);
    const int64_t words = bytes / sizeof(Word);
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < words;
         i += step)
        to[i] = from[i];
    return words * static_cast<int64_t>(sizeof(Word));
}

__global__ void __launch_bounds__(kThreads)
    replay_copy_kernel(const __grid_constant__ MegaMoEReplayCopy copy) {
    const int range = blockIdx.y;
    if (range == 0 && blockIdx.x == 0 && threadIdx.x == 0) *copy.num_valid = copy.value;
    if (range >= copy.count) return;
    const auto* source = static_cast<const char*>(copy.sources[range]);
    auto* target = static_cast<char*>(copy.targets[range]);
    const int64_t bytes = copy.bytes[range];
    const uintptr_t address =
        reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target);
    int64_t done = 0;
    if (address % sizeof(uint4) == 0) {
        done = copy_words<uint4>(source, target, bytes);
    } else if (address % sizeof(uint32_t) == 0) {
        done = copy_words<uint32_t>(source, target, bytes);
    }
    copy_words<char>(source + done, target + done, bytes - done);
}

}  // namespace

extern "C" {

int megamoe_prepare(const void*) {
    return library::returned(library::load(reinterpret_cast<const void*>(replay_copy_kernel)));
}

// One launch on `stream` of the current device. Returns a cudaError_t.
int megamoe_replay_copy(const MegaMoEReplayCopy* copy, void* stream) {
    if (copy->count < 0 || copy->count > kMaxRanges) return cudaErrorInvalidValue;
    int64_t most = 1;
    for (int range = 0; range < copy->count; ++range)
        most = copy->bytes[range] > most ? copy->bytes[range] : most;
    constexpr int64_t kBlockBytes = kThreads * sizeof(uint4);
    const int64_t blocks = (most + kBlockBytes - 1) / kBlockBytes;
    const dim3 grid(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks),
                    static_cast<unsigned>(copy->count > 0 ? copy->count : 1));
    void* parameters[] = {const_cast<MegaMoEReplayCopy*>(copy)};
    return library::returned(cudaLaunchKernel(reinterpret_cast<const void*>(replay_copy_kernel),
                                              grid, kThreads, parameters, 0,
                                              static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
