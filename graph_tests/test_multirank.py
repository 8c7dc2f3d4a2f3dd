"""Two and four ranks over gloo on a CPU: uneven, idle, compiled, and failing together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Inputs,
    RankPool,
    assert_close,
    assert_one_sentence,
    assert_same,
    make_config,
    outcome,
    random_checkpoint,
    random_inputs,
)
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(200)]

SHAPE: dict[str, Any] = dict(num_experts=8, top_k=3)
WORLDS = pytest.mark.parametrize("world_size", [2, 4])
Ranks = Callable[[int], RankPool]
COUNTS = [
    [7, 7, 7, 7],
    [32, 0, 7, 64],
    [1, 64, 0, 0],
    [0, 0, 0, 0],
    [0, 5, 1, 2],
    [64, 64, 64, 64],
    [3, 0, 0, 0],
]


# -- what runs in the ranks' processes ------------------------------------------------------------


def inputs_of(rank: int, tokens: int, seed: int) -> Inputs:
    return random_inputs(make_config(**SHAPE), tokens, seed=seed * 10 + rank)


def make_layer_of(context: mm.MegaMoEContext, *, seed: int = 0, local: bool = False) -> mm.MegaMoE:
    """The experts of this rank, from a checkpoint of all or from this rank's part of it."""
    layer, config = mm.MegaMoE(context), context.config
    checkpoint = random_checkpoint(config, seed=seed)
    if local:
        geometry = context.weight_geometry
        mine = slice(geometry.first_expert, geometry.first_expert + geometry.num_local_experts)
        layer.load_weights(*(t.clone() for t in checkpoint[mine] if t is not None))
    else:
        layer.load_weights(*checkpoint)
    shared = random_checkpoint(config, seed=seed + 1000, experts=config.num_shared_experts or 1)
    for number in range(config.num_shared_experts):
        layer.load_expert(config.num_experts + number, *shared[number])  # type: ignore[arg-type]
    return layer


def steps(
    rank: int, world_size: int, changes: dict[str, Any], how: str
) -> tuple[list[Tensor], int, list[str]]:
    """All steps of COUNTS -> results of this rank, launches, and what was wrong."""
    with mm.MegaMoEContext(make_config(**SHAPE, **changes), dist.group.WORLD, "cpu") as context:
        layer = make_layer_of(context, local=how == "local")
        call: Callable[..., Tensor] = layer
        if how == "compiled":
            call = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        results = []
        with torch.no_grad():
            for seed, counts in enumerate(COUNTS):
                results.append(call(*inputs_of(rank, counts[rank], seed)))
        wrong = [] if (context.rank, context.world_size) == (rank, world_size) else ["rank"]
        return results, int(context.launch_count), wrong


def masked_step(rank: int, world_size: int) -> tuple[Tensor, Tensor, int]:
    """Each rank masks another number of rows; rank 1 has NaN rows and ids out of range."""
    with mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cpu") as context:
        layer = make_layer_of(context)
        x, ids, weights = inputs_of(rank, 6, 0)
        masked = layer(x, ids, weights, num_valid=rank)
        if rank == 1:
            x[2], ids[3, 0], ids[4, 1] = float("nan"), 99, -5
        return masked, layer(x, ids, weights), context.invalid_id_count


def discarded_step(rank: int, world_size: int) -> tuple[Tensor, int]:
    """The last rank's program does not use its first result, and the compiler sees that."""
    with mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cpu") as context:
        layer = make_layer_of(context)

        def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y = layer(x, ids, weights)
            again: Tensor = layer(x if rank == world_size - 1 else y, ids, weights)
            return again

        with torch.no_grad():
            compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                result = compiled(*inputs_of(rank, 2 * rank, 0))
        return result, int(context.launch_count)


def runner_steps(rank: int, world_size: int) -> tuple[list[Tensor], list[str], int]:
    """Every rank replays the bucket of the largest count; n = 0 takes part."""
    with mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cpu") as context:
        layer = make_layer_of(context)

        def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            result: Tensor = layer(x, topk_ids, topk_weights)
            return result

        names = ("x", "topk_ids", "topk_weights")
        example = dict(zip(names, inputs_of(rank, 2, 0), strict=True))
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        runner = mm.GraphRunner(compiled, example, [1, 8, 64], context)
        runner.capture()
        after_capture = int(context.launch_count)
        results = []
        for seed, counts in enumerate(COUNTS):
            call = dict(zip(names, inputs_of(rank, counts[rank], seed), strict=True))
            bucket = runner.bucket_for(max(counts[:world_size]))
            results.append(runner(num_tokens=counts[rank], bucket=bucket, **call))
        launches = int(context.launch_count)
        assert launches == after_capture + len(COUNTS)
        refusals = [outcome(lambda: runner(num_tokens=counts[rank], **call))]
        assert (int(context.launch_count), int(context.num_valid)) == (launches, ALL_VALID)
        return results, refusals, launches


def refused_constructions(rank: int, world_size: int) -> dict[str, str]:
    """Every rank gets the error, and the group is good for the next context."""

    def build(**changes: Any) -> str:
        config = make_config(**{**SHAPE, **changes})
        return outcome(lambda: mm.MegaMoEContext(config, dist.group.WORLD, "cpu"))

    last = rank == world_size - 1
    results = {
        "top_k": build(top_k=2 if last else 3),
        "capacity": build(max_tokens_per_rank=64 + rank),
        "experts": build(num_experts=7),
        "few experts": build(num_experts=3, top_k=1),
        "backend": build(backend="triton"),
    }
    probe = mm.context.probe

    def broken(config: Any, device: Any) -> mm.Capability:
        verdict = probe(config, device)
        return mm.Capability(None, "no nvcc", {}) if last else verdict

    mm.context.probe = broken  # type: ignore[assignment]
    try:
        results["one rank"] = build()
    finally:
        mm.context.probe = probe  # type: ignore[assignment]
    results["none"] = build()
    return results


def closed_use(rank: int, world_size: int) -> tuple[str, str]:
    context = mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cpu")
    layer = make_layer_of(context)
    layer(*inputs_of(rank, rank, 0))
    if rank == 0:
        time.sleep(0.2)  # the ranks need not close together
    context.close()
    context.close()
    call = outcome(lambda: layer(*inputs_of(rank, 1, 0)))
    return call, outcome(lambda: context.warmup([1]))


def subgroup_use(rank: int, world_size: int) -> tuple[str, Tensor | None, int]:
    """Ranks 1 and 2 of four are a group of two; the others are told that they are not in it."""
    group = dist.new_group([1, 2])
    config = make_config(**SHAPE)
    if rank not in (1, 2):
        return outcome(lambda: mm.MegaMoEContext(config, group, "cpu")), None, -1
    with mm.MegaMoEContext(config, group, "cpu") as context:
        result = make_layer_of(context)(*inputs_of(rank, 3 * rank, 0))
        return "", result, context.rank


def alternating_contexts(rank: int, world_size: int) -> list[Tensor]:
    """S42: target and draft on one group, rank 0 late to every second step."""
    with (
        mm.MegaMoEContext(make_config(**SHAPE), dist.group.WORLD, "cpu") as target,
        mm.MegaMoEContext(
            make_config(**SHAPE, max_tokens_per_rank=16), dist.group.WORLD, "cpu"
        ) as draft,
    ):
        layers = [make_layer_of(target), make_layer_of(draft, seed=5)]
        results = []
        for seed in range(4):
            if rank == 0 and seed % 2:
                time.sleep(0.05)
            for layer in layers:
                results.append(layer(*inputs_of(rank, (rank + seed) % 3 * 5, seed)))
        assert int(target.launch_count) == int(draft.launch_count) == 4
        return results


def group_of_one(rank: int, world_size: int) -> Tensor:
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    with mm.MegaMoEContext(make_config(**SHAPE), group, "cpu") as context:
        assert (context.rank, context.world_size) == (0, 1)
        return make_layer_of(context)(*inputs_of(0, 5, 0))


def nothing(rank: int, world_size: int) -> int:
    return rank


def sleeper(rank: int, world_size: int) -> None:
    time.sleep(60)


def failure(rank: int, world_size: int) -> None:
    raise KeyError(f"rank {rank}")


# -- the tests ------------------------------------------------------------------------------------


def one_rank(
    rows: list[Inputs], *, seed: int = 0, num_valid: list[int] | None = None, **changes: Any
) -> list[Tensor]:
    """What one rank with all experts computes for the tokens of all ranks together.

    A shared expert runs on its token's own rank, so there the tokens are not put together.
    """
    counts = [x.shape[0] for x, _, _ in rows]
    batches = [tuple(torch.cat(t) for t in zip(*rows, strict=True))]
    config = make_config(**SHAPE, **{"max_tokens_per_rank": 1024, **changes})
    with mm.MegaMoEContext(config, device="cpu") as context:
        layer = make_layer_of(context, seed=seed)
        if num_valid is not None:
            mask = torch.cat([torch.arange(n) < v for n, v in zip(counts, num_valid, strict=True)])
            batches[0][1][~mask] = -1
        return list(layer(*batches[0]).split(counts))


def check(results: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """results[rank][step] against expected[step][rank], bit for bit."""
    for rank, of_rank in enumerate(results):
        for step, got in enumerate(of_rank):
            assert_same(got, expected[step][rank], f"rank {rank}, step {step}")


@pytest.fixture(scope="module")
def expected() -> Callable[[int], list[list[Tensor]]]:
    kept: dict[int, list[list[Tensor]]] = {}

    def results(world_size: int) -> list[list[Tensor]]:
        if world_size not in kept:
            kept[world_size] = [
                one_rank([inputs_of(rank, counts[rank], seed) for rank in range(world_size)])
                for seed, counts in enumerate(COUNTS)
            ]
        return kept[world_size]

    return results


@WORLDS
@pytest.mark.parametrize("how", ["eager", "local", "compiled"])
def test_uneven_and_idle_ranks_equal_one_rank(
    ranks: Ranks, expected: Any, world_size: int, how: str
) -> None:
    """S01, S03, S04, S08: bit for bit, with a checkpoint of all experts or of the rank's own."""
    replies = ranks(world_size).run(steps, {}, how)
    check([results for results, _, _ in replies], expected(world_size))
    for results, launches, wrong in replies:
        assert launches == len(COUNTS), "an idle rank launches as often as a busy one"
        assert wrong == []
        assert [r.dtype for r in results] == [torch.bfloat16] * len(COUNTS)


@WORLDS
def test_shared_experts_and_a_clamp(ranks: Ranks, world_size: int) -> None:
    changes = dict(num_shared_experts=2, swiglu_limit=0.5, routed_scaling_factor=2.5)
    replies = ranks(world_size).run(steps, changes, "eager")
    for seed, counts in enumerate(COUNTS):
        rows = [inputs_of(rank, counts[rank], seed) for rank in range(world_size)]
        alone = one_rank(rows, **changes)
        for rank in range(world_size):
            # The shared experts' batch is the rank's, not all ranks': other orders of fp32 sums.
            if counts[rank]:
                assert_close(replies[rank][0][seed], alone[rank], 4e-3, f"rank {rank}")
            else:
                assert replies[rank][0][seed].shape == (0, 128)


@WORLDS
def test_masks_and_faults_stay_on_their_rank(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(masked_step)
    rows = [inputs_of(rank, 6, 0) for rank in range(world_size)]
    copies: list[Inputs] = [(x, ids.clone(), weights) for x, ids, weights in rows]
    masked = one_rank(copies, num_valid=list(range(world_size)))
    rows[1][0][2], rows[1][1][3, 0], rows[1][1][4, 1] = float("nan"), -1, -1
    whole = one_rank(rows)
    for rank, (got_masked, got, invalid) in enumerate(replies):
        assert_same(got_masked, masked[rank], f"masked, rank {rank}")
        assert not got_masked[rank:].any()
        assert_same(got, whole[rank], f"rank {rank}")
        assert invalid == (2 if rank == 1 else 0)
        assert bool(got.isnan().any()) == (rank == 1)


@WORLDS
def test_an_unused_result_still_launches(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(discarded_step)
    assert [launches for _, launches in replies] == [4] * world_size
    rows = [inputs_of(rank, 2 * rank, 0) for rank in range(world_size)]
    first = one_rank(rows)
    last = world_size - 1
    second = one_rank(
        [(rows[r][0] if r == last else first[r], rows[r][1], rows[r][2]) for r in range(world_size)]
    )
    for rank, (got, _) in enumerate(replies):
        assert_same(got, second[rank], f"rank {rank}")


@WORLDS
def test_the_runner_replays_one_bucket_on_all_ranks(
    ranks: Ranks, expected: Any, world_size: int
) -> None:
    replies = ranks(world_size).run(runner_steps)
    check([results for results, _, _ in replies], expected(world_size))
    assert len({launches for _, _, launches in replies}) == 1
    for _, refusals, _ in replies:
        (message,) = refusals
        assert message.startswith("ValueError")
        assert_one_sentence(message, "bucket", f"all {world_size} ranks", "bucket_for")


@WORLDS
def test_constructions_fail_on_every_rank(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(refused_constructions)
    last = world_size - 1
    for reply in replies:
        assert reply["none"] == "", "the group is still good"
        for name, error, words in (
            ("top_k", "ValueError", f"config of rank {last}"),
            ("capacity", "ValueError", "config of rank 1"),
            ("experts", "ValueError", "ep_size"),
            ("few experts", "ValueError", "ep_size"),
        ):
            assert reply[name].startswith(error), (name, reply[name])
            assert_one_sentence(reply[name], words)
        assert reply["one rank"] == f"BackendUnavailable: rank {last}: no nvcc"
        assert reply["backend"].startswith("BackendUnavailable: rank 0: ")
        assert reply == replies[0]


@WORLDS
def test_a_closed_context_on_every_rank(ranks: Ranks, world_size: int) -> None:
    for call, warmup in ranks(world_size).run(closed_use):
        for message in (call, warmup):
            assert message.startswith("ContextClosed")
            assert_one_sentence(message)


def test_a_subgroup(ranks: Ranks) -> None:
    """S54 in small, and S20: a rank outside must not take itself for a group of its own."""
    replies = ranks(4).run(subgroup_use)
    expected = one_rank([inputs_of(rank, 3 * rank, 0) for rank in (1, 2)])
    for rank, (message, result, group_rank) in enumerate(replies):
        if rank in (1, 2):
            assert (message, group_rank) == ("", rank - 1)
            assert_same(result, expected[rank - 1], f"rank {rank}")
        else:
            assert message.startswith("ValueError: group")
            assert_one_sentence(message, f"global rank {rank}")


@WORLDS
def test_s42_two_contexts_alternate(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(alternating_contexts)
    for seed in range(4):
        rows = [inputs_of(rank, (rank + seed) % 3 * 5, seed) for rank in range(world_size)]
        for which, weights_seed in enumerate((0, 5)):
            for rank, want in enumerate(one_rank(rows, seed=weights_seed)):
                assert_same(replies[rank][2 * seed + which], want, f"rank {rank}, {seed}, {which}")


def test_s20_a_group_of_one_rank_is_one_rank(ranks: Ranks) -> None:
    (expected,) = one_rank([inputs_of(0, 5, 0)])
    for result in ranks(2).run(group_of_one):
        assert_same(result, expected)


def test_a_hang_and_a_failure_fail_the_test(tmp_path: Path) -> None:
    """The helper itself: no test of ranks can wait for ever, and the next one gets new ranks."""
    pool = RankPool(1, tmp_path)
    try:
        assert pool.run(nothing) == [0]
        with pytest.raises(pytest.fail.Exception, match="sleeper hangs"):
            pool.run(sleeper, timeout=0.5)
        with pytest.raises(pytest.fail.Exception, match=r"KeyError: 'rank 0'"):
            pool.run(failure)
    finally:
        pool.close()
