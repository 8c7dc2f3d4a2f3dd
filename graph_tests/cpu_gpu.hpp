// Runs the kernels of csrc/small_batch.cu on a CPU: a force-included stand-in for ptx.cuh, for the
// CUDA built-ins and for the runtime. Every thread is a fiber; a block (or a cluster) runs until
// all its fibers end, in an order drawn at random in which some warps are far ahead of others, so
// that a missing barrier shows up as a wrong result. What it checks beyond the values:
// - an asynchronous copy poisons its target when it starts, and lands when somebody waits for it;
// - a kernel launched programmatically runs up to its wait before its predecessor runs at all;
// - shared memory starts as NaN; global memory is what the test made it.
// It says nothing about time, about the memory model, or about alignment of PTX operands.
//
//     g++ -x c++ -include cpu_gpu.hpp csrc/small_batch.cu

#define MEGAMOE_PTX_CUH

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#undef __global__
#undef __device__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emu {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cpu_gpu: %s\n", what);
    std::abort();
}

constexpr int kWarp = 32;
constexpr size_t kStack = 128 * 1024;

struct Fiber;

// Fibers that wait for the rest of their group.
struct Gate {
    int size = 0, arrived = 0;
    std::vector<Fiber*> waiting;
};

struct Copy {
    void* target;
    std::vector<uint8_t> bytes;
};

struct Mbarrier {
    int expected = 0, arrived = 0, phase = 0;
    std::vector<Copy> copies, landing;  // of this phase, and of complete ones
    std::vector<Fiber*> waiting;
};

struct Warp {
    Gate gate;
    uint32_t priority = 0;
    uint8_t exchange[2][kWarp][32] = {};
};

struct Block {
    std::vector<uint8_t> storage;
    uint8_t* shared = nullptr;
    Gate gate;
    std::vector<Warp> warps;
    std::map<uint64_t*, Mbarrier> barriers;
    dim3 index;
    int rank = 0;
};

struct Fiber {
    ucontext_t context = {};
    std::unique_ptr<char[]> stack;
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint3 index = {};
    int lane = 0;
    int collectives = 0;
    std::vector<Copy> copies;
    bool ended = false;
};

struct Engine {
    ucontext_t scheduler = {};
    std::vector<Block> blocks;
    std::vector<Fiber> fibers;
    std::vector<Fiber*> ready;
    Gate cluster_gate;
    Fiber* current = nullptr;
    dim3 grid;
    int cluster = 1;
    std::function<void()> body;
    std::function<void()> predecessor;
};

inline Engine* engine = nullptr;
inline uint64_t random_state = 1;
inline bool order_is_random = true;

inline uint32_t random_below(uint32_t bound) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(random_state >> 33) % bound;
}

inline Fiber& self() { return *engine->current; }

inline void yield() {
    Fiber* fiber = engine->current;
    swapcontext(&fiber->context, &engine->scheduler);
}

inline void wake(std::vector<Fiber*>& fibers) {
    engine->ready.insert(engine->ready.end(), fibers.begin(), fibers.end());
    fibers.clear();
}

inline void pass(Gate& gate) {
    if (++gate.arrived == gate.size) {
        gate.arrived = 0;
        wake(gate.waiting);
    } else {
        gate.waiting.push_back(&self());
        yield();
    }
}

inline void fiber_main() {
    engine->body();
    self().ended = true;
    yield();
    fail("an ended fiber ran");
}

// The most urgent of a few ready fibers; from time to time other warps become urgent.
inline size_t pick_fiber(Engine& mine) {
    size_t best = mine.ready.size() - 1;
    if (!order_is_random) return best;
    if (random_below(2000) == 0)
        for (Block& block : mine.blocks)
            for (Warp& warp : block.warps) warp.priority = random_below(1 << 20);
    for (int i = 0; i < 8; ++i) {
        const size_t other = random_below(mine.ready.size());
        if (mine.ready[other]->warp->priority > mine.ready[best]->warp->priority) best = other;
    }
    return best;
}

inline void run_cluster(Engine& mine, int first, int threads, size_t shared_bytes) {
    Engine* outer = engine;
    engine = &mine;
    mine.blocks = std::vector<Block>(mine.cluster);
    mine.fibers = std::vector<Fiber>(mine.cluster * threads);
    mine.cluster_gate = {mine.cluster * threads, 0, {}};
    for (int b = 0; b < mine.cluster; ++b) {
        Block& block = mine.blocks[b];
        block.storage.assign(shared_bytes + 1024, 0xff);
        block.shared = block.storage.data();
        block.shared += -reinterpret_cast<uintptr_t>(block.shared) % 1024;
        block.gate.size = threads;
        block.warps.resize(threads / kWarp);
        block.index = dim3(first + b);
        block.rank = b;
        for (Warp& warp : block.warps) {
            warp.gate.size = kWarp;
            warp.priority = random_below(1 << 20);
        }
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = mine.fibers[b * threads + t];
            fiber.block = &block;
            fiber.warp = &block.warps[t / kWarp];
            fiber.index = uint3{static_cast<unsigned>(t), 0, 0};
            fiber.lane = t % kWarp;
            fiber.stack.reset(new char[kStack]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = kStack;
            makecontext(&fiber.context, fiber_main, 0);
            mine.ready.push_back(&fiber);
        }
    }
    while (!mine.ready.empty()) {
        const size_t pick = pick_fiber(mine);
        std::swap(mine.ready[pick], mine.ready.back());
        mine.current = mine.ready.back();
        mine.ready.pop_back();
        swapcontext(&mine.scheduler, &mine.current->context);
    }
    for (const Fiber& fiber : mine.fibers)
        if (!fiber.ended) fail("deadlock: a thread waits for ever");
    engine = outer;
}

// The launch that has not run yet. It runs when its successor waits for it, or at `synchronize`.
inline std::function<void()> pending;

inline void synchronize() {
    auto last = std::move(pending);
    pending = nullptr;
    if (last) last();
}

// Exchanges one value per lane within a warp.
template <typename T>
const T* exchange(const T& value) {
    static_assert(sizeof(T) <= 32);
    Fiber& fiber = self();
    auto& buffer = fiber.warp->exchange[fiber.collectives++ % 2];
    std::memcpy(buffer[fiber.lane], &value, sizeof(T));
    pass(fiber.warp->gate);
    static thread_local T values[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) std::memcpy(&values[lane], buffer[lane], sizeof(T));
    return values;
}

inline float half_value(uint32_t bits) {
    static const std::vector<float> table = [] {
        std::vector<float> values(65536);
        for (uint32_t i = 0; i < 65536; ++i)
            values[i] = __half2float(__half(__half_raw{static_cast<unsigned short>(i)}));
        return values;
    }();
    return table[bits & 0xffff];
}

inline Mbarrier& mbarrier(uint64_t* at) {
    const auto found = self().block->barriers.find(at);
    if (found == self().block->barriers.end()) fail("a barrier was not initialised");
    return found->second;
}

inline void arrive(Mbarrier& barrier) {
    if (++barrier.arrived > barrier.expected) fail("too many arrivals");
    if (barrier.arrived < barrier.expected) return;
    for (Copy& copy : barrier.copies) barrier.landing.push_back(std::move(copy));
    barrier.copies.clear();
    barrier.arrived = 0;
    ++barrier.phase;
    wake(barrier.waiting);
}

inline Copy start_copy(void* target, const void* source, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(target) % bytes || reinterpret_cast<uintptr_t>(source) % bytes)
        fail("a copy is not aligned");
    const auto* from = static_cast<const uint8_t*>(source);
    Copy copy{target, {from, from + bytes}};
    std::memset(target, 0x7f, bytes);
    return copy;
}

struct TensorMap {
    const uint8_t* base;
    uint64_t columns, rows;
    uint32_t box_columns, box_rows;
};

inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* base,
                             const cuuint64_t* size, const cuuint64_t*, const cuuint32_t* box,
                             const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const TensorMap made = {static_cast<uint8_t*>(base), size[0], size[1], box[0], box[1]};
    std::memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

}  // namespace emu

// Objects and not macros: the launcher has members of these names.
template <unsigned (*kRead)()>
struct Coordinate {
    struct {
        operator unsigned() const { return kRead(); }
    } x;
};
inline const Coordinate<+[] { return emu::self().index.x; }> threadIdx;
inline const Coordinate<+[] { return emu::self().block->index.x; }> blockIdx;
inline const Coordinate<+[] { return emu::engine->grid.x; }> gridDim;

// -- built-ins -----------------------------------------------------------------------------------

template <typename T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
    return a < b ? b : a;
}
template <typename T>
T __ldcg(const T* at) {
    return *at;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline void __syncthreads() { emu::pass(emu::self().block->gate); }
inline void __syncwarp() { emu::pass(emu::self().warp->gate); }
inline int atomicAdd(int* at, int value) {
    const int old = *at;
    *at += value;
    return old;
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int offset) {
    const int lane = emu::self().lane;
    return emu::exchange(value)[lane >= offset ? lane - offset : lane];
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
    const int lane = emu::self().lane;
    return emu::exchange(value)[lane ^ mask];
}
inline bool __any_sync(uint32_t, bool value) {
    const bool* values = emu::exchange(value);
    bool any = false;
    for (int lane = 0; lane < emu::kWarp; ++lane) any |= values[lane];
    return any;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
    const int* values = emu::exchange(value);
    uint32_t peers = 0;
    for (int lane = 0; lane < emu::kWarp; ++lane) peers |= uint32_t{values[lane] == value} << lane;
    return peers;
}

// -- ptx.cuh -------------------------------------------------------------------------------------

namespace ptx {

inline uint8_t* shared_memory() { return emu::self().block->shared; }

inline void wait_for_predecessor() {
    auto run = std::move(emu::engine->predecessor);
    emu::engine->predecessor = nullptr;
    if (run) run();
}
inline void allow_successor() {}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    emu::self().block->barriers[barrier].expected = arrivals;
}
inline void fence_barrier_init() {}
inline void barrier_wait(uint64_t* at, uint32_t parity) {
    emu::Mbarrier& barrier = emu::mbarrier(at);
    while (static_cast<uint32_t>(barrier.phase % 2) == parity) {
        barrier.waiting.push_back(&emu::self());
        emu::yield();
    }
    for (emu::Copy& copy : barrier.landing)
        std::memcpy(copy.target, copy.bytes.data(), copy.bytes.size());
    barrier.landing.clear();
}
inline void copy16(void* target, const void* source) {
    emu::self().copies.push_back(emu::start_copy(target, source, 16));
}
inline void copy4(void* target, const void* source) {
    emu::self().copies.push_back(emu::start_copy(target, source, 4));
}
inline void copies_arrive(uint64_t* at) {
    emu::Mbarrier& barrier = emu::mbarrier(at);
    for (emu::Copy& copy : emu::self().copies) barrier.copies.push_back(std::move(copy));
    emu::self().copies.clear();
    emu::arrive(barrier);
}
inline void copy_box(void* target, const CUtensorMap* map, int column, int row, uint64_t* at,
                     uint32_t bytes) {
    emu::TensorMap tensor;
    std::memcpy(&tensor, map, sizeof tensor);
    if (bytes != tensor.box_columns * tensor.box_rows || tensor.box_columns != 128)
        emu::fail("a box of an unexpected size");
    if (reinterpret_cast<uintptr_t>(target) % 1024) emu::fail("a box is not aligned");
    emu::Mbarrier& barrier = emu::mbarrier(at);
    for (uint32_t r = 0; r < tensor.box_rows; ++r)
        for (uint32_t piece = 0; piece < 8; ++piece) {
            const uint8_t* source = tensor.base + (row + r) * tensor.columns + column + piece * 16;
            uint8_t* to = static_cast<uint8_t*>(target) + r * 128 + (piece ^ r % 8) * 16;
            barrier.copies.push_back(emu::start_copy(to, source, 16));
        }
    emu::arrive(barrier);
}
inline void prefetch_map(const CUtensorMap*) {}

inline uint2 e4m3_to_f16(uint32_t four) {
    const auto two = [four](int shift) {
        const auto raw = __nv_cvt_fp8x2_to_halfraw2(four >> shift & 0xffff, __NV_E4M3);
        return raw.x | uint32_t{raw.y} << 16;
    };
    return make_uint2(two(0), two(16));
}

inline void mma(float (&d)[4], uint4 a, uint2 b) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    const int lane = emu::self().lane;
    const Operands* all = emu::exchange(Operands{{a.x, a.y, a.z, a.w}, {b.x, b.y}});
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;
        float sum = 0.0f;
        for (int q = 0; q < 4; ++q)
            for (int k = 0; k < 2; ++k) {
                const uint32_t left = all[row + q].a[2 * k + i / 2];
                const uint32_t right = all[column + q].b[k];
                sum += emu::half_value(left) * emu::half_value(right);
                sum += emu::half_value(left >> 16) * emu::half_value(right >> 16);
            }
        d[i] += sum;
    }
}

inline uint32_t cluster_size() { return emu::engine->cluster; }
inline uint32_t cluster_rank() { return emu::self().block->rank; }
inline void cluster_barrier() { emu::pass(emu::engine->cluster_gate); }
inline void cluster_barrier_relaxed() { emu::pass(emu::engine->cluster_gate); }
inline const float* in_block(const float* pointer, uint32_t rank) {
    const auto offset = reinterpret_cast<const uint8_t*>(pointer) - emu::self().block->shared;
    return reinterpret_cast<const float*>(emu::engine->blocks.at(rank).shared + offset);
}

}  // namespace ptx

// -- runtime -------------------------------------------------------------------------------------

namespace small_batch {
struct Args;
}

namespace emu {
// The kernels of small_batch.cu have one signature; Args is complete only behind its header.
using Launcher = std::function<void()> (*)(const void* kernel, void** parameters);
inline Launcher bind = nullptr;
}  // namespace emu

extern "C" {

inline int emulator_max_clusters = 1 << 20;

void emulator_seed(uint64_t seed) {
    emu::order_is_random = seed != 0;
    emu::random_state = seed;
}
void emulator_limit_clusters(int clusters) { emulator_max_clusters = clusters; }
void emulator_synchronize() { emu::synchronize(); }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** parameters) {
    bool programmatic = false;
    int cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension)
            cluster = attribute.val.clusterDim.x;
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
            programmatic = attribute.val.programmaticStreamSerializationAllowed;
    }
    const int grid = config->gridDim.x, threads = config->blockDim.x;
    if (grid % cluster || config->dynamicSmemBytes > 227 * 1024) return cudaErrorInvalidValue;
    const size_t shared = config->dynamicSmemBytes;
    if (!programmatic) emu::synchronize();
    auto predecessor = std::make_shared<std::function<void()>>(std::move(emu::pending));
    auto body = emu::bind(kernel, parameters);
    emu::pending = [=] {
        for (int first = 0; first < grid; first += cluster) {
            emu::Engine engine;
            engine.grid = dim3(grid);
            engine.cluster = cluster;
            engine.body = body;
            engine.predecessor = std::move(*predecessor);
            *predecessor = nullptr;
            emu::run_cluster(engine, first, threads, shared);
            if (engine.predecessor) emu::fail("a kernel ended without waiting");
        }
    };
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
    const int size = config->attrs[0].val.clusterDim.x;
    *clusters = min<int>(emulator_max_clusters, config->gridDim.x / size);
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    *entry = reinterpret_cast<void*>(emu::encode_tiled);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

}  // extern "C"
