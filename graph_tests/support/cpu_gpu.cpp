// Built by small_batch_layers.py: csrc/small_batch/small_batch.cu with fibers for threads.

#include "cpu_gpu.hpp"

#include "../../csrc/small_batch/small_batch.cu"

namespace {

std::function<void()> bind(const void* kernel, void** parameters) {
    const auto entry = reinterpret_cast<small_batch::Kernel>(const_cast<void*>(kernel));
    const auto args = *static_cast<small_batch::Args*>(parameters[0]);
    const auto w13 = *static_cast<CUtensorMap*>(parameters[1]);
    const auto w2 = *static_cast<CUtensorMap*>(parameters[2]);
    return [=] { entry(args, w13, w2); };
}

const bool bound = (emu::bind = bind, true);

int most_columns() {
    int most = 0;
    for (const auto& variant : small_batch::kVariants)
        if (variant.columns > most) most = variant.columns;
    return most;
}

}  // namespace

extern "C" {

// Number of the variant that takes so many tokens.
int emulator_variant(const MegaMoESmallBatchConfig* config, int tokens) {
    small_batch::Args args = {};
    return static_cast<int>(small_batch::choose(*config, tokens, args) - small_batch::kVariants);
}

// Whether it runs in the flavour with alpha, beta and biases.
int emulator_is_general(const MegaMoESmallBatchConfig* config) {
    const auto& variant = small_batch::kVariants[0];
    return variant.kernel(*config) == variant.general;
}

// What custom_ops/small_batch/kernel.py repeats, in the order of the test that compares them.
extern const int emulator_constants[];
const int emulator_constants[] = {
    small_batch::kMaxExperts,
    small_batch::kMaxPairs,
    most_columns(),
    small_batch::kFine,
    small_batch::kTileRows,
    static_cast<int>(sizeof(MegaMoESmallBatchConfig)),
    static_cast<int>(offsetof(small_batch::Counters, done) / sizeof(int)),
    static_cast<int>(std::size(small_batch::kVariants)),
};

}  // extern "C"
