"""Steps over two and four gloo processes on a CPU: every step equal to one process, none hangs."""

from __future__ import annotations

import time
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
    make_layer,
    named,
    outcome,
)
from step_helpers import (
    BUCKETS,
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

import megamoe_compile as mm

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(200)]


# -- 200 random steps -----------------------------------------------------------------------------


def random_counts(world_size: int, steps: int, most: int) -> list[list[int]]:
    """Zeros and ones often; some steps all idle, all ones, or with one busy rank."""
    generator = torch.Generator().manual_seed(world_size)
    counts = torch.randint(0, most + 1, (steps, world_size), generator=generator)
    kind = torch.rand(steps, world_size, generator=generator)
    counts[kind < 0.35] = 0
    counts[(kind >= 0.35) & (kind < 0.5)] = 1
    counts[::11] = 0
    counts[5::17] = 1
    counts[7::13, 1:] = 0
    return [list(map(int, row)) for row in counts]


STEPS = 200


def random_steps(rank: int, world_size: int) -> tuple[list[Tensor], dict[str, int]]:
    kinds = {"replayed": 0, "eager": 0, "idle": 0}
    results = []
    with make_context() as context, torch.no_grad():
        layer = make_layer(context)
        runner = make_runner(context, layer)
        for step, counts in enumerate(random_counts(world_size, STEPS, 12)):
            if step % 40 == rank:
                time.sleep(0.05)  # a rank comes late
            plan = agree(counts[rank]) if step % 2 else plan_of(counts, rank, BUCKETS)
            assert plan.tokens_per_rank == tuple(counts)
            inputs = inputs_of(rank, counts[rank], step)
            before = int(context.launch_count)
            if plan.is_idle and step % 3 == 0:
                y = runner(plan=plan)
            elif plan.bucket is None and step % 3 == 1:
                with context.step(plan):
                    y = layer(*inputs)
            else:
                y = runner(plan=plan, **named(inputs))
            assert int(context.launch_count) == before + 1
            results.append(y)
            kinds["eager" if plan.bucket is None else "replayed"] += 1
            kinds["idle"] += plan.is_idle
        assert alike(int(context.launch_count))
    return results, kinds


@WORLDS
def test_s01_s03_s04_200_random_steps_equal_one_process(ranks: Ranks, world_size: int) -> None:
    """Replayed and eager steps mixed, as the plan says; idle ranks, ones, late ranks."""
    replies = ranks(world_size).run(random_steps, timeout=120)
    reference = OneProcess()
    for step, counts in enumerate(random_counts(world_size, STEPS, 12)):
        batches = [inputs_of(rank, counts[rank], step) for rank in range(world_size)]
        expected = reference(batches)
        for rank, (results, _) in enumerate(replies):
            assert_same(results[step], expected[rank], f"rank {rank}, step {step}: {counts}")
    for _, kinds in replies:
        assert kinds["replayed"] > 80 and kinds["eager"] > 30 and kinds["idle"] > 50, kinds


def paired_steps(rank: int, world_size: int) -> None:
    reference = OneProcess()
    with make_context(max_tokens_per_rank=256) as context:
        layer = make_layer(context)
        for seed, pair in enumerate([(1, 200), (64, 65), (128, 129), (1, 1), (0, 256), (7, 1)]):
            counts = (list(pair) * world_size)[:world_size]
            batches = [inputs_of(r, counts[r], seed) for r in range(world_size)]
            with context.step(plan_of(counts, rank, BUCKETS)):
                assert_same(layer(*batches[rank]), reference(batches)[rank], f"{counts}")


@WORLDS
def test_s05_s06_one_token_beside_many(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(paired_steps)


def draft_steps(rank: int, world_size: int) -> None:
    """S38, S39: rank 0 drafts and verifies, the others take part without requests."""
    reference = OneProcess()
    with make_context(max_tokens_per_rank=32) as target, make_context() as draft:
        layers = {5: make_layer(target), 1: make_layer(draft)}
        runners = {
            width: mm.GraphRunner(
                layers[width],
                named(inputs_of(0, 5, 0)),
                [width, 3 * width],
                context,
                width=width,
            )
            for width, context in ((5, target), (1, draft))
        }
        for runner in runners.values():
            runner.capture()
        for step in range(12):
            width = 5 if step % 4 == 3 else 1  # three drafts, then verify
            counts = [(step % 3 + 1) * width] + [0] * (world_size - 1)
            runner = runners[width]
            plan = agree(counts[rank], buckets=runner.buckets, width=width, capacity=32)
            assert plan.width == width and plan.bucket == (3 * width if step % 3 else width)
            batches = [inputs_of(r, counts[r], step) for r in range(world_size)]
            inputs = {} if plan.is_idle else named(batches[rank])
            assert_same(runner(plan=plan, **inputs), reference(batches)[rank], f"step {step}")
        assert int(target.launch_count) != int(draft.launch_count)
        assert alike((int(target.launch_count), int(draft.launch_count)))


@WORLDS
def test_s38_s39_s42_draft_and_verify_with_idle_ranks(ranks: Ranks, world_size: int) -> None:
    """Two contexts, two widths, one group: no shared state, equal numbers of calls."""
    ranks(world_size).run(draft_steps)


def poisoned_steps(rank: int, world_size: int) -> None:
    """Old data, NaN and Inf in the pad rows of each rank's bucket, all of them the same rows."""
    reference = OneProcess()
    counts = [3, 0, 8, 1][:world_size]
    plan = plan_of(counts, rank, BUCKETS)
    batches = [inputs_of(r, n, 0) for r, n in enumerate(counts)]
    batches[0][1][0, 1:] = -1  # some slots of a row, and a whole row
    batches[0][1][1] = -1
    want = reference(batches)[rank]
    with make_context() as context:
        runner = make_runner(context, make_layer(context))
        for value in (0.0, 1e30, float("nan"), float("inf")):
            for static in (runner._static["hidden_states"], runner._static["topk_weights"]):
                static.fill_(value)
            runner._static["topk_ids"].fill_(5)
            assert_same(runner(plan=plan, **named(batches[rank])), want, f"padding {value}")
            assert context.invalid_id_count == 0
        assert rank != 0 or not want[1].any()


@WORLDS
def test_s28_s29_s32_pad_rows_of_no_rank_are_routed(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(poisoned_steps)


# -- agreement ------------------------------------------------------------------------------------


def bad_counts(rank: int, world_size: int) -> list[str]:
    """The last rank's count or setting is bad; then every rank's is good again."""
    last = rank == world_size - 1
    texts = []
    for bad in (-1, 3.5, "4", None, True, 2**70):
        texts.append(outcome(lambda bad=bad: agree(bad if last else 2)))  # type: ignore[misc]
    texts.append(outcome(lambda: agree(3 if last else 4, buckets=[2, 4], width=2)))
    texts.append(outcome(lambda: agree(2, buckets=[4, 1] if last else [1, 4])))
    texts.append(outcome(lambda: agree(-1 - rank)))
    assert agree(rank).tokens_per_rank == tuple(range(world_size)), "the group still works"
    return texts


@WORLDS
def test_a_bad_count_of_one_rank_is_the_same_error_on_all(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(bad_counts)
    assert all(reply == replies[0] for reply in replies)
    for text in replies[0][:-1]:
        assert text.startswith(f"ValueError: rank {world_size - 1}: "), text
        assert_one_sentence(text)
    assert "width 2" in replies[0][6] and "ascending" in replies[0][7]
    everyone = replies[0][-1]
    assert "rank 0: num_tokens" in everyone and f"rank {world_size - 1}: num_tokens" in everyone


def different_settings(rank: int, world_size: int) -> list[str]:
    last = rank == world_size - 1
    texts = [
        outcome(lambda: agree(2, buckets=[1, 8] if last else [1, 4])),
        outcome(lambda: agree(2, width=2 if last else 1, buckets=[2, 4])),
        outcome(lambda: agree(2, mode="sum_len" if last else "max_len")),
        outcome(lambda: agree(2, capacity=16 + rank)),
        outcome(lambda: agree(2, attn_tp=2, buckets=[4]) if last else agree(2, buckets=[4])),
        outcome(lambda: agree(rank, attn_tp=2)),
    ]
    own = [rank] * world_size if last else [0] * world_size
    texts.append(outcome(lambda: plan_of(own, rank, BUCKETS).check(dist.group.WORLD)))
    texts.append(outcome(lambda: plan_of([1] * world_size, 0).check(dist.group.WORLD)))
    texts.append(outcome(lambda: plan_of([1, 2, 3], 0).check(dist.group.WORLD)))
    plan = agree(rank, verify=True)
    plan.check(dist.group.WORLD)
    assert alike(plan.agreed)
    return texts


@WORLDS
def test_s37_settings_that_differ_are_named_on_all(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(different_settings)
    assert all(reply == replies[0] for reply in replies)
    last = world_size - 1
    for text in replies[0]:
        assert text.startswith("ValueError: "), text
        assert_one_sentence(text)
    for text in replies[0][:3] + replies[0][4:5]:
        assert f"of rank {last}: " in text and "as on rank 0" in text
    assert "'max_len', 16," in replies[0][3]
    assert f"'max_len', {16 + last}, 1) on rank {last}" in replies[0][3]
    assert "attn_tp" in replies[0][5]
    assert f"plan of rank {last}" in replies[0][6]
    assert "rank and num_ranks of the plan" in replies[0][7]


def problems(rank: int, world_size: int) -> list[str]:
    """What a rank's own checks find goes into the exchange."""
    last = rank == world_size - 1
    found: list[Exception] = [
        mm.CapacityError("kv cache: expected a free page, got none. Evict."),
        mm.NotWarmedUp("capture: expected x, got y. Call it."),
        KeyError("slot 7"),
        ValueError("page: expected x, got y. Fix it."),
    ]
    texts = [
        outcome(lambda error=error: agree(1, problem=error if last else None))  # type: ignore
        for error in found
    ]
    agree(1)
    return texts


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    replies = ranks(2).run(problems)
    assert replies[0] == replies[1]
    kinds = [text.partition(":")[0] for text in replies[0]]
    assert kinds == ["CapacityError", "NotWarmedUp", "MegaMoEError", "ValueError"]
    assert all("rank 1: " in text for text in replies[0])


def late_ranks(rank: int, world_size: int) -> None:
    for turn in range(world_size):
        if rank == turn:
            time.sleep(0.3)
        plan = agree(turn + rank, verify=turn % 2 == 0, timeout=30)
        assert plan.tokens_per_rank == tuple(range(turn, turn + world_size))


@WORLDS
def test_ranks_that_enter_late_are_waited_for(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(late_ranks)


def left_out(rank: int, world_size: int, verify: bool) -> str:
    agree(1)
    if rank == 1:
        return ""
    return outcome(lambda: agree(1, verify=verify, timeout=1.0))


@pytest.mark.parametrize("verify", [True, False])
def test_s36_a_rank_that_stays_away_is_reported(tmp_path: Path, verify: bool) -> None:
    """Within the time limit; with verify by its number."""
    pool = RankPool(2, tmp_path)
    try:
        text = pool.run(left_out, verify)[0]
    finally:
        pool.close()
    assert text.startswith("MegaMoEError: ranks that came")
    assert_one_sentence(text, "Every rank calls it once per step")
    assert not verify or "Ranks 1 failed" in text


# -- refusals of a runner and of a layer ----------------------------------------------------------


def refused_steps(rank: int, world_size: int) -> list[str]:
    """One rank's inputs, plan or tensors are wrong: nobody launches, and the next step is right."""
    last = rank == world_size - 1
    texts = []
    with make_context() as context, torch.no_grad():
        layer = make_layer(context)
        runner = make_runner(context, layer, verify=dist.group.WORLD)
        good = inputs_of(rank, 3, 0)
        plan = plan_of([3] * world_size, rank, BUCKETS)
        x, ids, weights = good

        def call(inputs: Inputs, plan: mm.StepPlan | None = plan, **arguments: Any) -> str:
            before = int(context.launch_count)
            text = outcome(lambda: runner(plan=plan, **arguments, **named(inputs)))
            assert int(context.launch_count) == before or not text
            return text

        texts.append(call((x[:2], ids, weights) if last else good))
        texts.append(call((x, ids.int(), weights) if last else good))
        other = plan_of([3] * world_size, rank, [8])
        texts.append(call(good, plan=other if last else plan))
        texts.append(call(good, plan=None, num_tokens=3, bucket=8 if last else 4))
        w13 = layer.w13
        if last:
            layer.w13 = w13.clone()
        texts.append(call(good))
        layer.w13 = w13
        assert call(good) == ""
        assert_same(runner(plan=plan, **named(good)), layer(*good))
        assert alike(int(context.launch_count))
        buckets = [1, 8] if last else [1, 4]
        unlike = mm.GraphRunner(layer, named(good), buckets, context)
        texts.append(outcome(unlike.capture))
        assert alike(int(context.launch_count))
    return texts


@WORLDS
def test_a_rank_that_refuses_leaves_no_other_waiting(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(refused_steps)
    assert all(reply == replies[0] for reply in replies)
    rows, dtype, plan, bucket, moved, capture = replies[0]
    last = f"rank {world_size - 1}"
    assert last in rows and "hidden_states" in rows
    assert last in dtype and "topk_ids" in dtype
    assert f"plan of {last}" in plan and f"plan of {last}" in bucket
    assert moved.startswith("MegaMoEError") and last in moved and "w13" in moved
    assert f"buckets and width of {last}" in capture


def over_capacity(rank: int, world_size: int) -> list[str]:
    """Rank 0 is over the capacity; the others could run, and must not."""
    counts = [17] + [1] * (world_size - 1)
    with make_context() as context:
        layer = make_layer(context)
        runner = make_runner(context, layer)
        plan = agree(counts[rank])
        assert (plan.bucket, plan.num_chunks) == (None, 2)
        before = int(context.launch_count)
        inputs = inputs_of(rank, counts[rank], 0)

        def by_hand() -> None:
            with context.step(plan):
                layer(*inputs)

        texts = [outcome(lambda: runner(plan=plan, **named(inputs))), outcome(by_hand)]
        assert int(context.launch_count) == before
        good = agree(rank)
        runner(plan=good, **named(inputs_of(rank, rank, 0)))
    return texts


@WORLDS
def test_s07_s11_over_capacity_is_one_error_on_all_ranks(ranks: Ranks, world_size: int) -> None:
    replies = ranks(world_size).run(over_capacity)
    assert all(reply == replies[0] for reply in replies)
    for text in replies[0]:
        assert text.startswith("CapacityError: ") and "17 of (17, 1" in text
        assert_one_sentence(text, "at most 16", "over_capacity='chunk'")


def chunked_steps(rank: int, world_size: int) -> list[str]:
    reference = OneProcess()
    chunks = set()
    with make_context(over_capacity="chunk") as context, torch.no_grad():
        layer = make_layer(context)
        runner = make_runner(context, layer)
        for step, counts in enumerate(random_counts(world_size, 40, 45)):
            plan = agree(counts[rank])
            batches = [inputs_of(r, counts[r], step) for r in range(world_size)]
            before = int(context.launch_count)
            y = runner(plan=plan, **named(batches[rank]))
            launches = int(context.launch_count) - before
            assert launches == (plan.num_chunks if plan.bucket is None else 1)
            assert plan.num_chunks == max(1, -(-max(counts) // 16))
            chunks.add(launches)
            want = reference(batches)[rank]
            assert y.shape == want.shape
            if y.numel():
                assert_close(y, want, 0.01, f"step {step}: {counts}")
        assert chunks == {1, 2, 3} and alike(int(context.launch_count))
        # Without a plan every rank is refused, whatever its own count: none waits for another.
        before = int(context.launch_count)
        texts = [outcome(lambda n=n: layer(*inputs_of(rank, n, 0))) for n in (0, 3, 20 * rank)]  # type: ignore
        assert int(context.launch_count) == before
        return texts


@WORLDS
def test_s11_chunks_are_as_many_on_every_rank(ranks: Ranks, world_size: int) -> None:
    """Equal to one launch within tolerance; chunks without rows launch too."""
    replies = ranks(world_size).run(chunked_steps, timeout=90)
    for text in {text for reply in replies for text in reply}:
        assert text.startswith("MegaMoEError: plan of the step")
        assert_one_sentence(text, f"{world_size} ranks", "context.step(plan)")


# -- groups ---------------------------------------------------------------------------------------


def odd_groups(rank: int, world_size: int) -> tuple[str, str]:
    """A group that this rank is not in, and one that does no collective of CPU tensors."""
    group = dist.new_group([0])
    outside = outcome(lambda: mm.StepPlan.agree(1, group, BUCKETS))
    if rank == 0:
        plan = mm.StepPlan.agree(3, group, BUCKETS, verify=True)
        assert plan.tokens_per_rank == (3,)
        x = torch.ones(plan.padded_tokens, 2)
        assert torch.equal(mm.dp_gather(x, plan, group), x)
        assert torch.equal(mm.attn_tp_gather(mm.attn_tp_split(x, group), 4, group), x)
        with mm.MegaMoEContext(make_config(), device="cpu") as alone:
            world = {"x": torch.ones(1)}, [1], alone
            wide = outcome(lambda: mm.GraphRunner(print, *world, verify=dist.group.WORLD))
            assert "ranks of the group: expected 1," in wide, wide
            mm.GraphRunner(print, *world, verify=group)
    for_cuda = dist.new_group(backend="cuda:gloo")
    return outside, outcome(lambda: mm.StepPlan.agree(1, for_cuda, BUCKETS))


def test_groups_that_cannot_agree_are_refused(ranks: Ranks) -> None:
    replies = ranks(2).run(odd_groups)
    assert replies[0][0] == ""
    assert "ValueError: group: expected one that this rank belongs to" in replies[1][0]
    for _, text in replies:
        assert text.startswith("ValueError: group")
        assert_one_sentence(text, "CPU tensors", "backend='gloo'")
