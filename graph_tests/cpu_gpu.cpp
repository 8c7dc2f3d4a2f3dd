// Built by test_small_batch_cuda.py: csrc/small_batch.cu with fibers for threads.

#include "cpu_gpu.hpp"

#include "../csrc/small_batch.cu"

namespace {

std::function<void()> bind(const void* kernel, void** parameters) {
    const auto entry = reinterpret_cast<small_batch::Kernel>(const_cast<void*>(kernel));
    const auto args = *static_cast<small_batch::Args*>(parameters[0]);
    const auto w13 = *static_cast<CUtensorMap*>(parameters[1]);
    const auto w2 = *static_cast<CUtensorMap*>(parameters[2]);
    return [=] { entry(args, w13, w2); };
}

const bool bound = (emu::bind = bind, true);

}  // namespace
