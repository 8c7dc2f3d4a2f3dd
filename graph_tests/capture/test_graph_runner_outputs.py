"""GraphRunner on a CPU: what it hands out, requests of several tokens, tensors that moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from blocks import Block, Routed
from helpers import (
    assert_close,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    random_checkpoint,
    refuses,
)
from runner_helpers import make_runner, named, poison
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megamoe_compile as mm


@pytest.fixture(scope="module")
def block() -> Iterator[Block]:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield Block(make_layer(context))


# -- outputs --------------------------------------------------------------------------------------


def test_outputs_are_cut_in_any_container(block: Block) -> None:
    context = block.experts.context
    table = torch.arange(8.0)

    def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Any:
        y = block(x, topk_ids, topk_weights)
        return {
            "y": y,
            "nested": [(y * 2, {"deep": y[:, :3]}), None, 7, "text"],
            "scalar": y.float().abs().amax(),
            "fixed": table,  # 8 rows, as the bucket of 8 has: but not in the other bucket
            "columns": y.T,
        }

    runner = make_runner(step, context, [4, 8])
    for tokens, bucket in ((3, 4), (3, 8), (7, 8), (0, 4), (8, 8)):
        inputs = named(context.config, tokens)
        poison(runner, 0.0)
        got = runner(num_tokens=tokens, bucket=bucket, **inputs)
        expected = block(**inputs)
        assert_same(got["y"], expected)
        (double, deep), nothing, number, text = got["nested"]
        assert_same(double, expected * 2)
        assert_same(deep["deep"], expected[:, :3])
        assert (nothing, number, text) == (None, 7, "text")
        assert got["scalar"].dim() == 0
        assert_same(got["fixed"], table)
        assert got["fixed"].data_ptr() != table.data_ptr()
        assert got["columns"].shape == (128, bucket)


class Pair(NamedTuple):
    y: Tensor
    double: Tensor


@pytest.mark.parametrize("copy", [True, False])
def test_tuples_stay_what_they_are(block: Block, copy: bool) -> None:
    """A plain tuple of tensors takes a shorter way than others."""
    for nest in (tuple, list, Pair._make, lambda ys: (ys[0], None), lambda ys: (ys, 1)):
        kinds = nest([torch.zeros(1), torch.zeros(1)])

        def step(nest: Any = nest, **inputs: Tensor) -> Any:
            y = block(**inputs)
            return nest([y, y * 2])

        runner = make_runner(step, block.experts.context, [4], copy_outputs=copy)
        inputs = named(block.experts.context.config, 3)
        got, expected = runner(num_tokens=3, **inputs), step(**inputs)
        assert type(got) is type(kinds)
        leaves, tree = pytree.tree_flatten(got)
        wanted, nested = pytree.tree_flatten(expected)
        assert tree == nested
        for leaf, want in zip(leaves, wanted, strict=True):
            if isinstance(want, Tensor):
                assert_same(leaf, want)
            else:
                assert leaf == want


def test_a_step_that_returns_its_input(block: Block) -> None:
    """The static buffer itself is never handed out."""
    context = block.experts.context
    runner = make_runner(lambda x, topk_ids, topk_weights: (x, topk_ids), context, [4])
    inputs = named(context.config, 3)
    x, ids = runner(num_tokens=3, **inputs)
    runner(num_tokens=3, **named(context.config, 3, seed=1))
    assert_same(x, inputs["x"])
    assert_same(ids, inputs["topk_ids"])


# -- requests of several tokens -------------------------------------------------------------------


def test_width_with_rows_of_requests() -> None:
    """Three tokens per request: one row of lengths per request, a table of fixed shape."""
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        layer = make_layer(context)

        def step(
            x: Tensor, topk_ids: Tensor, topk_weights: Tensor, lengths: Tensor, table: Tensor
        ) -> Any:
            y = layer(x, topk_ids, topk_weights) + table
            per_request = y.reshape(lengths.shape[0], 3, 128).sum(1) * lengths[:, None]
            return {"tokens": y, "requests": per_request, "lengths": lengths + 1, "table": table}

        table = torch.ones(128, dtype=torch.bfloat16)
        lengths = torch.arange(1, 9, dtype=torch.bfloat16)
        example = {**named(context.config, 3), "lengths": lengths[:1], "table": table}
        runner = mm.GraphRunner(
            step,
            example,
            [3, 6, 24],
            context,
            rows={"lengths": "requests", "table": None},
            width=3,
        )
        runner.capture()
        for requests in (0, 1, 2, 5, 8):
            tokens = 3 * requests
            call = {
                **named(context.config, tokens),
                "lengths": lengths[:requests],
                "table": table * requests,
            }
            got, expected = runner(num_tokens=tokens, **call), step(**call)
            assert got.keys() == expected.keys()
            for name, value in got.items():
                assert_same(value, expected[name], f"{name} of {requests} requests")
        with no_launch(context), refuses(ValueError, "num_tokens", "width 3", "4"):
            runner(num_tokens=4, **{**call, **named(context.config, 4)})
        with no_launch(context), refuses(ValueError, "input 'lengths'"):
            runner(num_tokens=6, **{**call, **named(context.config, 6)})
        with no_launch(context), refuses(ValueError, "input 'table'"):
            runner(num_tokens=24, **{**call, "table": table[:5]})


@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_a_bad_width_is_refused(block: Block, width: Any) -> None:
    context = block.experts.context
    with refuses(ValueError, "width"):
        mm.GraphRunner(block, named(context.config, 1), [2], context, width=width)


def test_buckets_are_multiples_of_the_width(block: Block) -> None:
    context = block.experts.context
    with refuses(ValueError, "buckets", "multiples of the width 4"):
        mm.GraphRunner(block, named(context.config, 1), [4, 6], context, width=4)


# -- captured tensors that moved ------------------------------------------------------------------


@pytest.fixture
def routed() -> Iterator[tuple[Routed, mm.GraphRunner, Tensor]]:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        model, x = Routed(make_layer(context)), named(make_config(), 3)["x"]
        runner = mm.GraphRunner(model, {"x": x}, [4], context)
        runner.capture()
        yield model, runner, x


def test_a_replaced_expert_weight_is_named(routed: Any) -> None:
    model, runner, x = routed
    expected = runner(num_tokens=3, x=x)
    old = model.experts.w13
    model.experts.w13 = old.clone()
    with no_launch(runner.context), refuses(mm.MegaMoEError, "MegaMoE[0].w13", "capture again"):
        runner(num_tokens=3, x=x)
    model.experts.w13 = old
    assert_same(runner(num_tokens=3, x=x), expected)
    model.experts.w13 = old.clone()
    runner.capture()
    assert_same(runner(num_tokens=3, x=x), expected)


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: setattr(m.router, "weight", nn.Parameter(m.router.weight.clone())),
        lambda m: setattr(m.router.weight, "data", m.router.weight.clone()),
        lambda m: setattr(m.router, "weight", None),
        lambda m: m.router._parameters.pop("weight"),
    ],
    ids=["new parameter", "new data", "None", "deleted"],
)
def test_a_replaced_parameter_is_named(routed: Any, replace: Any) -> None:
    model, runner, x = routed
    runner(num_tokens=3, x=x)
    replace(model)
    with no_launch(runner.context), refuses(mm.MegaMoEError, "router.weight", "write into"):
        runner(num_tokens=3, x=x)


def test_the_module_behind_a_function_is_watched_when_given() -> None:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        model, x = Routed(make_layer(context)), named(make_config(), 3)["x"]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for step, module in ((lambda x: model(x), model), (compiled, None), (model, None)):
            runner = mm.GraphRunner(step, {"x": x}, [4], context, module=module)
            runner.capture()
            runner(num_tokens=3, x=x)
            model.router.weight = nn.Parameter(model.router.weight.clone())
            with refuses(mm.MegaMoEError, "router.weight"):
                runner(num_tokens=3, x=x)


def test_weights_loaded_in_place_are_seen(routed: Any) -> None:
    model, runner, x = routed
    first = runner(num_tokens=3, x=x)
    model.experts.load_weights(*random_checkpoint(runner.context.config, seed=9))
    second = runner(num_tokens=3, x=x)
    assert not torch.equal(first, second)
    with torch.no_grad():
        assert_close(second, model(x), 0.01)
    model.router.weight.data.mul_(-1)
    third = runner(num_tokens=3, x=x)
    assert not torch.equal(second, third)


# -- several runners, summary ---------------------------------------------------------------------


def test_several_runners_on_one_context(block: Block) -> None:
    context = block.experts.context
    doubled = lambda x, topk_ids, topk_weights: 2 * block(x, topk_ids, topk_weights)  # noqa: E731
    target, draft = make_runner(block, context, [4, 16]), make_runner(doubled, context, [2, 8])
    for step in range(6):
        large, small = named(context.config, 5 + step, step), named(context.config, step % 3, step)
        first = target(num_tokens=5 + step, **large)
        second = draft(num_tokens=step % 3, **small)
        assert_same(first, block(**large))
        assert_same(second, 2 * block(**small))


def test_summary(block: Block) -> None:
    runner = make_runner(block, block.experts.context, [1, 4])
    runner(num_tokens=3, **named(runner.context.config, 3))
    rows = runner.summary()
    assert [row.bucket for row in rows] == [1, 4]
    assert [row.replays for row in rows] == [0, 1]
    for row in rows:
        assert row.path == "compiled"
        assert row.backend == "reference"
        assert row.capture_seconds > 0
        assert row.graph_bytes == 0
        assert row.replay_microseconds > 0


def test_a_progress_bar_on_request(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    context = block.experts.context
    runner = mm.GraphRunner(block, named(context.config, 1), [1, 2], context)
    runner.capture()
    assert capsys.readouterr().err == ""
    runner.capture(progress=True)
    assert "2/2" in capsys.readouterr().err


def test_a_closed_context_refuses_replay(block: Block) -> None:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        # The second step asks no op, as a replay of a captured graph asks none.
        steps = (Block(make_layer(context)), lambda x, topk_ids, topk_weights: x)
        runners = [make_runner(step, context, [4]) for step in steps]
        inputs = named(context.config, 3)
        for runner in runners:
            runner(num_tokens=3, **inputs)
    for runner in runners:
        with no_launch(context), refuses(mm.ContextClosed):
            runner(num_tokens=3, **inputs)
        with no_launch(context), refuses(mm.ContextClosed):
            runner.capture()
