"""Steps over several ranks with captured graphs: as processes on one GPU, or on a GPU each.

On one GPU it shows correctness, never timing. There the gathers go through a SymmetricExchange;
with a GPU per rank they go through NCCL too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    DEVICE,
    KEPT,
    LIMIT,
    SHAPE,
    check,
    inputs_of,
    jitter,
    layer_with,
    whole_numbers,
)
from helpers import RankPool, assert_close, assert_same, make_config, named, outcome
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID

pytestmark = [pytest.mark.gpu, pytest.mark.multirank, pytest.mark.timeout(420)]

CAPACITY = 128
BUCKETS = [1, 8, 32]
plan_of = mm.StepPlan.from_counts


def _layer(**changes: Any) -> mm.MegaMoE:
    return layer_with([*BUCKETS, CAPACITY], max_tokens_per_rank=CAPACITY, **changes)


def _exchange(context: mm.MegaMoEContext, group: Any = None, name: str = "world") -> Any:
    if name not in KEPT:
        KEPT[name] = mm.SymmetricExchange(
            256, 2048, device=DEVICE, group=group or dist.group.WORLD, order=context.launch_count
        )
    return KEPT[name]


def _agree(tokens: int, **options: Any) -> mm.StepPlan:
    options = {"buckets": BUCKETS, "capacity": CAPACITY, **options}
    return mm.StepPlan.agree(tokens, dist.group.WORLD, **options)


# -- gathers through symmetric memory -------------------------------------------------------------


def exchange_scenario(rank: int, world_size: int) -> None:
    """S25: back to back and without a synchronization, one rank late; each call gets its rows."""
    exchanged = _exchange(_layer().context)
    generator = torch.Generator().manual_seed(0)
    kept = []
    for step in range(40):
        counts = torch.randint(0, 33, (world_size,), generator=generator).tolist()
        mode = ("max_len", "sum_len")[step % 2]
        plan = plan_of(counts, rank, [32], mode=mode)  # type: ignore[arg-type]
        jitter(rank, step, world_size)
        gathered = mm.dp_gather(plan.pad(whole_numbers(rank, counts[rank], step)), plan, exchanged)
        summed = mm.dp_scatter(gathered * (rank + 1), plan, exchanged, reduce=True)
        kept.append((plan, gathered, summed, step))
    total = world_size * (world_size + 1) // 2
    for plan, gathered, summed, step in kept:
        rows = [whole_numbers(r, n, step) for r, n in enumerate(plan.tokens_per_rank)]
        assert_same(gathered[plan.real_rows("cuda")], torch.cat(rows), f"step {step}")
        assert_same(summed[: plan.num_tokens], rows[rank] * total, f"step {step}")
        assert not summed[plan.num_tokens :].any()


def replayed_exchange_scenario(rank: int, world_size: int) -> None:
    """An odd number of exchanges in a graph, replayed with other rows, one rank late."""
    exchanged = _exchange(_layer().context)
    plan = mm.StepPlan.of_bucket(8, world_size, rank)
    x = whole_numbers(rank, 8, 0)
    count = torch.tensor([8], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        gathered = mm.dp_gather(x, plan, exchanged)
        summed = mm.dp_scatter(gathered, plan, exchanged, reduce=True, num_valid=count)
        return mm.dp_gather(summed, plan, exchanged), summed

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        together, summed = step()
    kept = []
    for turn in range(20):
        jitter(rank, turn, world_size)
        x.copy_(whole_numbers(rank, 8, turn))
        count.fill_(turn % 9)
        graph.replay()
        kept.append((together.clone(), summed.clone()))
        if turn % 5 == 0:  # eager calls between replays
            mm.dp_gather(x, plan, exchanged)
    for turn, (whole, own) in enumerate(kept):
        rows = [whole_numbers(r, 8, turn) * world_size for r in range(world_size)]
        for part in rows:
            part[turn % 9 :] = 0
        assert_same(own, rows[rank], f"replay {turn}")
        assert_same(whole, torch.cat(rows), f"replay {turn}")


def compiled_exchange_scenario(rank: int, world_size: int) -> None:
    """Compiled, captured by the runner, in one program with the layer, in program order."""
    layer = _layer()
    context = layer.context
    exchanged = _exchange(context)

    def step(
        hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: mm.StepPlan
    ) -> tuple[Tensor, Tensor]:
        gathered = mm.dp_gather(hidden_states, plan, exchanged)
        y: Tensor = layer(hidden_states, topk_ids, topk_weights)
        own = mm.dp_scatter(gathered, plan, exchanged, num_valid=context.num_valid)
        mean = mm.dp_scatter(gathered, plan, exchanged, reduce=True, num_valid=context.num_valid)
        return y, own + mean / world_size

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    example = named(inputs_of(rank, 2, 0))
    runner = mm.GraphRunner(compiled, example, BUCKETS, context, with_plan=True)
    runner.capture()
    for seed, counts in enumerate([[3, 0], [8, 8], [0, 0], [1, 0], [32, 5], [0, 7], [2, 2]]):
        counts = (counts * world_size)[:world_size]
        plan = _agree(counts[rank])
        inputs = inputs_of(rank, counts[rank], seed)
        jitter(rank, seed, world_size)
        y, doubled = runner(plan=plan, **named(inputs))
        check(layer, inputs, y, f"{counts}")
        assert_close(doubled, inputs[0] * 2, 0.01, f"{counts}")


# -- steps ----------------------------------------------------------------------------------------


def random_steps_scenario(rank: int, world_size: int) -> None:
    """S01, S04, S36: replays and eager steps as the plan says, zeros and ones often."""
    layer = _layer()
    context = layer.context
    runner = mm.GraphRunner(layer, named(inputs_of(rank, 2, 0)), BUCKETS, context)
    runner.capture()
    generator = torch.Generator().manual_seed(1)
    start = int(context.launch_count)
    for step in range(200):
        counts = torch.randint(0, 48, (world_size,), generator=generator)
        kind = torch.rand(world_size, generator=generator)
        counts[kind < 0.4] = 0
        counts[(kind >= 0.4) & (kind < 0.5)] = 1
        plan = _agree(int(counts[rank]))
        inputs = inputs_of(rank, plan.num_tokens, step)
        if step % 7 == 0:
            jitter(rank, step, world_size)
        y = runner(plan=plan) if plan.is_idle else runner(plan=plan, **named(inputs))
        check(layer, inputs, y, f"step {step}: {plan}")
    assert int(context.launch_count) == start + 200
    assert int(context.num_valid) == ALL_VALID


def refused_scenario(rank: int, world_size: int) -> list[str]:
    """One rank's input is wrong, then one rank is over the capacity: nobody launches."""
    layer = _layer()
    context = layer.context
    runner = mm.GraphRunner(
        layer, named(inputs_of(rank, 2, 0)), BUCKETS, context, verify=dist.group.WORLD
    )
    runner.capture()
    before = int(context.launch_count)
    plan = _agree(4)
    bad = inputs_of(rank, 4 - (rank == 1), 0)
    texts = [outcome(lambda: runner(plan=plan, **named(bad)))]
    over = _agree(129 if rank == 0 else 1)
    inputs = inputs_of(rank, over.num_tokens, 0)
    texts.append(outcome(lambda: runner(plan=over, **named(inputs))))
    assert int(context.launch_count) == before
    good = inputs_of(rank, 4, 1)
    check(layer, good, runner(plan=plan, **named(good)), "after refusals")
    return texts


def chunked_scenario(rank: int, world_size: int) -> None:
    """S11: as many chunks on every rank, those without rows too; equal to one launch."""
    layer = _layer(over_capacity="chunk")
    context = layer.context
    runner = mm.GraphRunner(layer, named(inputs_of(rank, 2, 0)), BUCKETS, context)
    runner.capture()
    for seed, counts in enumerate([[300, 0], [1, 129], [0, 8], [257, 256], [128, 128]]):
        counts = (counts * world_size)[:world_size]
        plan = _agree(counts[rank])
        inputs = inputs_of(rank, counts[rank], seed)
        before = int(context.launch_count)
        y = runner(plan=plan, **named(inputs))
        launches = 1 if plan.bucket else -(-max(counts) // 128)
        assert int(context.launch_count) == before + launches
        check(layer, inputs, y, f"{counts}")
    before = int(context.launch_count)
    assert "context.step(plan)" in outcome(lambda: layer(*inputs_of(rank, 3, 0)))
    assert int(context.launch_count) == before


def unsynchronized_scenario(rank: int, world_size: int) -> None:
    """S40: a step waits for the device nowhere, with the count on the host or on the device."""
    layer = _layer()
    context = layer.context
    exchanged = _exchange(context)
    runner = mm.GraphRunner(layer, named(inputs_of(rank, 2, 0)), BUCKETS, context)
    runner.capture()
    inputs = inputs_of(rank, 3, 0)
    count = torch.tensor([2], dtype=torch.int32, device="cuda")
    plans = [plan_of([3] * world_size, rank, BUCKETS), plan_of([3] * world_size, rank)]
    dense = plan_of([3] * world_size, rank, mode="sum_len")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [runner(plan=plan, **named(inputs)) for plan in plans]
        with context.step(plans[1]):
            masked = layer(*inputs, num_valid=count)
        for plan in (plans[1], dense):
            gathered = mm.dp_gather(inputs[0], plan, exchanged)
            back = mm.dp_scatter(gathered, plan, exchanged)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for y in results:
        check(layer, inputs, y, "without synchronization")
    assert masked.any(dim=1).tolist() == [True, True, False]
    assert_same(back, inputs[0])


def tensor_parallel_scenario(rank: int, world_size: int) -> None:
    """S10, S33: attention TP 2 in a captured step, odd counts, a DP rank without tokens."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    layer = _layer()
    context = layer.context
    tp = _exchange(context, pairs[rank // 2], "pair")

    def step(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        x = mm.attn_tp_split(hidden_states, tp)
        ids = mm.attn_tp_split(topk_ids, tp, fill=-1)
        weights = mm.attn_tp_split(topk_weights, tp)
        valid = mm.attn_tp_num_valid(context.num_valid, x.shape[0], tp)
        y = layer(x, ids, weights, num_valid=valid)
        return mm.attn_tp_gather(y, hidden_states.shape[0], tp)

    context.warmup([1, 4, 16])
    for call in (step, torch.compile(step, fullgraph=True, dynamic=True)):
        runner = mm.GraphRunner(call, named(inputs_of(rank, 2, 0)), BUCKETS, context)
        runner.capture()
        for seed, counts in enumerate([(1, 0), (3, 5), (0, 0), (8, 7), (31, 1), (40, 33)]):
            own = counts[rank // 2 % 2]
            inputs = inputs_of(100 + rank // 2, own, seed)
            jitter(rank, seed, world_size)
            y = runner(plan=_agree(own, attn_tp=2), **named(inputs))
            check(layer, inputs, y, f"{counts}")


SCENARIOS = [
    exchange_scenario,
    replayed_exchange_scenario,
    compiled_exchange_scenario,
    random_steps_scenario,
    chunked_scenario,
    unsynchronized_scenario,
    tensor_parallel_scenario,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_ranks_on_one_gpu(pool: RankPool, scenario: Any) -> None:
    pool.run(scenario, timeout=LIMIT)


def test_refusals_are_the_same_on_every_rank(pool: RankPool) -> None:
    replies = pool.run(refused_scenario, timeout=LIMIT)
    assert all(reply == replies[0] for reply in replies)
    bad, over = replies[0]
    assert bad.startswith("ValueError: rank 1: input 'hidden_states'")
    assert over.startswith("CapacityError: ") and "over_capacity='chunk'" in over


# -- a GPU per rank -------------------------------------------------------------------------------


def nccl_scenario(rank: int, world_size: int) -> None:
    """Functional collectives over NCCL, compiled and captured; plans over the gloo group."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = dist.new_group(backend="nccl")
    context = mm.MegaMoEContext(make_config(**SHAPE, max_tokens_per_rank=CAPACITY), group, device)

    def step(x: Tensor, plan: mm.StepPlan) -> tuple[Tensor, Tensor]:
        gathered = mm.dp_gather(x, plan, group)
        summed = mm.dp_scatter(gathered, plan, group, reduce=True, num_valid=context.num_valid)
        part = mm.attn_tp_split(gathered, group)
        return summed, mm.attn_tp_gather(part, gathered.shape[0], group)

    refused = outcome(lambda: mm.StepPlan.agree(1, group, BUCKETS))
    assert refused.startswith("ValueError: group") and "backend='gloo'" in refused
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    runner = mm.GraphRunner(
        compiled, {"x": whole_numbers(rank, 4, 0)}, BUCKETS, context, with_plan=True
    )
    runner.capture()
    for seed, counts in enumerate([[3, 0], [8, 8], [0, 0], [1, 31]] * 2):
        counts = (counts * world_size)[:world_size]
        plan = _agree(counts[rank])
        x = whole_numbers(rank, counts[rank], seed)
        jitter(rank, seed, world_size)
        summed, whole = runner(plan=plan, x=x)
        assert_same(summed, x * world_size, f"{counts}")
        assert whole.shape[0] == world_size * (plan.bucket or 0)
        for mode in ("max_len", "sum_len"):
            eager = plan_of(counts, rank, mode=mode)  # type: ignore[arg-type]
            gathered = mm.dp_gather(eager.pad(x), eager, group)
            rows = [whole_numbers(r, n, seed) for r, n in enumerate(counts)]
            assert_same(gathered[eager.real_rows(device)], torch.cat(rows), f"{mode} {counts}")
    context.close()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_nccl_on_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = RankPool(2, tmp_path_factory.mktemp("nccl"))
    try:
        made.run(nccl_scenario, timeout=LIMIT)
    finally:
        made.close()
