"""Checkpoint weights into a layer: layouts, dtypes, in-place adoption, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Checkpoint,
    PeakStorage,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    random_checkpoint,
    random_inputs,
    refuses,
)
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile import weights as weights_module
from megamoe_compile.custom_ops.reference.recipe import (
    FP8,
    deinterleave_gate_up,
    dequantize_blocks,
    quantize_blocks,
)
from megamoe_compile.weights import WEIGHT_NAMES

ONE_EXPERT = 3 * 128 * 128  # bytes of a small FP8 expert, scales left out


def storages(layer: mm.MegaMoE) -> list[int]:
    return [getattr(layer, name).untyped_storage().data_ptr() for name in WEIGHT_NAMES]


def two_rank_context(config: mm.MegaMoEConfig, rank: int) -> mm.MegaMoEContext:
    """A context whose layers take the weights of one of two ranks; it must not be launched."""
    context = mm.MegaMoEContext(config, device="cpu")
    context.weight_geometry = weights_module.WeightGeometry.of(
        config, rank=rank, ep_size=2, alignment=128, device=context.device
    )
    return context


def padded_context(config: mm.MegaMoEConfig, alignment: int = 256) -> mm.MegaMoEContext:
    """As on a backend that needs a wider intermediate than the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megamoe_compile.context.intermediate_alignment", lambda _: alignment)
        return mm.MegaMoEContext(config, device="cpu")


# -- values ---------------------------------------------------------------------------------------


def test_fp8_with_fp32_scales(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    layer = mm.MegaMoE(context)
    layer.load_weights(*checkpoint.clone())
    for expert in range(4):
        assert_same(deinterleave_gate_up(layer.w13[expert]), checkpoint.w13[expert], "w13")
    assert_same(layer.w2, checkpoint.w2, "w2")
    assert checkpoint.w13_scale is not None and checkpoint.w2_scale is not None
    assert_same(layer.w13_scale, checkpoint.w13_scale)
    assert_same(layer.w2_scale, checkpoint.w2_scale)


def test_e8m0_scales_equal_their_fp32_values(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    assert checkpoint.w13_scale is not None and checkpoint.w2_scale is not None
    powers = Checkpoint(
        checkpoint.w13,
        checkpoint.w13_scale.to(torch.float8_e8m0fnu),
        checkpoint.w2,
        checkpoint.w2_scale.to(torch.float8_e8m0fnu),
    )
    plain = powers.clone()
    assert powers.w13_scale is not None and powers.w2_scale is not None
    plain.w13_scale, plain.w2_scale = powers.w13_scale.float(), powers.w2_scale.float()
    inputs = random_inputs(context.config, 5)
    layers = [mm.MegaMoE(context) for _ in range(2)]
    layers[0].load_weights(*powers)
    layers[1].load_weights(*plain)
    assert layers[0].w13_scale.dtype == torch.float32
    assert_same(layers[0](*inputs), layers[1](*inputs))


def test_bf16_is_quantized_on_load(context: mm.MegaMoEContext) -> None:
    bf16 = random_checkpoint(context.config, fp8=False)
    kept = bf16.clone()
    layer = mm.MegaMoE(context)
    layer.load_weights(*bf16)
    assert_same(bf16.w13, kept.w13, "the source")
    inputs = random_inputs(context.config, 5)
    assert_same(layer(*inputs), make_layer(context)(*inputs))  # random_checkpoint's own FP8
    w2 = dequantize_blocks(layer.w2[1], layer.w2_scale[1])
    assert float((w2 - bf16.w2[1]).abs().max()) < 0.1 * float(bf16.w2[1].abs().max())


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_global_and_local_experts(rank: int, fp8: bool) -> None:
    config = make_config()
    checkpoint = random_checkpoint(config, fp8=fp8)
    whole = mm.MegaMoE(two_rank_context(config, rank))
    whole.load_weights(*checkpoint)
    part = mm.MegaMoE(two_rank_context(config, rank))
    mine = slice(2 * rank, 2 * rank + 2)
    part.load_weights(*Checkpoint(*checkpoint[mine]).clone())  # type: ignore[arg-type]
    for name in WEIGHT_NAMES:
        assert getattr(whole, name).shape[0] == 2
        assert_same(getattr(whole, name), getattr(part, name), name)


def test_streaming_equals_one_load(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    whole, streamed = make_layer(context), mm.MegaMoE(context)
    for expert in (2, 0, 3, 1):
        streamed.load_expert(expert, *checkpoint[expert])  # type: ignore[arg-type]
    for name in WEIGHT_NAMES:
        assert_same(getattr(streamed, name), getattr(whole, name), name)


def test_experts_that_were_not_streamed_compute_zeros(context: mm.MegaMoEContext) -> None:
    layer = mm.MegaMoE(context)
    layer.load_expert(1, *random_checkpoint(context.config)[1])  # type: ignore[arg-type]
    x, ids, weights = random_inputs(context.config, 4)
    ids[:, 0], ids[:, 1] = 0, torch.tensor([1, 2, 1, 3])
    assert layer(x, ids, weights).any(dim=1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("expert", [-1, 4, 5, 100])
def test_an_expert_of_no_rank_is_refused(context: mm.MegaMoEContext, expert: int) -> None:
    layer = mm.MegaMoE(context)
    with refuses(ValueError, "expert", "0 to 3", str(expert)):
        layer.load_expert(expert, *random_checkpoint(context.config)[0])  # type: ignore[arg-type]
    assert not layer.loaded


def test_an_expert_of_another_rank_is_refused() -> None:
    config = make_config(num_shared_experts=1)
    layer = mm.MegaMoE(two_rank_context(config, 1))
    expert = random_checkpoint(config)[0]
    for wrong in (0, 1, 5):
        with refuses(ValueError, "expert", "2 to 3"):
            layer.load_expert(wrong, *expert)  # type: ignore[arg-type]
    for right in (2, 3, 4):
        layer.load_expert(right, *expert)  # type: ignore[arg-type]


# -- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_zero_padding_for_an_alignment_of_256(fp8: bool) -> None:
    config = make_config()
    padded, plain = (
        mm.MegaMoE(padded_context(config)),
        make_layer(mm.MegaMoEContext(config, device="cpu")),
    )
    checkpoint = random_checkpoint(config, fp8=fp8)
    padded.load_weights(*checkpoint)
    assert padded.w13.shape == (4, 512, 128) and padded.w2.shape == (4, 128, 256)
    assert padded.w13_scale.shape == (4, 4, 1) and padded.w2_scale.shape == (4, 1, 2)
    for expert in range(4):
        gate, up = deinterleave_gate_up(padded.w13[expert]).chunk(2)
        plain_gate, plain_up = deinterleave_gate_up(plain.w13[expert]).chunk(2)
        for half, plain_half in ((gate, plain_gate), (up, plain_up)):
            assert_same(half[:128], plain_half)
            assert not half[128:].float().any()
    assert not padded.w2[:, :, 128:].float().any()
    assert bool(padded.w13_scale.isfinite().all()) and bool((padded.w13_scale > 0).all())
    inputs = random_inputs(config, 9)
    assert_same(padded(*inputs), plain(*inputs))


def test_an_intermediate_that_is_no_multiple_of_128_loads_as_bf16() -> None:
    config = make_config(intermediate_size=96)
    with mm.MegaMoEContext(config, device="cpu") as context:
        layer = mm.MegaMoE(context)
        bf16 = random_checkpoint(config, fp8=False)
        layer.load_weights(*bf16)
        got = layer(*random_inputs(config, 3))
        for expert in range(4):
            gate_up = dequantize_blocks(
                deinterleave_gate_up(layer.w13[expert]), layer.w13_scale[expert]
            )
            assert not gate_up[96:128].any() and not gate_up[224:].any()
            assert float((gate_up[128:224] - bf16.w13[expert, 96:].float()).abs().max()) < 0.03
        assert bool(got.any())
        fp8 = Checkpoint(
            bf16.w13.to(FP8), torch.ones(4, 1, 1), bf16.w2.to(FP8), torch.ones(4, 1, 1)
        )
        with refuses(ValueError, "a multiple of 128", "pass bf16"):
            layer.load_weights(*fp8)


# -- memory ---------------------------------------------------------------------------------------


def test_adoption_keeps_the_storage(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    layer = mm.MegaMoE(context)
    layer.load_weights(*checkpoint)
    for name, source in zip(WEIGHT_NAMES, checkpoint, strict=True):
        assert source is not None
        got = getattr(layer, name).untyped_storage().data_ptr()
        assert got == source.untyped_storage().data_ptr(), name


def peak_of(load: Callable[[], None]) -> int:
    with PeakStorage() as measure:
        load()
    return measure.peak


@pytest.mark.parametrize("experts", [4, 32])
def test_adoption_takes_one_expert_of_extra_memory(experts: int) -> None:
    with mm.MegaMoEContext(make_config(num_experts=experts), device="cpu") as context:
        checkpoint = random_checkpoint(context.config)
        layer = mm.MegaMoE(context)
        assert 0 < peak_of(lambda: layer.load_weights(*checkpoint)) <= ONE_EXPERT


def test_the_measure_would_see_a_copy_of_the_whole_tensor(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *_: None) -> Any:
        w13.copy_(torch.stack([weights_module.interleave_gate_up(expert) for expert in w13]))
        return weights_module.PreparedWeights(w13, w13_scale, w2, w2_scale)

    monkeypatch.setattr("megamoe_compile.loading.adopt", whole)
    layer = mm.MegaMoE(context)
    checkpoint = random_checkpoint(context.config)
    assert peak_of(lambda: layer.load_weights(*checkpoint)) >= 4 * 2 * 128 * 128 > ONE_EXPERT


def test_the_measure_counts_what_is_alive_and_no_view() -> None:
    source = torch.zeros(1000)
    with PeakStorage() as measure:
        for _ in range(5):
            scratch = source + 1  # 4000 bytes, freed in the next round
            _ = scratch[1:].view(-1)
        assert measure.live == 4000
        del scratch, _
        source.add_(1)
        assert measure.live == 0
    assert measure.peak == 8000  # the next one is made before the last is let go


@pytest.mark.parametrize("experts", [4, 32])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_later_load_needs_scratch_for_one_expert(experts: int, fp8: bool) -> None:
    """FP8: one expert. bf16: quantizing one expert in fp32, whatever the number of experts."""
    with mm.MegaMoEContext(make_config(num_experts=experts), device="cpu") as context:
        layer = make_layer(context)
        checkpoint = random_checkpoint(context.config, fp8=fp8)
        limit = ONE_EXPERT if fp8 else 10 * ONE_EXPERT
        assert peak_of(lambda: layer.load_weights(*checkpoint)) <= limit


def test_streaming_needs_the_layer_and_scratch_for_one_expert() -> None:
    with mm.MegaMoEContext(make_config(num_experts=32), device="cpu") as context:
        layer = mm.MegaMoE(context)
        checkpoint = random_checkpoint(context.config)

        def load() -> None:
            for expert in range(32):
                layer.load_expert(expert, *checkpoint[expert])  # type: ignore[arg-type]

        assert peak_of(load) <= context.weight_geometry.nbytes() + ONE_EXPERT


def test_nbytes_is_what_a_layer_holds(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    held = sum(getattr(layer, name).untyped_storage().nbytes() for name in WEIGHT_NAMES)
    assert context.weight_geometry.nbytes() == held


def test_a_second_load_writes_in_place(context: mm.MegaMoEContext) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 5)
    before, first = storages(layer), layer(*inputs)
    layer.load_weights(*random_checkpoint(context.config, seed=5))
    second = layer(*inputs)
    layer.load_expert(2, *random_checkpoint(context.config, seed=6)[2])  # type: ignore[arg-type]
    assert storages(layer) == before
    assert not torch.equal(first, second)
    fresh = make_layer(context, seed=5)
    assert_same(second, fresh(*inputs))
    layer.load_weights(*random_checkpoint(context.config))
    assert_same(layer(*inputs), first)


# -- refusals: nothing half-written ---------------------------------------------------------------


def bad_checkpoints() -> dict[str, tuple[Callable[[Checkpoint], list[Any]], str]]:
    """name -> (good FP8 checkpoint -> arguments of load_weights, what the sentence names)."""
    meta = torch.device("meta")
    half = slice(None), slice(None, 128)
    return {
        "w13 2-D": (lambda c: [c.w13[0], c.w13_scale, c.w2, c.w2_scale], "w13.shape"),
        "w13 transposed": (
            lambda c: [c.w13.mT.contiguous(), c.w13_scale, c.w2, c.w2_scale],
            "w13.shape",
        ),
        "w13 rows": (lambda c: [c.w13[half], c.w13_scale, c.w2, c.w2_scale], "w13.shape"),
        "w2 columns": (
            lambda c: [c.w13, c.w13_scale, c.w2[..., :64].contiguous(), c.w2_scale],
            "w2.shape",
        ),
        "experts": (lambda c: [t[:3] for t in c if t is not None], "w13.shape"),
        "experts of w2": (lambda c: [c.w13, c.w13_scale, c.w2[:3], c.w2_scale[:3]], "w2.shape"),  # type: ignore[index]
        "w13 strided": (
            lambda c: [c.w13.mT.contiguous().mT, c.w13_scale, c.w2, c.w2_scale],
            "w13 layout",
        ),
        "w2 strided": (
            lambda c: [c.w13, c.w13_scale, c.w2.mT.contiguous().mT, c.w2_scale],
            "w2 layout",
        ),
        "w13 fp32": (lambda c: [c.w13.float(), c.w13_scale, c.w2, c.w2_scale], "w13.dtype"),
        "w13 e5m2": (
            lambda c: [c.w13.to(torch.float8_e5m2), c.w13_scale, c.w2, c.w2_scale],
            "w13.dtype",
        ),
        "w13 uint8": (
            lambda c: [c.w13.view(torch.uint8), c.w13_scale, c.w2, c.w2_scale],
            "w13.dtype",
        ),
        "mixed dtypes": (lambda c: [c.w13, c.w13_scale, c.w2.bfloat16(), None], "w2: expected"),
        "no scales": (lambda c: [c.w13, None, c.w2, None], "w13_scale.shape"),
        "no w2 scale": (lambda c: [c.w13, c.w13_scale, c.w2, None], "w2_scale.shape"),
        "bf16 with scales": (
            lambda c: [c.w13.bfloat16(), c.w13_scale, c.w2.bfloat16(), c.w2_scale],
            "w13_scale",
        ),
        "scale shape": (lambda c: [c.w13, c.w13_scale[:, :1], c.w2, c.w2_scale], "w13_scale.shape"),  # type: ignore[index]
        "scale of a row": (
            lambda c: [c.w13, torch.ones(4, 256, 1), c.w2, c.w2_scale],
            "w13_scale.shape",
        ),
        "scale int": (
            lambda c: [c.w13, c.w13_scale, c.w2, c.w2_scale.int()],  # type: ignore[union-attr]
            "w2_scale.dtype",
        ),
        "scale bf16": (
            lambda c: [c.w13, c.w13_scale.bfloat16(), c.w2, c.w2_scale],  # type: ignore[union-attr]
            "w13_scale.dtype",
        ),
        "w13 on meta": (lambda c: [c.w13.to(meta), c.w13_scale, c.w2, c.w2_scale], "meta"),
        "w2 on meta": (lambda c: [c.w13, c.w13_scale, c.w2.to(meta), c.w2_scale], "meta"),
        "scale on meta": (lambda c: [c.w13, c.w13_scale, c.w2, c.w2_scale.to(meta)], "meta"),  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("name", bad_checkpoints())
def test_a_failing_load_writes_nothing(context: mm.MegaMoEContext, name: str) -> None:
    make_arguments, words = bad_checkpoints()[name]
    checkpoint = random_checkpoint(context.config, seed=3)
    kept = checkpoint.clone()
    loaded = make_layer(context)
    fresh = mm.MegaMoE(context)
    before = {key: getattr(loaded, key).clone() for key in WEIGHT_NAMES}
    for layer in (fresh, loaded):
        with refuses(ValueError, words):
            layer.load_weights(*make_arguments(checkpoint))
    assert not fresh.loaded, "the layer would compute zeros from weights that it never got"
    assert all(getattr(fresh, key) is None for key in WEIGHT_NAMES)
    for key in WEIGHT_NAMES:
        assert_same(getattr(loaded, key), before[key], key)
    for got, expected in zip(checkpoint, kept, strict=True):
        assert got is not None and expected is not None
        assert_same(got, expected, "the checkpoint")


@pytest.mark.parametrize("name", ["w13 on meta", "scale on meta", "w13 rows", "scale int"])
def test_a_failing_load_expert_writes_nothing(context: mm.MegaMoEContext, name: str) -> None:
    make_arguments, words = bad_checkpoints()[name]
    arguments = make_arguments(random_checkpoint(context.config, seed=3))
    loaded, fresh = make_layer(context), mm.MegaMoE(context)
    before = {key: getattr(loaded, key).clone() for key in WEIGHT_NAMES}
    for layer in (fresh, loaded):
        with refuses(ValueError, words):
            layer.load_expert(1, *(t[1] for t in arguments))
    assert not fresh.loaded
    for key in WEIGHT_NAMES:
        assert_same(getattr(loaded, key), before[key], key)


def test_a_load_that_dies_midway_leaves_no_loaded_layer(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, say: the layer must not compute zeros for the experts that are missing."""
    write, calls = weights_module.write_expert, []

    def fail_at_third(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no more")
        write(*args)

    monkeypatch.setattr("megamoe_compile.loading.write_expert", fail_at_third)
    layer = mm.MegaMoE(context)
    with pytest.raises(MemoryError):
        layer.load_weights(*random_checkpoint(context.config, fp8=False))
    assert not layer.loaded
    with no_launch(context), refuses(mm.MegaMoEError, "weights of the layer"):
        layer(*random_inputs(context.config, 2))


def test_the_layers_own_storage_is_refused(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    before = layer.w13.clone()
    own = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    with refuses(ValueError, "own prepared storage"):
        layer.load_weights(*own)
    other = random_checkpoint(context.config, seed=1)
    with refuses(ValueError, "own prepared storage"):
        layer.load_weights(other.w13, other.w13_scale, layer.w2, layer.w2_scale)
    with refuses(ValueError, "own prepared storage"):
        layer.load_expert(0, *(t[0] for t in own))
    assert_same(layer.w13, before)


def test_an_adopted_checkpoint_is_refused_a_second_time(context: mm.MegaMoEContext) -> None:
    """Its rows are interleaved already; loading them again would scramble them."""
    layer, checkpoint = mm.MegaMoE(context), random_checkpoint(context.config)
    layer.load_weights(*checkpoint)
    with refuses(ValueError, "own prepared storage"):
        layer.load_weights(*checkpoint)


def test_an_unloaded_layer_refuses_to_run(context: mm.MegaMoEContext) -> None:
    layer = mm.MegaMoE(context)
    with no_launch(context), refuses(mm.MegaMoEError, "Call load_weights"):
        layer(*random_inputs(context.config, 2))


def test_loading_through_a_closed_context_raises(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    checkpoint = random_checkpoint(context.config)
    context.close()
    with refuses(mm.ContextClosed):
        layer.load_weights(*checkpoint)
    with refuses(mm.ContextClosed):
        layer.load_expert(0, *checkpoint[0])  # type: ignore[arg-type]


# -- modes and dtypes -----------------------------------------------------------------------------


def test_s72_weights_that_require_grad(context: mm.MegaMoEContext) -> None:
    bf16 = random_checkpoint(context.config, fp8=False)
    layer = mm.MegaMoE(context)
    layer.load_weights(nn.Parameter(bf16.w13), None, nn.Parameter(bf16.w2), None)
    fp8 = random_checkpoint(context.config)
    adopted = mm.MegaMoE(context)
    assert fp8.w13_scale is not None and fp8.w2_scale is not None
    adopted.load_weights(fp8.w13, nn.Parameter(fp8.w13_scale), fp8.w2, nn.Parameter(fp8.w2_scale))
    inputs = random_inputs(context.config, 3)
    for made in (layer, adopted):
        assert not any(getattr(made, name).requires_grad for name in WEIGHT_NAMES)
        assert not made(*inputs).requires_grad
    assert_same(layer(*inputs), adopted(*inputs))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_s72_loaded_in_inference_mode_and_written_outside(
    context: mm.MegaMoEContext, fp8: bool
) -> None:
    layer = mm.MegaMoE(context)
    with torch.inference_mode():
        layer.load_weights(*random_checkpoint(context.config, fp8=fp8))
    assert not any(getattr(layer, name).is_inference() for name in WEIGHT_NAMES)
    layer.load_weights(*random_checkpoint(context.config, seed=2))
    inputs = random_inputs(context.config, 3)
    assert_same(layer(*inputs), make_layer(context, seed=2)(*inputs))


def test_s72_inference_weights_loaded_outside(context: mm.MegaMoEContext) -> None:
    with torch.inference_mode():
        checkpoint = random_checkpoint(context.config)
    layer = mm.MegaMoE(context)
    layer.load_weights(*checkpoint)
    assert layer.w13.data_ptr() == checkpoint.w13.data_ptr(), "still no second copy"
    inputs = random_inputs(context.config, 3)
    assert_same(layer(*inputs), make_layer(context)(*inputs))


def test_strided_scales_are_taken_as_values(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    layer = mm.MegaMoE(context)
    scale = checkpoint.w13_scale
    assert scale is not None
    strided = torch.stack([scale, scale + 1], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    layer.load_weights(checkpoint.w13, strided, checkpoint.w2, checkpoint.w2_scale)
    assert layer.w13_scale.is_contiguous(), "a kernel reads raw memory"
    assert_same(layer.w13_scale, scale)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.eval(),
        lambda m: m.requires_grad_(False),
        lambda m: m.cpu(),
    ],
    ids=["bf16", "half", "float", "double", "cpu+fp16", "eval", "no grad", "cpu"],
)
def test_conversions_of_a_model_keep_the_recipe(
    context: mm.MegaMoEContext, convert: Callable[[nn.Module], nn.Module]
) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 3)
    expected, before = layer(*inputs), storages(layer)
    model = nn.Sequential(nn.Linear(2, 2), layer)
    convert(model)
    assert layer.w13.dtype == layer.w2.dtype == FP8
    assert layer.w13_scale.dtype == torch.float32
    assert layer.launch_count.dtype == layer.num_valid.dtype == torch.int32
    assert layer.launch_count is context.launch_count
    assert layer.num_valid is context.num_valid
    assert storages(layer) == before
    assert_same(layer(*inputs), expected)


def test_another_device_is_refused(context: mm.MegaMoEContext) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 3)
    expected = layer(*inputs)
    for move in (lambda: layer.to("meta"), lambda: nn.Sequential(layer).to_empty(device="meta")):
        with refuses(mm.MegaMoEError, "device of the layer", "cpu", "meta"):
            move()
    assert_same(layer(*inputs), expected)


# -- state_dict -----------------------------------------------------------------------------------


def test_state_dict_round_trip(context: mm.MegaMoEContext, tmp_path: Any) -> None:
    model = nn.Sequential(make_layer(context))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(state) == {f"0.{name}" for name in (*WEIGHT_NAMES, "_extra_state")}
    inputs = random_inputs(context.config, 3)
    loaded = make_layer(context, seed=4)
    before = storages(loaded)
    nn.Sequential(loaded).load_state_dict(state)
    assert storages(loaded) == before
    fresh = mm.MegaMoE(context)
    nn.Sequential(fresh).load_state_dict(state)
    assert fresh.loaded
    for layer in (loaded, fresh):
        assert_same(layer(*inputs), model[0](*inputs))


def test_state_dict_of_another_layout_writes_nothing(context: mm.MegaMoEContext) -> None:
    state = make_layer(context).state_dict()
    state["_extra_state"] = {**state["_extra_state"], "layout_version": 10**6}
    for layer in (make_layer(context, seed=4), mm.MegaMoE(context)):
        before = None if layer.w13 is None else layer.w13.clone()
        with refuses(ValueError, "layout_version", "original checkpoint"):
            layer.load_state_dict(state)
        if before is None:
            assert layer.w13 is None and not layer.loaded
        else:
            assert_same(layer.w13, before)


def test_state_dict_of_another_rank_is_refused() -> None:
    config = make_config()
    layers = [mm.MegaMoE(two_rank_context(config, rank)) for rank in (0, 1)]
    for layer in layers:
        layer.load_weights(*random_checkpoint(config))
    before = layers[1].w13.clone()
    with refuses(ValueError, "first_expert", "2", "0"):
        layers[1].load_state_dict(layers[0].state_dict())
    assert_same(layers[1].w13, before)


def test_state_dict_of_another_geometry_is_refused(context: mm.MegaMoEContext) -> None:
    with mm.MegaMoEContext(make_config(hidden_size=256), device="cpu") as other:
        state = make_layer(other).state_dict()
    for layer in (make_layer(context), mm.MegaMoE(context)):
        with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|shape"):
            layer.load_state_dict(state)
    assert not layer.loaded


def test_an_unloaded_layer_has_an_empty_state(context: mm.MegaMoEContext) -> None:
    state = mm.MegaMoE(context).state_dict()
    assert set(state) <= {"_extra_state"}
    fresh = mm.MegaMoE(context)
    fresh.load_state_dict(state)
    assert not fresh.loaded
    with pytest.raises(RuntimeError, match="w13"):
        make_layer(context).load_state_dict(state)


def test_quantize_blocks_reads_bf16_of_one_expert_only() -> None:
    w = torch.randn(256, 128).bfloat16()
    q, scale = quantize_blocks(w)
    assert q.shape == w.shape and scale.shape == (2, 1)
