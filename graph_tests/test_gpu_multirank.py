"""Several ranks of the deep_gemm backend as processes on one GPU: correctness, never timing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    DEVICE,
    LIMIT,
    SHAPE,
    check,
    inputs_of,
    layer_with,
    ranks_on_one_gpu,
)
from helpers import (
    RankPool,
    assert_close,
    assert_same,
    make_config,
    named,
    outcome,
    random_checkpoint,
)

import megamoe_compile as mm
from megamoe_compile.custom_ops.symmetric.memory import OVERLAP_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.multirank, pytest.mark.timeout(420)]

CAPACITY = 2048


def _layer() -> mm.MegaMoE:
    layer = layer_with([1, 8, 32, 128], max_tokens_per_rank=CAPACITY)
    assert layer.context.backend == "deep_gemm", layer.context.reason
    return layer


def _uneven(world_size: int) -> list[list[int]]:
    base = [[32, 0, 7, 128], [1, 2048], [0], [0, 64], [128, 129], [64, 65, 1, 0], [1], [128]]
    return [(counts * world_size)[:world_size] for counts in base]


def eager_scenario(rank: int, world_size: int) -> None:
    layer = _layer()
    for seed, counts in enumerate(_uneven(world_size)):
        inputs = inputs_of(rank, counts[rank], seed)
        check(layer, inputs, layer(*inputs), f"eager {counts}")


def compiled_scenario(rank: int, world_size: int) -> None:
    """One rank's result is not used: the call must stay, or its peers would wait for ever."""
    layer = _layer()

    def step(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        y = layer(x, ids, scores)
        z = layer(x, ids, scores)
        return x if rank == 0 else y + 0 * z

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seed, counts in enumerate(_uneven(world_size)):
            inputs = inputs_of(rank, counts[rank], seed)
            before = int(layer.context.launch_count)
            y = compiled(*inputs)
            assert int(layer.context.launch_count) == before + 2, counts
            if rank:
                check(layer, inputs, y, f"compiled {counts}")


def captured_scenario(rank: int, world_size: int) -> None:
    """All ranks replay one bucket; real counts are uneven, zero, and change between replays."""
    layer = _layer()
    example = named(inputs_of(rank, 1, 0))
    runner = mm.GraphRunner(layer, example, [1, 8, 32, 128], layer.context)
    runner.capture()
    plans = [[32, 0, 7, 128], [1, 0], [0], [128], [8, 3, 5], [0, 0, 1], [1], [31, 32]]
    for seed, plan in enumerate(plans * 3):
        counts = (plan * world_size)[:world_size]
        bucket = runner.bucket_for(max(counts))
        inputs = inputs_of(rank, counts[rank], seed)
        y = runner(num_tokens=counts[rank], bucket=bucket, **named(inputs))
        check(layer, inputs, y, f"replay {counts}")
        eager = layer(*inputs)  # on every rank, between replays: launches stay equal
        # An expert's rank picks the kernel by its own number of tokens: only where all ranks have
        # the bucket's do eager and replay run the same ones.
        if counts == [bucket] * world_size:
            assert_same(y, eager, f"replay {counts}")
        else:
            assert_close(y, eager, 0.02, f"replay {counts}")
    assert "bucket" in outcome(lambda: runner(num_tokens=1, **example))


def delayed_scenario(rank: int, world_size: int) -> None:
    """S25: rank 1 comes 50 ms late to every other call, on the host and on the device."""
    layer = _layer()
    for turn in range(6):
        inputs = inputs_of(rank, [32, 0, 7, 128][(rank + turn) % 4], turn)
        if rank == 1 and turn % 2:
            time.sleep(0.05)
            torch.cuda._sleep(20_000_000)
        first, second = layer(*inputs), layer(*inputs)
        check(layer, inputs, first, f"turn {turn}")
        assert_same(second, first, f"turn {turn}")


def skewed_scenario(rank: int, world_size: int) -> None:
    """S08: all tokens of all ranks to one expert, and to the experts of one rank."""
    layer = _layer()
    local = 16 // world_size
    for seed, expert in enumerate((0, 15)):
        x, ids, scores = inputs_of(rank, 128, seed)
        ids = torch.full_like(ids, -1)
        ids[:, 0] = expert
        check(layer, (x, ids, scores), layer(x, ids, scores), f"expert {expert}")
    x, ids, scores = inputs_of(rank, 128, 3)
    ids = ids % local + (world_size - 1) * local
    check(layer, (x, ids, scores), layer(x, ids, scores), "last rank's experts")


def random_scenario(rank: int, world_size: int) -> None:
    """S04: random counts, zeros often, without padding; the bits repeat."""
    layer = _layer()
    generator = torch.Generator().manual_seed(0)
    for turn in range(40):
        counts = torch.randint(0, 129, (world_size,), generator=generator)
        counts[torch.rand(world_size, generator=generator) < 0.4] = 0
        inputs = inputs_of(rank, int(counts[rank]), turn)
        check(layer, inputs, layer(*inputs), f"turn {turn}: {counts.tolist()}")


def second_context_scenario(rank: int, world_size: int) -> None:
    """S53, S57: a second live context, memory used unevenly before; closed in another order."""
    layer = _layer()
    if rank == 0:
        ballast = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del ballast
    config = make_config(**SHAPE, max_tokens_per_rank=256)
    context = mm.MegaMoEContext(config, dist.group.WORLD, DEVICE)
    other = mm.MegaMoE(context)
    other.load_weights(*random_checkpoint(config))
    inputs = inputs_of(rank, 32 * (rank % 2), 5)
    a, b, c = layer(*inputs), other(*inputs), layer(*inputs)
    assert_same(a, c)
    check(layer, inputs, b, "second context")
    if rank:
        time.sleep(0.05 * rank)
    context.close()
    check(layer, inputs, layer(*inputs), "after close")


SCENARIOS = [
    eager_scenario,
    skewed_scenario,
    delayed_scenario,
    random_scenario,
    captured_scenario,
    compiled_scenario,
    second_context_scenario,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_ranks(pool: RankPool, scenario: Any) -> None:
    pool.run(scenario, timeout=LIMIT)


def refused_scenario(rank: int, world_size: int) -> list[str]:
    """Ranks that disagree, or share a GPU by mistake: one error on every rank, no hang."""
    import os

    different = make_config(**SHAPE, max_tokens_per_rank=128 + 128 * (rank % 2))
    texts = [outcome(lambda: mm.MegaMoEContext(different, dist.group.WORLD, DEVICE))]
    allowed = os.environ.pop(OVERLAP_VARIABLE)
    same = make_config(**SHAPE, max_tokens_per_rank=128)
    texts.append(outcome(lambda: mm.MegaMoEContext(same, dist.group.WORLD, DEVICE)))
    os.environ[OVERLAP_VARIABLE] = allowed
    return texts


def test_refusals_are_the_same_on_every_rank(tmp_path: Path) -> None:
    made = ranks_on_one_gpu(2, tmp_path)
    try:
        results = made.run(refused_scenario, timeout=LIMIT)
    finally:
        made.close()
    assert results[0] == results[1]
    different, shared = results[0]
    assert "config of rank 1" in different and "ValueError" in different
    assert "GPU" in shared and OVERLAP_VARIABLE in shared


def exit_scenario(rank: int, world_size: int, order: str) -> None:
    layer = _layer()
    inputs = inputs_of(rank, 8, 0)
    layer(*inputs)
    if order == "group_first":
        dist.destroy_process_group()
    if order != "never":
        layer.context.close()
    if order == "context_first":
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["group_first", "context_first", "never"])
def test_teardown_in_any_order_does_not_hang(tmp_path: Path, order: str) -> None:
    made = ranks_on_one_gpu(2, tmp_path)
    try:
        made.run(exit_scenario, order, timeout=LIMIT)
        for pipe in made._pipes:
            pipe.close()  # the children's loop ends, and the interpreters exit on their own
        deadline = time.monotonic() + 30
        for process in made._processes:
            process.join(max(deadline - time.monotonic(), 0))
            assert process.exitcode is not None, f"{order}: a rank did not exit"
    finally:
        made.close()
