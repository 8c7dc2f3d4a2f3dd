"""The ops of torch.ops.megamoe: schema, fake against kernel, and what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import (
    Inputs,
    assert_close,
    assert_one_sentence,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    op_arguments,
    oracle,
    random_inputs,
    refuses,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import megamoe_compile as mm
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.reference.recipe import expert_slots
from megamoe_compile.custom_ops.staging import router_topk  # noqa: F401 - registers its op

# opcheck's schema test compares tensors in a way that e4m3 lacks; the others take e4m3.
NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def registered_ops() -> list[torch._ops.OpOverload]:
    names = torch._C._dispatch_get_all_op_names()
    found = []
    for name in sorted(names):
        namespace, _, rest = name.partition("::")
        if namespace == library.NAMESPACE:
            packet, _, overload = rest.partition(".")
            found.append(getattr(getattr(torch.ops.megamoe, packet), overload or "default"))
    return found


OPS = (library.fused_moe,)
ROUTER = torch.ops.megamoe.router_topk.default


def strided(inputs: Inputs) -> Inputs:
    """The same values with a row stride in each input."""

    def every_second_row(t: Tensor) -> Tensor:
        wide = t.new_zeros(2 * t.shape[0], t.shape[1] + 3)
        wide[::2, : t.shape[1]] = t
        return wide[::2, : t.shape[1]]

    return tuple(every_second_row(t) for t in inputs)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def layer() -> Any:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield make_layer(context)


def test_only_the_documented_ops_are_registered() -> None:
    """Each has its own opcheck: fused_moe below, the row exchange in test_parallel.py, the router
    in test_routers.py."""
    assert [str(op) for op in registered_ops()] == [
        "megamoe.fused_moe.default",
        "megamoe.gather_rows.default",
        "megamoe.reduce_scatter_rows.default",
        "megamoe.router_topk.default",
    ]


def test_s61_no_op_returns_an_argument_or_a_view() -> None:
    for op in registered_ops():
        schema = op._schema
        assert all(result.alias_info is None for result in schema.returns), schema
        mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        # The counter that keeps calls in order; the router is a function of its inputs alone.
        assert len(mutated) == (op is not ROUTER), schema


def test_s61_the_output_is_new_memory(layer: mm.MegaMoE) -> None:
    arguments = op_arguments(layer, random_inputs(layer.context.config, 7))
    taken = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, Tensor)}
    first, second = library.fused_moe(*arguments), library.fused_moe(*arguments)
    assert first.untyped_storage().data_ptr() not in taken
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_tags(layer: mm.MegaMoE) -> None:
    for op in OPS:
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert torch.Tag.needs_exact_strides in op.tags
        assert not hasattr(torch.Tag, "cudagraph_unsafe") or (
            torch.Tag.cudagraph_unsafe not in op.tags
        )


CASES = [
    pytest.param(*case, id="-".join(str(c).removeprefix("torch.") for c in case))
    for case in itertools.product((0, 1, 7, 64), ("dense", "strided"))
]
DTYPES = [
    pytest.param(torch.int64, torch.float32, id="int64-fp32"),
    pytest.param(torch.int32, torch.bfloat16, id="int32-bf16"),
]


@pytest.mark.parametrize("ids_dtype,weights_dtype", DTYPES)
@pytest.mark.parametrize("tokens,layout", CASES)
def test_s60_opcheck(
    layer: mm.MegaMoE,
    tokens: int,
    layout: str,
    ids_dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> None:
    inputs = random_inputs(
        layer.context.config, tokens, ids_dtype=ids_dtype, weights_dtype=weights_dtype
    )
    if layout == "strided":
        inputs = strided(inputs)
    for op in OPS:
        if layout == "strided" and tokens == 0:
            # The other tests copy by (size - 1) * stride, negative for no rows; the test of fake
            # against real below covers this case.
            opcheck(op, op_arguments(layer, inputs), test_utils="test_aot_dispatch_dynamic")
            continue
        opcheck(op, op_arguments(layer, inputs, as_bytes=True))
        opcheck(op, op_arguments(layer, inputs), test_utils=NOT_SCHEMA)


def test_s60_opcheck_with_two_ranks_worth_of_shared_experts() -> None:
    with mm.MegaMoEContext(make_config(num_shared_experts=1), device="cpu") as context:
        shared = make_layer(context)
        opcheck(
            library.fused_moe,
            op_arguments(shared, random_inputs(context.config, 3), as_bytes=True),
        )


GPT_OSS = dict(swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0, expert_bias=True)


@pytest.fixture(scope="module")
def bias_layer() -> Any:
    with mm.MegaMoEContext(make_config(**GPT_OSS), device="cpu") as context:
        yield make_layer(context)


@pytest.mark.parametrize("tokens", [0, 3])
def test_opcheck_with_biases(bias_layer: mm.MegaMoE, tokens: int) -> None:
    inputs = random_inputs(bias_layer.context.config, tokens)
    opcheck(library.fused_moe, op_arguments(bias_layer, inputs, as_bytes=True))
    opcheck(library.fused_moe, op_arguments(bias_layer, inputs), test_utils=NOT_SCHEMA)


def test_rows_without_an_expert_stay_zero_in_spite_of_a_bias(bias_layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(bias_layer.context.config, 6)
    ids[2] = -1
    got = bias_layer(x, ids, weights, num_valid=5)
    assert got.any(dim=1).tolist() == [True, True, False, True, True, False]
    assert_close(got, oracle(bias_layer, (x, ids, weights), num_valid=5), 1e-6)


def wrong_biases(layer: mm.MegaMoE) -> list[tuple[Tensor | None, Tensor | None, str]]:
    b13, b2 = layer.w13_bias, layer.w2_bias
    assert b13 is not None and b2 is not None
    wide = torch.zeros(b2.shape[0], 2 * b2.shape[1])
    return [
        (None, None, "whether there are biases"),
        (b13, None, "both, or neither"),
        (None, b2, "whether there are biases"),
        (b13[:, 1:].contiguous(), b2, "w13_bias.shape"),
        (b13, b2[:1], "w2_bias.shape"),
        (b13.bfloat16(), b2, "w13_bias.dtype"),
        (b13, wide[:, ::2], "w2_bias.stride()"),
    ]


def test_wrong_biases_are_refused(bias_layer: mm.MegaMoE) -> None:
    for b13, b2, words in wrong_biases(bias_layer):
        arguments = list(op_arguments(bias_layer, random_inputs(bias_layer.context.config, 3)))
        arguments[7:9] = b13, b2
        with no_launch(bias_layer.context), refuses(ValueError, words):
            library.fused_moe(*arguments)
        if words.startswith("whether"):
            continue  # what only the table of runtimes knows, the fake cannot say
        with FakeTensorMode() as mode, pytest.raises(Exception) as caught:
            library.fused_moe(
                *(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
            )
        assert_one_sentence(str(caught.value), words)


def test_biases_are_refused_by_a_context_without(layer: mm.MegaMoE, bias_layer: mm.MegaMoE) -> None:
    arguments = list(op_arguments(layer, random_inputs(layer.context.config, 3)))
    arguments[7:9] = bias_layer.w13_bias, bias_layer.w2_bias
    with no_launch(layer.context), refuses(ValueError, "whether there are biases", "False"):
        library.fused_moe(*arguments)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale"])
def test_weights_that_are_not_contiguous_are_refused(layer: mm.MegaMoE, name: str) -> None:
    """Kernels see a pointer, and would read other numbers."""
    arguments = list(op_arguments(layer, random_inputs(layer.context.config, 3)))
    at = 3 + ("w13", "w13_scale", "w2", "w2_scale").index(name)
    t = arguments[at]
    wide = t.view(torch.uint8).repeat(2, 1, 1).view(t.dtype)
    arguments[at] = wide[::2]
    assert arguments[at].shape == t.shape and not arguments[at].is_contiguous()
    with no_launch(layer.context), refuses(ValueError, f"{name}.stride()", "contiguous"):
        library.fused_moe(*arguments)


def test_compiled_and_eager_agree_with_biases(bias_layer: mm.MegaMoE) -> None:
    with torch.no_grad():
        compiled = torch.compile(bias_layer, fullgraph=True, dynamic=True)
        for tokens in (3, 7, 0):
            inputs = random_inputs(bias_layer.context.config, tokens)
            assert_same(compiled(*inputs), bias_layer(*inputs), f"{tokens} tokens")


@pytest.mark.parametrize("tokens,layout", CASES)
def test_s59_fake_equals_real(layer: mm.MegaMoE, tokens: int, layout: str) -> None:
    inputs = random_inputs(layer.context.config, tokens)
    if layout == "strided":
        inputs = strided(inputs)
    arguments = op_arguments(layer, inputs)
    real = library.fused_moe(*arguments)
    with FakeTensorMode() as mode:
        fake = library.fused_moe(
            *(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
        )
    for name in ("shape", "dtype", "device"):
        assert getattr(fake, name) == getattr(real, name)
    assert fake.stride() == real.stride()
    assert real.is_contiguous()


def test_s02_padded_rows_come_back_as_rows(layer: mm.MegaMoE) -> None:
    """Rows out are rows in, whatever the number of real ones: 16 in, 5 real, 16 out."""
    inputs = random_inputs(layer.context.config, 16)
    padded = layer(*inputs, num_valid=5)
    assert padded.shape == inputs[0].shape
    assert_same(padded[:5], layer(*(t[:5] for t in inputs)))
    assert not padded[5:].any()
    empty = layer(*(t[:0] for t in inputs))
    assert empty.shape == (0, inputs[0].shape[1])
    assert empty.dtype == padded.dtype
    assert empty.stride() == padded.stride()


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_s16_dtypes_of_ids_and_weights(
    layer: mm.MegaMoE, tokens: int, ids_dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    x, ids, weights = random_inputs(layer.context.config, tokens)
    weights = weights.bfloat16()  # the same numbers in both dtypes
    got = layer(x, ids.to(ids_dtype), weights.to(weights_dtype))
    assert_same(got, oracle(layer, (x, ids, weights)))


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_s77_strided_rows_give_the_same_bits(layer: mm.MegaMoE, tokens: int) -> None:
    inputs = random_inputs(layer.context.config, tokens)
    assert_same(layer(*strided(inputs)), layer(*inputs))


def bad_inputs(config: mm.MegaMoEConfig) -> dict[str, tuple[Inputs, type[Exception], str]]:
    """name -> (inputs, error of the eager call, what the sentence names)."""
    x, ids, weights = random_inputs(config, 7)
    wide = torch.zeros(7, 2 * config.hidden_size, dtype=torch.bfloat16)
    long = random_inputs(config, config.max_tokens_per_rank + 1)
    return {
        "x 3-D": ((x[None], ids, weights), ValueError, "hidden_states.dim()"),
        "x 1-D": ((x[0], ids, weights), ValueError, "hidden_states.dim()"),
        "ids 1-D": ((x, ids[:, 0], weights), ValueError, "topk_ids.dim()"),
        "weights 3-D": ((x, ids, weights[None]), ValueError, "topk_weights.dim()"),
        "x fp32": ((x.float(), ids, weights), ValueError, "hidden_states.dtype"),
        "x fp16": ((x.half(), ids, weights), ValueError, "hidden_states.dtype"),
        "ids int16": ((x, ids.short(), weights), ValueError, "topk_ids.dtype"),
        "ids fp32": ((x, ids.float(), weights), ValueError, "topk_ids.dtype"),
        "weights fp16": ((x, ids, weights.half()), ValueError, "topk_weights.dtype"),
        "H": ((x[:, :64].contiguous(), ids, weights), ValueError, "hidden_states.shape[1]"),
        "K of ids": ((x, ids[:, :1], weights), ValueError, "topk_ids.shape[1]"),
        "K of weights": ((x, ids, weights[:, :1]), ValueError, "topk_weights.shape[1]"),
        "T of ids": ((x, ids[:6], weights), ValueError, "topk_ids.shape[0]"),
        "T of weights": ((x, ids, weights[:6]), ValueError, "topk_weights.shape[0]"),
        "x transposed": ((x.T.contiguous().T, ids, weights), ValueError, "hidden_states.stride(1)"),
        "x every 2nd column": ((wide[:, ::2], ids, weights), ValueError, "hidden_states.stride(1)"),
        "ids transposed": ((x, ids.T.contiguous().T, weights), ValueError, "topk_ids.stride(1)"),
        "capacity": (long, mm.CapacityError, "max_tokens_per_rank"),
    }


@pytest.mark.parametrize("name", bad_inputs(make_config()))
def test_bad_input_in_eager(layer: mm.MegaMoE, name: str) -> None:
    inputs, error, words = bad_inputs(layer.context.config)[name]
    with no_launch(layer.context), refuses(error, words):
        layer(*inputs)
    with no_launch(layer.context), refuses(error, words):
        library.fused_moe(*op_arguments(layer, inputs))


@pytest.mark.parametrize("name", bad_inputs(make_config()))
def test_s77_fake_gives_the_same_verdict_and_sentence(layer: mm.MegaMoE, name: str) -> None:
    inputs, _, words = bad_inputs(layer.context.config)[name]
    try:
        layer(*inputs)
    except ValueError as error:
        sentence = str(error)
    with FakeTensorMode() as mode, pytest.raises(Exception) as caught:
        library.fused_moe(
            *(
                mode.from_tensor(a) if isinstance(a, Tensor) else a
                for a in op_arguments(layer, inputs)
            )
        )
    assert sentence in str(caught.value)
    assert_one_sentence(str(caught.value), words)


def test_s77_a_slice_of_a_wider_tensor_is_fine(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 7)
    wide = torch.full((7, 3 * x.shape[1]), float("nan"), dtype=torch.bfloat16)
    wide[:, 128:256] = x
    assert_same(layer(wide[:, 128:256], ids, weights), layer(x, ids, weights))


def test_s77_top_k_of_one_takes_any_column_stride() -> None:
    with mm.MegaMoEContext(make_config(top_k=1), device="cpu") as context:
        layer = make_layer(context)
        x, ids, weights = random_inputs(context.config, 5)
        wide = ids.expand(5, 3).contiguous()
        assert_same(layer(x, wide[:, ::3], weights), layer(x, ids, weights))


def test_launch_count_grows_by_one_per_call(layer: mm.MegaMoE) -> None:
    before = int(layer.context.launch_count)
    for tokens in (3, 0, 1):
        layer(*random_inputs(layer.context.config, tokens))
    assert int(layer.context.launch_count) == before + 3
    assert layer.launch_count is layer.context.launch_count


def test_s71_another_layout_version_is_refused(layer: mm.MegaMoE) -> None:
    arguments = op_arguments(layer, random_inputs(layer.context.config, 2))
    with no_launch(layer.context), refuses(mm.MegaMoEError, "layout_version", "compile it again"):
        library.fused_moe(*arguments[:-1], library.LAYOUT_VERSION + 1)


@pytest.mark.parametrize("context_id", [-1, 10**6])
def test_unknown_context_id_is_refused(layer: mm.MegaMoE, context_id: int) -> None:
    arguments = list(op_arguments(layer, random_inputs(layer.context.config, 2)))
    arguments[-4] = context_id
    with no_launch(layer.context), refuses(mm.ContextClosed, "open MegaMoEContext"):
        library.fused_moe(*arguments)


def test_dense_experts_equal_picked_ones(layer: mm.MegaMoE) -> None:
    """The form without host synchronization, for a CUDA stream, gives the same.

    Not the same bits on every CPU: a matrix product's order of sums may depend on its rows.
    """
    x, ids, weights = random_inputs(layer.context.config, 9)
    ids[2, 0], ids[3] = -1, -1
    arguments = (x.float(), ids, weights, layer.prepared)
    dense, picked = expert_slots(*arguments, dense=True), expert_slots(*arguments)
    assert_close(dense, picked, 1e-4)
    assert not dense[3].any() and not dense[2, 0].any()
