"""What makes torch.compile compile a layer again, and what must not: contexts, geometries, strides.

torch.compile gives up at the ninth graph of a code object, which fullgraph=True makes an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    Inputs,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    random_inputs,
    refuses,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import megamoe_compile as mm
from megamoe_compile.tracing import as_graph_input

BACKENDS = ["eager", "inductor"]


def compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@contextlib.contextmanager
def many_layers(*changes: dict[str, Any], device: str = "cpu") -> Iterator[list[mm.MegaMoE]]:
    """Layers with different weights, each of a context of its own."""
    with contextlib.ExitStack() as stack:
        contexts = [
            stack.enter_context(mm.MegaMoEContext(make_config(**change), device=device))
            for change in changes
        ]
        yield [make_layer(context, seed=seed) for seed, context in enumerate(contexts)]


class Block(nn.Module):
    def __init__(self, experts: mm.MegaMoE) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return x + self.experts(x, topk_ids, topk_weights)


# -- contexts and geometries ----------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda layer: layer, Block], ids=["layer", "block"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_contexts_share_one_graph(backend: str, wrap: Callable[..., nn.Module]) -> None:
    """Which launches on the context of the layer that is called, not on that of the first."""
    with many_layers(*[{"swiglu_limit": 1.0 + n} for n in range(10)]) as layers:
        for layer in layers:
            module, inputs = wrap(layer), random_inputs(layer.context.config, 5)
            expected, others = module(*inputs), [int(one.launch_count) for one in layers]
            compiled = torch.compile(module, fullgraph=True, backend=backend)
            assert_same(compiled(*inputs), expected)
            others[layers.index(layer)] += 1
            assert [int(one.launch_count) for one in layers] == others
    assert compiled_graphs() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_geometries_are_one_graph_each(backend: str) -> None:
    with many_layers(*[{"hidden_size": 128 * (1 + n)} for n in range(10)]) as layers:
        for _ in range(2):
            for layer in layers:
                inputs = random_inputs(layer.context.config, 5)
                compiled = torch.compile(layer, fullgraph=True, backend=backend)
                assert_same(compiled(*inputs), layer(*inputs))
    assert compiled_graphs() == 10


def test_a_shared_graph_refuses_a_context_that_is_closed() -> None:
    with many_layers({}, {}) as (first, second):
        inputs = random_inputs(first.context.config, 5)
        compiled = [torch.compile(layer, fullgraph=True) for layer in (first, second)]
        for step, layer in zip(compiled, (first, second), strict=True):
            assert_same(step(*inputs), layer(*inputs))
        first.context.close()
        with no_launch(second.context), refuses(mm.ContextClosed):
            compiled[0](*inputs)
        assert_same(compiled[1](*inputs), second(*inputs))
    assert compiled_graphs() == 1


def test_the_size_that_is_an_id_is_no_size_of_tokens() -> None:
    """Equal sizes become one symbol, unless one of them is marked."""
    with many_layers({}) as (layer,):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for tokens in (layer.context.context_id, 5, 6):
            if tokens <= 64:
                inputs = random_inputs(layer.context.config, tokens)
                assert_same(compiled(*inputs), layer(*inputs))
    assert compiled_graphs() == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_on_its_own_is_exported(strict: bool) -> None:
    with many_layers({}) as (layer,):
        inputs = random_inputs(layer.context.config, 5)
        module = torch.export.export(layer, inputs, strict=strict).module()
        before = int(layer.launch_count)
        assert_same(module(*inputs), layer(*inputs))
        assert int(layer.launch_count) == before + 2


@pytest.mark.gpu
def test_reduce_overhead_captures_one_graph_per_context() -> None:
    """The id is a size of the compiled graph, and so a key of what Inductor captures."""
    with (
        many_layers(*[{"backend": "triton"}] * 2, device="cuda") as (first, second),
        torch._inductor.config.patch({"triton.cudagraph_or_error": True}),
    ):
        inputs = random_inputs(first.context.config, 5, device="cuda")
        steps = [
            torch.compile(layer, fullgraph=True, mode="reduce-overhead")
            for layer in (first, second)
        ]
        for _ in range(4):
            for step, layer in zip(steps, (first, second), strict=True):
                expected, before = layer(*inputs), int(layer.launch_count)
                assert_same(step(*inputs).clone(), expected)
                assert int(layer.launch_count) == before + 1
    assert compiled_graphs() == 1
    assert not counters["inductor"]["cudagraph_skips"]


# -- strides --------------------------------------------------------------------------------------


def strided(t: Tensor) -> Iterator[Tensor]:
    """The rows of t in seven layouts."""
    rows, columns = t.shape
    yield t
    for left, width in ((0, columns + 3), (2, columns + 5), (1, 4 * columns)):
        wide = t.new_zeros(rows, width)
        wide[:, left : left + columns] = t
        yield wide[:, left : left + columns]
    every = t.new_zeros(2 * rows, columns)
    every[::2] = t
    yield every[::2]
    sparse = t.new_zeros(3 * rows, 2 * columns)
    sparse[::3, :columns] = t
    yield sparse[::3, :columns]
    buffer = t.new_zeros(64, columns)
    buffer[:rows] = t
    yield buffer[:rows]


@pytest.mark.parametrize("dynamic,graphs", [(True, 3), (None, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_ids_and_weights_make_no_graph(
    backend: str, dynamic: bool | None, graphs: int
) -> None:
    """For 0, 1 and n tokens, in seven layouts: graphs as for one layout."""
    with many_layers({}) as (layer,):
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
        for tokens in (7, 0, 1, 5, 9):
            x, ids, weights = random_inputs(layer.context.config, tokens)
            expected = layer(x, ids, weights)
            for other_ids, other_weights in zip(strided(ids), strided(weights), strict=True):
                assert_same(compiled(x, other_ids, weights), expected)
                assert_same(compiled(x, ids, other_weights), expected)
                assert_same(compiled(x, other_ids, other_weights), expected)
            if tokens:  # one row for all tokens
                row = ids[:1].expand(tokens, -1)
                assert_same(compiled(x, row, weights), layer(x, row, weights))
    assert compiled_graphs() == graphs


def test_rows_of_hidden_states_that_are_strided_are_one_graph_more() -> None:
    """They are not copied: the op reads them where they are."""
    with many_layers({}) as (layer,):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for tokens in (7, 0, 1, 5, 9):
            x, ids, weights = random_inputs(layer.context.config, tokens)
            for other in strided(x):
                assert_same(compiled(other, ids, weights), layer(x, ids, weights))
    assert compiled_graphs() == 4


def test_a_view_as_num_valid_makes_no_graph() -> None:
    counts = torch.tensor([2, 5, 3], dtype=torch.int32)
    with many_layers({}) as (layer,):
        inputs = random_inputs(layer.context.config, 7)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for mask in (counts[:1], counts[1:2], counts[2:].clone()):
            assert_same(compiled(*inputs, mask), layer(*inputs, int(mask)))
    assert compiled_graphs() == 1


def test_the_one_graph_recipe_takes_strided_rows() -> None:
    with many_layers({}) as (layer,):
        names = ["hidden_states", "topk_ids", "topk_weights"]
        compiled = mm.compile_one_graph(layer, layer.context, names, backend="eager")
        for tokens in (7, 0, 1, 5):
            x, ids, weights = random_inputs(layer.context.config, tokens)
            for other in strided(ids):
                assert_same(compiled(x, other, weights), layer(x, ids, weights))
    assert compiled_graphs() == 1


def test_marks_of_the_inputs_are_kept() -> None:
    with many_layers({}) as (layer,):
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for tokens in (7, 5, 2):
            x, ids, weights = random_inputs(layer.context.config, tokens)
            inputs = torch.stack([x, x])[1], torch.cat([ids, ids], 1)[:, :2], weights
            for t in inputs:
                torch._dynamo.mark_dynamic(t, 0)
            assert_same(compiled(*inputs), layer(x, ids, weights))
    assert compiled_graphs() == 1


def refused() -> dict[str, Callable[[Inputs], Inputs]]:
    return {
        "ids": lambda inputs: (inputs[0], inputs[1].mT.contiguous().mT, inputs[2]),
        "weights": lambda inputs: (*inputs[:2], inputs[2].mT.contiguous().mT),
        "rows": lambda inputs: (inputs[0].mT.contiguous().mT, *inputs[1:]),
        "axes": lambda inputs: (inputs[0], inputs[1][0], inputs[2]),
    }


@pytest.mark.parametrize("name", refused())
@pytest.mark.parametrize("tokens", [2, 7])
def test_columns_that_are_strided_stay_refused(name: str, tokens: int) -> None:
    with many_layers({}) as (layer,):
        bad = refused()[name](random_inputs(layer.context.config, tokens))
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        with no_launch(layer.context), refuses(ValueError) as caught:
            layer(*bad)
        with no_launch(layer.context), pytest.raises(Exception) as again:
            compiled(*bad)
        assert str(caught.value) in str(again.value)


def test_contiguous_rows_are_handed_on_as_they_are() -> None:
    t = torch.arange(6).reshape(3, 2).clone()
    assert as_graph_input(t, own_rows=True) is t
    view = torch.arange(8).reshape(4, 2)[1:]
    plain = as_graph_input(view, own_rows=True)
    assert plain.data_ptr() == view.data_ptr() and not plain._is_view()
    tracked = torch.ones(4, 2, requires_grad=True)[1:]
    assert as_graph_input(tracked, own_rows=True).requires_grad
    assert not vars(view)
