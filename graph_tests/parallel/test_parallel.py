"""The shape helpers, chunks and plans on one process: groups of one, and TP parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_config, make_layer, named, random_inputs, refuses
from torch import Tensor
from torch._dynamo.utils import counters

import megamoe_compile as mm

plan_of = mm.StepPlan.from_counts
MODES = pytest.mark.parametrize("mode", ["max_len", "sum_len"])


def rows_of(count: int, *columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, *(columns or (4,))).to(dtype)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# -- attention TP ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 15])
def test_split_parts_make_up_the_whole(rows: int, size: int) -> None:
    x = rows_of(rows)
    parts = [mm.attn_tp_split(x, (rank, size)) for rank in range(size)]
    assert {part.shape for part in parts} == {(-(-rows // size), 4)}
    together = torch.cat(parts)
    assert torch.equal(together[:rows], x)
    assert not together[rows:].any(), "pad rows are zero"
    assert not any(shares_memory(part, x) for part in parts), "never a view"
    assert all(part.is_contiguous() for part in parts)


def test_s34_draft_rows_are_padded_to_the_tp_size_and_cut_back() -> None:
    """3 requests x 5 draft tokens over TP 4: 16 rows, and 15 back."""
    x = rows_of(15)
    parts = [mm.attn_tp_split(x, (rank, 4)) for rank in range(4)]
    assert sum(part.shape[0] for part in parts) == 16
    assert torch.equal(torch.cat(parts)[:15], x)


def test_split_fills_ids_with_what_is_not_routed() -> None:
    ids = torch.arange(6).view(3, 2)
    last = mm.attn_tp_split(ids, (1, 2), fill=-1)
    assert last.tolist() == [[4, 5], [-1, -1]] and last.dtype == ids.dtype


def test_split_takes_strided_rows_and_leaves_no_trace_of_them() -> None:
    wide = rows_of(10, 8)
    for x in (wide[::2], wide[:, 2:6], wide.T):
        parts = [mm.attn_tp_split(x, (rank, 2)) for rank in range(2)]
        assert torch.equal(torch.cat(parts)[: x.shape[0]], x)
    nan = torch.full((3, 4), float("nan"))
    assert not mm.attn_tp_split(nan, (1, 2))[1:].any()


@pytest.mark.parametrize("place", [(2, 2), (-1, 2), (0, 0)])
def test_split_refuses_a_rank_outside(place: tuple[int, int]) -> None:
    with refuses(ValueError, "rank"):
        mm.attn_tp_split(rows_of(3), place)


@pytest.mark.parametrize("rows,valid,size", [(8, 5, 2), (8, 0, 2), (8, 8, 4), (7, 3, 4), (1, 1, 4)])
def test_num_valid_of_a_part(rows: int, valid: int, size: int) -> None:
    """The real rows of all parts are exactly the first `valid` rows of the whole."""
    part = -(-rows // size)
    count = torch.tensor([valid], dtype=torch.int32)
    per_rank = [mm.attn_tp_num_valid(count, part, (rank, size)) for rank in range(size)]
    assert all(n.dtype is torch.int32 and n.shape == (1,) for n in per_rank)
    real = torch.cat([torch.arange(part) < n for n in per_rank])
    assert real.nonzero().flatten().tolist() == list(range(valid))


def test_split_compiles_into_few_graphs() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return mm.attn_tp_split(x, (0, 2)), mm.attn_tp_split(x, (1, 2), fill=-1)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 5, 8, 0, 1, 2, 30, 31):
        x = rows_of(rows)
        assert all(map(torch.equal, compiled(x), both(x)))
    assert counters["stats"]["unique_graphs"] <= 4


def test_split_has_no_guard_on_an_unbacked_count() -> None:
    """The one-graph recipe, with attention TP inside."""

    def step(x: Tensor) -> Tensor:
        return mm.attn_tp_gather(mm.attn_tp_split(x, None) * 2, x.shape[0], None)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (5, 1, 9):
        x = rows_of(rows)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert torch.equal(compiled(x), x * 2)
    assert counters["stats"]["unique_graphs"] == 1


# -- a group of one -------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("reduce", [False, True])
def test_s20_a_group_of_one(mode: Any, count: int, reduce: bool) -> None:
    plan = plan_of([count], 0, [4], mode=mode)
    x = plan.pad(rows_of(count), fill=7)
    gathered = mm.dp_gather(x, plan, None)
    assert torch.equal(gathered, x) and not shares_memory(gathered, x)
    own = mm.dp_scatter(gathered, plan, None, reduce)
    assert torch.equal(own[:count], x[:count]) and not shares_memory(own, gathered)
    assert own.shape == x.shape and not own[count:].any()
    assert torch.equal(mm.attn_tp_gather(x, x.shape[0], None), x)
    assert not shares_memory(mm.attn_tp_gather(x, x.shape[0], None), x)


def test_s30_pad_rows_come_out_as_zeros_whatever_they_were() -> None:
    plan = plan_of([2], 0, [4])
    y = torch.full((4, 3), float("nan"))
    y[:3] = 1
    for reduce in (False, True):
        assert mm.dp_scatter(y, plan, None, reduce).tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
        for count in (torch.tensor([3], dtype=torch.int32), torch.tensor(3, dtype=torch.int32)):
            own = mm.dp_scatter(y, plan, None, reduce, num_valid=count)
            assert own.tolist() == [[1] * 3] * 3 + [[0] * 3]


def test_the_plan_of_a_captured_graph_takes_all_rows_for_real() -> None:
    """Its real count is on the device; without it nothing is masked, and nothing is a view."""
    plan, y = mm.StepPlan.of_bucket(4), rows_of(4)
    own = mm.dp_scatter(y, plan, None)
    assert torch.equal(own, y) and not shares_memory(own, y)
    count = torch.tensor([1], dtype=torch.int32)
    assert mm.dp_scatter(y, plan, None, num_valid=count).any(dim=1).tolist() == [True] + 3 * [False]


@pytest.mark.parametrize("shape,dtype", [((), torch.int64), ((2, 3), torch.bfloat16)])
@MODES
def test_rows_of_any_kind(shape: tuple[int, ...], dtype: torch.dtype, mode: Any) -> None:
    plan = plan_of([3], 0, mode=mode)
    x = torch.randint(0, 9, (3, *shape)).to(dtype)
    gathered = mm.dp_gather(x, plan, None)
    assert gathered.dtype == dtype and torch.equal(gathered, x)
    assert torch.equal(mm.dp_scatter(gathered, plan, None), x)
    assert torch.equal(mm.attn_tp_split(x, None), x)


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any communication fails the test: a refusal comes before it."""

    def never(*args: object) -> Tensor:
        raise AssertionError("communicated before the check")

    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(mm.parallel.rows, name, never)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("rows", [0, 2, 5])
def test_wrong_row_counts_are_refused_before_anything_is_sent(rows: int) -> None:
    padded, dense = plan_of([3], 0, [4]), plan_of([3], 0, mode="sum_len")
    x = rows_of(rows)
    with refuses(ValueError, "rows of x", "4 (plan.padded_tokens", str(rows)):
        mm.dp_gather(x, padded, None)
    with refuses(ValueError, "rows of x", "3 (plan.num_tokens", str(rows)):
        mm.dp_gather(x, dense, None)
    for reduce in (False, True):
        with refuses(ValueError, "rows of y", "4 (ranks x", str(rows)):
            mm.dp_scatter(x, padded, None, reduce)
        with refuses(ValueError, "rows of y", "3 (the sum", str(rows)):
            mm.dp_scatter(x, dense, None, reduce)
    with refuses(ValueError, "rows of y", "3 (num_tokens", str(rows)):
        mm.attn_tp_gather(x, 3, None)


@pytest.mark.usefixtures("silence")
def test_a_plan_of_other_ranks_is_refused() -> None:
    for plan in (plan_of([3, 3], 0), plan_of([3, 3], 1, mode="sum_len")):
        for call in (mm.dp_gather, mm.dp_scatter):
            with refuses(ValueError, "(rank, ranks) of the plan", "(0, 1)"):
                call(rows_of(3), plan, None)


@pytest.mark.usefixtures("silence")
def test_gradients_and_scalars_are_refused() -> None:
    plan = plan_of([3], 0)
    grad = rows_of(3).requires_grad_()
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: mm.dp_gather(x, plan, None),
        lambda x: mm.dp_scatter(x, plan, None),
        lambda x: mm.attn_tp_split(x, (0, 2)),
        lambda x: mm.attn_tp_gather(x, 3, None),
    ]
    for call in calls:
        with refuses(mm.MegaMoEError, "no backward"):
            call(grad)
        with refuses(ValueError, "at least 1"):
            call(torch.tensor(1.0))


@MODES
def test_s35_fakes_have_the_shape_of_each_mode(mode: Any) -> None:
    """With symbolic sizes: every graph gives what eager gives, and there are few."""

    def step(x: Tensor, plan: mm.StepPlan) -> tuple[Tensor, Tensor]:
        gathered = mm.dp_gather(x, plan, None)
        return gathered, mm.dp_scatter(gathered * 2, plan, None, reduce=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (7, 5, 1, 0, 9, 2):
        plan = plan_of([count], 0, mode=mode)
        x = plan.pad(rows_of(count))
        for got, want in zip(compiled(x, plan), step(x, plan), strict=True):
            assert got.shape == want.shape and torch.equal(got, want)
            assert type(got) is Tensor
    assert counters["stats"]["unique_graphs"] <= 3


def test_a_compiled_step_says_what_is_wrong() -> None:
    compiled = torch.compile(mm.dp_gather, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"rows of x: expected 5 \(plan.num_tokens.*got 3"):
        compiled(rows_of(3), plan_of([5], 0, mode="sum_len"), None)


# -- chunks ---------------------------------------------------------------------------------------

SMALL_CHUNKS = {"max_tokens_per_rank": 4, "over_capacity": "chunk"}
chunked = pytest.mark.parametrize("context", [SMALL_CHUNKS], indirect=True)


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 8, 11])
@chunked
def test_s11_over_capacity_chunks_equal_one_launch(context: mm.MegaMoEContext, tokens: int) -> None:
    layer = make_layer(context)
    inputs = random_inputs(context.config, tokens)
    y = layer(*inputs)
    assert int(context.launch_count) == max(1, -(-tokens // 4))
    with mm.MegaMoEContext(make_config(), device="cpu") as wide:
        torch.testing.assert_close(y, make_layer(wide)(*inputs), rtol=0.02, atol=0.02)
        assert y.shape == inputs[0].shape and not shares_memory(y, inputs[0])


@chunked
def test_num_valid_goes_over_the_chunks(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    inputs = random_inputs(context.config, 11)
    full = layer(*inputs)
    for valid in (0, 3, 4, 6, 11):
        count = torch.tensor([valid], dtype=torch.int32)
        context.num_valid.fill_(valid)
        implied = layer(*inputs)
        context.num_valid.fill_(2**31 - 1)
        for y in (implied, layer(*inputs, num_valid=valid), layer(*inputs, num_valid=count)):
            assert y.any(dim=1).tolist() == [True] * valid + [False] * (11 - valid)
            torch.testing.assert_close(y[:valid], full[:valid], rtol=0.02, atol=0.02)


@chunked
def test_chunks_compile_into_a_graph_per_number_of_chunks(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (3, 4, 2, 6, 7, 8, 5, 11, 10):
            inputs = random_inputs(context.config, tokens)
            before = int(context.launch_count)
            y = compiled(*inputs)
            assert int(context.launch_count) - before == -(-tokens // 4)
            assert torch.equal(y, layer(*inputs))
    assert counters["stats"]["unique_graphs"] <= 5


@chunked
def test_chunks_of_a_plan_compile_too(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (3, 7, 11, 2, 8, 12, 9):
            inputs = random_inputs(context.config, tokens)
            before = int(context.launch_count)
            with context.step(plan_of([tokens], 0)):
                y = compiled(*inputs)
            assert int(context.launch_count) - before == -(-tokens // 4)
            assert torch.equal(y, layer(*inputs))
    # A graph for each number of launches, and one more where the last is exactly full.
    assert counters["stats"]["unique_graphs"] <= 6


@chunked
def test_a_plan_sets_the_number_of_launches(context: mm.MegaMoEContext) -> None:
    """More than this rank's own rows need: the others' launches must find a partner."""
    layer = make_layer(context)
    inputs = random_inputs(context.config, 3)
    expected = layer(*inputs)
    with context.step(plan_of([3], 0)):
        context._chunks = 3  # as a longer rank would make it
        before = int(context.launch_count)
        assert torch.equal(layer(*inputs), expected)
        assert int(context.launch_count) - before == 3
        with refuses(mm.CapacityError, "at most 3 x 4", "13"):
            layer(*random_inputs(context.config, 13))
    assert context._chunks is None


@chunked
def test_rows_that_disagree_launch_no_chunk(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    x, ids, weights = random_inputs(context.config, 9)
    with refuses(ValueError, "topk_ids.shape[0]", "9", "10"):
        layer(x, torch.cat([ids, ids[:1]]), weights)
    with refuses(ValueError, "topk_weights.shape[0]", "9", "8"):
        layer(x, ids, weights[:8])
    assert int(context.launch_count) == 0


def test_the_step_of_a_plan_is_scoped(context: mm.MegaMoEContext) -> None:
    outer, inner = plan_of([3], 0), plan_of([60], 0)
    with pytest.raises(KeyError), context.step(outer):
        with context.step(inner):
            assert context._chunks == 1
        assert context._chunks == 1
        raise KeyError
    assert context._chunks is None
    with refuses(mm.CapacityError, "at most 64", "65 of (65,)"), context.step(plan_of([65], 0)):
        pass
    with refuses(ValueError, "(rank, ranks) of the plan"), context.step(plan_of([3, 3], 0)):
        pass
    context.close()
    with refuses(mm.ContextClosed), context.step(outer):
        pass


# -- the runner with a plan -----------------------------------------------------------------------


def make_runner(context: mm.MegaMoEContext, **options: Any) -> Any:
    layer = make_layer(context)
    example = named(random_inputs(context.config, 4))
    runner = mm.GraphRunner(layer, example, [1, 4, 8], context, **options)
    runner.capture()

    def call(tokens: int, **arguments: Any) -> Tensor:
        inputs = random_inputs(context.config, tokens)
        result: Tensor = runner(**arguments, **named(inputs))
        assert torch.equal(result, layer(*inputs))
        return result

    return runner, call


def test_the_runner_takes_a_plan_or_a_count(context: mm.MegaMoEContext) -> None:
    runner, call = make_runner(context)
    for tokens in (3, 0, 8, 9, 64):
        plan = plan_of([tokens], 0, runner.buckets)
        replays = sum(row.replays for row in runner.summary())
        call(tokens, plan=plan)
        call(tokens, plan=plan, num_tokens=tokens)
        assert sum(row.replays for row in runner.summary()) - replays == (2 if tokens <= 8 else 0)
    call(3, num_tokens=3)
    call(3, num_tokens=3, bucket=8)
    for wrong in ({"num_tokens": 2}, {"bucket": 8}):
        with refuses(ValueError, "num_tokens and bucket", "as in the plan"):
            call(3, plan=plan_of([3], 0, runner.buckets), **wrong)
    with refuses(ValueError, "plan or num_tokens"):
        call(3)


def test_s41_a_plan_that_does_not_fit_is_refused(context: mm.MegaMoEContext) -> None:
    """More or fewer tokens than rows, buckets and width that the runner does not have."""
    runner, call = make_runner(context)
    for tokens in (2, 4):
        with refuses(ValueError, "hidden_states", f"num_tokens is {tokens}"):
            call(3, plan=plan_of([tokens], 0, runner.buckets))
    with refuses(ValueError, "bucket and width of the plan", "[1, 4, 8]", "5"):
        call(3, plan=plan_of([3], 0, [5]))
    with refuses(ValueError, "bucket and width of the plan"):
        call(4, plan=plan_of([4], 0, [4], 2))
    with refuses(ValueError, "(rank, ranks) of the plan"):
        call(3, plan=plan_of([3, 3], 0, [4]))
    with refuses(mm.CapacityError, "at most 64"):
        call(65, plan=plan_of([65], 0, runner.buckets))
    assert runner.summary()[1].replays == 0


def test_s36_an_idle_rank_may_leave_its_inputs_out(context: mm.MegaMoEContext) -> None:
    runner, call = make_runner(context)
    launches = int(context.launch_count)
    assert runner(plan=plan_of([0], 0, runner.buckets)).shape == (0, 128)
    assert runner(plan=plan_of([0], 0)).shape == (0, 128), "eagerly too"
    assert runner(num_tokens=0).shape == (0, 128)
    assert int(context.launch_count) - launches == 3
    with refuses(ValueError, "inputs"):
        runner(num_tokens=1)
    call(3, plan=plan_of([3], 0, runner.buckets))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_gathers_gets_the_plan(context: mm.MegaMoEContext, compiled: bool) -> None:
    """Of the bucket where it is captured, of the call where it runs eagerly."""
    seen = []

    def step(x: Tensor, plan: mm.StepPlan) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append(plan)
        return mm.dp_scatter(mm.dp_gather(x, plan, None) * 2, plan, None)

    called = (
        torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else step
    )
    runner = mm.GraphRunner(
        called, {"x": rows_of(2)}, [1, 4, 8], context, with_plan=True, above="eager"
    )
    runner.capture()
    for tokens in (3, 0, 1, 8, 9):
        x = rows_of(tokens)
        for mode in ("max_len", "sum_len"):
            plan = plan_of([tokens], 0, runner.buckets, mode=mode)  # type: ignore[arg-type]
            assert torch.equal(runner(plan=plan, x=x), x * 2)
            if not compiled:
                bucket = plan.bucket
                assert seen[-1] == (plan if bucket is None else mm.StepPlan.of_bucket(bucket))
        assert torch.equal(runner(num_tokens=tokens, x=x), x * 2)
    with refuses(ValueError, "names that are not the runner's own", "plan"):
        mm.GraphRunner(step, {"plan": rows_of(1)}, [1], context)
