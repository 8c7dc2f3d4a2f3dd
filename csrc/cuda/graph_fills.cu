// Makes kernels of the fills in a captured graph, before it is instantiated.
//
// The host pays 0.01 us for a kernel of a graph that it launches, and 1.8 us for a memset node,
// which cuBLAS captures in front of some GEMMs: one or two in each layer of a model. (H200,
// CUDA 13.0.)
//
// The library has a C interface and no torch dependency: one build serves every torch version.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "library.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8 * 132;  // what an H200 runs at once
constexpr int64_t kMaxRows = 65535;      // the most that a grid has in y

struct Fill {
    char* target;
    int64_t pitch;  // bytes from row to row
    int64_t units;  // of one row
    int64_t rows;
    uint32_t pattern;  // four bytes, which repeat
};

template <typename Unit>
__device__ Unit unit_of(uint32_t pattern) {
    return static_cast<Unit>(pattern);
}

template <>
__device__ uint4 unit_of<uint4>(uint32_t pattern) {
    return {pattern, pattern, pattern, pattern};
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ Fill fill) {
    const Unit unit = unit_of<Unit>(fill.pattern);
    for (int64_t row = blockIdx.y; row < fill.rows; row += gridDim.y) {
        auto* target = reinterpret_cast<Unit*>(fill.target + row * fill.pitch);
        for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < fill.units;
             i += int64_t{gridDim.x} * kThreads)
            target[i] = unit;
    }
}

const void* kernel_of(int unit_bytes) {
    switch (unit_bytes) {
        case 1:
            return reinterpret_cast<const void*>(fill_kernel<uint8_t>);
        case 2:
            return reinterpret_cast<const void*>(fill_kernel<uint16_t>);
        case 4:
            return reinterpret_cast<const void*>(fill_kernel<uint32_t>);
        default:
            return reinterpret_cast<const void*>(fill_kernel<uint4>);
    }
}

// CUDA 13 has the data of edges before the count in all of these calls; before, only in those named
// _v2. None is asked for: then an edge with data, such as a programmatic one, is the error
// cudaErrorLossyQuery.
#if CUDART_VERSION >= 13000
#define MEGAMOE_EDGES(count) nullptr, count
#else
#define MEGAMOE_EDGES(count) count
#endif

cudaError_t dependencies(cudaGraphNode_t node, cudaGraphNode_t* found, size_t* count) {
    return cudaGraphNodeGetDependencies(node, found, MEGAMOE_EDGES(count));
}

cudaError_t dependents(cudaGraphNode_t node, cudaGraphNode_t* found, size_t* count) {
    return cudaGraphNodeGetDependentNodes(node, found, MEGAMOE_EDGES(count));
}

cudaError_t add_edges(cudaGraph_t graph, const std::vector<cudaGraphNode_t>& from,
                      const std::vector<cudaGraphNode_t>& to) {
    return cudaGraphAddDependencies(graph, from.data(), to.data(), MEGAMOE_EDGES(from.size()));
}

using Neighbours = cudaError_t (*)(cudaGraphNode_t, cudaGraphNode_t*, size_t*);

cudaError_t list(Neighbours neighbours, cudaGraphNode_t node, std::vector<cudaGraphNode_t>& found) {
    size_t count = 0;
    cudaError_t error = neighbours(node, nullptr, &count);
    found.resize(count);
    if (error == cudaSuccess && count > 0) error = neighbours(node, found.data(), &count);
    return error;
}

// A kernel that does what the node does, behind `before`.
cudaError_t add_kernel(cudaGraph_t graph, const cudaMemsetParams& memset,
                       const std::vector<cudaGraphNode_t>& before, cudaGraphNode_t* added) {
    Fill fill = {static_cast<char*>(memset.dst), 0, 0, static_cast<int64_t>(memset.height),
                 memset.value};
    if (memset.elementSize == 1) fill.pattern = (memset.value & 0xFF) * 0x01010101u;
    if (memset.elementSize == 2) fill.pattern = (memset.value & 0xFFFF) * 0x00010001u;
    if (fill.rows > 1)
        fill.pitch = static_cast<int64_t>(memset.pitch);  // of one row it is arbitrary
    const int64_t bytes = static_cast<int64_t>(memset.width) * memset.elementSize;
    const uint64_t address = reinterpret_cast<uintptr_t>(memset.dst) | fill.pitch | bytes;
    const int unit_bytes = address % sizeof(uint4) == 0 ? sizeof(uint4) : memset.elementSize;
    fill.units = bytes / unit_bytes;

    const int64_t blocks = (fill.units + kThreads - 1) / kThreads;
    void* arguments[] = {&fill};
    cudaKernelNodeParams kernel = {};
    kernel.func = const_cast<void*>(kernel_of(unit_bytes));
    kernel.gridDim = dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxBlocks)),
                          static_cast<unsigned>(std::clamp<int64_t>(fill.rows, 1, kMaxRows)));
    kernel.blockDim = dim3(kThreads);
    kernel.kernelParams = arguments;
    return cudaGraphAddKernelNode(added, graph, before.data(), before.size(), &kernel);
}

// Whether a kernel of the current device may write there: it may not where a graph has another
// device's work too.
bool is_here(const void* target) {
    int current = -1;
    cudaPointerAttributes at = {};
    const bool known = cudaGetDevice(&current) == cudaSuccess &&
                       cudaPointerGetAttributes(&at, target) == cudaSuccess;
    if (!known) cudaGetLastError();
    return known && at.type == cudaMemoryTypeDevice && at.device == current;
}

// Puts a kernel in the place of one memset node; `done` where it is. A node that is not this
// device's or whose edges are more than an order stays.
cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, bool* done) {
    std::vector<cudaGraphNode_t> before, after;
    cudaMemsetParams memset = {};
    cudaError_t error = cudaGraphMemsetNodeGetParams(node, &memset);
    if (error == cudaSuccess && !is_here(memset.dst)) return cudaSuccess;
    if (error == cudaSuccess) error = list(dependencies, node, before);
    if (error == cudaSuccess) error = list(dependents, node, after);
    if (error == cudaErrorLossyQuery) {
        cudaGetLastError();
        return cudaSuccess;
    }
    cudaGraphNode_t added = nullptr;
    if (error == cudaSuccess) error = add_kernel(graph, memset, before, &added);
    if (error == cudaSuccess && !after.empty())
        error = add_edges(graph, std::vector<cudaGraphNode_t>(after.size(), added), after);
    if (error == cudaSuccess) error = cudaGraphDestroyNode(node);
    *done = error == cudaSuccess;
    return error;
}

cudaError_t replace_all(cudaGraph_t graph, int32_t* replaced) {
    size_t count = 0;
    cudaError_t error = cudaGraphGetNodes(graph, nullptr, &count);
    std::vector<cudaGraphNode_t> nodes(count);
    if (error == cudaSuccess && count > 0) error = cudaGraphGetNodes(graph, nodes.data(), &count);
    for (size_t i = 0; error == cudaSuccess && i < count; ++i) {
        cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        bool done = false;
        error = cudaGraphNodeGetType(nodes[i], &type);
        if (error == cudaSuccess && type == cudaGraphNodeTypeMemset)
            error = replace(graph, nodes[i], &done);
        *replaced += done;
    }
    return error;
}

}  // namespace

extern "C" {

int megamoe_prepare(const void*) {
    cudaError_t error = cudaSuccess;
    for (int unit_bytes : {1, 2, 4, 16})
        if (error == cudaSuccess) error = library::load(kernel_of(unit_bytes));
    return library::returned(error);
}

// Replaces the memset nodes of `graph`, a cudaGraph_t, that fill memory of the current device, and
// counts them. Those of child graphs stay. Returns a cudaError_t; after an error the graph is of no
// use.
int megamoe_graph_fills(void* graph, int32_t* replaced) {
    *replaced = 0;
    return library::returned(replace_all(static_cast<cudaGraph_t>(graph), replaced));
}

}  // extern "C"
