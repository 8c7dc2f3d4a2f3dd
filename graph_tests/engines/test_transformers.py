"""experts_implementation="megamoe" on models of transformers: their code, our experts."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    PeakStorage,
    assert_close,
    assert_same,
    assert_same_choices,
    oracle,
    outcome,
    refuses,
    relative_error,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference.recipe import FP8, quantize_blocks

transformers = pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from hf_models import (  # noqa: E402
    CAPACITY,
    FAMILIES,
    PROMPT,
    dequantized,
    experts_of,
    logits_of,
    make_model,
)

from megamoe_compile.engines.transformers import model as megamoe  # noqa: E402
from megamoe_compile.engines.transformers.experts import HFExperts, layout_of  # noqa: E402


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [quantize_blocks(expert) for expert in w.detach()]
    return torch.stack([q for q, _ in pairs]), torch.stack([s for _, s in pairs])


def fp8_model(scale_dtype: torch.dtype = torch.float32) -> Any:
    """A model whose experts transformers itself made fine-grained FP8."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = make_model()
    weights = [(e.gate_up_proj.detach(), e.down_proj.detach()) for e in experts_of(model)]
    # Only the experts: the kernels of FP8 linear layers need a GPU.
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    scale_fmt = "ue8m0" if scale_dtype == torch.float8_e8m0fnu else "float"
    config = transformers.FineGrainedFP8Config(scale_fmt=scale_fmt)
    replace_with_fp8_linear(model, linear, config)
    for experts, sources in zip(experts_of(model), weights, strict=True):
        for name, source in zip(("gate_up_proj", "down_proj"), sources, strict=True):
            q, scale = quantize(source)
            if scale_dtype == torch.float8_e8m0fnu:  # powers of two, and codes that fit them
                scale = scale.log2().ceil().exp2()
                n, c = source.shape[1:]
                blocks = scale.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :c]
                q = (source.float() / blocks).to(FP8)
            assert getattr(experts, name).shape == q.shape
            assert getattr(experts, f"{name}_scale_inv").dtype == scale_dtype
            setattr(experts, name, nn.Parameter(q, requires_grad=False))
            scale = scale.to(scale_dtype)
            setattr(experts, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
    return model


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """`register`, undone after the test."""
    registries = megamoe._registries()
    yield megamoe.register
    for registry in registries:
        registry._global_mapping.pop("megamoe", None)


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_the_models_own(family: str) -> None:
    model = make_model(family)
    own, exact_weights = logits_of(model), logits_of(dequantized(model))
    with megamoe.prepare(model, max_tokens_per_rank=CAPACITY) as context:
        ours = logits_of(model)
    # The router has scaled the weights, and shared experts are not ours.
    assert context.config.routed_scaling_factor == 1.0
    assert context.config.num_shared_experts == 0
    # Only the FP8 activations differ, then the FP8 weights too.
    assert_close(ours, exact_weights, 0.03, "logits against dequantized weights")
    assert_close(ours, own, 0.04, "logits against the original weights")
    assert relative_error(ours, own) > 1e-4, "the model's own experts ran"


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_exactly_the_layers(family: str) -> None:
    model = make_model(family)
    own = dequantized(model).float()
    own.set_experts_implementation("eager")
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    x = torch.randn(5, 128).bfloat16()
    ids = torch.tensor([[0, 1], [2, 3], [-1, 2], [3, 0], [-1, -1]])
    weights = torch.rand(5, 2)
    for experts, reference in zip(experts_of(model), experts_of(own), strict=True):
        y = experts(x, ids, weights)
        assert_same(y, oracle(experts.megamoe, (x, ids, weights)), "experts")
        assert_same(y[4], torch.zeros_like(y[4]), "a row without experts")
        assert_same(experts(x[None], ids[None], weights[None]), y[None], "3-D hidden_states")
        skipped = weights.masked_fill(ids == -1, 0.0)
        expected = reference(x.float(), ids.clamp(min=0), skipped)
        assert_close(y, expected.bfloat16(), 0.06, "fp32 experts")


def test_limit_of_deepseek_v4_is_passed_on() -> None:
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = transformers.DeepseekV4Config(
        hidden_size=128,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
    )
    experts = v4.DeepseekV4Experts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    experts = experts.to(torch.bfloat16)
    own = dequantized(experts).float()
    own.config._experts_implementation = "eager"  # a copy, as the module is
    context = megamoe.prepare(experts, max_tokens_per_rank=8)
    assert context.config.swiglu_limit == 0.5
    assert context.config.top_k == config.num_experts_per_tok
    inputs = (torch.randn(4, 128).bfloat16(), torch.tensor([[0], [1], [2], [3]]), torch.ones(4, 1))
    expected = own(inputs[0].float(), *inputs[1:])
    assert_close(experts(*inputs), expected.bfloat16(), 0.08, "clamped experts")


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_experts_are_taken_over(scale_dtype: torch.dtype) -> None:
    model = fp8_model(scale_dtype)
    assert all(type(experts).__name__ == "FP8Experts" for experts in experts_of(model))
    before = [e.gate_up_proj.untyped_storage().data_ptr() for e in experts_of(model)]
    with PeakStorage() as memory:
        context = megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    expert = 3 * 128 * 128
    assert memory.peak < 3 * expert, "more than one expert was copied"
    after = [layer.w13.untyped_storage().data_ptr() for layer in context.layers]
    assert after == before
    assert not any(list(experts.parameters()) for experts in experts_of(model))
    if scale_dtype == torch.float32:
        bf16 = make_model()
        megamoe.prepare(bf16, max_tokens_per_rank=CAPACITY)
        assert_same(logits_of(model), logits_of(bf16), "the same FP8 weights, quantized on load")
    assert_close(logits_of(model), logits_of(make_model()), 0.05, "logits")


def test_transposed_experts() -> None:
    aria = pytest.importorskip("transformers.models.aria.modeling_aria")
    config = transformers.AriaTextConfig(
        hidden_size=128, intermediate_size=128, moe_num_experts=4, moe_topk=2, hidden_act="silu"
    )
    experts = aria.AriaExperts(config)
    if not hasattr(experts, "is_transposed"):
        pytest.skip("this version of transformers has its own experts in Aria")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    experts = experts.to(torch.bfloat16)
    w13, w2 = experts.gate_up_proj.detach().mT, experts.down_proj.detach().mT
    layout = layout_of(experts, "experts", None)
    assert (layout.hidden_size, layout.intermediate_size, layout.num_experts) == (128, 128, 4)
    megamoe.prepare(experts, max_tokens_per_rank=8)
    layer = mm.MegaMoE(experts.megamoe.context)
    layer.load_weights(w13.contiguous(), None, w2.contiguous(), None)
    inputs = (torch.randn(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    assert_same(experts(*inputs), layer(*inputs), "transposed experts")


# -- memory and ownership --------------------------------------------------------------------------


def test_weights_are_not_kept_twice() -> None:
    model = make_model()
    parameters = [p for e in experts_of(model) for p in (e.gate_up_proj, e.down_proj)]
    originals = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters]
    count, bf16_bytes = len(experts_of(model)), sum(p.nbytes for p in parameters)
    del parameters
    with PeakStorage() as memory:
        context = megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
        gc.collect()
        torch.empty(0)  # the mode looks for what was freed at each operator
        held = memory.live
    assert all(original.expired() for original in originals), "bf16 weights are still alive"
    layers = count * context.weight_geometry.nbytes()
    assert bf16_bytes > 1.9 * layers
    assert layers <= held < 1.1 * layers
    scratch = 20 * 3 * 128 * 128  # one expert in fp32 and what quantizing it takes
    assert memory.peak < layers + scratch


def test_contexts_are_shared_and_released() -> None:
    model = make_model()
    context = megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    assert {layer.context for layer in context.layers} == {context}
    assert len(context.layers) == len(experts_of(model)) == 2
    weights = StorageWeakRef(context.layers[0].w13.untyped_storage())
    megamoe.release(model)
    assert context.closed
    gc.collect()
    assert weights.expired()
    with refuses(ValueError, "gate_up_proj", "Load the model anew"):
        logits_of(model)
    megamoe.release(model)  # idempotent
    with megamoe.prepare(make_model(), max_tokens_per_rank=CAPACITY) as context:
        model = make_model()
    closed = make_model()
    megamoe.prepare(closed, max_tokens_per_rank=CAPACITY).close()
    with refuses(mm.ContextClosed, "open MegaMoEContext"):
        logits_of(closed)


def test_a_failed_preparation_closes_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = []

    def fail(experts: Any, layout: Any, context: mm.MegaMoEContext) -> None:
        contexts.append(context)
        raise MemoryError

    monkeypatch.setattr(megamoe, "convert", fail)
    with pytest.raises(MemoryError):
        megamoe.prepare(make_model(), max_tokens_per_rank=CAPACITY)
    assert [context.closed for context in contexts] == [True]


def test_prepare_twice_is_refused() -> None:
    model = make_model()
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    expected = logits_of(model)
    with refuses(mm.MegaMoEError, "unconverted", "model.layers.0.mlp.experts"):
        megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    assert_same(logits_of(model), expected, "after the refusal")


def test_a_checkpoint_is_not_lost_in_silence(tmp_path: Path) -> None:
    model = make_model()
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    words = ("model.layers.0.mlp.experts.gate_up_proj", "cannot read back", "Save the model before")
    with refuses(mm.MegaMoEError, *words):
        model.state_dict()
    with refuses(mm.MegaMoEError, *words):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    layer = experts_of(model)[0].megamoe
    assert set(layer.state_dict()) >= {"w13", "w13_scale", "w2", "w2_scale"}


def test_weights_are_reloaded_in_place() -> None:
    model, other = make_model(), make_model()
    for experts in experts_of(other):
        experts.gate_up_proj.data.neg_()
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    before = logits_of(model)
    addresses = [layer.w13.data_ptr() for layer in model.modules() if isinstance(layer, HFExperts)]
    for converted, source in zip(experts_of(model), experts_of(other), strict=True):
        with torch.no_grad():
            converted.megamoe.load_weights(source.gate_up_proj, None, source.down_proj, None)
    layers = [layer for layer in model.modules() if isinstance(layer, HFExperts)]
    assert [layer.w13.data_ptr() for layer in layers] == addresses
    megamoe.prepare(other, max_tokens_per_rank=CAPACITY)
    assert_same(logits_of(model), logits_of(other), "reloaded weights")
    assert relative_error(logits_of(model), before) > 1e-3


# -- the first call --------------------------------------------------------------------------------


def test_register_alone_converts_at_the_first_call(registered: Callable[..., None]) -> None:
    registered(max_tokens_per_rank=CAPACITY)
    config = make_model().config
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="megamoe", dtype=torch.bfloat16
    ).eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    ours = logits_of(model)
    first, second = (experts.megamoe for experts in experts_of(model))
    assert first.context is second.context
    assert first.context.config.max_tokens_per_rank == CAPACITY
    prepared = make_model()
    prepared.load_state_dict(state)
    megamoe.prepare(prepared, max_tokens_per_rank=CAPACITY)
    assert_same(ours, logits_of(prepared), "lazily converted")
    # Another model of this geometry shares the context; each lets go of its own layers only.
    other = make_model()
    other.set_experts_implementation("megamoe")
    expected = logits_of(other)
    assert experts_of(other)[0].megamoe.context is first.context
    megamoe.release(model)
    assert not first.context.closed
    assert_same(logits_of(other), expected, "after the release of its neighbour")
    megamoe.release(other)
    assert first.context.closed
    third = make_model()
    third.set_experts_implementation("megamoe")
    assert_same(logits_of(third), expected, "a new context after the old one closed")


def test_fp8_experts_convert_at_the_first_call(registered: Callable[..., None]) -> None:
    registered(max_tokens_per_rank=CAPACITY)
    model = fp8_model()
    model.set_experts_implementation("megamoe")
    prepared = fp8_model()
    megamoe.prepare(prepared, max_tokens_per_rank=CAPACITY)
    assert_same(logits_of(model), logits_of(prepared), "FP8, lazily converted")


def test_first_call_inside_compile(registered: Callable[..., None]) -> None:
    registered(max_tokens_per_rank=CAPACITY)
    model = make_model(num_hidden_layers=1)
    model.set_experts_implementation("megamoe")
    with pytest.raises(Exception, match=r"\.prepare\(model, \.\.\.\), or the model once eagerly"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(PROMPT)
    assert all(experts.gate_up_proj.numel() for experts in experts_of(model))
    expected = logits_of(model)  # eager: it converts
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(logits_of(compiled), expected, "compiled after an eager call")
    registered(max_tokens_per_rank=CAPACITY + 1)  # a context of its own, made by this call
    breaking = make_model(num_hidden_layers=1)
    breaking.set_experts_implementation("megamoe")
    torch._dynamo.reset()
    compiled = torch.compile(breaking, backend="aot_eager")  # a graph break leads to eager mode
    assert_same(logits_of(compiled), expected, "compiled with graph breaks")


def test_gradients_are_refused_before_conversion(registered: Callable[..., None]) -> None:
    registered(max_tokens_per_rank=CAPACITY)
    model = make_model()
    model.set_experts_implementation("megamoe")
    with refuses(mm.MegaMoEError, "no backward", "torch.no_grad()"):
        model(PROMPT)
    assert all(experts.gate_up_proj.numel() for experts in experts_of(model))
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    with refuses(mm.MegaMoEError, "no backward", "torch.no_grad()"):
        model(PROMPT)


# -- compile and generate --------------------------------------------------------------------------


def decode_steps(model: Any, call: Any, steps: int) -> Tensor:
    """Prefill eagerly into a static cache, then `steps` tokens through `call`."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    outputs = []
    with torch.no_grad():
        token = model(PROMPT, past_key_values=cache).logits[:, -1:].argmax(-1)
        for step in range(steps):
            positions = torch.full((2, 1), PROMPT.shape[1] + step)
            output = call(token, past_key_values=cache, position_ids=positions)
            outputs.append(output.logits)
            token = output.logits.argmax(-1)
    return torch.cat(outputs, dim=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_compiles_to_one_graph(family: str) -> None:
    model = make_model(family)
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    expected = decode_steps(model, model, 3)
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(decode_steps(model, compiled, 3), expected, "compiled decode")
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_decode_compiles_with_inductor() -> None:
    model = make_model(num_hidden_layers=1)
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    expected = decode_steps(model, model, 2)
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, options={"emulate_precision_casts": True})
    assert_close(decode_steps(model, compiled, 2), expected, 0.02, "compiled decode")
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_generate_with_a_static_cache(compiled: bool) -> None:
    model = make_model()
    megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    options: dict[str, Any] = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    mask = torch.ones_like(PROMPT)
    expected = model.generate(PROMPT, attention_mask=mask, **options)
    if compiled:
        config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
        config._compile_all_devices = True  # on a CPU transformers does not compile on its own
        options["compile_config"] = config
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = model.generate(
            PROMPT, attention_mask=mask, cache_implementation="static", **options
        )
    assert tokens.tolist() == expected.tolist()
    assert bool(counters["stats"]["unique_graphs"]) == compiled


def test_generate_by_name_alone_compiled_with_inductor() -> None:
    """`register` and experts_implementation="megamoe": the eager prefill converts the experts."""
    megamoe.register(max_tokens_per_rank=CAPACITY)
    model = make_model()
    model.set_experts_implementation("megamoe")
    options: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    options["attention_mask"] = torch.ones_like(PROMPT)
    expected = model.generate(PROMPT, **options)
    config = transformers.CompileConfig(fullgraph=True, mode=None)
    config._compile_all_devices = True
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = model.generate(
            PROMPT, cache_implementation="static", compile_config=config, **options
        )
    assert counters["stats"]["unique_graphs"] >= 1
    assert_same_choices(got.logits, expected.logits, 0.05)


# -- what is refused -------------------------------------------------------------------------------


def odd_experts(**attributes: Any) -> Any:
    model = make_model()
    for name, value in attributes.items():
        setattr(experts_of(model)[1], name, value)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), ["experts in Linear", "at least one module", "got none"]),
        (
            lambda: make_model().float(),
            ["Load the model with dtype=torch.bfloat16", "torch.float32"],
        ),
        (lambda: make_model(hidden_act="gelu"), ["unsupported activation", "silu", "GELU"]),
        (lambda: odd_experts(limit=1.0), ["unsupported activation", "limit 1.0"]),
        (lambda: odd_experts(has_bias=True), ["gate_up_proj_bias", "a parameter", "got none"]),
        (lambda: odd_experts(has_gate=False), ["has_gate", "got False"]),
        (lambda: odd_experts(is_concatenated=False), ["unsupported activation", "layers.1.mlp"]),
        (lambda: odd_experts(is_transposed=True), ["gate_up_proj.shape", "[4, 128, 256]"]),
        (lambda: odd_experts(has_post_expert_norm=True), ["has_post_expert_norm", "got True"]),
        (lambda: odd_experts(activation_scheme="static"), ["activation_scheme", "'static'"]),
        (lambda: make_model().to("meta"), ["loaded", "meta device"]),
    ],
)
def test_unsupported_experts(make: Callable[[], nn.Module], words: list[str]) -> None:
    model = make()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with refuses(ValueError, *words):
        megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert not any(isinstance(module, HFExperts) for module in model.modules())


def test_fp8_of_other_blocks_is_refused() -> None:
    model = fp8_model()
    for experts in experts_of(model):
        experts.block_size = (64, 64)
    with refuses(ValueError, "block_size", "[128, 128]", "(64, 64)"):
        megamoe.prepare(model, max_tokens_per_rank=CAPACITY)


@pytest.mark.parametrize(("name", "value"), [("is_concatenated", False), ("is_transposed", True)])
def test_fp8_in_another_order_is_refused(name: str, value: bool) -> None:
    """A scale of 128 rows belongs to gate or to up, and stays with its block."""
    model = fp8_model()
    setattr(experts_of(model)[1], name, value)
    with refuses(ValueError, f"layers.1.mlp.experts.{name}", "FP8", f"got {value}"):
        megamoe.prepare(model, max_tokens_per_rank=CAPACITY)


def test_capacity_and_config_changes() -> None:
    model = make_model()
    context = megamoe.prepare(model, max_tokens_per_rank=8, backend="reference")
    assert context.config.backend == "reference"
    with refuses(mm.CapacityError, "18", "8"):
        logits_of(model)
    chunked, whole = make_model(), make_model()
    megamoe.prepare(chunked, max_tokens_per_rank=8, over_capacity="chunk")
    megamoe.prepare(whole, max_tokens_per_rank=CAPACITY)
    assert_close(logits_of(chunked), logits_of(whole), 0.01, "a prefill in chunks")


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers replaces its own entry of sys.modules while it is imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.2")
    with refuses(mm.MegaMoEError, ">= 5.17", "5.16.2", "pip install"):
        megamoe.register()


# -- several ranks ---------------------------------------------------------------------------------


def test_ids_of_a_shard() -> None:
    """As transformers calls it: local ids, the number of local experts for slots of other ranks."""
    model = make_model()
    whole = experts_of(model)[0]
    shards = [copy.deepcopy(whole) for _ in range(2)]
    x, ids = torch.randn(6, 128).bfloat16(), torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1]])
    x, weights = x[:4], torch.rand(4, 2)
    total = torch.zeros(4, 128)
    for rank, shard in enumerate(shards):
        half = slice(2 * rank, 2 * rank + 2)
        shard.gate_up_proj = nn.Parameter(shard.gate_up_proj.detach()[half].clone())
        shard.down_proj = nn.Parameter(shard.down_proj.detach()[half].clone())
        shard.num_experts, shard._is_expert_parallel = 2, True
        context = megamoe.prepare(shard, max_tokens_per_rank=8)
        local = torch.where(ids // 2 == rank, ids % 2, 2)
        total += shard(x, local, weights.masked_fill(local == 2, 0.0))
        assert context.invalid_id_count == 0, "sentinels are no mistakes"
        # All-to-all: one (token, expert) pair per row.
        alone = shard(x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
        zero = torch.tensor([[0, -1]] * 4)
        assert_same(alone, shard(x, zero, torch.ones(4, 2)), "rows of one slot")
    megamoe.prepare(whole, max_tokens_per_rank=8)
    assert_close(total.bfloat16(), whole(x, ids, weights), 0.01, "sum over the shards")


def group_matches_one_rank(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    alone, model = make_model(), make_model()
    megamoe.prepare(alone, max_tokens_per_rank=CAPACITY)
    context = megamoe.prepare(model, max_tokens_per_rank=CAPACITY, group=dist.group.WORLD)
    assert context.world_size == world_size
    assert context.layers[0].w13.shape[0] == 4 // world_size
    prompt = PROMPT[:1, : 4 + 3 * rank]  # every rank has tokens of its own
    return relative_error(logits_of(model, prompt), logits_of(alone, prompt))


@pytest.mark.multirank
def test_group_matches_one_rank(ranks: Callable[[int], Any]) -> None:
    # Not bitwise: an expert's matrix product has the rows of all ranks.
    assert max(ranks(2).run(group_matches_one_rank)) < 0.01


def sharded_by_transformers(rank: int, world_size: int, how: str) -> tuple[float, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (world_size,))
    alone, model = (make_model(moe_intermediate_size=256) for _ in range(2))
    megamoe.prepare(alone, max_tokens_per_rank=CAPACITY)
    tensor = how == "tensor"
    plan = {}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        plan |= {
            f"{experts}.gate_up_proj": "packed_colwise" if tensor else "grouped_gemm",
            f"{experts}.down_proj": "rowwise" if tensor else "grouped_gemm",
            experts: "moe_tp_experts" if tensor else "ep_dispatch_experts",
        }
    if tensor:
        apply_tensor_parallelism(model, mesh, plan)
    else:
        apply_expert_parallelism(model, mesh, mesh, plan, how)
    context = megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    expected = (4, 128) if tensor else (2, 256)
    assert (context.config.num_experts, context.config.intermediate_size) == expected
    # transformers before 5.20 sums over the ranks where it finds a sharded parameter.
    for module in experts_of(model):
        remains = [parameter.to_local().numel() for parameter in module.parameters()]
        assert remains == [0, 0]
    error = relative_error(logits_of(model), logits_of(alone))
    return error, context.invalid_id_count


@pytest.mark.multirank
@pytest.mark.parametrize("how", ["all_reduce", "all_to_all", "tensor"])
def test_experts_sharded_by_transformers(ranks: Callable[[int], Any], how: str) -> None:
    pytest.importorskip(
        "transformers.distributed.expert_parallel",
        reason="this version of transformers shards experts while it loads, with accelerate",
    )
    for error, invalid in ranks(2).run(sharded_by_transformers, how):
        assert error < 0.05  # without the sum over the ranks it is 0.09 and more
        assert invalid == 0


def first_call_of_a_shard(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    megamoe.register(max_tokens_per_rank=CAPACITY)
    model = make_model(moe_intermediate_size=256, num_hidden_layers=1)
    model.set_experts_implementation("megamoe")
    experts = "model.layers.0.mlp.experts"
    plan = {
        f"{experts}.gate_up_proj": "packed_colwise",
        f"{experts}.down_proj": "rowwise",
        experts: "moe_tp_experts",
    }
    apply_tensor_parallelism(model, init_device_mesh("cpu", (world_size,)), plan)
    return outcome(lambda: logits_of(model))


@pytest.mark.multirank
def test_first_call_of_a_shard_is_refused(ranks: Callable[[int], Any]) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="as above")
    for message in ranks(2).run(first_call_of_a_shard):
        assert message.startswith("MegaMoEError: first call of Qwen3MoeExperts: expected")
        assert "prepare(model, ...)" in message
