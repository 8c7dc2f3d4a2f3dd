"""The op and the layer under torch.compile and torch.export, with the number of graphs asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.output_code
import torch._inductor.utils
from blocks import Block, Routed, inputs_of
from helpers import (
    assert_close,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    refuses,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops import library

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class RoutedBlock(Routed):
    """Router, softmax, top-k, experts and a dense shared expert."""

    def __init__(self, experts: mm.MegaMoE) -> None:
        super().__init__(experts)
        self.shared = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(x) + torch.nn.functional.silu(self.shared(x))


def compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# -- every way to compile -------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "eager": dict(backend="eager"),
    "aot_eager": dict(backend="aot_eager"),
    "default": dict(),
    "reduce-overhead": dict(mode="reduce-overhead"),
    "dynamic": dict(dynamic=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_fullgraph_equals_eager(layer: mm.MegaMoE, way: str) -> None:
    """The same bits, one launch per call, and an earlier result stays (S50)."""
    block = Block(layer)
    first, second = inputs_of(layer, 7), inputs_of(layer, 7, seed=1)
    with torch.no_grad():
        expected = [block(*first), block(*second)]
        compiled = torch.compile(block, fullgraph=True, **WAYS[way])
        before = int(layer.context.launch_count)
        y1 = compiled(*first)
        kept = y1.clone()
        y2 = compiled(*second)
        assert int(layer.context.launch_count) == before + 2
    assert_same(y1, kept, "y1 after y2")
    assert_same(y1, expected[0])
    assert_same(y2, expected[1])
    assert compiled_graphs() == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_router_experts_and_shared_in_one_graph(layer: mm.MegaMoE, mode: Callable[[], Any]) -> None:
    block, x = RoutedBlock(layer), inputs_of(layer, 7)[0]
    with mode():
        expected = block(x)
        compiled = torch.compile(block, fullgraph=True)
        assert_close(compiled(x), expected, 0.01)
    assert compiled_graphs() == 1


def test_s70_a_call_inside_a_with_block(layer: mm.MegaMoE) -> None:
    block = RoutedBlock(layer)

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
        with torch.set_grad_enabled(False):
            return block(y)

    x = inputs_of(layer, 5)[0]
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), forward(x), 0.02)
    assert compiled_graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("strict", [False, True])
def test_export(layer: mm.MegaMoE, strict: bool) -> None:
    block = Block(layer)
    tokens = torch.export.Dim("tokens", max=64)
    with torch.no_grad():
        program = torch.export.export(
            block, inputs_of(layer, 7), dynamic_shapes=({0: tokens},) * 3, strict=strict
        )
        calls = [n for n in program.graph.nodes if n.target is library.fused_moe]
        assert len(calls) == 1
        module = program.module()
        before = int(layer.context.launch_count)
        for count in (7, 5, 2, 1, 0, 64):
            inputs = inputs_of(layer, count)
            assert_same(module(*inputs), block(*inputs), f"{count} tokens")
        assert int(layer.context.launch_count) == before + 12
        with no_launch(layer.context), pytest.raises(AssertionError, match="<= 64"):
            module(*inputs_of(layer, 65))
        lowered = program.run_decompositions().module()
        assert_same(lowered(*inputs_of(layer, 3)), block(*inputs_of(layer, 3)))


def test_an_exported_program_launches_on_its_context(layer: mm.MegaMoE) -> None:
    with torch.no_grad(), mm.MegaMoEContext(make_config(), device="cpu") as context:
        block, inputs = Block(make_layer(context)), inputs_of(layer, 7)
        module = torch.export.export(block, inputs).module()
        module(*inputs)
        context.close()
        with no_launch(context), refuses(mm.ContextClosed):
            module(*inputs)


# -- how many graphs ------------------------------------------------------------------------------

DYNAMIC = [7, 5, 1, 0, 1, 0, 64]


@pytest.mark.parametrize(
    "dynamic,sizes,graphs",
    [
        (True, DYNAMIC, 3),  # any, 1, 0
        (None, DYNAMIC, 4),  # 7, then any, 1, 0
        (False, DYNAMIC, 5),  # each of its own
        (True, [1, 2, 3, 8, 0, 16], 3),
        (None, [1, 2, 3, 8, 0, 16], 3),
        (False, [1, 2, 3, 8, 0, 16], 6),
    ],
)
def test_s66_number_of_graphs(
    layer: mm.MegaMoE, dynamic: bool | None, sizes: Sequence[int], graphs: int
) -> None:
    block = Block(layer)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for count in sizes:
            inputs = inputs_of(layer, count)
            assert_same(compiled(*inputs), block(*inputs), f"{count} tokens")
    assert compiled_graphs() == graphs


def test_s66_dynamic_sizes_through_inductor(layer: mm.MegaMoE) -> None:
    block = Block(layer)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, dynamic=True)
        before = int(layer.context.launch_count)
        for count in DYNAMIC:
            inputs = inputs_of(layer, count)
            got = compiled(*inputs)
            assert_same(got, block(*inputs), f"{count} tokens")
            assert got.shape == inputs[0].shape
        assert int(layer.context.launch_count) == before + 2 * len(DYNAMIC)
    assert compiled_graphs() == 3


@pytest.mark.parametrize("marked", [(0,), (1,), (2,), (0, 1, 2)])
def test_s67_mark_dynamic(layer: mm.MegaMoE, marked: tuple[int, ...]) -> None:
    """Any of the inputs marked: one graph for 2 to capacity, guarded by nothing else."""
    block = Block(layer)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
        for count in (7, 5, 2, 33, 64):
            inputs = inputs_of(layer, count)
            for index in marked:
                torch._dynamo.mark_dynamic(inputs[index], 0)
            assert_same(compiled(*inputs), block(*inputs), f"{count} tokens")
        assert compiled_graphs() == 1
        with no_launch(layer.context), pytest.raises(Exception, match="max_tokens_per_rank"):
            compiled(*inputs_of(layer, 65))


def test_s16_s66_dtype_and_emptiness_alone_decide(layer: mm.MegaMoE) -> None:
    """int32 against int64 ids compile once each; empty against busy, no further time."""
    block = Block(layer)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
        for dtype in (torch.int64, torch.int32):
            for count in (7, 0, 5, 0, 9):
                x, ids, weights = inputs_of(layer, count)
                compiled(x, ids.to(dtype), weights)
    assert compiled_graphs() == 4


def test_num_valid_adds_no_graph_per_value(layer: mm.MegaMoE) -> None:
    inputs = inputs_of(layer, 7)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for count in (5, 3, 6, 2):
            mask = torch.tensor([count], dtype=torch.int32)
            assert_same(compiled(*inputs, mask), layer(*inputs, count))
        assert compiled_graphs() == 1
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for count in (5, 3, 6, 2):
            assert_same(compiled(*inputs, count), layer(*inputs, count))
        assert compiled_graphs() <= 2
        layer.context.num_valid.fill_(3)
        try:
            assert_same(compiled(*inputs, None), layer(*inputs, 3))
        finally:
            layer.context.num_valid.fill_(ALL_VALID)


# -- the one-graph recipe -------------------------------------------------------------------------

TOKEN_INPUTS = ["x", "topk_ids", "topk_weights"]


@pytest.mark.parametrize("order", [[7, 5, 1, 0, 1, 0, 64], [0, 1, 5], [1, 0, 2], [64, 1]], ids=str)
def test_one_graph_for_any_order(layer: mm.MegaMoE, order: Sequence[int]) -> None:
    block, context = Block(layer), layer.context
    with torch.no_grad():
        compiled = mm.compile_one_graph(block, context, TOKEN_INPUTS, backend="aot_eager")
        for count in order:
            inputs = inputs_of(layer, count)
            before = int(context.launch_count)
            got = compiled(*inputs)
            assert int(context.launch_count) == before + 1, "an idle rank launches too"
            assert_same(got, block(*inputs), f"{count} tokens")
            assert int(context.num_valid) == ALL_VALID
    assert compiled_graphs() == 1


def test_one_graph_through_inductor(layer: mm.MegaMoE) -> None:
    block = Block(layer)
    with torch.no_grad():
        compiled = mm.compile_one_graph(block, layer.context, TOKEN_INPUTS)
        for count in (7, 0, 1, 64):
            inputs = inputs_of(layer, count)
            assert_same(compiled(*inputs), block(*inputs), f"{count} tokens")
    assert compiled_graphs() == 1


def test_one_graph_takes_keywords_and_other_arguments(layer: mm.MegaMoE) -> None:
    def step(x: Tensor, ids: Tensor, weights: Tensor, scale: float = 1.0, **more: Any) -> Any:
        y = layer(x, ids, weights) * scale
        return {"y": y, "sum": y.float().sum(), "more": more.get("shift")}

    compiled = mm.compile_one_graph(
        step, layer.context, ["x", "ids", "weights"], backend="aot_eager"
    )
    shift = torch.ones(2)  # an output of one row would count as one per token
    with torch.no_grad():
        for count in (5, 1, 0):
            x, ids, weights = inputs_of(layer, count)
            got = compiled(x, weights=weights, ids=ids, scale=2.0, shift=shift)
            expected = step(x, ids, weights, 2.0)
            assert_same(got["y"], expected["y"])
            assert_same(got["sum"], expected["sum"])
            assert_same(got["more"], shift)
    assert compiled_graphs() == 1


def test_one_graph_routes_nothing_in_an_idle_step(layer: mm.MegaMoE) -> None:
    def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, topk_ids, topk_weights), layer.num_valid.expand(2).clone()

    compiled = mm.compile_one_graph(step, layer.context, TOKEN_INPUTS, backend="aot_eager")
    with torch.no_grad():
        for count, mask in ((3, ALL_VALID), (0, 0), (1, ALL_VALID)):
            y, seen = compiled(*inputs_of(layer, count))
            assert y.shape == (count, 128)
            assert seen.tolist() == [mask, mask]
    assert compiled_graphs() == 1


def test_one_graph_leaves_the_callers_tensors_alone(layer: mm.MegaMoE) -> None:
    """What it marks must not follow the tensor into somebody else's compile."""
    inputs = inputs_of(layer, 5)
    before = [set(vars(t)) for t in inputs]
    compiled = mm.compile_one_graph(Block(layer), layer.context, TOKEN_INPUTS, backend="aot_eager")
    with torch.no_grad():
        compiled(*inputs)
        assert [set(vars(t)) for t in inputs] == before
        torch.compile(lambda x: x[:5] * x.shape[0], fullgraph=True, dynamic=False)(inputs[0])


def test_one_graph_refuses_what_does_not_fit(layer: mm.MegaMoE) -> None:
    x, ids, weights = inputs_of(layer, 5)
    with refuses(ValueError, "token_inputs", "rows"):
        mm.compile_one_graph(Block(layer), layer.context, ["rows"])
    with refuses(ValueError, "token_inputs"):
        mm.compile_one_graph(Block(layer), layer.context, [])
    compiled = mm.compile_one_graph(Block(layer), layer.context, TOKEN_INPUTS, backend="aot_eager")
    with torch.no_grad(), no_launch(layer.context):
        with refuses(ValueError, "tokens of the inputs", "5", "4"):
            compiled(x, ids[:4], weights)
        with pytest.raises(TypeError):
            compiled(x, ids)


def test_one_graph_above_capacity(layer: mm.MegaMoE) -> None:
    compiled = mm.compile_one_graph(Block(layer), layer.context, TOKEN_INPUTS, backend="aot_eager")
    with torch.no_grad():
        compiled(*inputs_of(layer, 5))
        with no_launch(layer.context), refuses(mm.CapacityError, "at most 64", "65"):
            compiled(*inputs_of(layer, 65))
        assert_same(compiled(*inputs_of(layer, 3)), Block(layer)(*inputs_of(layer, 3)))


def test_one_graph_restores_the_mask_when_an_idle_step_fails(layer: mm.MegaMoE) -> None:
    def broken(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        raise KeyError("the step's own")

    compiled = mm.compile_one_graph(broken, layer.context, TOKEN_INPUTS, backend="eager")
    with no_launch(layer.context), pytest.raises(Exception, match="the step's own"):
        compiled(*inputs_of(layer, 0))


# -- many layers, many contexts -------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, layers: Sequence[mm.MegaMoE]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, topk_ids, topk_weights)
        return x


@pytest.fixture(scope="module")
def twelve() -> Iterator[list[mm.MegaMoE]]:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield [make_layer(context, seed=n) for n in range(12)]


def test_s65_twelve_equal_blocks_compile_once(twelve: list[mm.MegaMoE]) -> None:
    stack, inputs = Stack(twelve), inputs_of(twelve[0], 5)
    with torch.no_grad():
        expected = stack(*inputs)
        for block in stack.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_same(stack(*inputs), expected)
    assert compiled_graphs() == 1


def test_s65_a_model_of_twelve_layers_is_one_graph(twelve: list[mm.MegaMoE]) -> None:
    stack, inputs = Stack(twelve), inputs_of(twelve[0], 5)
    context = twelve[0].context
    with torch.no_grad():
        expected = stack(*inputs)
        for options in (dict(backend="aot_eager"), {}):
            compiled = torch.compile(stack, fullgraph=True, **options)  # type: ignore[call-overload]
            before = int(context.launch_count)
            assert_same(compiled(*inputs), expected)
            assert int(context.launch_count) == before + 12
    assert compiled_graphs() == 2


def test_two_contexts_in_one_graph(layer: mm.MegaMoE) -> None:
    with mm.MegaMoEContext(make_config(swiglu_limit=0.5), device="cpu") as context:
        other = make_layer(context, seed=3)

        def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y = layer(x, ids, weights)
            return other(y, ids, weights) + layer(y, ids, weights)

        inputs = inputs_of(layer, 5)
        with torch.no_grad():
            expected = step(*inputs)
            compiled = torch.compile(step, fullgraph=True)
            before = int(layer.context.launch_count), int(context.launch_count)
            assert_same(compiled(*inputs), expected)
            assert int(layer.context.launch_count) == before[0] + 2
            assert int(context.launch_count) == before[1] + 1
            context.close()
            with pytest.raises(mm.ContextClosed):
                compiled(*inputs)
