// The PTX that small_batch.cu needs, one function per instruction. Nothing else in the kernel is
// assembly, so that a test can put functions with the same names in their place and run the kernel
// on a CPU (graph_tests/support/cpu_gpu.hpp).

#ifndef MEGAMOE_PTX_CUH
#define MEGAMOE_PTX_CUH

#include <cuda.h>

#include <cstdint>

namespace ptx {

// 1024-byte aligned: the 128-byte swizzle repeats every 1024 bytes.
__device__ __forceinline__ uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns when the grids that this one depends on have completed and their writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets a dependent grid start once every block has said so or has ended.
__device__ __forceinline__ void allow_successor() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// -- barriers ------------------------------------------------------------------------------------

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

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// One arrival, and `bytes` of copies that the barrier waits for.
__device__ __forceinline__ void arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Barrier `id` (1 to 15) of `threads` threads of the block, those that only arrive included.
__device__ __forceinline__ void group_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void group_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -- copies to shared memory that arrive at a barrier --------------------------------------------

__device__ __forceinline__ void copy4(void* target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)),
                 "l"(source)
                 : "memory");
}

// One arrival at `barrier` when this thread's earlier copy4 have landed.
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
        : "memory");
}

// The box at (column, row) of a byte tensor, first to leave L2: for bytes that are read once.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// `bytes` contiguous bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(void* target, const void* source, uint32_t bytes,
                                           uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- order of memory accesses --------------------------------------------------------------------

// Between ordinary accesses to global memory and those of the copy engine. Without the name of a
// space it is a fence of the whole GPU as well, which takes the better part of a microsecond.
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Between this block's ordinary accesses to shared memory and those of the matrix units.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ int load_acquire(const int* at) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// This and `count_up` also publish what the block's other threads did before a barrier with this
// thread. That needs a fence of the whole GPU: the others below are for counts that guard no data.
__device__ __forceinline__ void add_release(int* at, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Adds one, or goes back to 0 from `last`; returns the old value.
#define MEGAMOE_COUNT(name, order)                                     \
    __device__ __forceinline__ int name(int* at, int last) {           \
        int old;                                                       \
        asm volatile("atom." order ".gpu.global.inc.u32 %0, [%1], %2;" \
                     : "=r"(old)                                       \
                     : "l"(at), "r"(last)                              \
                     : "memory");                                      \
        return old;                                                    \
    }
MEGAMOE_COUNT(count_up, "acq_rel")
MEGAMOE_COUNT(take_next, "relaxed")  // a mere count, which orders nothing
#undef MEGAMOE_COUNT

// The same as `take_next`, and nobody waits for the old value.
__device__ __forceinline__ void check_off(int* at, int last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(at), "r"(last) : "memory");
}

// A count in shared memory that another warp of the block publishes.
__device__ __forceinline__ int load_acquire_shared(const int* at) {
    int value;
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];"
                 : "=r"(value)
                 : "r"(shared_address(at))
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_release_shared(int* at, int value) {
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(at)), "r"(value)
                 : "memory");
}

// -- matrix products of a warpgroup --------------------------------------------------------------

// Rows of 128 bytes in shared memory, 128-byte swizzle, 1024-byte groups of 8 rows.
__device__ __forceinline__ uint64_t matrix(const uint8_t* pointer) {
    constexpr uint64_t kGroup = uint64_t{1024 / 16} << 32, kSwizzle128 = uint64_t{1} << 62;
    return (shared_address(pointer) & 0x3ffff) >> 4 | uint64_t{1} << 16 | kGroup | kSwizzle128;
}

__device__ __forceinline__ void multiply_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiply_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps the compiler from moving accesses to `d` over the wait.
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <typename T, int kOuter, int kCount>
__device__ __forceinline__ void hold(T (&d)[kOuter][kCount]) {
#pragma unroll
    for (int i = 0; i < kOuter; ++i) hold(d[i]);
}

// d [64 x columns] (+)= a [64 x 32] b [columns x 32]^T, both e4m3 rows of 128 bytes of which byte
// `at` on is used. Of d, thread (warp w, g = lane / 4, q = lane % 4) has d[4 j + 2 h + i]: row
// 16 w + g + 8 h, column 8 j + 2 q + i.
__device__ __forceinline__ void multiply(float (&d)[4], const uint8_t* a, const uint8_t* b, int at,
                                         bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3}, %4, %5, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(matrix(a) + (at >> 4)), "l"(matrix(b) + (at >> 4)), "r"(int{add}));
}

__device__ __forceinline__ void multiply(float (&d)[8], const uint8_t* a, const uint8_t* b, int at,
                                         bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "l"(matrix(a) + (at >> 4)), "l"(matrix(b) + (at >> 4)), "r"(int{add}));
}

__device__ __forceinline__ void multiply(float (&d)[16], const uint8_t* a, const uint8_t* b, int at,
                                         bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15])
        : "l"(matrix(a) + (at >> 4)), "l"(matrix(b) + (at >> 4)), "r"(int{add}));
}

}  // namespace ptx

#endif  // MEGAMOE_PTX_CUH
