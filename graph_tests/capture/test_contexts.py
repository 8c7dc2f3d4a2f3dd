"""A step over several geometries: MegaMoEContexts, and the runner over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same, make_config, make_layer, random_inputs, refuses
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID

WIDTHS = (128, 256)


@pytest.fixture
def contexts() -> Iterator[mm.MegaMoEContexts]:
    first = mm.MegaMoEContext(make_config(intermediate_size=WIDTHS[0]), device="cpu")
    second = mm.MegaMoEContext(
        make_config(intermediate_size=WIDTHS[1]), device="cpu", num_valid=first.num_valid
    )
    with mm.MegaMoEContexts([first, second]) as made:
        yield made


class Step(nn.Module):
    """A layer of each geometry, one after the other, as in a model."""

    def __init__(self, contexts: mm.MegaMoEContexts) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(c, seed=n) for n, c in enumerate(contexts.contexts))

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states, topk_ids, topk_weights)
        return hidden_states


def runner_of(step: Step, contexts: Any, compiled: bool = False) -> mm.GraphRunner:
    x, ids, weights = random_inputs(make_config(), 1)
    example = {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}
    run: Any = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    runner = mm.GraphRunner(run, example, [2, 8], contexts, module=step)
    runner.capture(progress=False)
    return runner


@pytest.mark.parametrize("compiled", [False, True])
def test_every_layer_skips_the_pad_rows(contexts: mm.MegaMoEContexts, compiled: bool) -> None:
    step = Step(contexts)
    runner = runner_of(step, contexts, compiled)
    seen: list[Tensor] = []
    for layer in step.layers:
        layer.register_forward_hook(lambda layer, args, y: seen.append(y.clone()))
    for tokens in (8, 5, 0, 1):
        inputs = random_inputs(make_config(), tokens, seed=tokens)
        names = dict(zip(("hidden_states", "topk_ids", "topk_weights"), inputs, strict=True))
        expected = step(*inputs)
        seen.clear()
        assert_same(runner(num_tokens=tokens, **names), expected, f"{tokens} tokens")
        if not compiled:
            assert len(seen) == 2
            for y in seen:  # the bucket's rows: those behind the real ones are not routed
                assert bool(y[:tokens].any()) == bool(tokens)
                assert not y[tokens:].any(), "a pad row was routed"
        assert int(contexts.num_valid) == ALL_VALID


def test_the_runner_warms_up_and_watches_each(
    contexts: mm.MegaMoEContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = []
    monkeypatch.setattr(
        mm.MegaMoEContext, "warmup", lambda context, buckets: warmed.append((context, buckets))
    )
    step = Step(contexts)
    runner = runner_of(step, contexts)
    assert warmed == [(context, [2, 8]) for context in contexts.contexts]
    assert [row.backend for row in runner.summary()] == ["reference", "reference"]
    layer: Any = step.layers[1]
    layer.w13 = layer.w13.clone()
    with refuses(mm.MegaMoEError, "contexts[1].MegaMoE[0]"):
        runner(num_tokens=0)


def test_one_graph(contexts: mm.MegaMoEContexts) -> None:
    step = Step(contexts)
    names = ["hidden_states", "topk_ids", "topk_weights"]
    compiled = mm.compile_one_graph(step, contexts, names, backend="aot_eager")
    for tokens in (3, 0, 1):
        inputs = random_inputs(make_config(), tokens)
        assert_same(compiled(*inputs), step(*inputs), f"{tokens} tokens")
    with refuses(mm.CapacityError, "at most 64", "65"):
        compiled(*random_inputs(make_config(), 65))


def test_one_closed_is_enough(contexts: mm.MegaMoEContexts) -> None:
    runner = runner_of(Step(contexts), contexts)
    assert not contexts.closed
    contexts.contexts[1].close()
    assert contexts.closed
    with refuses(mm.ContextClosed, "open"):
        runner(num_tokens=0)
    with refuses(mm.ContextClosed, "open"):
        contexts.__enter__()


@pytest.mark.parametrize("failing", [0, 1])
def test_all_are_closed(
    contexts: mm.MegaMoEContexts, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    close = mm.MegaMoEContext.close

    def fail(context: mm.MegaMoEContext) -> None:
        if context is contexts.contexts[failing]:
            raise RuntimeError("the driver")
        close(context)

    monkeypatch.setattr(mm.MegaMoEContext, "close", fail)
    with pytest.raises(RuntimeError, match="the driver"):
        contexts.close()
    assert contexts.contexts[1 - failing].closed, "the failure of another left it open"
    monkeypatch.undo()
    contexts.close()
    assert all(context.closed for context in contexts.contexts)


def test_plan_and_sums(contexts: mm.MegaMoEContexts) -> None:
    assert contexts.launches_per_call(mm.StepPlan.from_counts([64])) == 1
    with refuses(mm.CapacityError, "at most 64"):
        contexts.launches_per_call(mm.StepPlan.from_counts([65]))
    assert (contexts.rank, contexts.world_size, contexts.backend) == (0, 1, "reference")
    step = Step(contexts)
    x, ids, weights = random_inputs(make_config(), 4)
    ids[1, 0] = 9
    step(x, ids, weights)
    assert contexts.invalid_id_count == 2
    contexts.num_valid.fill_(1)
    contexts.reset()
    assert int(contexts.num_valid) == ALL_VALID
    assert [int(context.launch_count) for context in contexts.contexts] == [0, 0]


def test_contexts_that_do_not_go_together() -> None:
    def context(**changes: Any) -> mm.MegaMoEContext:
        return mm.MegaMoEContext(make_config(**changes), device="cpu")

    first = context()
    shared = dict(device="cpu", num_valid=first.num_valid)
    with refuses(ValueError, "at least one"):
        mm.MegaMoEContexts([])
    with refuses(ValueError, "num_valid of contexts[1]", "num_valid=contexts[0].num_valid"):
        mm.MegaMoEContexts([first, context(intermediate_size=256)])
    small = mm.MegaMoEContext(make_config(max_tokens_per_rank=8), **shared)
    with refuses(ValueError, "capacity of contexts[1]", "64", "8"):
        mm.MegaMoEContexts([first, small])
    chunked = mm.MegaMoEContext(make_config(over_capacity="chunk"), **shared)
    with refuses(ValueError, "over_capacity of contexts[1]", "chunk"):
        mm.MegaMoEContexts([first, chunked])
    with refuses(ValueError, "num_valid of the context", "torch.int32 [1] on cpu", "torch.int64"):
        mm.MegaMoEContext(make_config(), device="cpu", num_valid=torch.tensor([1]))


@pytest.mark.gpu
def test_captured_over_two_geometries() -> None:
    first = mm.MegaMoEContext(make_config(backend="triton"), device="cuda")
    second = mm.MegaMoEContext(
        make_config(backend="triton", intermediate_size=256),
        device="cuda",
        num_valid=first.num_valid,
    )
    with mm.MegaMoEContexts([first, second]) as contexts:
        step = Step(contexts)
        inputs = random_inputs(make_config(), 8, device="cuda")
        names = ("hidden_states", "topk_ids", "topk_weights")
        example = dict(zip(names, inputs, strict=True))
        runner = mm.GraphRunner(step, example, [2, 8], contexts)
        runner.capture(progress=False)
        for tokens in (8, 5, 0, 1):
            given = {n: t[:tokens].clone() for n, t in example.items()}
            with torch.no_grad():
                # The bucket's rows, so that every kernel is the same.
                bucket = runner.bucket_for(tokens)
                padded = tuple(t[:bucket] for t in inputs)
                contexts.num_valid.fill_(tokens)
                expected = step(*padded)[:tokens]
                contexts.num_valid.fill_(ALL_VALID)
            assert_same(runner(num_tokens=tokens, **given), expected, f"{tokens} tokens")
            assert int(contexts.num_valid) == ALL_VALID
