"""The small-batch kernel's general flavour: alpha and beta of SwiGLU, and biases of the experts.

Its oracle is a formula of this file. The cases run twice, as those of test_small_batch_cuda.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same, refuses, relative_error
from small_batch_layers import (
    DEVICES,
    TOLERANCE,
    VARIANTS,
    Backend,
    Case,
    Layer,
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

from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.reference.recipe import (
    dequantize_blocks,
    dequantize_rows,
    quantize_rows,
)
from megamoe_compile.custom_ops.small_batch.kernel import SmallBatch, Tuning

OAI: dict[str, Any] = dict(alpha=1.702, beta=1.0, limit=7.0)  # gpt-oss, MiniMax-M3


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


@pytest.fixture
def gpu() -> Backend:
    return "cuda", None


def oracle(layer: Layer) -> Tensor:
    """[T, H] bf16, pair by pair in fp32; gate is row 16 a + b of w13 for column 8 a + b, b < 8."""
    case = layer.case
    w13, w13_scale, w2, w2_scale = layer.weights
    w13_bias, w2_bias = layer.biases or (w13_scale.new_zeros(len(w13), w13.shape[1]), None)
    row = torch.arange(case.intermediate, device=w13.device)
    row = row // 8 * 16 + row % 8
    limit = float("inf") if case.limit is None else case.limit
    x = dequantize_rows(*quantize_rows(layer.x))
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(len(w13)):
        ids = layer.ids == expert
        weights = layer.routing.float() * case.scaling
        if expert >= case.experts:  # a shared one
            ids, weights = torch.ones_like(ids[:, :1]), torch.ones_like(weights[:, :1])
        ids = ids & (torch.arange(case.tokens, device=x.device)[:, None] < layer.num_valid)
        if not ids.any():
            continue
        codes = w13[expert].view(torch.uint8)
        blocks = w13_scale[expert].chunk(2)  # of gate, of up
        gate, up = (
            x @ dequantize_blocks(codes[rows].view(w13.dtype), scale).T + w13_bias[expert, rows]
            for rows, scale in zip((row, row + 8), blocks, strict=True)
        )
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(case.alpha * gate) * (up + case.beta)
        down = dequantize_blocks(w2[expert], w2_scale[expert]).T
        for token, slot in ids.nonzero().tolist():
            weight = weights[token, slot]
            result = dequantize_rows(*quantize_rows(hidden[token, None] * weight, 32)) @ down
            if w2_bias is not None:
                result = result + weight * w2_bias[expert]
            y[token] += result[0].bfloat16()
    return y.bfloat16()


CASES = [
    *(Case(t, **OAI, bias=0.5) for t in (0, 1, 2, 8, 17, 64)),
    Case(3, **OAI),
    Case(3, alpha=1.702, limit=None),
    Case(3, alpha=0.5, limit=3.0),
    Case(3, beta=1.0, limit=0.5),
    Case(3, beta=-0.75, limit=None),
    Case(3, bias=0.5, limit=None),
    Case(3, alpha=1.702, beta=1.0, limit=0.5, bias=0.5),  # clamped with the bias, not before it
    Case(5, 384, 768, experts=32, top_k=8, **OAI, bias=0.1, layout="strided", scaling=2.5),
    Case(6, **OAI, bias=30.0),  # most of gate and up are clamped, or far below
    Case(6, alpha=1.702, beta=1.0, limit=None, bias=300.0),
    Case(8, **OAI, bias=0.5, shared=2, num_valid=5, scaling=1.5),
    Case(10, **OAI, bias=0.5, routing="holes", num_valid=7),
    Case(17, **OAI, bias=0.5, routing="holes", num_valid=11, weights=torch.bfloat16),
    Case(64, 128, 256, experts=4, **OAI, bias=0.5, shared=1, routing="holes", num_valid=50),
    Case(5, **OAI, bias=0.5, routing="none"),
    Case(9, **OAI, bias=0.5, num_valid=0),
    Case(9, 128, 128, **OAI, bias=0.5, shared=1, num_valid=100),
    Case(2, 384, 384, **OAI, bias=0.5),  # odd numbers of slabs from here on
    Case(12, 384, 128, **OAI, bias=0.5),
    Case(20, 384, 128, experts=16, top_k=1, **OAI, bias=0.5),
    Case(40, 384, 384, experts=16, top_k=2, **OAI, bias=0.5),
    Case(16, 256, 256, experts=4, top_k=3, routing="same", **OAI, bias=0.5),
    Case(40, 256, 128, experts=4, top_k=1, routing="one", **OAI, bias=0.5),  # several chunks
    Case(20, experts=16, **OAI, bias=0.5),
]
LARGE = [  # GPU only: padded gpt-oss, MiniMax-M3, fewer experts
    *(Case(t, 2944, 2944, experts=32, top_k=4, **OAI, bias=0.5) for t in (1, 8, 16, 64, 128)),
    *(Case(t, 6144, 3072, experts=16, top_k=4, shared=1, **OAI) for t in (1, 8, 16, 64)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case: Case, backend: Backend) -> None:
    layer = make_layer(case, *backend)
    check(layer, oracle(layer))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_matches_the_formula_at_size(case: Case, gpu: Backend) -> None:
    layer = make_layer(case, *gpu)
    check(layer, oracle(layer))


@pytest.mark.parametrize("form", [{}, {**OAI, "bias": 0.5}], ids=str)
def test_the_formula_is_the_recipe(form: dict[str, Any], backend: Backend) -> None:
    case = Case(6, 384, 256, shared=1, num_valid=5, routing="holes", scaling=1.5, **form)
    layer = make_layer(case, *backend)
    assert relative_error(oracle(layer), layer.reference()) <= 0.001


def test_cases_reach_every_variant() -> None:
    assert variants_of(CASES) == set(range(VARIANTS))


@pytest.mark.parametrize(
    ("options", "general"),
    [
        ({}, False),
        ({"swiglu_limit": 7.0}, False),
        ({"swiglu_alpha": 1.702}, True),
        ({"swiglu_beta": 1.0}, True),
        ({"expert_bias": True}, True),
    ],
    ids=str,
)
def test_what_runs_in_the_general_flavour(options: dict[str, Any], general: bool) -> None:
    op = make_op("cpu", emulated(), **options)
    assert emulated().emulator_is_general(op._config_address) == general


@pytest.mark.parametrize("tokens", [3, 20])
def test_biases_of_zero_change_nothing(tokens: int, backend: Backend) -> None:
    plain = make_layer(Case(tokens), *backend)
    zero = make_layer(Case(tokens, bias=0.0), *backend)
    assert_same(check(zero, oracle(zero)), check(plain))


def test_a_row_without_an_expert_has_no_bias(backend: Backend) -> None:
    layer = make_layer(Case(12, **OAI, bias=100.0, num_valid=9), *backend)
    layer.ids[2:5] = -1
    layer.ids[6] = 99  # invalid
    y = check(layer, oracle(layer))
    empty = [2, 3, 4, 6, 9, 10, 11]
    assert not y[empty].any()
    assert int(layer.invalid_count) == 2


def test_a_weight_of_zero_has_no_bias(backend: Backend) -> None:
    layer = make_layer(Case(4, **OAI, bias=100.0), *backend)
    layer.routing[1] = 0.0
    assert not check(layer, oracle(layer))[1].any()


def test_a_batch_changes_no_row(backend: Backend) -> None:
    layer = make_layer(Case(19, top_k=4, **OAI, bias=0.5, shared=1), *backend)
    whole = layer()
    for rows in (slice(0, 1), slice(0, 8), slice(0, 9)):
        assert_same(layer(rows=rows), whole[rows], f"rows {rows}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(value: float, backend: Backend) -> None:
    layer = make_layer(Case(8, top_k=4, **OAI, bias=0.5), *backend)
    clean = layer()
    layer.x[3, 17] = value
    got = layer()
    assert not bool(got[3].isfinite().any())
    rest = [i for i in range(8) if i != 3]
    assert_same(got[rest], clean[rest], "rows beside the bad one")


def test_a_bad_bias_stays_with_its_expert_and_column(backend: Backend) -> None:
    layer = make_layer(Case(8, **OAI, bias=0.5), *backend)
    clean = layer()
    layer.biases[1][3, 77] = float("nan")
    takes = (layer.ids == 3).any(dim=1)
    assert bool(takes.any()) and not bool(takes.all())
    got = layer()
    assert bool(got[takes, 77].isnan().all())
    clean[takes, 77] = float("nan")
    assert_same(got, clean)


def test_order_of_threads_changes_nothing() -> None:
    library = emulated()
    for case in (Case(10, top_k=3, **OAI, bias=0.5), Case(20, 512, 128, **OAI, bias=0.5)):
        results = []
        for seed in (0, 1, 2, 3):
            library.emulator_seed(seed)
            results.append(make_layer(case, "cpu", library)())
        for result in results[1:]:
            assert_same(result, results[0])


def test_refuses_biases_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(Case(4, hidden=128, bias=0.5, shared=1), "cpu", emulated())
    w13_bias, w2_bias = layer.biases
    wanted = "contiguous fp32 (9, 512) and (9, 128)"
    columns = w13_bias.t().contiguous().t()
    bad: tuple[tuple[tuple[Tensor | None, ...], str], ...] = (
        ((), "None and None"),
        ((w13_bias,), "float32 (9, 512) and None"),
        ((None, w2_bias), "None and float32 (9, 128)"),
        ((w13_bias.bfloat16(), w2_bias), "bfloat16 (9, 512) and float32 (9, 128)"),
        ((w13_bias[:8], w2_bias), "float32 (8, 512) and float32 (9, 128)"),  # no shared expert
        ((w2_bias, w13_bias), "float32 (9, 128) and float32 (9, 512)"),
        ((columns, w2_bias), "float32 (9, 512), not contiguous and"),
    )
    plain = make_layer(Case(4, hidden=128), "cpu", emulated())
    for biases, got in bad:
        layer.biases = biases  # type: ignore[assignment]
        with refuses(ValueError, f"w13_bias and w2_bias: expected {wanted}, got {got}"):
            layer()
    for biases in ((w13_bias, w2_bias), (w13_bias,), (None, w2_bias)):
        plain.biases = biases  # type: ignore[assignment]
        with refuses(ValueError, "expected none of them, got", "expert_bias=True"):
            plain()
    layer.synchronize()
    assert not layer.launch_count and not plain.launch_count
    # The library has the rule too, for whoever calls it.
    monkeypatch.setattr(SmallBatch, "_takes", lambda op, biases: True)
    for one, biases in ((layer, ()), (layer, (w13_bias,)), (layer, (None, w2_bias))):
        one.biases = biases  # type: ignore[assignment]
        with refuses(RuntimeError, "call of small_batch: expected success, got CUDA error 1 "):
            one()
    for biases in ((w13_bias, w2_bias), (w13_bias,), (None, w2_bias)):
        plain.biases = biases  # type: ignore[assignment]
        with refuses(RuntimeError, "call of small_batch: expected success, got CUDA error 1 "):
            plain()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"swiglu_alpha": 0.0}, "swiglu_alpha: expected a finite number > 0, got 0.0"),
        ({"swiglu_alpha": float("inf")}, "swiglu_alpha: expected a finite number > 0, got inf"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha: expected a finite number > 0, got nan"),
        ({"swiglu_beta": float("nan")}, "swiglu_beta: expected a finite number, got nan"),
    ],
    ids=str,
)
def test_refuses_a_swiglu_that_is_none(options: dict[str, Any], word: str) -> None:
    with refuses(ValueError, word):
        make_op("cpu", emulated(), **options)


def test_the_library_refuses_an_alpha_that_nobody_set() -> None:
    with refuses(
        BackendUnavailable, "small_batch kernels on cpu: expected an SM90 GPU and a geometry"
    ):
        make_op("cpu", emulated(), swiglu_alpha=1e-60)  # 0 in fp32


# -- GPU only ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_the_same_bits_in_200_runs(tokens: int, gpu: Backend) -> None:
    layer = make_layer(Case(tokens, 2944, 768, experts=32, top_k=4, **OAI, bias=0.5), *gpu)
    check_same_bits(layer, check(layer, oracle(layer)))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("pdl", [True, False])
def test_graph_replay(pdl: bool, gpu: Backend) -> None:
    """A chain of calls in one graph; inputs, num_valid and biases change between replays."""
    case = Case(8, 1024, 512, experts=32, top_k=6, **OAI, bias=0.5)
    layer = make_layer(case, *gpu, Tuning(pdl=pdl))
    for outputs in replays_of_a_chain(layer, case):
        want = oracle(layer)
        for y in outputs:
            assert bool(y.isfinite().all())
            assert relative_error(y, want) <= TOLERANCE
        for bias in layer.biases:
            bias.mul_(-1.5)
