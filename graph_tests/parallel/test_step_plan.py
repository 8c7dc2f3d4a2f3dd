"""StepPlan on one process: what is decided, from what, every size, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
from helpers import (
    assert_one_sentence,
    make_config,
    make_layer,
    named,
    no_launch,
    random_inputs,
    refuses,
)
from hypothesis import given
from hypothesis import strategies as st

import megamoe_compile as mm
from megamoe_compile.parallel.agreement import fingerprint
from megamoe_compile.parallel.step_plan import SPARE_ROWS

BUCKETS = [1, 4, 8]
plan_of = mm.StepPlan.from_counts
MODES = pytest.mark.parametrize("mode", ["max_len", "sum_len"])
some_counts = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def public(plan: mm.StepPlan) -> dict[str, Any]:
    return {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if not field.name.startswith("_")
    }


# -- what is decided ------------------------------------------------------------------------------


def test_fields_of_a_replayed_step() -> None:
    plan = plan_of([3, 0, 7, 1], 1, BUCKETS)
    assert public(plan) == {
        "num_tokens": 0,
        "tokens_per_rank": (3, 0, 7, 1),
        "bucket": 8,
        "padded_tokens": 8,
        "mode": "max_len",
        "rank": 1,
        "width": 1,
        "num_chunks": 1,
        "attn_tp": 1,
        "slot_rows": 8,
    }
    assert (plan.is_idle, plan.all_idle, plan.num_ranks) == (True, False, 4)
    assert (plan.max_tokens, plan.total_tokens) == (7, 11)


def test_fields_of_an_eager_step() -> None:
    plan = plan_of([3, 9], 1, [1, 4], mode="sum_len", capacity=4)
    assert (plan.bucket, plan.padded_tokens, plan.num_chunks) == (None, 9, 3)
    assert (plan.num_tokens, plan.is_idle, plan.mode) == (9, False, "sum_len")


@pytest.mark.parametrize(
    "longest,bucket", [(0, 1), (1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, None), (1000, None)]
)
def test_s37_the_bucket_comes_from_the_largest_count(longest: int, bucket: int | None) -> None:
    """Wherever the largest count is, and whatever this rank's own is."""
    for counts in set(itertools.permutations([longest, 0, min(longest, 1)])):
        plans = [plan_of(counts, rank, BUCKETS, capacity=8) for rank in range(3)]
        assert {plan.bucket for plan in plans} == {bucket}
        assert {plan.num_chunks for plan in plans} == {max(1, -(-longest // 8))}


@given(some_counts, st.lists(st.integers(1, 10), unique=True).map(sorted), st.integers(1, 5))
def test_s04_every_rank_decides_alike(counts: list[int], buckets: list[int], capacity: int) -> None:
    buckets = [bucket for bucket in buckets if bucket <= capacity]
    for mode in ("max_len", "sum_len"):
        plans = [
            plan_of(counts, rank, buckets, mode=mode, capacity=capacity)  # type: ignore[arg-type]
            for rank in range(len(counts))
        ]
        assert {plan.agreed for plan in plans} == {plans[0].agreed}
        assert [plan.num_tokens for plan in plans] == counts
        # Another count with the same maximum changes no decision.
        others = [max(counts)] * len(counts)
        other = plan_of(others, 0, buckets, mode=mode, capacity=capacity)  # type: ignore[arg-type]
        assert (other.bucket, other.num_chunks) == (plans[0].bucket, plans[0].num_chunks)


def test_s36_all_idle_is_a_step_like_others() -> None:
    plan = plan_of([0, 0], 0, BUCKETS)
    assert (plan.bucket, plan.padded_tokens, plan.all_idle, plan.num_chunks) == (1, 1, True, 1)
    eager = plan_of([0, 0], 0)
    assert (eager.bucket, eager.padded_tokens, eager.num_chunks) == (None, 0, 1)


def test_s38_draft_width_counts_tokens() -> None:
    """An idle rank of a verify step of 6 tokens per request has the bucket's shape."""
    buckets = [6, 12, 30]
    plan = plan_of([0, 30, 6], 0, buckets, 6)
    assert (plan.width, plan.bucket, plan.padded_tokens, plan.is_idle) == (6, 30, 30, True)
    with refuses(ValueError, "counts[1]", "width 6", "7"):
        plan_of([6, 7], 0, buckets, 6)
    with refuses(ValueError, "multiples of the width 6", "[6, 8]"):
        plan_of([6, 6], 0, [6, 8], 6)


def test_s44_a_capacity_below_requests_x_width_is_refused_before_capture() -> None:
    """128 requests with draft length 6 are 768 rows."""
    with refuses(mm.CapacityError, "768", "at most 512"):
        plan_of([0], 0, [128 * 6], 6, capacity=512)
    config = make_config(max_tokens_per_rank=512)
    with mm.MegaMoEContext(config, device="cpu") as context:
        layer = make_layer(context)
        example = named(random_inputs(config, 6))
        with no_launch(context), refuses(mm.CapacityError, "768", "at most 512"):
            mm.GraphRunner(layer, example, [6, 768], context, width=6)


def test_of_bucket_is_the_step_of_a_captured_graph() -> None:
    plan = mm.StepPlan.of_bucket(8, 4, 2, 2)
    assert plan == plan_of([8] * 4, 2, [8], 2)
    assert plan.mode == "max_len"


# -- counts and ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [[3, 0], (3, 0), torch.tensor([3, 0]), torch.tensor([3, 0]).int()]
)
def test_counts_of_any_kind(given: Any) -> None:
    assert plan_of(given, 0, BUCKETS) == plan_of([3, 0], 0, BUCKETS)
    assert all(type(count) is int for count in plan_of(given, 0).tokens_per_rank)


@pytest.mark.parametrize("given", [[3], [3, 0], [3, 0, 1, 2, 4], torch.tensor([3]), []])
def test_s34_counts_of_a_wrong_length_are_refused(given: Any) -> None:
    """Length 1, the DP size, or more than the ranks: a count would belong to another rank."""
    with refuses(ValueError, "len(counts)", "4, one count per rank", str(len(given))):
        plan_of(given, 0, BUCKETS, num_ranks=4)
    if len(given) < 4:
        with refuses(ValueError, "rank", "counts"):
            plan_of(given, 3, BUCKETS)


@pytest.mark.parametrize("rank", [None, -1, 2, 1.0, True])
def test_a_rank_without_a_count_is_refused(rank: Any) -> None:
    with refuses(ValueError, "rank"):
        plan_of([3, 0], rank, BUCKETS)


@pytest.mark.parametrize("count", [-1, 2.0, "2", None, True, 2**63, torch.tensor(2)])
def test_bad_counts_are_refused(count: Any) -> None:
    with refuses(ValueError, "counts[1]"):
        plan_of([3, count], 0, BUCKETS)
    with refuses(ValueError, "num_tokens"):
        mm.StepPlan.agree(count, None, BUCKETS)


@pytest.mark.parametrize(
    "counts",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([True, False]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        torch.empty(2, dtype=torch.int64, device="meta"),
        5,
    ],
)
def test_bad_count_tensors_are_refused(counts: Any) -> None:
    with refuses(ValueError, "counts"):
        plan_of(counts, 0)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"buckets": [4, 1]}, "ascending"),
        ({"buckets": [0, 1]}, "ascending"),
        ({"buckets": [4, 4]}, "ascending"),
        ({"buckets": [2.0]}, "ascending"),
        ({"buckets": 4}, "buckets"),
        ({"buckets": [[1]]}, "buckets"),
        ({"buckets": [16], "capacity": 8}, "largest bucket"),
        ({"width": 0}, "width"),
        ({"width": None}, "width"),
        ({"mode": "longest"}, "mode"),
        ({"capacity": 0}, "capacity"),
        ({"attn_tp": 0}, "attn_tp"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    for make in (lambda **c: plan_of([3], 0, **c), lambda **c: mm.StepPlan.agree(3, None, **c)):
        with refuses(ValueError, words):
            make(**changes)


def test_settings_that_only_equal_good_ones_are_refused() -> None:
    """1.0 and True equal 1: what was found about one must not be said of another."""
    for first, second in ((1, 1.0), (2.0, 2), (3, True)):
        for bucket in (first, second):
            good = type(bucket) is int
            try:
                assert plan_of([0], 0, [bucket]).bucket == bucket and good
            except ValueError:
                assert not good


def test_agree_on_one_rank_exchanges_nothing() -> None:
    assert mm.StepPlan.agree(3, None, BUCKETS) == plan_of([3], 0, BUCKETS)
    assert mm.StepPlan.agree(3, verify=True, timeout=1.0).bucket is None
    with pytest.raises(KeyError, match="mine"):
        mm.StepPlan.agree(3, problem=KeyError("mine"))


# -- sizes ----------------------------------------------------------------------------------------


def test_s31_real_rows_of_a_gathered_buffer() -> None:
    """4 ranks, max-length padding 8: a local count is no prefix bound."""
    counts = [3, 0, 8, 1]
    for rank in range(4):
        padded = plan_of(counts, rank, [8])
        kept = padded.real_rows().nonzero().flatten().tolist()
        assert kept == [0, 1, 2, *range(16, 24), 24]
        assert padded.gathered_rows == 32
        dense = plan_of(counts, rank, [8], mode="sum_len")
        assert dense.real_rows().tolist() == [True] * 12
        assert dense.gathered_rows == 12


@MODES
@given(counts=some_counts, buckets=st.sampled_from([[], [4], [12]]))
def test_sizes_agree_with_each_other(mode: Any, counts: list[int], buckets: list[int]) -> None:
    plans = [plan_of(counts, rank, buckets, mode=mode) for rank in range(len(counts))]
    for plan in plans:
        assert plan.gathered_rows == sum(other.local_rows for other in plans)
        rows = [row for rank in range(len(counts)) for row in plan.rows_of(rank)]
        mask = plan.real_rows()
        assert mask.dtype is torch.bool and mask.shape == (plan.gathered_rows,)
        assert mask.nonzero().flatten().tolist() == rows
        assert [len(plan.rows_of(rank)) for rank in range(len(counts))] == counts
        assert plan.counts().tolist() == counts and plan.counts().dtype is torch.int32
        assert plan.local_rows >= plan.num_tokens
        if mode == "sum_len":
            assert plan._gathered_at is not None and plan._own_at is not None
            assert plan._gathered_at.shape == (plan.gathered_rows,)
            assert plan._own_at.tolist() == list(plan.rows_of(plan.rank))
            # Never 0 or 1 pad rows: torch.compile would make graphs of their own for them.
            assert plan.slot_rows - plan.max_tokens == SPARE_ROWS >= 2


def test_real_rows_of_follows_a_device_count() -> None:
    """In a captured graph the mask is made from counts that change between replays."""
    counts = torch.zeros(3, dtype=torch.int32)
    compiled = torch.compile(lambda c: mm.real_rows_of(c, 4), fullgraph=True, backend="aot_eager")
    for values in ([3, 0, 4], [0, 0, 0], [1, 4, 2]):
        counts.copy_(torch.tensor(values))
        expected = plan_of(values, 0, [4]).real_rows()
        assert torch.equal(mm.real_rows_of(counts, 4), expected)
        assert torch.equal(compiled(counts), expected)


@MODES
def test_pad_gives_the_rows_that_a_gather_takes(mode: Any) -> None:
    for rank, count in enumerate((3, 0)):
        plan = plan_of([3, 0], rank, [4], mode=mode)
        rows = torch.randn(count, 2)
        padded = plan.pad(rows, fill=-1)
        assert padded.shape == (plan.local_rows, 2)
        assert torch.equal(padded[:count], rows) and bool((padded[count:] == -1).all())
        assert count == 0 or padded.data_ptr() != rows.data_ptr()
        with refuses(ValueError, "plan.num_tokens", str(count), str(count + 1)):
            plan.pad(torch.randn(count + 1, 2))


@pytest.mark.parametrize(
    "longest,attn_tp,chunks", [(0, 1, 1), (8, 1, 1), (9, 1, 2), (17, 1, 3), (16, 2, 1), (17, 2, 2)]
)
def test_chunks_cover_the_longest_rank(longest: int, attn_tp: int, chunks: int) -> None:
    counts = [0] * attn_tp + [longest] * attn_tp
    plan = plan_of(counts, 0, capacity=8, attn_tp=attn_tp)
    assert plan.num_chunks == plan.chunks(8) == chunks
    assert plan.chunks(None) == 1
    assert chunks * 8 * attn_tp >= longest


def test_attention_tp_ranks_hold_the_same_tokens() -> None:
    plan = plan_of([5, 5, 2, 2], 3, [8], attn_tp=2)
    across = plan.across_dp()
    assert (across.tokens_per_rank, across.rank, across.num_tokens) == ((5, 2), 1, 2)
    assert (across.bucket, across.padded_tokens, across.gathered_rows) == (8, 8, 16)
    dense = plan_of([5, 5, 2, 2], 1, attn_tp=2, mode="sum_len").across_dp()
    assert (dense.gathered_rows, dense.local_rows) == (7, 5)
    assert dense._own_at is not None and dense._own_at.tolist() == [0, 1, 2, 3, 4]
    for counts in ([5, 4, 2, 2], [5, 5, 2]):
        with refuses(ValueError, "tokens_per_rank", "attn_tp"):
            plan_of(counts, 0, attn_tp=2)


# -- the object -----------------------------------------------------------------------------------


@MODES
def test_a_plan_is_a_value(mode: Any) -> None:
    plan, same = (plan_of([3, 0], 1, BUCKETS, mode=mode) for _ in range(2))
    assert plan == same and hash(plan) == hash(same)
    assert plan != plan_of([3, 0], 0, BUCKETS, mode=mode)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan and copy.real_rows().tolist() == plan.real_rows().tolist()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.bucket = 4  # type: ignore[misc]
    assert "tensor" not in repr(plan)


def test_fingerprints_are_those_of_every_process() -> None:
    """Unlike hash(), which has a seed of its own in each."""
    assert fingerprint(((1, 4), 1, "max_len")) == 0x3116C7F86EA1C0
    assert fingerprint((1,)) != fingerprint((2,))


def test_errors_are_sentences() -> None:
    with pytest.raises(ValueError) as caught:
        plan_of([1, -1], 0)
    assert_one_sentence(str(caught.value), "counts[1]", "-1")
