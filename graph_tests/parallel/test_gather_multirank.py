"""Gathers, scatters and attention TP over two and four gloo processes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_close, assert_one_sentence, assert_same, make_layer, named, outcome
from step_helpers import (
    BUCKETS,
    SHAPE,
    WORLDS,
    OneProcess,
    Ranks,
    agree,
    alike,
    inputs_of,
    make_context,
    make_runner,
    plan_of,
)
from torch import Tensor
from torch._dynamo.utils import counters

import megamoe_compile as mm

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(200)]


# -- gathers --------------------------------------------------------------------------------------

GATHERED = [[3, 0, 8, 1], [1, 0, 0, 0], [0, 0, 0, 0], [5, 5, 5, 5], [1, 1, 1, 1], [0, 7, 0, 2]]


def gather_steps(rank: int, world_size: int, how: str, modes: tuple[str, ...]) -> int:
    """Both modes, with and without a bucket, against what one process sees."""
    group = dist.group.WORLD

    def step(x: Tensor, plan: mm.StepPlan) -> tuple[Tensor, ...]:
        gathered = mm.dp_gather(x, plan, group)
        return (
            gathered,
            mm.dp_scatter(gathered, plan, group),
            mm.dp_scatter(gathered * (rank + 1), plan, group, reduce=True),
        )

    call: Callable[..., Any] = step
    if how != "eager":
        call = torch.compile(step, fullgraph=True, dynamic=True, backend=how)
    with torch.no_grad():
        for counts in [counts[:world_size] for counts in GATHERED]:
            own = [
                torch.arange(r * 100.0, r * 100 + 4 * n).view(n, 4) for r, n in enumerate(counts)
            ]
            results = {}
            for mode in modes:
                for buckets in [[], [8]]:
                    plan = plan_of(counts, rank, buckets, mode=mode)  # type: ignore[arg-type]
                    x = plan.pad(own[rank], fill=7)
                    gathered, back, summed = outputs = call(x, plan)
                    assert all(type(y) is Tensor for y in outputs), "no lazy tensor leaks"
                    assert gathered.shape == (plan.gathered_rows, 4)
                    assert torch.equal(gathered[plan.real_rows()], torch.cat(own))
                    total = world_size * (world_size + 1) / 2
                    for y, scale in ((back, 1.0), (summed, total)):
                        assert y.shape == (plan.local_rows, 4)
                        n = plan.num_tokens
                        assert torch.allclose(y[:n], own[rank] * scale)
                        assert not y[n:].any(), "S30: pad rows are zero"
                        storage = y.untyped_storage().data_ptr()
                        assert not n or storage != gathered.untyped_storage().data_ptr()
                    results[mode, len(buckets)] = gathered[plan.real_rows()]
            assert all(torch.equal(rows, torch.cat(own)) for rows in results.values())
    return int(counters["stats"]["unique_graphs"])


@WORLDS
def test_s20_s31_s33_s35_both_modes_give_the_same_rows(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(gather_steps, "eager", ("max_len", "sum_len"))


def compiled_gather_steps(rank: int, world_size: int) -> list[int]:
    graphs = []
    for mode in ("max_len", "sum_len"):
        torch._dynamo.reset()
        counters.clear()
        graphs.append(gather_steps(rank, world_size, "aot_eager", (mode,)))
    return graphs


def test_s35_gathers_compile_into_few_graphs(ranks: Ranks) -> None:
    """fullgraph, with symbolic sizes: a graph for each of the sizes 0, 1 and other; in sum_len mode
    of this rank's rows and of the sum."""
    for max_len, sum_len in ranks(2).run(compiled_gather_steps, timeout=150):
        assert max_len <= 3 and sum_len <= 6


def inductor_steps(rank: int, world_size: int) -> None:
    group = dist.group.WORLD

    def step(x: Tensor, plan: mm.StepPlan) -> Tensor:
        gathered = mm.dp_gather(x, plan, group)
        mm.dp_gather(x, plan, group)  # dropped on every rank, or on none
        return mm.dp_scatter(gathered.sin(), plan, group, reduce=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for counts in ([3, 5], [4, 2]):
        plan = plan_of(counts, rank, mode="sum_len")
        x = torch.arange(4.0 * counts[rank]).view(-1, 4)
        assert torch.allclose(compiled(x, plan), x.sin() * world_size, atol=1e-5)


def test_s35_gathers_compile_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(inductor_steps, timeout=150)


def refused_gathers(rank: int, world_size: int) -> None:
    """Every rank is refused on its own, before anything is sent: the group is not out of step."""
    group = dist.group.WORLD
    plan = plan_of([3] * world_size, rank, [4])
    dense = plan_of([3] * world_size, rank, mode="sum_len")
    one = plan_of([3], 0)
    for bad in (
        lambda: mm.dp_gather(torch.zeros(3, 2), plan, group),
        lambda: mm.dp_gather(torch.zeros(4, 2), dense, group),
        lambda: mm.dp_scatter(torch.zeros(4 * world_size + 1, 2), plan, group, reduce=True),
        lambda: mm.dp_scatter(torch.zeros(4 * world_size, 2), dense, group, reduce=True),
        lambda: mm.attn_tp_gather(torch.zeros(3, 2), 2 * world_size, group),
        lambda: mm.dp_gather(torch.zeros(3, 2), one, group),
        lambda: mm.dp_gather(torch.zeros(4, 2), plan, None),
    ):
        text = outcome(bad)
        assert text.startswith("ValueError: "), text
        assert_one_sentence(text)
    rows = torch.full((4, 2), float(rank))
    assert torch.equal(mm.dp_gather(rows, plan, group)[::4, 0], torch.arange(float(world_size)))


@WORLDS
def test_wrong_sizes_are_refused_before_the_collective(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(refused_gathers)


def gathered_experts(rank: int, world_size: int) -> None:
    """A backend without dispatch: gather the tokens, run the local experts, reduce-scatter."""
    reference, group = OneProcess(), dist.group.WORLD
    local = SHAPE["num_experts"] // world_size

    def step(
        hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: mm.StepPlan
    ) -> Tensor:
        x = mm.dp_gather(hidden_states, plan, group)
        ids = mm.dp_gather(topk_ids, plan, group)
        weights = mm.dp_gather(topk_weights, plan, group)
        mine = torch.where(ids // local == rank, ids, -1)
        return mm.dp_scatter(reference.layer(x, mine, weights).float(), plan, group, reduce=True)

    with make_context() as context:
        runner = make_runner(context, step, with_plan=True)
        for seed, counts in enumerate(GATHERED):
            counts = counts[:world_size]
            for mode in ("max_len", "sum_len"):
                buckets = BUCKETS if seed % 2 else []
                plan = plan_of(counts, rank, buckets, mode=mode)  # type: ignore[arg-type]
                batches = [inputs_of(r, counts[r], seed) for r in range(world_size)]
                inputs = named(batches[rank])
                if plan.bucket is None:
                    inputs = {name: plan.pad(rows) for name, rows in inputs.items()}
                    with context.step(plan):
                        y = step(**inputs, plan=plan)[: counts[rank]]
                else:
                    y = runner(plan=plan, **inputs)
                want = reference(batches)[rank]
                assert y.shape == want.shape
                if y.numel():
                    assert_close(y, want.float(), 0.01, f"{mode} {counts}")


# -- attention TP ---------------------------------------------------------------------------------


def tensor_parallel_steps(rank: int, world_size: int) -> None:
    """Attention TP 2 x DP 2: the ranks of a pair hold the same tokens, and dispatch each once."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, dp = pairs[rank // 2], across[rank % 2]
    reference = OneProcess()
    with make_context() as context, torch.no_grad():
        layer = make_layer(context)
        routed: list[int] = []

        def step(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = mm.attn_tp_split(hidden_states, tp)
            ids = mm.attn_tp_split(topk_ids, tp, fill=-1)
            weights = mm.attn_tp_split(topk_weights, tp)
            valid = mm.attn_tp_num_valid(context.num_valid, x.shape[0], tp)
            real = torch.arange(x.shape[0]) < valid
            routed.append(int(((ids >= 0).any(1) & real).sum()))
            y = layer(x, ids, weights, num_valid=valid)
            return mm.attn_tp_gather(y, hidden_states.shape[0], tp)

        runner = make_runner(context, step)
        cases = [(1, 0), (3, 5), (0, 0), (7, 8), (1, 1), (0, 3), (9, 12), (2, 31), (15, 4)]
        for seed, (first, second) in enumerate(cases):
            counts = [first, first, second, second]
            plan = agree(counts[rank], attn_tp=2, verify=True)
            batches = [inputs_of(r // 2, counts[r], seed) for r in range(4)]
            routed.clear()
            y = runner(plan=plan, **named(batches[rank]))
            both = reference([batches[0], batches[2]])
            assert_same(y, both[rank // 2], f"{counts}")
            total = torch.tensor(sum(routed))
            dist.all_reduce(total)
            assert int(total) == first + second, f"{counts}: {int(total)} tokens dispatched"
            # The rows of all DP ranks, over the group of the ranks with the same TP rank.
            for mode in ("max_len", "sum_len"):
                over = plan_of(counts, rank, attn_tp=2, mode=mode).across_dp()  # type: ignore
                gathered = mm.dp_gather(over.pad(y), over, dp)
                assert_same(gathered[over.real_rows()], torch.cat(both), f"{mode} {counts}")
        refused = outcome(lambda: agree(rank % 2, attn_tp=2))
        assert "attn_tp" in refused and alike(refused)


def test_s10_s33_attention_tp_2_x_dp_2(ranks: Ranks) -> None:
    """Odd counts, a DP rank without tokens: equal to one process, each token dispatched once."""
    ranks(4).run(tensor_parallel_steps, timeout=90)


def replicated_steps(rank: int, world_size: int) -> tuple[int, int]:
    """All ranks hold one batch: every rank dispatches all of it, or after a split its part."""
    reference = OneProcess()
    inputs = inputs_of(0, 5, 0)
    with make_context() as context:
        layer = make_layer(context)
        (want,) = reference([inputs])
        everything = layer(*inputs)
        assert_same(everything, want)
        group = dist.group.WORLD
        x, weights = (mm.attn_tp_split(t, group) for t in (inputs[0], inputs[2]))
        ids = mm.attn_tp_split(inputs[1], group, fill=-1)
        assert_same(mm.attn_tp_gather(layer(x, ids, weights), 5, group), want)
        return inputs[0].shape[0], int((ids >= 0).any(1).sum())


@WORLDS
def test_s10_replicated_tokens(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(replicated_steps)
    assert sum(whole for whole, _ in replies) == 5 * world_size
    assert sum(part for _, part in replies) == 5


@WORLDS
def test_a_step_that_gathers_tokens_and_scatters_sums(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(gathered_experts)
