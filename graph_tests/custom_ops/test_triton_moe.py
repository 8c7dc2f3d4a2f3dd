"""The triton backend against the recipe.

The cases run twice: on a CUDA GPU, and on the CPU in Triton's interpreter. TRITON_INTERPRET takes
effect when triton is imported, so two processes of their own, which are ranks of one gloo group,
run what is interpreted. Interpreted bf16 results are cut off, not rounded: hence two tolerances.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Inputs,
    RankPool,
    assert_close,
    assert_same,
    make_config,
    make_layer,
    named,
    op_arguments,
    oracle,
    outcome,
    poisoned_allocator,
    random_biases,
    random_inputs,
    refuses,
    relative_error,
)
from torch import Tensor
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe_compile as mm
from megamoe_compile.backends.runtimes import layer_spec
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.call import Call
from megamoe_compile.custom_ops.deep_gemm.api import parse_version
from megamoe_compile.custom_ops.symmetric.memory import OVERLAP_VARIABLE
from megamoe_compile.custom_ops.triton.runtime import TritonRuntime
from megamoe_compile.custom_ops.triton.tiling import Device

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(300),
]
TOLERANCE = {"cpu": 0.009, "cuda": 0.008}
SHAPE: dict[str, Any] = dict(
    backend="triton",
    hidden_size=256,
    intermediate_size=128,
    num_experts=4,
    top_k=2,
    max_tokens_per_rank=40,
    swiglu_limit=10.0,
)
# The interpreter takes some milliseconds per program: few programs for what needs many launches.
TINY = {"hidden_size": 128, "num_experts": 2, "top_k": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """SHAPE with `changes`, and what a launch gets. `gpu`: the tiles of another GPU."""

    tokens: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpu: Device | None = None
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    num_valid: int | None = None
    layout: str = "dense"  # dense | strided | odd (rows not 16-byte aligned)
    routing: str = "random"  # random | one | holes (some -1) | none (all -1) | twice (equal ids)

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", *(f"{k}={v}" for k, v in self.changes.items())]
        if self.gpu is not None:
            parts.append(f"sms={self.gpu.num_sms}-fp8={self.gpu.fp8_dot}")
        parts += [str(self.ids), str(self.weights), self.layout, self.routing]
        parts += [] if self.num_valid is None else [f"valid={self.num_valid}"]
        defaults = ("torch.int64", "torch.float32", "dense", "random")
        return "-".join(part for part in parts if part not in defaults)

    @property
    def config(self) -> mm.MegaMoEConfig:
        return make_config(**{**SHAPE, **self.changes})


class Bench:
    """A layer, a runtime with poisoned workspaces, and inputs."""

    def __init__(self, case: Case, device: str) -> None:
        config = case.config
        self.case, self.device = case, device
        self.context = mm.MegaMoEContext(config, device=device)
        self.layer = make_layer(self.context) if device == "cpu" else device_layer(self.context)
        self.runtime = self.context._runtime
        if case.gpu is not None:
            spec = layer_spec(config, "triton")
            self.runtime = TritonRuntime(spec, self.context.device, gpu=case.gpu)
        self.inputs = inputs_of(case, device)
        self.num_valid = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device)
        if case.num_valid is not None:
            self.num_valid.fill_(case.num_valid)
        self.launches = torch.zeros(1, dtype=torch.int32, device=device)

    def poison(self) -> None:
        for name, t in vars(self.runtime).items():
            if isinstance(t, Tensor) and name not in ("_arrived", "invalid_count"):
                t.fill_(float("nan") if t.is_floating_point() else 0x7F)

    def __call__(self, rows: slice = slice(None), inputs: Inputs | None = None) -> Tensor:
        x, ids, weights = (t[rows] for t in inputs or self.inputs)
        y = torch.full(x.shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        self.poison()
        prepared = self.layer.prepared
        call = Call(x, ids, weights, prepared, self.num_valid, self.launches, y)
        self.runtime.launch(call)  # type: ignore[union-attr]
        return y

    def reference(self, inputs: Inputs | None = None, **options: Any) -> Tensor:
        valid = min(max(int(self.num_valid), 0), 2**20)
        return oracle(self.layer, inputs or self.inputs, num_valid=valid, **options)

    def check(self, inputs: Inputs | None = None) -> Tensor:
        y = self(inputs=inputs)
        assert_close(y, self.reference(inputs), TOLERANCE[self.device])
        return y


@functools.lru_cache(maxsize=2)
def device_weights(config: mm.MegaMoEConfig) -> tuple[Tensor, Tensor]:
    """Random bf16 experts, made on the GPU: large ones take seconds on a CPU."""
    e, h, i = config.num_experts, config.hidden_size, config.intermediate_size
    generator = torch.Generator("cuda").manual_seed(e)
    options: dict[str, Any] = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    return (
        torch.randn(e, 2 * i, h, **options) * h**-0.5,
        torch.randn(e, h, i, **options) * i**-0.5,
    )


def device_layer(context: mm.MegaMoEContext) -> mm.MegaMoE:
    layer, config = mm.MegaMoE(context), context.config
    w13, w2 = device_weights(config)
    b13, b2 = random_biases(config, config.num_experts)
    layer.load_weights(w13, None, w2, None, b13, b2)
    for number in range(config.num_shared_experts):
        own = (None if bias is None else bias[number] for bias in (b13, b2))
        layer.load_expert(config.num_experts + number, w13[number], None, w2[number], None, *own)
    return layer


def inputs_of(case: Case, device: str, seed: int = 0) -> Inputs:
    x, ids, weights = random_inputs(
        case.config,
        case.tokens,
        seed=seed,
        ids_dtype=case.ids,
        weights_dtype=case.weights,
        device=device,
    )
    if case.layout == "strided":
        x, ids, weights = (torch.cat([t, t, t], dim=1)[:, : t.shape[1]] for t in (x, ids, weights))
    elif case.layout == "odd":
        x = torch.nn.functional.pad(x, (1, 2))[:, 1 : x.shape[1] + 1]
    if case.routing == "one":
        ids[:, 0], ids[:, 1:] = 1, -1
    elif case.routing == "holes":
        ids.view(-1)[::3] = -1
    elif case.routing == "none":
        ids[:] = -1
    elif case.routing == "twice":
        ids[:] = ids[:, :1].clone()
    return x, ids, weights


# -- where a check runs ---------------------------------------------------------------------------

Runner = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    if parse_version(version("triton")) < (3, 7) and parse_version(version("numpy")) >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4")
    pool = RankPool(
        2, tmp_path_factory.mktemp("interpreters"), environment={"TRITON_INTERPRET": "1"}
    )
    yield pool
    pool.close()


def on_rank_0(rank: int, world_size: int, function: Runner, *args: Any) -> Any:
    return function("cpu", *args) if rank == 0 else None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Runner:
    """run(check, *args) = check(device, *args), in the interpreter or on the GPU."""
    if request.param == "cuda":
        return lambda function, *args: function("cuda", *args)
    pool: RankPool = request.getfixturevalue("interpreters")
    return lambda function, *args: pool.run(on_rank_0, function, *args)[0]


@pytest.fixture
def gpu() -> Runner:
    return lambda function, *args: function("cuda", *args)


# -- one rank -------------------------------------------------------------------------------------

GPT_OSS = dict(swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0, expert_bias=True)
KINDS = pytest.mark.parametrize("options", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
DIRECT = Device(1, 232448, fp8_dot=False)  # one program per scale of the intermediate
SMALL_GPU = Device(16, 101376, fp8_dot=False)
FP8 = Device(132, 232448, fp8_dot=True)
FP8_DIRECT = Device(1, 101376, fp8_dot=True)
CASES = [
    *(Case(tokens) for tokens in (0, 1, 4)),
    Case(1, {"hidden_size": 640, "intermediate_size": 256}, gpu=Device(999, 232448, False)),
    Case(9, gpu=DIRECT),
    Case(9, gpu=FP8),
    Case(4, {"swiglu_limit": None}, gpu=FP8_DIRECT),
    Case(4, {"intermediate_size": 256, "swiglu_limit": 0.5}, gpu=SMALL_GPU),
    Case(35, TINY),
    Case(40, {**TINY, "num_experts": 1}, gpu=DIRECT),  # a tile of 64
    Case(6, {"top_k": 3, "num_experts": 5, "routed_scaling_factor": 2.5}, ids=torch.int32),
    Case(4, {"num_shared_experts": 1}, weights=torch.bfloat16, num_valid=3),
    Case(5, layout="strided", ids=torch.int32, weights=torch.bfloat16),
    Case(3, layout="odd"),
    Case(20, {**TINY, "num_experts": 8}, routing="one"),  # two tiles of an expert
    Case(6, routing="holes", num_valid=4),
    Case(5, routing="none"),
    Case(4, routing="twice"),
    Case(4, {**GPT_OSS, "num_shared_experts": 1}, weights=torch.bfloat16, num_valid=3),
    Case(9, {**GPT_OSS, "routed_scaling_factor": 2.5}, gpu=DIRECT, routing="holes"),
    Case(4, {**GPT_OSS, "intermediate_size": 192}, gpu=SMALL_GPU),  # padded to 256
    Case(4, {"swiglu_alpha": 1.702, "swiglu_beta": -0.5, "swiglu_limit": None}, gpu=FP8),
    Case(3, {"expert_bias": True}, num_valid=2),
    Case(2, TINY, num_valid=0),
    Case(2, TINY, num_valid=-1),
]
ROOM = {"max_tokens_per_rank": 512}
LARGE = [
    *(
        Case(t, dict(hidden_size=h, intermediate_size=i, num_experts=e, top_k=k) | ROOM)
        for (h, i, e, k), t in itertools.product(
            ((4096, 2048, 16, 6), (2048, 768, 64, 8)), (1, 8, 64, 500)
        )
    ),
    Case(8, dict(hidden_size=7168, intermediate_size=2048, num_experts=8, top_k=8)),
    Case(8, dict(hidden_size=4096, intermediate_size=1408, num_experts=12), gpu=FP8_DIRECT),
    Case(40, dict(hidden_size=2048, intermediate_size=768, num_experts=16), gpu=SMALL_GPU),
    Case(
        64, dict(hidden_size=2944, intermediate_size=2880, num_experts=32, top_k=4) | ROOM | GPT_OSS
    ),
    Case(300, {"num_experts": 512, "top_k": 8, "max_tokens_per_rank": 300}),
    Case(2000, {"num_experts": 4, "max_tokens_per_rank": 2000}),
]


def check_recipe(device: str, case: Case) -> None:
    bench = Bench(case, device)
    y = bench.check()
    assert int(bench.launches) == 1
    skipped = (bench.inputs[1] == -1).all(dim=1)
    if case.num_valid is not None:
        skipped |= torch.arange(case.tokens, device=device) >= case.num_valid
    if not case.config.num_shared_experts:
        assert_same(y[skipped], torch.zeros_like(y[skipped]), "rows without an expert")
    assert not bool(bench.runtime._arrived.any()), "a counter is not zero again"  # type: ignore
    assert_same(bench(), y, "again, with poisoned workspaces")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_recipe(run: Runner, case: Case) -> None:
    run(check_recipe, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_matches_the_recipe_at_size(gpu: Runner, case: Case) -> None:
    gpu(check_recipe, case)


def check_pad_rows(device: str) -> None:
    bench = Bench(Case(6, {**TINY, "top_k": 2}, num_valid=4), device)
    clean = bench()
    for garbage in (float("nan"), float("inf"), 3e38):
        bench.inputs[0][4:] = garbage
        bench.inputs[1][4:] = -(2**62)
        bench.inputs[2][4:] = garbage
        assert_same(bench(), clean, f"{garbage} in pad rows")
    assert int(bench.runtime.invalid_count) == 0  # type: ignore[union-attr]


def test_s75_pad_rows_change_nothing(run: Runner) -> None:
    run(check_pad_rows)


def check_bad_row(device: str, value: float) -> None:
    bench = Bench(Case(6, {**TINY, "top_k": 2}), device)
    clean = bench()
    bench.inputs[0][3, 17] = value
    got = bench()
    assert not bool(got[3].isfinite().any())
    rest = [0, 1, 2, 4, 5]
    assert_same(got[rest], clean[rest], "rows beside the bad one")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(run: Runner, value: float) -> None:
    run(check_bad_row, value)


def check_hostile_values(device: str) -> None:
    bench = Bench(Case(6, {**TINY, "swiglu_limit": None}), device)
    for row, fill in enumerate((0.0, -0.0, 1e-30, 1e-38, 3e38)):
        bench.inputs[0][row, :128] = fill
    got, want = bench(), bench.reference()
    rest = [0, 1, 2, 3, 5]  # the sums of row 4 may overflow
    assert_close(got[rest], want[rest], TOLERANCE[device])


def test_s73_zeros_tiny_and_huge_values(run: Runner) -> None:
    run(check_hostile_values)


def check_invalid_ids(device: str) -> None:
    bench = Bench(Case(6, num_valid=4), device)
    ids = bench.inputs[1]
    ids[0, 0], ids[1, 1], ids[2, 0], ids[3, 0], ids[5, 0] = 4, -2, 2**40, -1, 99
    got = bench()
    assert int(bench.runtime.invalid_count) == 3  # type: ignore[union-attr]
    assert_close(got, bench.reference(), TOLERANCE[device])
    ids[0, 0] = ids[1, 1] = ids[2, 0] = -1
    assert_same(got, bench(), "the same slots skipped")


def test_invalid_ids_are_skipped_and_counted(run: Runner) -> None:
    run(check_invalid_ids)


def check_rows_of_a_batch(device: str) -> None:
    """S03, S13: large, small, large: nothing stale, and a row does not depend on its batch."""
    bench = Bench(Case(6, {"top_k": 3}), device)
    whole = bench.check()
    for rows in (slice(0, 1), slice(3, 5), slice(0, 6)):
        assert_close(bench(rows), whole[rows], TOLERANCE[device], f"rows {rows}")
    assert int(bench.launches) == 4


def test_a_row_does_not_depend_on_its_batch(run: Runner) -> None:
    run(check_rows_of_a_batch)


def check_sort_in_chunks(device: str) -> None:
    bench = Bench(Case(6, {**TINY, "num_experts": 4, "top_k": 3}, routing="holes"), device)
    whole = bench.check()
    bench.runtime._constants["group"]["CHUNK"] = 4  # type: ignore[union-attr]
    assert_same(bench(), whole, "sorted four pairs at a time")
    pairs, first = bench.runtime._pairs, bench.runtime._first  # type: ignore[union-attr]
    sorted_ids = bench.inputs[1].view(-1)[pairs[: int((bench.inputs[1] >= 0).sum())].long()]
    assert_same(sorted_ids, sorted_ids.sort().values)
    assert_same(first.long(), torch.searchsorted(sorted_ids, torch.arange(4, device=device)))


def test_pairs_are_sorted_by_expert(run: Runner) -> None:
    run(check_sort_in_chunks)


def check_close_frees(device: str) -> None:
    bench = Bench(Case(2, TINY), device)
    staged = StorageWeakRef(bench.runtime._staged.untyped_storage())  # type: ignore[union-attr]
    bench.context.close()  # the runtime itself lives on here
    assert bench.runtime is not None and staged.expired()


def test_a_closed_context_keeps_no_workspace(run: Runner) -> None:
    run(check_close_frees)


def check_not_worse(device: str) -> None:
    bench = Bench(Case(16), device)
    exact = bench.reference(quantize=False)
    ours, recipe = (relative_error(y, exact) for y in (bench(), bench.reference()))
    assert ours <= recipe * 1.02


def test_never_worse_than_the_recipe(run: Runner) -> None:
    run(check_not_worse)


# -- through the op -------------------------------------------------------------------------------


def check_layer(device: str, options: dict[str, Any]) -> None:
    with mm.MegaMoEContext(make_config(**{**SHAPE, **TINY, **options}), device=device) as context:
        assert (context.backend, context.buffer_bytes > 0) == ("triton", True)
        layer = make_layer(context)
        context.warmup([3, 4])
        how = {"cpu": "aot_eager", "cuda": "inductor"}[device]
        compiled = torch.compile(layer, fullgraph=True, backend=how, dynamic=True)
        for tokens in (3, 4, 0):
            inputs = random_inputs(context.config, tokens, device=device)
            before = int(context.launch_count)
            with poisoned_allocator():
                y = layer(*inputs)
            assert_close(y, oracle(layer, inputs), TOLERANCE[device])
            assert_same(compiled(*inputs), y, f"compiled, {tokens} tokens")
            assert int(context.launch_count) == before + 2
        masked = layer(*random_inputs(context.config, 4, device=device), num_valid=2)
        assert not masked[2:].any() and bool(masked[:2].any())
        with refuses(mm.CapacityError, "at most 40"):
            layer(*random_inputs(context.config, 41, device=device))
        context.reset()
        assert int(context.launch_count) == 0
        inputs = random_inputs(context.config, 3, device=device)
    with pytest.raises(mm.ContextClosed):
        layer(*inputs)


@KINDS
def test_eager_and_compiled_layer(run: Runner, options: dict[str, Any]) -> None:
    run(check_layer, options)


def check_op(device: str, options: dict[str, Any]) -> None:
    with mm.MegaMoEContext(make_config(**{**SHAPE, **TINY, **options}), device=device) as context:
        layer = make_layer(context)
        inputs = random_inputs(context.config, 2, device=device)
        opcheck(library.fused_moe, op_arguments(layer, inputs, as_bytes=True))


@KINDS
def test_opcheck(run: Runner, options: dict[str, Any]) -> None:
    run(check_op, options)


def check_runner(device: str, options: dict[str, Any]) -> None:
    """Buckets, replays and changed inputs; on a GPU in CUDA graphs."""
    with mm.MegaMoEContext(make_config(**{**SHAPE, **TINY, **options}), device=device) as context:
        layer = make_layer(context)
        example = named(random_inputs(context.config, 1, device=device))
        runner = mm.GraphRunner(layer, example, [2, 4], context=context)
        runner.capture()
        for seed, tokens in enumerate((3, 1, 4, 0, 2)):
            inputs = random_inputs(context.config, tokens, seed=seed, device=device)
            got = runner(num_tokens=tokens, **named(inputs))
            bucket = [torch.cat([t, t.new_zeros(4, t.shape[1])])[:4] for t in inputs]
            bucket = [t[: runner.bucket_for(tokens)] for t in bucket]
            assert_same(got, layer(*bucket, num_valid=tokens)[:tokens], f"{tokens} tokens")
            assert_close(got, oracle(layer, inputs), TOLERANCE[device])
        assert {line.backend for line in runner.summary()} == {"triton"}


@KINDS
def test_replay_equals_eager(run: Runner, options: dict[str, Any]) -> None:
    run(check_runner, options)


# -- several ranks --------------------------------------------------------------------------------


def plan_of(counts: list[int], rank: int, buckets: list[int]) -> mm.StepPlan:
    return mm.StepPlan.from_counts(counts, rank, buckets)


def run_ranks(rank: int, world_size: int, device: str, options: dict[str, Any]) -> None:
    changes = {**TINY, "num_experts": world_size, "num_shared_experts": 1, **options}
    config = make_config(**{**SHAPE, **changes, "max_tokens_per_rank": 8})
    with mm.MegaMoEContext(config, device=device) as alone:
        whole = make_layer(alone)
    with mm.MegaMoEContext(config, dist.group.WORLD, device) as context:
        layer = mm.MegaMoE(context)
        # This rank's routed experts, and the shared one.
        local = config.num_experts // world_size
        own = [*range(rank * local, (rank + 1) * local), config.num_experts]
        parts = (None if t is None else t[own].clone() for t in whole.prepared)
        layer.install(mm.weights.PreparedWeights(*parts))  # type: ignore[arg-type]
        context.warmup([4])
        eager = [[3, 0], [1, 8], [0, 0]]
        for seed, counts in enumerate(eager):
            counts = (counts * world_size)[:world_size]
            inputs = random_inputs(
                config, counts[rank], seed=seed * 10 + rank, device=device, ids_dtype=torch.int32
            )
            want = oracle(whole, inputs)
            before = int(context.launch_count)
            assert_close(layer(*inputs), want, TOLERANCE[device], f"eager {counts}")
            plan = plan_of(counts, rank, [4])
            with context.step(plan):  # every rank brings the bucket's rows, where there is one
                assert context._step_rows.rows == plan.bucket
                assert_close(layer(*inputs), want, TOLERANCE[device], f"planned {counts}")
            assert int(context.launch_count) == before + 2
        # A plan that counted too few: refused before anything is exchanged, here by all ranks.
        inputs = random_inputs(config, 5, device=device)
        with context.step(plan_of([2] * world_size, rank, [4])), refuses(mm.CapacityError, "4"):
            layer(*inputs)
        # An id that is not valid counts on the rank that has it.
        bad = random_inputs(config, 2, device=device)
        bad[1][0, 0] = 77
        layer(*bad)
        assert context.invalid_id_count == 1
        if device == "cuda":
            replay_on_ranks(context, layer, rank, world_size)


def replay_on_ranks(
    context: mm.MegaMoEContext, layer: mm.MegaMoE, rank: int, world_size: int
) -> None:
    config = context.config
    example = named(random_inputs(config, 1, device="cuda"))
    runner = mm.GraphRunner(layer, example, [2, 4], context=context)
    runner.capture()
    for seed, counts in enumerate([[3, 0], [1, 2], [4, 4], [0, 0], [2, 1]]):
        counts = (counts * world_size)[:world_size]
        plan = plan_of(counts, rank, [2, 4])
        inputs = random_inputs(config, counts[rank], seed=seed * 7 + rank, device="cuda")
        got = runner(plan=plan, **named(inputs))
        assert_close(got, layer(*inputs), TOLERANCE["cuda"], f"replay {counts}")


@pytest.mark.multirank
@KINDS
def test_two_ranks_with_uneven_and_idle_counts(
    interpreters: RankPool, options: dict[str, Any]
) -> None:
    interpreters.run(run_ranks, "cpu", options)


@pytest.mark.gpu
@pytest.mark.multirank
@KINDS
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_a_gpu(world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    pool = RankPool(world_size, tmp_path, environment={OVERLAP_VARIABLE: "1"})
    try:
        pool.run(run_ranks, "cuda", options, timeout=240)
    finally:
        pool.close()


# -- GPU only -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_error_has_no_step_over_a_sweep_of_token_counts() -> None:
    """S13: tiles and splits change at thresholds of T."""
    changes = dict(hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4)
    bench = Bench(Case(0, {**changes, "max_tokens_per_rank": 400}), "cuda")
    errors = {}
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 95, 96, 97, 128, 129, 257, 400):
        inputs = random_inputs(bench.case.config, tokens, device="cuda")
        errors[tokens] = relative_error(bench(inputs=inputs), bench.reference(inputs))
    assert max(errors.values()) <= TOLERANCE["cuda"], errors


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_the_same_bits_in_200_runs(tokens: int) -> None:
    """Programs that share a scale arrive in any order."""
    shape = dict(hidden_size=2048, intermediate_size=768, num_experts=32, top_k=8)
    bench = Bench(Case(tokens, shape), "cuda")
    first = bench.check()
    results = [bench() for _ in range(200)]
    for y in results:
        assert_same(y, first)


@pytest.mark.gpu
def test_graph_replay_of_a_chain() -> None:
    """Calls back to back in one graph; inputs and num_valid change between replays."""
    shape = dict(hidden_size=1024, intermediate_size=512, num_experts=32, top_k=6)
    case = Case(8, shape)
    bench = Bench(case, "cuda")
    layer, context = bench.layer, bench.context
    context.warmup([8])
    outputs: list[Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = [layer(*bench.inputs, num_valid=bench.num_valid) for _ in range(5)]
    for seed, valid in ((1, 8), (2, 3), (3, 0), (4, 8)):
        for static, fresh in zip(bench.inputs, inputs_of(case, "cuda", seed), strict=True):
            static.copy_(fresh)
        bench.num_valid.fill_(valid)
        for y in outputs:
            y.fill_(float("nan"))
        before = int(context.launch_count)
        graph.replay()
        assert int(context.launch_count) == before + 5
        eager = layer(*bench.inputs, num_valid=bench.num_valid)
        for y in outputs:
            assert_same(y, eager, f"valid={valid}")
        assert_close(eager, bench.reference(), TOLERANCE["cuda"])


@pytest.mark.gpu
def test_capture_without_warmup_is_refused() -> None:
    bench = Bench(Case(3), "cuda")
    graph = torch.cuda.CUDAGraph()
    with refuses(mm.NotWarmedUp, "warmup([3"), torch.cuda.graph(graph):
        bench.layer(*bench.inputs)
    assert outcome(lambda: bench.layer(*bench.inputs)) == ""
