// The kernel of megamoe::fused_moe for the common call: right inputs, a token count that was
// launched before, a wheel with a tvm-ffi binding. It stages the rows and launches the mega kernel
// without entering Python, which costs more than both.
//
// Everything else goes to the Python kernel of the same op, arguments untouched: what is to be
// refused, closed contexts, first launches, weights as uint8. So each rule and each error text
// stands in one place, custom_ops/library.py and call.py, and a check here only has to be strict,
// not to explain.
//
// It is built against torch's C++ headers, once per torch version. The stable ABI would not do: its
// C functions turn exceptions into error codes, and a ValueError or ContextClosed that the Python
// kernel raises would arrive as a RuntimeError.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

extern "C" {

// One value of tvm-ffi's C ABI, version 0.1: an argument or a result.
struct MegaMoEAny {
    int32_t type_index;
    uint32_t small_length;  // of a string in `value`; else 0
    union {
        int64_t as_int;
        double as_double;
        void* as_pointer;
        char as_bytes[8];
    } value;
};

// What does not change between the calls of a context. `custom_ops/deep_gemm/native.py` mirrors the
// field order. Functions come as addresses, so that nothing here links to them.
struct MegaMoEFusedMoEConfig {
    // megamoe_pre_dispatch of csrc/staging/pre_dispatch.cu, and its config.
    int (*stage)(const void* config, const void* x, int64_t x_stride, const void* ids,
                 int64_t ids_stride, const void* weights, int64_t weights_stride,
                 const void* num_valid, void* launch_count, int32_t num_tokens, int32_t variant,
                 void* stream);
    const void* stage_config;
    // TVMFFIFunctionCall, TVMFFIErrorMoveFromRaised and TVMFFIObjectDecRef.
    int (*call)(void* function, MegaMoEAny* arguments, int32_t count, MegaMoEAny* result);
    void (*take_error)(void** error);
    int (*release)(void* object);
    // The mega kernel's function object, and its arguments behind the output and the weights.
    void* mega;
    const MegaMoEAny* fixed;
    // aoti_torch_get_current_cuda_stream
    int (*current_stream)(int32_t device, void** stream);
    int64_t experts, rows, hidden;  // shape of w13
    int64_t top_k, capacity, layout_version;
    int32_t num_fixed;
    int32_t device;  // index
};

}  // extern "C"

namespace {

static_assert(sizeof(MegaMoEAny) == 16 && offsetof(MegaMoEAny, value) == 8);
static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, byte_offset) == 40);
static_assert(sizeof(DLDataType) == 4 && sizeof(DLDevice) == 8);

constexpr int32_t kTensorPointer = 7;  // type_index of a DLTensor*
constexpr int32_t kFirstObject = 64;   // from here on a value is a reference
constexpr size_t kObjectHeader = 24;   // what an error's texts stand behind
constexpr size_t kViews = 5;           // output, w13, w13_scale, w2, w2_scale
constexpr size_t kOpArguments = 15;

struct Context {
    MegaMoEFusedMoEConfig config;
    // Held over a call's two launches, so that another thread's don't come between them, and by
    // `leave`, which returns when no call uses the config any more. It guards what follows.
    std::mutex mutex;
    bool open = true;
    std::vector<MegaMoEAny> arguments;  // of the mega kernel; the views of a call stand first
    std::vector<char> warm;             // per number of tokens
    int64_t launches = 0;
};

// Never destroyed: a thread may still be in a call when the process ends.
std::shared_mutex& table_mutex = *new std::shared_mutex;
auto& table = *new std::unordered_map<int64_t, std::shared_ptr<Context>>;

std::shared_ptr<Context> find(int64_t context_id) {
    std::shared_lock lock(table_mutex);
    const auto entry = table.find(context_id);
    return entry == table.end() ? nullptr : entry->second;
}

// The op's arguments, in the order of its schema.
struct Arguments {
    explicit Arguments(const c10::IValue* stack)
        : x(stack[0].toTensor()),
          ids(stack[1].toTensor()),
          weights(stack[2].toTensor()),
          w13(stack[3].toTensor()),
          w13_scale(stack[4].toTensor()),
          w2(stack[5].toTensor()),
          w2_scale(stack[6].toTensor()),
          has_bias(!stack[7].isNone() || !stack[8].isNone()),
          num_valid(stack[9].toTensor()),
          launch_count(stack[10].toTensor()),
          context_id(stack[11].toInt()),
          top_k(stack[12].toInt()),
          capacity(stack[13].toInt()),
          layout_version(stack[14].toInt()) {}

    const at::Tensor &x, &ids, &weights, &w13, &w13_scale, &w2, &w2_scale;
    bool has_bias;
    const at::Tensor &num_valid, &launch_count;
    int64_t context_id, top_k, capacity, layout_version;
};

bool is_rows(const at::Tensor& t, int64_t rows, int64_t columns) {
    return t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.stride(1) == 1;
}

bool is_weight(const at::Tensor& t, at::ScalarType dtype, std::array<int64_t, 3> shape) {
    return t.scalar_type() == dtype && t.sizes() == at::IntArrayRef(shape);
}

bool is_one_int(const at::Tensor& t) { return t.scalar_type() == at::kInt && t.numel() == 1; }

// What `_runtime` of library.py and the rules of call.py ask, but for whether weights are
// contiguous, which the mega kernel asks itself; and one device.
bool holds(const Arguments& a, const MegaMoEFusedMoEConfig& config) {
    if (a.layout_version != config.layout_version || a.top_k != config.top_k || a.x.dim() != 2)
        return false;
    if (a.has_bias) return false;  // the mega kernel has no argument for it
    const int64_t tokens = a.x.size(0);
    const int64_t e = config.experts, r = config.rows, h = config.hidden;
    const auto ids = a.ids.scalar_type(), weights = a.weights.scalar_type();
    const c10::Device device = a.x.device();
    return tokens <= a.capacity && tokens <= config.capacity && device.index() == config.device &&
           is_rows(a.x, tokens, h) && a.x.scalar_type() == at::kBFloat16 &&
           is_rows(a.ids, tokens, a.top_k) && (ids == at::kInt || ids == at::kLong) &&
           is_rows(a.weights, tokens, a.top_k) &&
           (weights == at::kFloat || weights == at::kBFloat16) &&
           is_weight(a.w13, at::kFloat8_e4m3fn, {e, r, h}) &&
           is_weight(a.w13_scale, at::kFloat, {e, r / 128, h / 128}) &&
           is_weight(a.w2, at::kFloat8_e4m3fn, {e, h, r / 2}) &&
           is_weight(a.w2_scale, at::kFloat, {e, h / 128, r / 256}) && is_one_int(a.num_valid) &&
           is_one_int(a.launch_count) && a.ids.device() == device && a.weights.device() == device &&
           a.w13.device() == device && a.w13_scale.device() == device && a.w2.device() == device &&
           a.w2_scale.device() == device && a.num_valid.device() == device &&
           a.launch_count.device() == device &&
           c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
}

DLTensor view_of(const at::Tensor& t, void* data, uint8_t code, uint8_t bits) {
    DLTensor view = {};
    view.data = data;
    view.device = {t.is_cuda() ? kDLCUDA : kDLCPU, t.is_cuda() ? t.device().index() : 0};
    view.ndim = static_cast<int32_t>(t.dim());
    view.dtype = {code, bits, 1};
    view.shape = const_cast<int64_t*>(t.sizes().data());
    view.strides = const_cast<int64_t*>(t.strides().data());
    return view;
}

// Weights are read only; DLPack has no way to say so.
DLTensor weight_view(const at::Tensor& t, uint8_t code, uint8_t bits) {
    return view_of(t, const_cast<void*>(t.const_data_ptr()), code, bits);
}

// Throws the error that tvm-ffi holds for this thread.
[[noreturn]] void fail(const MegaMoEFusedMoEConfig& config) {
    struct Text {
        const char* data;
        size_t size;
    };
    void* error = nullptr;
    config.take_error(&error);
    std::string got = "an error without a text";
    if (error != nullptr) {
        const auto* texts =
            reinterpret_cast<const Text*>(static_cast<char*>(error) + kObjectHeader);
        got = std::string(texts[0].data, texts[0].size) + ": " +
              std::string(texts[1].data, texts[1].size);
        config.release(error);
    }
    TORCH_CHECK(false, "mega kernel launch: expected success, got ", got,
                ". An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1.");
}

void launch_mega(Context& context, const Arguments& a, const at::Tensor& out) {
    std::array<DLTensor, kViews> views = {
        view_of(out, out.mutable_data_ptr(), kDLBfloat, 16),
        weight_view(a.w13, kDLFloat8_e4m3fn, 8),
        weight_view(a.w13_scale, kDLFloat, 32),
        weight_view(a.w2, kDLFloat8_e4m3fn, 8),
        weight_view(a.w2_scale, kDLFloat, 32),
    };
    for (size_t i = 0; i < kViews; ++i) context.arguments[i].value.as_pointer = &views[i];
    const auto& config = context.config;
    const auto count = static_cast<int32_t>(context.arguments.size());
    MegaMoEAny result = {};
    if (config.call(config.mega, context.arguments.data(), count, &result) != 0) fail(config);
    if (result.type_index >= kFirstObject) config.release(result.value.as_pointer);
}

// The output, or nothing where the Python kernel has to take the call: then nothing was launched.
std::optional<at::Tensor> run(const Arguments& a) {
    const auto context = find(a.context_id);
    if (context == nullptr || !holds(a, context->config)) return std::nullopt;
    const auto& config = context->config;
    const int64_t tokens = a.x.size(0);
    void* stream = nullptr;
    if (config.current_stream(config.device, &stream) != 0) return std::nullopt;
    const at::Tensor out = at::empty({tokens, config.hidden}, a.x.options());

    std::lock_guard lock(context->mutex);
    if (!context->open || !context->warm[tokens]) return std::nullopt;
    const int variant =
        2 * (a.ids.scalar_type() == at::kLong) + (a.weights.scalar_type() == at::kBFloat16);
    const int error = config.stage(config.stage_config, a.x.const_data_ptr(), a.x.stride(0),
                                   a.ids.const_data_ptr(), a.ids.stride(0),
                                   a.weights.const_data_ptr(), a.weights.stride(0),
                                   a.num_valid.const_data_ptr(), a.launch_count.mutable_data_ptr(),
                                   static_cast<int32_t>(tokens), variant, stream);
    if (error != 0) return std::nullopt;  // the Python kernel fails alike, and explains
    launch_mega(*context, a, out);
    ++context->launches;
    return out;
}

// Where the dispatcher finds the Python kernel, which stands under every backend's key but the one
// that `install` took.
c10::DispatchKeySet& python_kernel = *new c10::DispatchKeySet;

void fused_moe(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    std::optional<at::Tensor> out = run(Arguments(stack->data() + stack->size() - kOpArguments));
    if (!out.has_value()) return op.redispatchBoxed(python_kernel, stack);
    torch::jit::drop(*stack, kOpArguments);
    torch::jit::push(*stack, std::move(*out));
}

}  // namespace

extern "C" {

// Makes this the op's kernel under a dispatch key, once, for the rest of the process: CUDA, or CPU
// in tests. Returns what went wrong, or null.
const char* megamoe_fused_moe_install(const char* key_name) {
    static std::mutex mutex;
    static std::string installed, problem;
    std::lock_guard lock(mutex);
    if (installed == key_name) return nullptr;
    try {
        TORCH_CHECK(installed.empty(), "it is the kernel for ", installed);
        const c10::DispatchKey key = c10::parseDispatchKey(key_name);
        const bool on_cpu = key == c10::DispatchKey::CPU;
        python_kernel =
            c10::DispatchKeySet(on_cpu ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
        auto* library =  // its destructor would unregister
            new torch::Library(torch::Library::IMPL, "megamoe", key, __FILE__, __LINE__);
        library->impl("fused_moe", torch::CppFunction::makeFromBoxedFunction<&fused_moe>());
        installed = key_name;
        return nullptr;
    } catch (const std::exception& error) {
        problem = error.what();
        return problem.c_str();
    }
}

// Calls with this id may come here from now on. The caller keeps alive what `config` points to
// until it leaves.
void megamoe_fused_moe_enter(int64_t context_id, const MegaMoEFusedMoEConfig* config) {
    const auto context = std::make_shared<Context>();
    context->config = *config;
    context->arguments.assign(kViews, MegaMoEAny{kTensorPointer, 0, {}});
    context->arguments.insert(context->arguments.end(), config->fixed,
                              config->fixed + config->num_fixed);
    context->warm.assign(config->capacity + 1, 0);
    std::unique_lock lock(table_mutex);
    table[context_id] = context;
}

// Calls of this many tokens no longer go to the Python kernel, which has made the first one.
void megamoe_fused_moe_warm(int64_t context_id, int64_t tokens) {
    const auto context = find(context_id);
    if (context == nullptr || tokens < 0 || tokens > context->config.capacity) return;
    std::lock_guard lock(context->mutex);
    context->warm[tokens] = 1;
}

// Waits for a call that is being launched. After it, all calls with this id go to Python.
void megamoe_fused_moe_leave(int64_t context_id) {
    const auto context = find(context_id);
    if (context == nullptr) return;
    {
        std::unique_lock lock(table_mutex);
        table.erase(context_id);
    }
    std::lock_guard lock(context->mutex);
    context->open = false;
}

// Launches made here so far, -1 for an id that is not in the table.
int64_t megamoe_fused_moe_launches(int64_t context_id) {
    const auto context = find(context_id);
    if (context == nullptr) return -1;
    std::lock_guard lock(context->mutex);
    return context->launches;
}

}  // extern "C"
