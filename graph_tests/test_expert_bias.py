"""Biases of the experts, from the checkpoint into a layer's buffers, and back out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same, make_config, random_checkpoint, refuses
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.weights import BIAS_NAMES, WEIGHT_NAMES, WeightGeometry

NAMES = WEIGHT_NAMES + BIAS_NAMES


def bias_layer(rank: int = 0, ep_size: int = 1, alignment: int = 128, **changes: Any) -> mm.MegaMoE:
    """A layer with biases, of one of `ep_size` ranks; it must not be launched where there are 2."""
    config = make_config(**{"expert_bias": True, **changes})
    context = mm.MegaMoEContext(make_config(**{**changes, "expert_bias": False}), device="cpu")
    context.weight_geometry = WeightGeometry.of(
        config, rank=rank, ep_size=ep_size, alignment=alignment, device=context.device
    )
    return mm.MegaMoE(context)


def random_biases(config: mm.MegaMoEConfig, experts: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    e = experts or config.num_experts
    return tuple(  # type: ignore[return-value]
        torch.randn(e, n, generator=generator)
        for n in (2 * config.intermediate_size, config.hidden_size)
    )


def prepared_w13_bias(bias: Tensor, padded: int) -> Tensor:
    """[E, 2I] -> [E, 2 * padded] row by row: gate 0..7, up 0..7, gate 8..15, ... and zeros."""
    half = bias.shape[1] // 2
    out = torch.zeros(bias.shape[0], 2 * padded)
    for row in range(half):
        at = row // 8 * 16 + row % 8
        out[:, at] = bias[:, row]
        out[:, at + 8] = bias[:, half + row]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_biases_stand_in_the_order_of_the_rows(fp8: bool, dtype: torch.dtype) -> None:
    """FP8 weights are adopted, bf16 ones are written expert by expert."""
    layer = bias_layer()
    config = layer.context.config
    b13, b2 = (bias.to(dtype) for bias in random_biases(config))
    kept = b13.clone(), b2.clone()
    layer.load_weights(*random_checkpoint(config, fp8=fp8), b13, b2)
    assert layer.w13_bias is not None and layer.w2_bias is not None
    assert_same(layer.w13_bias, prepared_w13_bias(kept[0].float(), 128), "w13_bias")
    assert_same(layer.w2_bias, kept[1].float(), "w2_bias")
    b13.zero_(), b2.zero_()
    assert_same(layer.w2_bias, kept[1].float(), "a copy")
    assert layer.w13_bias.is_contiguous() and layer.w2_bias.is_contiguous()


def test_padding_holds_zeros() -> None:
    layer = bias_layer(alignment=256, intermediate_size=384)
    config = layer.context.config
    b13, b2 = random_biases(config)
    layer.load_weights(*random_checkpoint(config), b13, b2)
    assert layer.w13_bias is not None
    assert_same(layer.w13_bias, prepared_w13_bias(b13, 512), "w13_bias")


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_global_and_local_experts(rank: int, fp8: bool) -> None:
    whole, part = bias_layer(rank, 2), bias_layer(rank, 2)
    config = whole.context.config
    checkpoint, biases = random_checkpoint(config, fp8=fp8), random_biases(config)
    mine = slice(2 * rank, 2 * rank + 2)
    whole.load_weights(*checkpoint.clone(), *biases)
    own: Any = checkpoint[mine]
    part.load_weights(*own, *(bias[mine] for bias in biases))
    for name in NAMES:
        assert getattr(whole, name).shape[0] == 2
        assert_same(getattr(whole, name), getattr(part, name), name)


def test_streaming_equals_one_load_and_takes_shared_experts() -> None:
    layer, streamed = (bias_layer(num_shared_experts=1) for _ in range(2))
    config = layer.context.config
    checkpoint: Any = random_checkpoint(config)
    b13, b2 = random_biases(config)
    layer.load_weights(*checkpoint.clone(), b13, b2)
    for expert in (2, 0, 3, 1):
        streamed.load_expert(expert, *checkpoint[expert], b13[expert], b2[expert])
    for each in (layer, streamed):
        each.load_expert(4, *checkpoint[1], b13[1], b2[1])
    for name in NAMES:
        assert_same(getattr(streamed, name), getattr(layer, name), name)
        assert_same(getattr(layer, name)[4], getattr(layer, name)[1], f"shared {name}")


def test_experts_that_were_not_loaded_have_zero_biases() -> None:
    layer = bias_layer()
    checkpoint: Any = random_checkpoint(layer.context.config)
    b13, b2 = random_biases(layer.context.config)
    layer.load_expert(1, *checkpoint[1], b13[1], b2[1])
    for name in BIAS_NAMES:
        assert getattr(layer, name).any(dim=1).tolist() == [False, True, False, False]


def test_a_second_load_writes_in_place() -> None:
    layer = bias_layer()
    config = layer.context.config
    layer.load_weights(*random_checkpoint(config), *random_biases(config))
    assert layer.w13_bias is not None and layer.w2_bias is not None
    before = layer.w13_bias.data_ptr(), layer.w2_bias.data_ptr()
    b13, b2 = (2 * bias for bias in random_biases(config))
    layer.load_weights(*random_checkpoint(config, seed=1), b13, b2)
    assert (layer.w13_bias.data_ptr(), layer.w2_bias.data_ptr()) == before
    assert_same(layer.w2_bias, b2)
    assert_same(layer.w13_bias, prepared_w13_bias(b13, 128))


WRONG: dict[str, tuple[Any, str]] = {
    "none": (lambda b13, b2: (None, None), "w13_bias.shape"),
    "w13_bias missing": (lambda b13, b2: (None, b2), "w13_bias.shape"),
    "w2_bias missing": (lambda b13, b2: (b13, None), "w2_bias.shape"),
    "halves": (lambda b13, b2: (b13[:, :128], b2), "w13_bias.shape"),
    "other experts": (lambda b13, b2: (b13, b2[:3]), "w2_bias.shape"),
    "fp16": (lambda b13, b2: (b13.half(), b2), "w13_bias.dtype"),
    "meta": (lambda b13, b2: (b13, b2.to("meta")), "w2_bias.device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_bias_is_refused_and_nothing_written(name: str) -> None:
    change, words = WRONG[name]
    layer = bias_layer()
    checkpoint: Any = random_checkpoint(layer.context.config)
    kept = checkpoint.clone()
    b13, b2 = change(*random_biases(layer.context.config))
    with refuses(ValueError, words):
        layer.load_weights(*checkpoint, b13, b2)
    one = [None if bias is None or len(bias) < 4 else bias[0] for bias in (b13, b2)]
    with refuses(ValueError, words):
        layer.load_expert(0, *checkpoint[0], *one)
    assert not layer.loaded
    assert_same(checkpoint.w13, kept.w13)


def test_a_bias_is_refused_where_the_config_has_none(context: mm.MegaMoEContext) -> None:
    layer = mm.MegaMoE(context)
    checkpoint: Any = random_checkpoint(context.config)
    b13, b2 = random_biases(context.config)
    with refuses(ValueError, "w13_bias.shape", "expert_bias=True"):
        layer.load_weights(*checkpoint, b13, b2)
    with refuses(ValueError, "w2_bias.shape", "expert_bias=True"):
        layer.load_expert(0, *checkpoint[0], None, b2[0])
    assert not layer.loaded
    layer.load_weights(*checkpoint)
    assert layer.w13_bias is None and layer.w2_bias is None


def test_nbytes_is_what_a_layer_holds() -> None:
    layer = bias_layer()
    config = layer.context.config
    layer.load_weights(*random_checkpoint(config), *random_biases(config))
    held = sum(getattr(layer, name).nbytes for name in NAMES)
    assert held == layer.context.weight_geometry.nbytes()


def test_state_dict_round_trip() -> None:
    layer, fresh = bias_layer(), bias_layer()
    config = layer.context.config
    layer.load_weights(*random_checkpoint(config), *random_biases(config))
    state = layer.state_dict()
    assert set(state) == {*NAMES, "_extra_state"}
    fresh.load_state_dict(state)
    fresh.to(torch.bfloat16)
    for name in NAMES:
        assert_same(getattr(fresh, name), getattr(layer, name), name)
    del state["w2_bias"]
    with pytest.raises(RuntimeError):
        bias_layer().load_state_dict(state)


def test_state_dict_with_biases_is_refused_without_them(context: mm.MegaMoEContext) -> None:
    layer = bias_layer()
    config = layer.context.config
    layer.load_weights(*random_checkpoint(config), *random_biases(config))
    with pytest.raises(RuntimeError, match="w13_bias"):
        mm.MegaMoE(context).load_state_dict(layer.state_dict())
