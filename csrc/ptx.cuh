// The PTX that small_batch.cu needs, one function per instruction. Nothing else in the kernels is
// assembly, so that a test can put functions with the same names in their place and run the kernels
// on a CPU (graph_tests/cpu_gpu.hpp).

#ifndef MEGAMOE_PTX_CUH
#define MEGAMOE_PTX_CUH

#include <cuda.h>

#include <cstdint>

namespace ptx {

// 1024-byte aligned: the tensor copy's 128-byte swizzle repeats every 1024 bytes.
__device__ __forceinline__ uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// -- programmatic dependent launch ---------------------------------------------------------------

// Returns when the grids that this one depends on have completed and their writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets a dependent grid start once every block has said so or has ended.
__device__ __forceinline__ void allow_successor() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// -- barriers in shared memory, and copies that arrive at them -----------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier must follow.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// 16 bytes, past L1; asks L2 for the whole 128-byte line.
__device__ __forceinline__ void copy16(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(target)),
                 "l"(source)
                 : "memory");
}

__device__ __forceinline__ void copy4(void* target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)),
                 "l"(source)
                 : "memory");
}

// One arrival at `barrier` when this thread's earlier copy16 and copy4 have landed.
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
        : "memory");
}

// One arrival at `barrier` when the box at (column, row) of a byte tensor has landed.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier, uint32_t bytes) {
    const uint32_t at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
        "l"(map), "r"(column), "r"(row), "r"(at)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- arithmetic ----------------------------------------------------------------------------------

// Bytes 0, 1 and bytes 2, 3 of four e4m3 as two pairs of f16; exact.
__device__ __forceinline__ uint2 e4m3_to_f16(uint32_t four) {
    uint2 pairs;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(four));
    return pairs;
}

// d [16 x 8] += a [16 x 16] b [16 x 8]. With g = lane / 4 and q = lane % 4, a thread has
// a: rows g (a.x, a.z) and g + 8 (a.y, a.w), b: column g, d: rows g, g + 8 of columns 2q, 2q + 1.
__device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// -- clusters ------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of all threads of the cluster; writes before it are visible after it.
__device__ __forceinline__ void cluster_barrier() {
    __syncwarp();
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The same without an order of memory accesses.
__device__ __forceinline__ void cluster_barrier_relaxed() {
    __syncwarp();
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.aligned;" ::
            : "memory");
}

// `pointer` into this block's shared memory -> the same place in that of block `rank`.
__device__ __forceinline__ const float* in_block(const float* pointer, uint32_t rank) {
    const float* remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(pointer), "r"(rank));
    return remote;
}

}  // namespace ptx

#endif  // MEGAMOE_PTX_CUH
