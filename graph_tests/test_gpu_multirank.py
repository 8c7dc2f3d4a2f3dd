"""Several ranks of the deep_gemm backend as processes on one GPU: correctness, never timing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    RankPool,
    assert_close,
    assert_same,
    make_config,
    outcome,
    random_checkpoint,
    random_inputs,
)

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference import (
    interleave_gate_up,
    moe_reference,
)
from megamoe_compile.custom_ops.symmetric import OVERLAP_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.multirank, pytest.mark.timeout(420)]

SHAPE: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=256, num_experts=16, top_k=4, max_tokens_per_rank=2048
)
LIMIT = 240  # seconds for one scenario on all ranks, compilations included
KEPT: dict[str, Any] = {}  # of a rank's process, between scenarios


@pytest.fixture(scope="module", params=[2, 4, 8])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    made = RankPool(
        request.param, tmp_path_factory.mktemp("ranks"), environment={OVERLAP_VARIABLE: "1"}
    )
    yield made
    made.close()


def _layer(rank: int, world_size: int) -> mm.MegaMoE:
    """One context and layer per process, with this rank's experts; rebuilt after a restart."""
    if "layer" not in KEPT:
        config = make_config(**SHAPE)
        context = mm.MegaMoEContext(config, dist.group.WORLD, "cuda:0")
        assert context.backend == "deep_gemm", context.reason
        layer = mm.MegaMoE(context)
        checkpoint = random_checkpoint(config)
        w13 = torch.stack([interleave_gate_up(w) for w in checkpoint.w13]).cuda()
        assert checkpoint.w13_scale is not None and checkpoint.w2_scale is not None
        KEPT["all"] = (
            w13,
            checkpoint.w13_scale.cuda(),
            checkpoint.w2.cuda(),
            checkpoint.w2_scale.cuda(),
        )
        layer.load_weights(*checkpoint)
        context.warmup([1, 8, 32, 128])
        KEPT["layer"] = layer
    return KEPT["layer"]


def _inputs(rank: int, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    return random_inputs(make_config(**SHAPE), tokens, seed=seed * 100 + rank, device="cuda")


def _check(layer: mm.MegaMoE, inputs: tuple[torch.Tensor, ...], y: torch.Tensor, what: str) -> None:
    assert y.shape == inputs[0].shape, what
    if y.shape[0]:
        group = layer.context._runtime.intermediate_group  # type: ignore[union-attr]
        want = moe_reference(*inputs, *KEPT["all"], intermediate_group=group)  # type: ignore[misc]
        assert_close(y, want, 0.03 if y.shape[0] < 8 else 0.02, what)


def _uneven(world_size: int) -> list[list[int]]:
    base = [[32, 0, 7, 128], [1, 2048], [0], [0, 64], [128, 129], [64, 65, 1, 0], [1], [128]]
    return [(counts * world_size)[:world_size] for counts in base]


def eager_scenario(rank: int, world_size: int) -> None:
    layer = _layer(rank, world_size)
    for seed, counts in enumerate(_uneven(world_size)):
        inputs = _inputs(rank, counts[rank], seed)
        _check(layer, inputs, layer(*inputs), f"eager {counts}")


def compiled_scenario(rank: int, world_size: int) -> None:
    """One rank's result is not used: the call must stay, or its peers would wait for ever."""
    layer = _layer(rank, world_size)

    def step(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        y = layer(x, ids, scores)
        z = layer(x, ids, scores)
        return x if rank == 0 else y + 0 * z

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seed, counts in enumerate(_uneven(world_size)):
            inputs = _inputs(rank, counts[rank], seed)
            before = int(layer.context.launch_count)
            y = compiled(*inputs)
            assert int(layer.context.launch_count) == before + 2, counts
            if rank:
                _check(layer, inputs, y, f"compiled {counts}")


def captured_scenario(rank: int, world_size: int) -> None:
    """All ranks replay one bucket; real counts are uneven, zero, and change between replays."""
    layer = _layer(rank, world_size)
    names = ("hidden_states", "topk_ids", "topk_weights")
    example = dict(zip(names, _inputs(rank, 1, 0), strict=True))
    runner = mm.GraphRunner(layer, example, [1, 8, 32, 128], layer.context)
    runner.capture()
    plans = [[32, 0, 7, 128], [1, 0], [0], [128], [8, 3, 5], [0, 0, 1], [1], [31, 32]]
    for seed, plan in enumerate(plans * 3):
        counts = (plan * world_size)[:world_size]
        bucket = runner.bucket_for(max(counts))
        inputs = _inputs(rank, counts[rank], seed)
        y = runner(num_tokens=counts[rank], bucket=bucket, **dict(zip(names, inputs, strict=True)))
        _check(layer, inputs, y, f"replay {counts}")
        eager = layer(*inputs)  # on every rank, between replays: launches stay equal
        # An expert's rank picks the kernel by its own number of tokens: only where all ranks have
        # the bucket's do eager and replay run the same ones.
        if counts == [bucket] * world_size:
            assert_same(y, eager, f"replay {counts}")
        else:
            assert_close(y, eager, 0.02, f"replay {counts}")
    assert "bucket" in outcome(
        lambda: runner(num_tokens=1, **dict(zip(names, _inputs(rank, 1, 0), strict=True)))
    )


def delayed_scenario(rank: int, world_size: int) -> None:
    """S25: rank 1 comes 50 ms late to every other call, on the host and on the device."""
    layer = _layer(rank, world_size)
    for turn in range(6):
        inputs = _inputs(rank, [32, 0, 7, 128][(rank + turn) % 4], turn)
        if rank == 1 and turn % 2:
            time.sleep(0.05)
            torch.cuda._sleep(20_000_000)
        first, second = layer(*inputs), layer(*inputs)
        _check(layer, inputs, first, f"turn {turn}")
        assert_same(second, first, f"turn {turn}")


def skewed_scenario(rank: int, world_size: int) -> None:
    """S08: all tokens of all ranks to one expert, and to the experts of one rank."""
    layer = _layer(rank, world_size)
    local = 16 // world_size
    for seed, expert in enumerate((0, 15)):
        x, ids, scores = _inputs(rank, 128, seed)
        ids = torch.full_like(ids, -1)
        ids[:, 0] = expert
        _check(layer, (x, ids, scores), layer(x, ids, scores), f"expert {expert}")
    x, ids, scores = _inputs(rank, 128, 3)
    ids = ids % local + (world_size - 1) * local
    _check(layer, (x, ids, scores), layer(x, ids, scores), "last rank's experts")


def random_scenario(rank: int, world_size: int) -> None:
    """S04: random counts, zeros often, without padding; the bits repeat."""
    layer = _layer(rank, world_size)
    generator = torch.Generator().manual_seed(0)
    for turn in range(40):
        counts = torch.randint(0, 129, (world_size,), generator=generator)
        counts[torch.rand(world_size, generator=generator) < 0.4] = 0
        inputs = _inputs(rank, int(counts[rank]), turn)
        _check(layer, inputs, layer(*inputs), f"turn {turn}: {counts.tolist()}")


def second_context_scenario(rank: int, world_size: int) -> None:
    """S53, S57: a second live context, memory used unevenly before; closed in another order."""
    layer = _layer(rank, world_size)
    if rank == 0:
        ballast = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del ballast
    config = make_config(**{**SHAPE, "max_tokens_per_rank": 256})
    context = mm.MegaMoEContext(config, dist.group.WORLD, "cuda:0")
    other = mm.MegaMoE(context)
    other.load_weights(*random_checkpoint(config))
    inputs = _inputs(rank, 32 * (rank % 2), 5)
    a, b, c = layer(*inputs), other(*inputs), layer(*inputs)
    assert_same(a, c)
    _check(layer, inputs, b, "second context")
    if rank:
        time.sleep(0.05 * rank)
    context.close()
    _check(layer, inputs, layer(*inputs), "after close")


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

    different = make_config(**{**SHAPE, "max_tokens_per_rank": 128 + 128 * (rank % 2)})
    texts = [outcome(lambda: mm.MegaMoEContext(different, dist.group.WORLD, "cuda:0"))]
    allowed = os.environ.pop(OVERLAP_VARIABLE)
    texts.append(
        outcome(lambda: mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cuda:0"))
    )
    os.environ[OVERLAP_VARIABLE] = allowed
    return texts


def test_refusals_are_the_same_on_every_rank(tmp_path: Path) -> None:
    made = RankPool(2, tmp_path, environment={OVERLAP_VARIABLE: "1"})
    try:
        results = made.run(refused_scenario, timeout=LIMIT)
    finally:
        made.close()
    assert results[0] == results[1]
    different, shared = results[0]
    assert "config of rank 1" in different and "ValueError" in different
    assert "GPU" in shared and OVERLAP_VARIABLE in shared


def exit_scenario(rank: int, world_size: int, order: str) -> None:
    layer = _layer(rank, world_size)
    inputs = _inputs(rank, 8, 0)
    layer(*inputs)
    if order == "group_first":
        dist.destroy_process_group()
    if order != "never":
        layer.context.close()
    if order == "context_first":
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["group_first", "context_first", "never"])
def test_teardown_in_any_order_does_not_hang(tmp_path: Path, order: str) -> None:
    made = RankPool(2, tmp_path, environment={OVERLAP_VARIABLE: "1"})
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
