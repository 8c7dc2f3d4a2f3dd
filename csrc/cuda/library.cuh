// What every library of kernels has beside its own functions, for its one source to include.
// `custom_ops/cuda/launch.py` loads them: each has
//   int megamoe_prepare(config)             loads every kernel onto the current device, so that no
//                                           launch has to: loading a module while another rank's
//                                           kernel spins would deadlock
//   const char* megamoe_error_string(int)   below
// and functions of its own, which return a cudaError_t too.

#ifndef MEGAMOE_CUDA_LIBRARY_CUH
#define MEGAMOE_CUDA_LIBRARY_CUH

#include <cuda_runtime.h>

namespace library {

// The caller has the error: none is left behind for the next launch.
inline int returned(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

inline cudaError_t load(const void* kernel) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace library

extern "C" const char* megamoe_error_string(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

#endif
