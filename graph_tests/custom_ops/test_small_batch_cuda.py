"""The small-batch kernel against the recipe.

The cases run twice: on an SM90 GPU, and without one on the CPU (see small_batch_layers.py).
"""

from __future__ import annotations

import ctypes
import itertools
import types

import pytest
import torch
from helpers import assert_same, refuses, relative_error
from kernel_mocks import assert_interface
from small_batch_layers import (
    DEVICES,
    TOLERANCE,
    VARIANTS,
    Backend,
    Case,
    backend_of,
    check,
    check_same_bits,
    emulated,
    make_layer,
    make_op,
    needs_sm90,
    replays_of_a_chain,
    variants_of,
)
from torch import Tensor

from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.small_batch import kernel as small_batch_cuda
from megamoe_compile.custom_ops.small_batch.kernel import Tuning


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


@pytest.fixture
def gpu() -> Backend:
    return "cuda", None


CASES = [
    *(Case(t) for t in (0, 1, 2, 3, 7, 8, 9, 16, 33)),
    Case(1, 512, 128, experts=4, top_k=1, limit=None, ids=torch.int32),
    Case(2, 128, 384, experts=4, top_k=3, limit=0.5, weights=torch.bfloat16),
    Case(5, 384, 768, experts=32, top_k=8, layout="strided", scaling=2.5),
    Case(6, 1024, 128, experts=16, top_k=6, layout="odd", ids=torch.int32),
    Case(4, 896, 640, experts=3, top_k=2, limit=None),
    Case(1, 256, 128, layout="odd"),
    Case(12, routing="one"),
    Case(40, 256, 128, experts=4, top_k=1, routing="one"),  # more pairs than columns
    Case(64, 128, 128, experts=2, top_k=1, routing="one"),
    Case(24, 2048, 128, experts=4),
    Case(7, 128, 256, experts=4, top_k=4, routing="same"),  # chunks of one expert, x resident
    Case(16, 256, 128, experts=4, top_k=3, routing="same"),
    Case(20, 128, 128, experts=4, top_k=4, routing="same"),
    Case(40, 1024, 128, experts=2, top_k=1, routing="one"),
    Case(17, 128, 512, experts=4, top_k=2),  # fewer columns of y than of the intermediate
    Case(10, routing="holes", num_valid=7),
    Case(5, routing="none"),
    Case(9, num_valid=0),
    Case(9, num_valid=-1),
    Case(9, num_valid=100, shared=1),
    Case(20, 128, 256, experts=4, top_k=2, shared=2, num_valid=13, scaling=1.5),
    Case(3, experts=1000, top_k=8, hidden=128, intermediate=128),
    Case(130, 128, 128, experts=16, top_k=2),
    Case(40, 384, 384, experts=16, top_k=2),  # odd numbers of slabs, 8 to 32 columns
    Case(12, 384, 128),
    Case(20, 384, 128, experts=16, top_k=1),
    Case(20, experts=16),
    Case(40, 384, 128, experts=6, top_k=1, num_valid=33),
    Case(40, 128, 384, experts=2, top_k=2, routing="holes"),
]
LARGE = [  # GPU only
    *(
        Case(t, 1024, 512, experts=e, top_k=k)
        for t, e, k in itertools.product((1, 8, 13, 33, 64, 128), (8, 32, 128), (1, 6, 8))
    ),
    Case(1, 4096, 2048, experts=16, top_k=6),
    Case(8, 4096, 2048, experts=16, top_k=6),
    Case(32, 4096, 2048, experts=16, top_k=6),
    Case(8, 4096, 2048, experts=256, top_k=6),
    Case(64, 2048, 768, experts=128, top_k=8),
    Case(8, 7168, 2048, experts=12, top_k=8, limit=None),
    Case(16, 7168, 2048, experts=8, top_k=8, limit=None),
    Case(64, 7168, 2048, experts=8, top_k=8, limit=None),
    Case(8, 6144, 2048, experts=12, top_k=8),
    Case(8, 3072, 1536, experts=12, top_k=8),
    Case(8, 4096, 1408, experts=12, top_k=8),
    Case(64, 2048, 768, experts=128, top_k=8, routing="one"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_recipe(case: Case, backend: Backend) -> None:
    check(make_layer(case, *backend))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_matches_the_recipe_at_size(case: Case, gpu: Backend) -> None:
    check(make_layer(case, *gpu))


TUNINGS = [
    Tuning(num_sms=5),
    Tuning(num_sms=1),
    Tuning(num_sms=9, stages=2),
    Tuning(num_sms=16, stages=5, pdl=False),
    Tuning(num_sms=7, stages=3),
    Tuning(num_sms=7, in_flight=(1, 1)),
    Tuning(num_sms=5, in_flight=(10_000, 10_000)),
]


@pytest.mark.parametrize(
    "case", [Case(3), Case(11, 512, 384), Case(40, 128, 256, top_k=3)], ids=str
)
def test_tuning_changes_no_bit(case: Case, backend: Backend) -> None:
    first = check(make_layer(case, *backend, TUNINGS[0]))
    for tuning in TUNINGS[1:]:
        assert_same(make_layer(case, *backend, tuning)(), first, str(tuning))


def test_a_batch_changes_no_row(backend: Backend) -> None:
    layer = make_layer(Case(19, top_k=4), *backend)
    whole = layer()
    for rows in (slice(0, 1), slice(0, 8), slice(0, 9)):
        assert_same(layer(rows=rows), whole[rows], f"rows {rows}")


def test_pad_rows_change_nothing(backend: Backend) -> None:
    layer = make_layer(Case(8, num_valid=5), *backend)
    clean = layer()
    for garbage in (float("nan"), float("inf"), 1e30):
        layer.x[5:] = garbage
        layer.routing[5:] = garbage
        assert_same(layer(), clean, f"{garbage} in pad rows")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_stays_alone(value: float, backend: Backend) -> None:
    layer = make_layer(Case(8, top_k=4), *backend)
    clean = layer()
    layer.x[3, 17] = value
    got = layer()
    assert not bool(got[3].isfinite().any())
    rest = [i for i in range(8) if i != 3]
    assert_same(got[rest], clean[rest], "rows beside the bad one")


def test_hostile_values(backend: Backend) -> None:
    layer = make_layer(Case(6, limit=None), *backend)
    for row, fill in enumerate((0.0, -0.0, 1e-30, 1e-38, 3e38)):
        layer.x[row, :128] = fill
    got, want = layer(), layer.reference()
    assert_same(got.isfinite().float(), want.isfinite().float(), "finite elements")
    finite = want.isfinite().all(dim=1)
    assert relative_error(got[finite], want[finite]) <= TOLERANCE


def test_invalid_ids_are_skipped_and_counted(backend: Backend) -> None:
    layer = make_layer(Case(6, num_valid=4), *backend)
    layer.ids[0, 0] = 8
    layer.ids[1, 1] = -2
    layer.ids[2, 0] = 2**31 - 1 if layer.ids.dtype is torch.int32 else 2**40
    layer.ids[3, 0] = -1
    layer.ids[5, 0] = 99  # a pad row: not counted
    check(layer)
    assert int(layer.invalid_count) == 3


def test_an_expert_range_is_its_part_of_the_sum(backend: Backend) -> None:
    case = Case(7, top_k=4)
    whole = make_layer(case, *backend)
    parts = torch.zeros_like(whole.x, dtype=torch.float32)
    for first in (0, 4):
        layer = make_layer(case, *backend)
        layer.op = make_op(
            *backend,
            first_expert=first,
            num_local_experts=4,
            top_k=case.top_k,
            capacity=case.tokens,
            swiglu_limit=case.limit,
        )
        layer.weights = tuple(w[first : first + 4].contiguous() for w in whole.weights)
        parts += layer().float()
    assert relative_error(parts, whole()) <= TOLERANCE


def test_most_tokens_of_a_call(backend: Backend) -> None:
    for top_k, most in ((2, 512), (6, 170), (1024, 1)):
        op = make_op(*backend, num_experts=1024, top_k=top_k, capacity=1000)
        assert op.max_tokens == most
    layer = make_layer(Case(9, experts=128, top_k=128), *backend)
    assert layer.op.max_tokens == 8
    with refuses(ValueError, "tokens on this rank: expected at most 8, got 9"):
        layer()


def test_calls_share_workspaces(backend: Backend) -> None:
    """Large, small, large without a synchronization: nothing stale."""
    layer = make_layer(Case(9, top_k=4), *backend)
    want = [layer(rows=slice(0, n)) for n in (9, 2, 9)]
    got = [torch.full_like(w, float("nan")) for w in want]
    for y, n in zip(got, (9, 2, 9), strict=True):
        layer.launch(y, slice(0, n))
    layer.synchronize()
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_never_worse_than_the_recipe(backend: Backend) -> None:
    layer = make_layer(Case(16, 512, 256, top_k=4), *backend)
    exact = layer.reference(recipe=False)
    ours = relative_error(layer(), exact)
    recipe = relative_error(layer.reference(), exact)
    assert ours <= recipe * 1.02


def test_order_of_threads_changes_nothing() -> None:
    """Any schedule of the emulated threads gives the same bits: no missing barrier."""
    library = emulated()
    for case in (Case(10, 512, 384, top_k=3), Case(20, 2048, 128, experts=4)):
        results = []
        for seed in (0, 1, 2, 3):
            library.emulator_seed(seed)
            results.append(make_layer(case, "cpu", library)())
        for result in results[1:]:
            assert_same(result, results[0])


def test_constants_are_those_of_the_source() -> None:
    numbers = (ctypes.c_int * 8).in_dll(emulated(), "emulator_constants")
    module = small_batch_cuda
    layer = make_layer(Case(1, hidden=384), "cpu", emulated())
    tiles = layer.case.hidden // module.TILE_ROWS
    assert list(numbers) == [
        module.MAX_EXPERTS,
        module.MAX_PAIRS,
        module.MAX_COLUMNS,
        module.INTERMEDIATE_GROUP,
        module.TILE_ROWS,
        ctypes.sizeof(module._Config),
        layer.op._workspaces["counters"].numel() - tiles,
        VARIANTS,
    ]


def test_cases_reach_every_variant() -> None:
    assert variants_of(CASES) == set(range(VARIANTS))


def routing_of(counts: list[int]) -> Tensor:
    """Ids [tokens, 1] that give each expert its count of pairs."""
    return torch.tensor([expert for expert, n in enumerate(counts) for _ in range(n)])[:, None]


@pytest.mark.parametrize(
    "counts",
    [
        [1] * 20,  # 20 chunks of one pair
        [33, 1, 1, 1],  # 8, 16 or 32 columns: one pair behind full chunks
        [17, 17, 17, 17],
        [1, 65],
        [9, 1, 9, 1, 9, 1, 1, 1],
    ],
    ids=str,
)
def test_workspaces_hold_the_worst_routing(counts: list[int]) -> None:
    """Nothing is written behind a workspace, whatever the number of chunks."""
    case = Case(sum(counts), 128, 128, experts=len(counts), top_k=1)
    layer = make_layer(case, "cpu", emulated())
    layer.ids[:] = routing_of(counts)
    behind = {}
    for name, workspace in layer.op._workspaces.items():
        guarded = torch.zeros(workspace.nbytes + 65536, dtype=torch.uint8)
        behind[name] = guarded[workspace.nbytes :].fill_(0xA5)
        layer.op._workspaces[name] = guarded[: workspace.nbytes].view(workspace.dtype)
        setattr(layer.op._config, name, guarded.data_ptr())
    check(layer)
    for name, tail in behind.items():
        assert bool((tail == 0xA5).all()), name


def test_reset_after_a_launch_that_did_not_end() -> None:
    layer = make_layer(Case(20, 128, 128), "cpu", emulated())
    want = check(layer)
    layer.op._workspaces["counters"].fill_(3)
    layer.op.reset()
    assert_same(layer(), want)


def test_more_blocks_than_multiprocessors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for ever for the ones that find no place."""
    gpu = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with refuses(ValueError, "num_sms: expected at most 132, got 133"):
        make_op("cuda", emulated(), tuning=Tuning(num_sms=133))
    with refuses(ValueError, "num_sms: expected a number of blocks"):
        make_op("cpu", emulated(), tuning=Tuning())


def test_refuses_what_does_not_fit() -> None:
    library = emulated()
    layer = make_layer(Case(4), "cpu", library)
    good = dict(x=layer.x, ids=layer.ids, routing=layer.routing)
    bad = (
        ("x", layer.x.float(), "x.dtype"),
        ("x", layer.x[:, :128], "x.shape"),
        ("x", layer.x.t().contiguous().t(), "stride"),
        ("ids", layer.ids[:, :1], "topk_ids.shape"),
        ("ids", layer.ids.short(), "topk_ids.dtype"),
        ("routing", layer.routing.double(), "topk_weights.dtype"),
        ("x", torch.cat([layer.x, layer.x]), "tokens"),
    )
    for name, value, word in bad:
        with refuses(ValueError, word):
            a = {**good, name: value}
            layer.op(
                *(a["x"], a["ids"], a["routing"], layer.num_valid, layer.launch_count),
                *(*layer.weights, layer.x, 0),
            )
    for geometry, word in (
        ({"hidden_size": 200}, "hidden_size: expected a multiple of 128, got 200"),
        ({"intermediate_size": 100}, "intermediate_size: expected a multiple of 128, got 100"),
        ({"num_experts": 1025}, "local experts, routed and shared: expected 1 to 1024, got 1025"),
        ({"num_shared_experts": 1017}, "local experts, routed and shared"),
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"first_expert": -1, "num_local_experts": 4}, "within 0 to 8 (num_experts), got -1 to 3"),
        ({"tuning": Tuning(num_sms=5, stages=1)}, "stages: expected 0, or 2 and more, got 1"),
        (
            {"tuning": Tuning(num_sms=5, in_flight=(0, -1))},
            "in_flight: expected KiB, or 0, got (0, -1)",
        ),
        ({"first_expert": 5, "num_local_experts": 4}, "within 0 to 8 (num_experts), got 5 to 9"),
    ):
        with refuses(ValueError, word):
            make_op("cpu", library, **geometry)


def test_slots_that_are_too_many_for_one_token() -> None:
    assert make_op("cpu", emulated(), top_k=1025).max_tokens == 0


def test_what_the_compiler_made() -> None:
    """No spills, and no products that wait for each other (ptxas C7510 to C7520)."""
    try:
        library = cuda_build.build("small_batch", ["small_batch/small_batch.cu"])
    except BackendUnavailable as error:
        if "nvcc build" in str(error):
            raise
        pytest.skip(str(error))
    report = cuda_build.resource_report(library)
    assert len(report) == 2 * VARIANTS
    for kernel in report:
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
    log = library.with_suffix(".log").read_text()
    assert "wgmma" not in log and "C75" not in log, log
    assert_interface(library, "small_batch")


# -- GPU only ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_the_same_bits_in_200_runs(tokens: int, pdl: bool, gpu: Backend) -> None:
    case = Case(tokens, 2048, 768, experts=32, top_k=8)
    layer = make_layer(case, *gpu, Tuning(pdl=pdl))
    check_same_bits(layer, check(layer))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("pdl", [True, False])
def test_graph_replay(pdl: bool, gpu: Backend) -> None:
    """A chain of calls in one graph; inputs and num_valid change between replays."""
    case = Case(8, 1024, 512, experts=32, top_k=6)
    layer = make_layer(case, *gpu, Tuning(pdl=pdl))
    for outputs in replays_of_a_chain(layer, case):
        eager = layer()
        for y in outputs:
            assert_same(y, eager, f"valid={int(layer.num_valid)}")
        assert relative_error(eager, layer.reference()) <= TOLERANCE
