"""MegaMoE as a module: what a call gives, and that a bad one is refused before any launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks import Routed
from helpers import (
    Inputs,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    op_arguments,
    oracle,
    random_checkpoint,
    random_inputs,
    refuses,
)
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile.custom_ops import library


@pytest.fixture(scope="module")
def layer() -> Iterator[mm.MegaMoE]:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield make_layer(context)


# -- results --------------------------------------------------------------------------------------

GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"hidden_size": 256, "intermediate_size": 256, "num_experts": 8, "top_k": 4},
    {"swiglu_limit": 0.5, "routed_scaling_factor": 2.5},
    {"num_shared_experts": 2},
    {"top_k": 1, "num_experts": 1},
]


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: "-".join(map(str, g)) or "small")
def test_equals_the_oracle(geometry: dict[str, Any], tokens: int) -> None:
    with mm.MegaMoEContext(make_config(**geometry), device="cpu") as context:
        made, inputs = make_layer(context), random_inputs(context.config, tokens)
        got = made(*inputs)
        assert got.shape == inputs[0].shape
        assert got.dtype == torch.bfloat16
        assert_same(got, oracle(made, inputs))


def test_inputs_are_not_written(layer: mm.MegaMoE) -> None:
    inputs = random_inputs(layer.context.config, 5)
    kept = tuple(t.clone() for t in inputs)
    layer(*inputs)
    for got, expected in zip(inputs, kept, strict=True):
        assert_same(got, expected)


def test_s50_an_earlier_result_is_not_overwritten(layer: mm.MegaMoE) -> None:
    first = layer(*random_inputs(layer.context.config, 5))
    kept = first.clone()
    second = layer(*random_inputs(layer.context.config, 5, seed=1))
    assert_same(first, kept)
    assert not torch.equal(first, second)


def test_writing_into_the_result_reaches_nothing(layer: mm.MegaMoE) -> None:
    inputs = random_inputs(layer.context.config, 5)
    first = layer(*inputs)
    kept = first.clone()
    first.fill_(float("nan"))
    assert_same(layer(*inputs), kept)


def test_gradients_are_refused_not_dropped(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 3)
    for tracked in (x, weights):
        tracked.requires_grad_()
        with no_launch(layer.context), refuses(mm.MegaMoEError, "no backward", "torch.no_grad()"):
            layer(x, ids, weights)
        with torch.no_grad():
            layer(x, ids, weights)
        tracked.requires_grad_(False)


def test_repr_says_what_it_is(layer: mm.MegaMoE) -> None:
    for words in ("reference", "hidden_size=128", "num_experts=4", "rank=0/1"):
        assert words in repr(layer)


# -- num_valid (S02, S40, S41) --------------------------------------------------------------------


def num_valid_forms(count: int) -> list[Any]:
    return [
        count,
        torch.tensor(count, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.tensor([[count]], dtype=torch.int32),
    ]


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_s40_num_valid_in_every_form(layer: mm.MegaMoE, count: int) -> None:
    inputs = random_inputs(layer.context.config, 7)
    expected = oracle(layer, inputs, num_valid=count)
    assert not expected[count:].any()
    for form in num_valid_forms(count):
        assert_same(layer(*inputs, num_valid=form), expected)
        assert_same(layer(*inputs, form), expected)
    layer.context.num_valid.fill_(count)
    try:
        assert_same(layer(*inputs), expected)
        assert_same(layer(*inputs, num_valid=7), oracle(layer, inputs))
    finally:
        layer.context.num_valid.fill_(2**31 - 1)
    assert_same(layer(*inputs), oracle(layer, inputs))
    assert_same(layer(*inputs, num_valid=None), oracle(layer, inputs))


def test_s40_an_updated_tensor_is_honoured(layer: mm.MegaMoE) -> None:
    inputs, count = random_inputs(layer.context.config, 7), torch.zeros(1, dtype=torch.int32)
    for value in (7, 0, 3):
        count.fill_(value)
        assert_same(layer(*inputs, count), oracle(layer, inputs, num_valid=value))


@pytest.mark.parametrize("count", [8, 100, -1, -(2**40), 2**40])
def test_s41_a_count_beyond_the_rows_is_refused(layer: mm.MegaMoE, count: int) -> None:
    inputs = random_inputs(layer.context.config, 7)
    with no_launch(layer.context), refuses(ValueError, "num_valid", "0 to 7", str(count)):
        layer(*inputs, num_valid=count)


def test_s41_a_count_on_the_device_masks_at_most_the_rows(layer: mm.MegaMoE) -> None:
    """The host cannot see it without waiting; nothing past the rows is read."""
    inputs = random_inputs(layer.context.config, 7)
    for value in (8, 2**31 - 1):
        assert_same(layer(*inputs, torch.tensor([value], dtype=torch.int32)), layer(*inputs))
    negative = layer(*inputs, torch.tensor([-1], dtype=torch.int32))
    assert not negative.any()


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([3]),
        torch.tensor([3.0]),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32, device="meta"),
    ],
    ids=["int64", "fp32", "two", "none", "other device"],
)
def test_num_valid_of_another_kind_is_refused(layer: mm.MegaMoE, bad: Tensor) -> None:
    inputs = random_inputs(layer.context.config, 7)
    with no_launch(layer.context), refuses(ValueError, "num_valid", "int32"):
        layer(*inputs, num_valid=bad)


@pytest.mark.parametrize("bad", [torch.tensor([3]), torch.tensor([1, 2], dtype=torch.int32)])
def test_the_op_itself_checks_num_valid(layer: mm.MegaMoE, bad: Tensor) -> None:
    arguments = list(op_arguments(layer, random_inputs(layer.context.config, 7)))
    arguments[9] = bad
    with no_launch(layer.context), refuses(ValueError, "num_valid", "int32"):
        library.fused_moe(*arguments)


# -- ids out of range -----------------------------------------------------------------------------


def test_ids_out_of_range_with_validate(layer: mm.MegaMoE) -> None:
    strict = make_layer(layer.context, validate=True)
    x, ids, weights = random_inputs(layer.context.config, 5)
    for bad in (4, 1000, -2, -(2**40), 2**40):
        wrong = ids.clone()
        wrong[3, 1] = bad
        with no_launch(layer.context), refuses(ValueError, "topk_ids[3, 1]", "-1 or 0 to 3"):
            strict(x, wrong, weights)
    ids[0] = -1
    assert_same(strict(x, ids, weights), layer(x, ids, weights))
    assert strict(x[:0], ids[:0], weights[:0]).shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_skipped_and_counted(layer: mm.MegaMoE, dtype: torch.dtype) -> None:
    context = layer.context
    x, ids, weights = random_inputs(context.config, 5)
    skipped, wild = ids.clone(), ids.to(dtype)
    skipped[1, 0] = skipped[2, 1] = skipped[4, 0] = -1
    big = torch.iinfo(dtype).max
    wild[1, 0], wild[2, 1], wild[4, 0] = context.config.num_experts, -7, big
    before = context.invalid_id_count
    assert_same(layer(x, wild, weights), layer(x, skipped, weights))
    assert context.invalid_id_count == before + 3
    layer(x, skipped, weights)
    assert context.invalid_id_count == before + 3, "-1 is no fault"


def test_validate_does_nothing_while_compiling(layer: mm.MegaMoE) -> None:
    strict = make_layer(layer.context, validate=True)
    x, ids, weights = random_inputs(layer.context.config, 5)
    ids[3, 1] = 99
    with torch.no_grad():
        compiled = torch.compile(strict, fullgraph=True, backend="aot_eager")
        assert_same(compiled(x, ids, weights), layer(x, ids, weights))


# -- another geometry -----------------------------------------------------------------------------


def test_inputs_of_another_geometry(layer: mm.MegaMoE) -> None:
    for changes, words in (
        ({"hidden_size": 256}, "hidden_states.shape[1]"),
        ({"top_k": 3}, "topk_ids.shape[1]"),
    ):
        inputs = random_inputs(make_config(**changes), 3)
        with no_launch(layer.context), refuses(ValueError, words):
            layer(*inputs)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"hidden_size": 256}, "geometry"),
        ({"intermediate_size": 256}, "geometry"),
        ({"num_experts": 8}, "geometry"),
    ],
)
def test_mixed_weights_are_refused_by_the_op(
    layer: mm.MegaMoE, changes: dict[str, Any], words: str
) -> None:
    """w13 of one geometry with the other weights of another: never a wild read."""
    with mm.MegaMoEContext(make_config(**changes), device="cpu") as context:
        other = make_layer(context)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        arguments = list(op_arguments(layer, random_inputs(layer.context.config, 3)))
        at = 3 + ("w13", "w13_scale", "w2", "w2_scale").index(name)
        arguments[at] = getattr(other, name)
        with no_launch(layer.context), refuses(ValueError, words if name == "w13" else name):
            library.fused_moe(*arguments)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale"])
def test_a_replaced_weight_of_another_dtype_is_refused_by_the_op(
    layer: mm.MegaMoE, name: str
) -> None:
    arguments = list(op_arguments(layer, random_inputs(layer.context.config, 3)))
    at = 3 + ("w13", "w13_scale", "w2", "w2_scale").index(name)
    arguments[at] = arguments[at].bfloat16()
    with no_launch(layer.context), refuses(ValueError, name, "dtype"):
        library.fused_moe(*arguments)


def test_the_buffer_of_another_geometry_is_refused(layer: mm.MegaMoE) -> None:
    """A layer's weights with the context of another: each of the layer's own checks says so."""
    with mm.MegaMoEContext(make_config(hidden_size=256), device="cpu") as context:
        stranger = mm.MegaMoE(context)
        with refuses(ValueError, "w13.shape", "[4, 256, 256]", "[4, 256, 128]"):
            stranger.load_weights(*random_checkpoint(layer.context.config))
        arguments = list(op_arguments(layer, random_inputs(layer.context.config, 3)))
        arguments[11] = context.context_id
        with no_launch(context), refuses(ValueError, "geometry"):
            library.fused_moe(*arguments)


# -- compiled calls give the same sentences --------------------------------------------------------


def compiled_refusals(layer: mm.MegaMoE) -> dict[str, tuple[Inputs, str]]:
    x, ids, weights = random_inputs(layer.context.config, 7)
    return {
        "rank": ((x[0], ids, weights), "hidden_states.dim()"),
        "dtype": ((x.float(), ids, weights), "hidden_states.dtype"),
        "H": ((x[:, :64].contiguous(), ids, weights), "hidden_states.shape[1]"),
        "K": ((x, ids[:, :1].contiguous(), weights), "topk_ids.shape[1]"),
        "T": ((x, ids[:6], weights), "topk_ids.shape[0]"),
        "strides": ((x.T.contiguous().T, ids, weights), "hidden_states.stride(1)"),
        "capacity": (random_inputs(layer.context.config, 65), "max_tokens_per_rank"),
    }


@pytest.mark.parametrize("name", ["rank", "dtype", "H", "K", "T", "strides", "capacity"])
@pytest.mark.parametrize("after_a_good_call", [False, True], ids=["first", "second"])
def test_bad_input_to_a_compiled_layer(
    layer: mm.MegaMoE, name: str, after_a_good_call: bool
) -> None:
    inputs, words = compiled_refusals(layer)[name]
    try:
        layer(*inputs)
    except ValueError as error:
        sentence = str(error)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        if after_a_good_call:
            compiled(*random_inputs(layer.context.config, 7))
        with no_launch(layer.context), pytest.raises(Exception) as caught:
            compiled(*inputs)
        assert words in sentence
        assert sentence in str(caught.value)
        compiled(*random_inputs(layer.context.config, 7))  # still good


def test_gradients_are_refused_in_a_compiled_layer_too(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    with no_launch(layer.context), pytest.raises(Exception, match="no backward"):
        compiled(x, ids, weights)


# -- use inside a model ---------------------------------------------------------------------------


class Block(Routed):
    """Router, top-k, experts of its own, residual."""

    def __init__(self, context: mm.MegaMoEContext, seed: int = 0) -> None:
        super().__init__(make_layer(context, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(x)


def test_parameters_and_buffers_of_a_model(layer: mm.MegaMoE) -> None:
    model = nn.Sequential(Block(layer.context), Block(layer.context))
    assert {name for name, _ in model.named_parameters()} == {"0.router.weight", "1.router.weight"}
    saved = model.state_dict()
    assert not any("launch_count" in name or "num_valid" in name for name in saved)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inf"])
def test_in_a_model_in_every_mode(layer: mm.MegaMoE, mode: Callable[[], Any]) -> None:
    block, x = Block(layer.context), random_inputs(layer.context.config, 6)[0]
    with torch.no_grad():
        expected = block(x)
    with mode():
        assert_same(block(x), expected)
    with torch.random.fork_rng(), mode():
        assert_same(block(x.clone()), expected)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "10"])
def test_an_unsupported_limit_never_reaches_a_layer(limit: Any) -> None:
    with refuses(ValueError, "swiglu_limit"):
        make_config(swiglu_limit=limit)
