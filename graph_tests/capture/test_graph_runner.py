"""GraphRunner on a CPU: buckets, padding, replay, refusals: every rule but the capture itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from blocks import Block, Routed
from helpers import (
    assert_close,
    assert_same,
    make_config,
    make_layer,
    no_launch,
    poisoned_allocator,
    refuses,
)
from runner_helpers import BUCKETS, REPLAYS_OF_A_CAPTURE, make_runner, named, poison
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def block() -> Iterator[Block]:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield Block(make_layer(context))


@pytest.fixture(scope="module")
def config(block: Block) -> mm.MegaMoEConfig:
    return block.experts.context.config


@pytest.fixture(scope="module")
def runner(block: Block) -> mm.GraphRunner:
    return make_runner(block, block.experts.context)


# -- replay equals eager --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(17))
def test_every_count_equals_eager(runner: mm.GraphRunner, block: Block, tokens: int) -> None:
    inputs = named(block.experts.context.config, tokens)
    before = int(runner.context.launch_count)
    got = runner(num_tokens=tokens, **inputs)
    assert int(runner.context.launch_count) == before + 1
    assert_same(got, block(**inputs))
    assert int(runner.context.num_valid) == ALL_VALID


@pytest.mark.parametrize("options", [dict(backend="aot_eager"), dict(), dict(dynamic=True)])
def test_a_compiled_step(block: Block, options: dict[str, Any]) -> None:
    context = block.experts.context
    runner = make_runner(torch.compile(block, fullgraph=True, **options), context, [1, 4, 8])
    assert 1 <= runner.graphs_compiled <= 3
    for tokens in (8, 0, 1, 3, 4, 5, 7):
        inputs = named(context.config, tokens)
        assert_same(runner(num_tokens=tokens, **inputs), block(**inputs), f"{tokens} tokens")
    assert_same(runner(num_tokens=5, **named(context.config, 5)), block(**named(context.config, 5)))


def test_a_replay_never_compiles(block: Block) -> None:
    """A late compile on one rank would make the others wait: it is an error here."""
    context = block.experts.context
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    runner = make_runner(compiled, context, [2, 4])
    inputs = named(context.config, 3)
    runner(num_tokens=3, **inputs)
    torch._dynamo.reset()
    with no_launch(context), pytest.raises(RuntimeError, match="recompile"):
        runner(num_tokens=3, **inputs)
    runner.capture()
    assert_same(runner(num_tokens=3, **inputs), block(**inputs))


def test_random_order_with_eager_calls_between(runner: mm.GraphRunner, block: Block) -> None:
    context, choose = runner.context, random.Random(0)
    for step in range(150):
        tokens = choose.randrange(17)
        inputs = named(context.config, tokens, seed=step)
        before = int(context.launch_count)
        if choose.random() < 0.3:
            got = block(**inputs)
            with mm.MegaMoEContext(context.config, device="cpu") as fresh:
                expected = Block(make_layer(fresh))(**inputs)
        else:
            got, expected = runner(num_tokens=tokens, **inputs), None
        assert int(context.launch_count) == before + 1
        if expected is None:
            expected = block(**inputs)
        assert_same(got, expected, f"step {step}")


def test_large_then_small_leaves_no_stale_rows(runner: mm.GraphRunner, block: Block) -> None:
    context = runner.context
    runner(num_tokens=16, **named(context.config, 16, seed=5))
    for tokens in (9, 3, 1, 0):
        inputs = named(context.config, tokens, seed=6)
        got = runner(num_tokens=tokens, **inputs, bucket=16)
        assert got.shape[0] == tokens
        assert_same(got, block(**inputs))


def test_several_layers_count_several_launches() -> None:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        blocks = nn.ModuleList(Block(make_layer(context, seed=n)) for n in range(3))

        def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            for inner in blocks:
                x = inner(x, topk_ids, topk_weights)
            return x

        runner = make_runner(step, context, [2, 4])
        assert int(context.launch_count) == 3 * 2 * REPLAYS_OF_A_CAPTURE
        inputs = named(context.config, 3)
        assert_same(runner(num_tokens=3, **inputs), step(**inputs))
        assert int(context.launch_count) == 3 * (2 * REPLAYS_OF_A_CAPTURE + 2)


def test_inputs_changed_between_replays(runner: mm.GraphRunner, block: Block) -> None:
    inputs = named(runner.context.config, 4)
    first = runner(num_tokens=4, **inputs)
    kept = first.clone()
    inputs["x"].mul_(2)
    second = runner(num_tokens=4, **inputs)
    assert_same(second, block(**inputs))
    assert_same(first, kept, "an earlier result")
    assert not torch.equal(first, second)


def test_inputs_are_not_written_and_not_kept(runner: mm.GraphRunner) -> None:
    inputs = named(runner.context.config, 4)
    kept = {name: value.clone() for name, value in inputs.items()}
    got = runner(num_tokens=4, **inputs)
    for name, value in inputs.items():
        assert_same(value, kept[name], name)
    taken = {value.untyped_storage().data_ptr() for value in inputs.values()}
    taken |= {static.untyped_storage().data_ptr() for static in runner._static.values()}
    assert got.untyped_storage().data_ptr() not in taken


def test_strided_inputs_are_copied_as_values(runner: mm.GraphRunner, block: Block) -> None:
    inputs = named(runner.context.config, 8)
    halves = {name: value[::2] for name, value in inputs.items()}
    assert_same(
        runner(num_tokens=4, **halves), block(**{n: v.contiguous() for n, v in halves.items()})
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_s72_any_grad_mode(runner: mm.GraphRunner, block: Block, mode: Any) -> None:
    inputs = named(runner.context.config, 3)
    with torch.no_grad():
        expected = block(**inputs)
    with mode():
        got = runner(num_tokens=3, **inputs)
        assert not got.requires_grad
        assert_same(got, expected)
    tracked = {**inputs, "x": inputs["x"].clone().requires_grad_()}
    assert not runner(num_tokens=3, **tracked).requires_grad


def test_captured_in_inference_mode_and_used_outside(block: Block) -> None:
    context = block.experts.context
    with torch.inference_mode():
        runner = make_runner(block, context, [4])
    inputs = named(context.config, 3)
    assert_same(runner(num_tokens=3, **inputs), block(**inputs))


# -- padding (S28, S75) ---------------------------------------------------------------------------


POISON = {"old data": None, "nan": math.nan, "inf": math.inf, "3e38": 3e38}


@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
def test_s28_s75_pad_rows_change_nothing(runner: mm.GraphRunner, block: Block, tokens: int) -> None:
    inputs = named(runner.context.config, tokens)
    expected = block(**inputs)
    invalid = runner.context.invalid_id_count
    for what, value in POISON.items():
        poison(runner, value)
        for bucket in (8, 16):
            got = runner(num_tokens=tokens, bucket=bucket, **inputs)
            assert_same(got, expected, f"{what}, bucket {bucket}")
    assert runner.context.invalid_id_count == invalid, "a pad row's ids are not looked at"


def test_s29_a_routers_choice_for_pad_rows_changes_nothing() -> None:
    """The step's own router sees the garbage; the experts do not."""
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        routed = Routed(make_layer(context))
        runner = mm.GraphRunner(routed, {"x": named(context.config, 3)["x"]}, [16], context)
        runner.capture()
        x = named(context.config, 5)["x"]
        results = []
        for value in POISON.values():
            poison(runner, value)
            results.append(runner(num_tokens=5, x=x))
        for result in results:
            assert_same(result, results[0])
        with torch.no_grad():
            assert_close(results[0], routed(x), 0.01)


def test_s30_pad_rows_of_the_experts_are_zeros(block: Block) -> None:
    """Inside the step, where a later reduction would see them."""
    context, seen = block.experts.context, []

    def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        seen.append(block.experts(x, topk_ids, topk_weights))
        return x

    runner = make_runner(step, context, [8])
    poison(runner, 3e38)
    runner(num_tokens=5, **named(context.config, 5))
    assert seen[-1].shape[0] == 8
    assert not seen[-1][5:].any()
    assert bool(seen[-1][:5].any(dim=1).all())


def test_s76_poisoned_allocator(runner: mm.GraphRunner, block: Block) -> None:
    inputs = named(runner.context.config, 5)
    expected = block(**inputs)
    with poisoned_allocator():
        assert_same(runner(num_tokens=5, **inputs), expected)


# -- num_valid ------------------------------------------------------------------------------------


def test_the_mask_is_back_after_every_call(runner: mm.GraphRunner, block: Block) -> None:
    context = runner.context
    for tokens in (0, 3, 16):
        runner(num_tokens=tokens, **named(context.config, tokens))
        assert int(context.num_valid) == ALL_VALID
    inputs = named(context.config, 20)
    assert bool(block.experts(*inputs.values()).any(dim=1).all())


def test_the_mask_is_back_after_a_step_that_fails() -> None:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        layer, fail = make_layer(context), [False]

        def step(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            if fail[0]:
                raise KeyError("the step's own")
            result: Tensor = layer(x, topk_ids, topk_weights)
            return result

        runner = make_runner(step, context, [2, 4])
        inputs = named(context.config, 3)
        expected = runner(num_tokens=3, **inputs)
        fail[0] = True
        for attempt in (lambda: runner(num_tokens=3, **inputs), runner.capture):
            with no_launch(context), pytest.raises(KeyError):
                attempt()
        fail[0] = False
        with refuses(mm.NotWarmedUp):  # the second capture failed: nothing half-captured
            runner(num_tokens=3, **inputs)
        runner.capture()
        assert_same(runner(num_tokens=3, **inputs), expected)


# -- buckets --------------------------------------------------------------------------------------


def test_the_smallest_bucket_that_holds_the_tokens(runner: mm.GraphRunner) -> None:
    expected = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16, 17: None, 1000: None}
    assert {n: runner.bucket_for(n) for n in expected} == expected


def test_the_chosen_bucket_is_the_one_that_runs(runner: mm.GraphRunner) -> None:
    def replays() -> dict[int, int]:
        return {row.bucket: row.replays for row in runner.summary()}

    for tokens, bucket in ((0, 1), (3, 4), (9, 16)):
        before = replays()
        runner(num_tokens=tokens, **named(runner.context.config, tokens))
        after = replays()
        assert {b for b in after if after[b] != before[b]} == {bucket}
    before = replays()
    runner(num_tokens=3, bucket=16, **named(runner.context.config, 3))
    assert replays()[16] == before[16] + 1


@pytest.mark.parametrize("bucket", [3, 2, 32, 0, -1, 5.0])
def test_a_bucket_that_does_not_fit_is_refused(runner: mm.GraphRunner, bucket: Any) -> None:
    with no_launch(runner.context), refuses(ValueError, "bucket", "3 tokens", "bucket_for"):
        runner(num_tokens=3, bucket=bucket, **named(runner.context.config, 3))


@pytest.mark.parametrize("buckets", [[1], [64], [3, 5, 6], [1, 2, 3, 4, 63, 64], (2, 4)])
def test_any_ascending_list_is_fine(block: Block, buckets: Sequence[int]) -> None:
    context = block.experts.context
    runner = make_runner(block, context, buckets)
    assert [row.bucket for row in runner.summary()] == list(buckets)
    for tokens in {0, 1, buckets[0], buckets[-1]}:
        if tokens <= buckets[-1]:
            inputs = named(context.config, tokens)
            assert_same(runner(num_tokens=tokens, **inputs), block(**inputs))


@pytest.mark.parametrize(
    "buckets", [[], [0], [0, 1], [-1, 1], [2, 1], [1, 1], [1, 2, 2], [1.0], ["1"], [True], [None]]
)
def test_other_buckets_are_refused(block: Block, buckets: Any) -> None:
    context = block.experts.context
    with refuses(ValueError, "buckets", "ascending"):
        mm.GraphRunner(block, named(context.config, 1), buckets, context)


def test_s44_a_bucket_above_capacity_is_refused_at_construction() -> None:
    """128 requests of 6 tokens need 768 rows: said before any capture starts."""
    with mm.MegaMoEContext(make_config(max_tokens_per_rank=512), device="cpu") as context:
        block = Block(make_layer(context))
        with no_launch(context), refuses(mm.CapacityError, "512", "768", "max_tokens_per_rank"):
            mm.GraphRunner(block, named(context.config, 1), [6, 768], context, width=6)


def test_above_the_largest_bucket(block: Block) -> None:
    context = block.experts.context
    inputs = named(context.config, 17)
    strict = make_runner(block, context)
    with no_launch(context), refuses(mm.CapacityError, "at most 16", "17", "above='eager'"):
        strict(num_tokens=17, **inputs)
    eager = make_runner(block, context, above="eager")
    before = int(context.launch_count)
    assert_same(eager(num_tokens=17, **inputs), block(**inputs))
    assert int(context.launch_count) == before + 2
    tracked = {**inputs, "x": inputs["x"].clone().requires_grad_()}
    assert not eager(num_tokens=17, **tracked).requires_grad, "as below the largest bucket"
    with no_launch(context), refuses(mm.CapacityError, "at most 64", "65"):
        eager(num_tokens=65, **named(context.config, 65))
    assert_same(eager(num_tokens=3, **named(context.config, 3)), block(**named(context.config, 3)))
    with refuses(ValueError, "above", "'chunk'"):
        make_runner(block, context, above="chunk")


def test_not_warmed_up(block: Block) -> None:
    context = block.experts.context
    runner = mm.GraphRunner(block, named(context.config, 3), BUCKETS, context)
    assert runner.summary() == []
    with no_launch(context), refuses(mm.NotWarmedUp, "capture()"):
        runner(num_tokens=3, **named(context.config, 3))


# -- inputs ---------------------------------------------------------------------------------------


def bad_calls(config: mm.MegaMoEConfig) -> dict[str, tuple[dict[str, Any], str]]:
    good = named(config, 3)
    return {
        "missing": (dict(num_tokens=3, x=good["x"], topk_ids=good["topk_ids"]), "topk_weights"),
        "unknown": (dict(num_tokens=3, **good, mask=good["x"]), "mask"),
        "none": (dict(num_tokens=3), "inputs"),
        "rows": (dict(num_tokens=4, **good), "input 'x'"),
        "rows of one": (dict(num_tokens=3, **{**good, "topk_ids": good["topk_ids"][:2]}), "ids"),
        "dtype": (dict(num_tokens=3, **{**good, "x": good["x"].float()}), "input 'x'"),
        "ids dtype": (dict(num_tokens=3, **{**good, "topk_ids": good["topk_ids"].int()}), "ids"),
        "columns": (dict(num_tokens=3, **{**good, "x": good["x"][:, :64]}), "input 'x'"),
        "rank": (dict(num_tokens=3, **{**good, "x": good["x"][None]}), "input 'x'"),
        "negative": (dict(num_tokens=-1, **good), "num_tokens"),
    }


@pytest.mark.parametrize("name", bad_calls(make_config()))
def test_bad_inputs_are_refused(runner: mm.GraphRunner, name: str) -> None:
    call, words = bad_calls(runner.context.config)[name]
    kept = {n: static.clone() for n, static in runner._static.items()}
    with no_launch(runner.context), refuses(ValueError, words):
        runner(**call)
    for n, static in runner._static.items():
        assert_same(static, kept[n], n)


@pytest.mark.parametrize(
    "example,rows,words",
    [
        ({"x": torch.zeros(0, 4)}, {}, "at least one row"),
        ({"x": torch.zeros(())}, {}, "at least one row"),
        ({"x": torch.zeros(1, 4)}, {"y": None}, "rows"),
        ({"x": torch.zeros(1, 4)}, {"x": "rows"}, "rows"),
        ({"num_tokens": torch.zeros(1, 4)}, {}, "example_inputs"),
        ({"bucket": torch.zeros(1, 4)}, {}, "example_inputs"),
    ],
)
def test_bad_examples_are_refused(
    block: Block, example: Mapping[str, Tensor], rows: Any, words: str
) -> None:
    with refuses(ValueError, words):
        mm.GraphRunner(block, example, [1], block.experts.context, rows=rows)


def test_examples_are_valid_data_in_every_static_row(block: Block) -> None:
    """Warm-up must not run on zeros or on chance: a KV cache slot of garbage is written there."""
    context = block.experts.context
    example = named(context.config, 3)
    runner = mm.GraphRunner(block, example, [8], context)
    for name, static in runner._static.items():
        assert static.shape[0] == 8
        assert static.is_contiguous()
        for row in range(8):
            assert_same(static[row], example[name][row % 3], name)
    example["x"].zero_()
    assert bool(runner._static["x"].any())
