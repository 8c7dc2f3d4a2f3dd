// Runs the kernel of csrc/small_batch/small_batch.cu on a CPU: a stand-in for ptx.cuh, for the CUDA built-ins and
// for the runtime, which cpu_gpu.cpp includes first. Every thread of every block is a fiber; they run until all
// end, in an order drawn at random in which some warps are far ahead of others, so that a missing
// barrier shows up as a wrong result. What it checks beyond the values:
// - an asynchronous copy poisons its target when it starts, and lands when somebody waits for it;
// - a barrier completes when all arrivals and all announced bytes are there, and not twice;
// - a kernel launched programmatically runs up to its wait before its predecessor runs at all;
// - shared memory starts as NaN; global memory is what the test made it.
// It says nothing about time, about the memory model (fences do nothing here), or about how wgmma
// rounds.

#define MEGAMOE_PTX_CUH  // so that ptx.cuh is empty

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
    int64_t bytes = 0;  // announced, and not yet copied
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
    std::map<int, Gate> groups;  // named barriers
    dim3 index;
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
    Fiber* current = nullptr;
    dim3 grid;
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

// Polls since something happened that another thread may have waited for.
inline int64_t polls = 0;
constexpr int64_t kMostPolls = 20'000'000;

// Lets all others run, and comes back.
inline void pause() {
    if (++polls > kMostPolls) fail("deadlock: threads poll for ever");
    engine->ready.insert(engine->ready.begin(), engine->current);
    yield();
}

inline void wake(std::vector<Fiber*>& fibers) {
    engine->ready.insert(engine->ready.end(), fibers.begin(), fibers.end());
    fibers.clear();
}

inline void pass(Gate& gate) {
    polls = 0;
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

inline void run_grid(Engine& mine, int threads, size_t shared_bytes) {
    Engine* outer = engine;
    engine = &mine;
    const int blocks = static_cast<int>(mine.grid.x);
    mine.blocks = std::vector<Block>(blocks);
    mine.fibers = std::vector<Fiber>(blocks * threads);
    for (int b = 0; b < blocks; ++b) {
        Block& block = mine.blocks[b];
        block.storage.assign(shared_bytes + 1024, 0xff);
        block.shared = block.storage.data();
        block.shared += -reinterpret_cast<uintptr_t>(block.shared) % 1024;
        block.gate.size = threads;
        block.warps.resize(threads / kWarp);
        block.index = dim3(b);
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

inline float e4m3_value(uint8_t bits) {
    static const std::vector<float> table = [] {
        std::vector<float> values(256);
        for (int i = 0; i < 256; ++i)
            values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(i, __NV_E4M3)));
        return values;
    }();
    return table[bits];
}

inline Mbarrier& mbarrier(uint64_t* at) {
    const auto found = self().block->barriers.find(at);
    if (found == self().block->barriers.end()) fail("a barrier was not initialised");
    return found->second;
}

inline void complete(Mbarrier& barrier) {
    if (barrier.arrived > barrier.expected) fail("too many arrivals");
    if (barrier.bytes < 0) fail("more bytes than announced");
    if (barrier.arrived < barrier.expected || barrier.bytes > 0) return;
    for (Copy& copy : barrier.copies) barrier.landing.push_back(std::move(copy));
    barrier.copies.clear();
    barrier.arrived = 0;
    ++barrier.phase;
    wake(barrier.waiting);
}

inline void arrive(Mbarrier& barrier) {
    polls = 0;
    ++barrier.arrived;
    complete(barrier);
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
inline void __syncthreads() { emu::pass(emu::self().block->gate); }
inline void __syncwarp() { emu::pass(emu::self().warp->gate); }
inline int atomicAdd(int* at, int value) {
    const int old = *at;
    *at += value;
    return old;
}
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
    return emu::exchange(value)[lane];
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
inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
    const uint32_t* values = emu::exchange(value);
    uint32_t equal = 0;
    for (int lane = 0; lane < emu::kWarp; ++lane) equal |= uint32_t{values[lane] == value} << lane;
    return equal;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }

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
inline void arrive(uint64_t* at) { emu::arrive(emu::mbarrier(at)); }
inline void arrive_expect(uint64_t* at, uint32_t bytes) {
    emu::mbarrier(at).bytes += bytes;
    emu::arrive(emu::mbarrier(at));
}
inline emu::Gate& group(int id, int threads) {
    emu::Gate& gate = emu::self().block->groups[id];
    if (gate.size != 0 && gate.size != threads) emu::fail("a named barrier of two sizes");
    gate.size = threads;
    return gate;
}
inline void group_sync(int id, int threads) { emu::pass(group(id, threads)); }
inline void group_arrive(int id, int threads) {
    emu::Gate& gate = group(id, threads);
    if (++gate.arrived < gate.size) return;
    gate.arrived = 0;
    emu::wake(gate.waiting);
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
inline void copy_bytes(void* target, const void* source, uint32_t bytes, uint64_t* at) {
    emu::Mbarrier& barrier = emu::mbarrier(at);
    for (uint32_t i = 0; i < bytes; i += 16)
        barrier.copies.push_back(emu::start_copy(static_cast<uint8_t*>(target) + i,
                                                 static_cast<const uint8_t*>(source) + i, 16));
    barrier.bytes -= bytes;
    emu::complete(barrier);
}
inline void copy_box(void* target, const CUtensorMap* map, int column, int row, uint64_t* at) {
    emu::TensorMap tensor;
    std::memcpy(&tensor, map, sizeof tensor);
    if (tensor.box_columns != 128) emu::fail("a box of an unexpected size");
    if (column + 128 > tensor.columns || row + tensor.box_rows > tensor.rows)
        emu::fail("a box outside of its tensor");
    if (reinterpret_cast<uintptr_t>(target) % 1024) emu::fail("a box is not aligned");
    emu::Mbarrier& barrier = emu::mbarrier(at);
    for (uint32_t r = 0; r < tensor.box_rows; ++r)
        for (uint32_t piece = 0; piece < 8; ++piece) {
            const uint8_t* source = tensor.base + (row + r) * tensor.columns + column + piece * 16;
            uint8_t* to = static_cast<uint8_t*>(target) + r * 128 + (piece ^ r % 8) * 16;
            barrier.copies.push_back(emu::start_copy(to, source, 16));
        }
    barrier.bytes -= tensor.box_columns * tensor.box_rows;
    emu::complete(barrier);
}
inline void prefetch_map(const CUtensorMap*) {}
inline void fence_async_global() {}
inline void fence_async_shared() {}
inline int load_acquire(const int* at) {
    emu::pause();
    return *at;
}
inline int load_acquire_shared(const int* at) { return load_acquire(at); }
inline void store_release_shared(int* at, int value) {
    emu::polls = 0;
    *at = value;
}
inline void add_release(int* at, int value) {
    emu::polls = 0;
    *at += value;
}
inline int count_up(int* at, int last) {
    emu::polls = 0;
    const int old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
inline int take_next(int* at, int last) { return count_up(at, last); }
inline void check_off(int* at, int last) { count_up(at, last); }

inline void multiply_begin() {}
inline void multiply_commit() {}
inline void multiply_wait() {}
template <typename T>
void hold(T&) {}

inline float element(const uint8_t* matrix, int row, int column) {
    if (reinterpret_cast<uintptr_t>(matrix) % 1024) emu::fail("a matrix is not aligned");
    return emu::e4m3_value(
        matrix[row * 128 + ((column / 16 ^ row % 8) * 16) + column % 16]);
}
template <int kCount>
void multiply(float (&d)[kCount], const uint8_t* a, const uint8_t* b, int at, bool add) {
    const int lane = emu::self().lane, warp = emu::self().index.x / 32 % 4;
    for (int i = 0; i < kCount; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = at; k < at + 32; ++k) sum += element(a, row, k) * element(b, column, k);
        d[i] = add ? d[i] + sum : sum;
    }
}

}  // namespace ptx

// -- runtime -------------------------------------------------------------------------------------

namespace emu {
// The launch of `kernel` with a copy of its arguments. cpu_gpu.cpp sets it, which knows their types.
using Launcher = std::function<void()> (*)(const void* kernel, void** parameters);
inline Launcher bind = nullptr;
}  // namespace emu

extern "C" {

void emulator_seed(uint64_t seed) {
    emu::order_is_random = seed != 0;
    emu::random_state = seed;
}
void emulator_synchronize() { emu::synchronize(); }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** parameters) {
    bool programmatic = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
            programmatic = attribute.val.programmaticStreamSerializationAllowed;
    }
    if (config->dynamicSmemBytes > 227 * 1024) return cudaErrorInvalidValue;  // of an SM90 block
    const dim3 grid = config->gridDim;
    const int threads = config->blockDim.x;
    const size_t shared = config->dynamicSmemBytes;
    if (!programmatic) emu::synchronize();
    auto predecessor = std::make_shared<std::function<void()>>(std::move(emu::pending));
    auto body = emu::bind(kernel, parameters);
    emu::pending = [=] {
        emu::Engine engine;
        engine.grid = grid;
        engine.body = body;
        engine.predecessor = std::move(*predecessor);
        *predecessor = nullptr;
        emu::run_grid(engine, threads, shared);
        if (engine.predecessor) emu::fail("a kernel ended without waiting");
    };
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
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
