"""The oracle against an implementation of its own, and its behaviour at the edges of FP8."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Inputs,
    assert_close,
    assert_same,
    make_config,
    make_layer,
    oracle,
    poisoned_allocator,
    random_biases,
    random_checkpoint,
    random_inputs,
    relative_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference.recipe import (
    FP8,
    deinterleave_gate_up,
    dequantize_blocks,
    dequantize_rows,
    interleave_gate_up,
    moe_reference,
    quantize_blocks,
    quantize_rows,
    stage,
    swiglu,
)

Array = np.ndarray
QUANTIZED = 1e-3  # relative error between two right implementations of the recipe

# -- the other implementation: numpy, one token and slot at a time, e4m3 from its definition -------


def e4m3_values() -> Array:
    """The 127 finite non-negative values: 4 bits of exponent with bias 7, 3 of mantissa."""
    values = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # that one is NaN
    ]
    return np.array(values)


E4M3 = e4m3_values()


def to_e4m3(values: Array) -> Array:
    """Round to the nearest e4m3 value, ties to the even code; saturates."""
    magnitude = np.minimum(np.abs(values), 448.0)
    above = np.clip(np.searchsorted(E4M3, magnitude), 1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    to_high, to_low = high - magnitude, magnitude - low
    take_high = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    return np.copysign(np.where(take_high, high, low), values)


def naive_quantize(row: Array, group: int) -> Array:
    """A row after quantization and back. The scale and its reciprocal are float32 as on a GPU:
    ties between two e4m3 values are common for bf16 rows, and float64 would break them otherwise.
    """
    out = np.empty_like(row)
    for start in range(0, len(row), group):
        part = row[start : start + group].astype(np.float32)
        scale = np.maximum(np.abs(part).max(), np.float32(1e-10)) / np.float32(448)
        scaled = part * (np.float32(1) / scale)
        out[start : start + group] = to_e4m3(scaled.astype(np.float64)) * float(scale)
    return out


def naive_expand(w: Tensor, scale: Tensor) -> Array:
    """Checkpoint [N, C] e4m3 with 128x128 scales -> float64."""
    return w.double().numpy() * np.kron(scale.double().numpy(), np.ones((128, 128)))


def to_bf16(values: Array) -> Array:
    return torch.from_numpy(values).float().bfloat16().double().numpy()


def naive_moe(
    config: mm.MegaMoEConfig,
    inputs: Inputs,
    w13: Array,
    w2: Array,
    b13: Array,
    b2: Array,
    *,
    num_valid: int | None = None,
    quantize: bool = True,
    group: int = 128,
) -> Tensor:
    """w13 [E+S, 2I, H] with gate before up, w2 [E+S, H, I], and their biases, in float64.

    SwiGLU as transformers' GptOssExperts._apply_gate has it, with beta for its 1.
    """
    x, ids, weights = (t.double().numpy() for t in inputs)
    limit, half = config.swiglu_limit, config.intermediate_size
    out = np.zeros_like(x)
    for token in range(x.shape[0] if num_valid is None else num_valid):
        row = naive_quantize(x[token], 128) if quantize else x[token]
        slots = [
            (int(ids[token, k]), weights[token, k] * config.routed_scaling_factor)
            for k in range(config.top_k)
            if 0 <= ids[token, k] < config.num_experts
        ]
        slots += [(config.num_experts + s, 1.0) for s in range(config.num_shared_experts)]
        for expert, weight in slots:
            gate_up = w13[expert] @ row + b13[expert]
            gate, up = gate_up[:half], gate_up[half:]
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            glu = gate / (1 + np.exp(-gate * config.swiglu_alpha))
            hidden = (up + config.swiglu_beta) * glu * weight
            if quantize:
                hidden = naive_quantize(hidden, group)
            out[token] += to_bf16(w2[expert] @ hidden + weight * b2[expert])
    return torch.from_numpy(to_bf16(out)).bfloat16()


def compare_with_naive(
    config: mm.MegaMoEConfig, tokens: int, change: Callable[[Tensor], None] | None = None
) -> None:
    inputs = random_inputs(config, tokens)
    if change is not None:
        change(inputs[1])
    with mm.MegaMoEContext(config, device="cpu") as context:
        layer = mm.MegaMoE(context)
        checkpoint = random_checkpoint(config)
        parts = [checkpoint.clone()]
        num_shared = config.num_shared_experts
        biases = random_biases(config, config.num_experts + num_shared)
        layer.load_weights(
            *checkpoint, *(None if b is None else b[: config.num_experts] for b in biases)
        )
        if num_shared:
            shared: Any = random_checkpoint(config, seed=9, experts=num_shared)
            parts.append(shared)
            for number in range(config.num_experts, config.num_experts + num_shared):
                own = (None if b is None else b[number] for b in biases)
                layer.load_expert(number, *shared[number - config.num_experts], *own)
        w13, w2 = (
            np.stack(
                [
                    naive_expand(w, s)
                    for part in parts
                    for w, s in zip(
                        getattr(part, name), getattr(part, f"{name}_scale"), strict=True
                    )
                ]
            )
            for name in ("w13", "w2")
        )
        b13, b2 = (
            np.zeros(w.shape[:2]) if b is None else b.double().numpy()
            for w, b in zip((w13, w2), biases, strict=True)
        )
        got = layer(*inputs)
        # The only differences: fp32 against fp64 sums, and what a rounding makes of them.
        assert_close(got, naive_moe(config, inputs, w13, w2, b13, b2), QUANTIZED, "quantized")
        exact = naive_moe(config, inputs, w13, w2, b13, b2, quantize=False)
        assert_close(oracle(layer, inputs, quantize=False), exact, 3e-3, "unquantized")
        assert_close(got, exact, 0.06, "quantization error")
        assert relative_error(got, exact) > 0.01, "nothing was quantized"
        narrow = naive_moe(config, inputs, w13, w2, b13, b2, group=64)
        assert_close(oracle(layer, inputs, intermediate_group=64), narrow, QUANTIZED, "64 columns")


GEOMETRIES = [
    dict(),
    dict(hidden_size=256, intermediate_size=384, num_experts=8, top_k=3),
    dict(swiglu_limit=0.5, routed_scaling_factor=2.5),
    dict(swiglu_limit=10.0, num_experts=5, top_k=5),
    dict(num_shared_experts=2, routed_scaling_factor=1.5),
    dict(top_k=1, intermediate_size=256),
    dict(swiglu_alpha=1.702),
    dict(swiglu_beta=-0.5, swiglu_limit=1.0),
    dict(expert_bias=True, num_shared_experts=1, routed_scaling_factor=2.5),
    dict(swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0, expert_bias=True, top_k=3),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: "-".join(map(str, g)) or "small")
def test_equals_a_naive_implementation(geometry: dict[str, object]) -> None:
    compare_with_naive(make_config(**geometry), 9)


def test_equals_a_naive_implementation_with_skipped_slots() -> None:
    def skip(ids: Tensor) -> None:
        ids[0, 0], ids[1] = -1, -1

    compare_with_naive(make_config(), 9, skip)


def test_swiglu_limit_clamps_as_the_recipe_says() -> None:
    gate = torch.tensor([-20.0, -1.0, 0.5, 20.0])
    up = torch.tensor([20.0, -20.0, 0.25, -0.25])
    silu = torch.nn.functional.silu
    assert_same(swiglu(gate, up, None), silu(gate) * up)
    clamped_up = torch.tensor([2.0, -2.0, 0.25, -0.25])
    assert_same(swiglu(gate, up, 2.0), silu(torch.tensor([-20.0, -1.0, 0.5, 2.0])) * clamped_up)


@pytest.mark.parametrize("limit", [None, 0.5, 10.0])
def test_swiglu_limit_reaches_the_layer(limit: float | None) -> None:
    results = []
    for value in (limit, None):
        with mm.MegaMoEContext(make_config(swiglu_limit=value), device="cpu") as context:
            x, ids, weights = random_inputs(context.config, 4)
            results.append([make_layer(context)(x * by, ids, weights) for by in (1, 16)])
    for by, clamped, free in zip((1, 16), *results, strict=True):
        # Activations reach about 4, and 60 at 16 times the input.
        reached = limit is not None and limit < 4 * by
        assert bool((clamped == free).all()) != reached


# -- quantization ---------------------------------------------------------------------------------


def test_s74_e4m3_rounding_and_saturation() -> None:
    values = [0.0, 447.0, 448.0, 449.0, 464.0, 465.0, 1e4, torch.finfo(torch.bfloat16).max]
    for top in values[1:]:
        row = torch.tensor([*[v for v in values if v <= top], 1e-3, -top, -3.0]).bfloat16()
        row = torch.nn.functional.pad(row, (0, 128 - row.numel()))[None]
        q, scale = quantize_rows(row)
        assert bool(q.float().isfinite().all())
        assert float(q.float().abs().max()) == 448.0
        assert float(scale) == pytest.approx(float(row.abs().max()) / 448, rel=1e-6)
        naive = naive_quantize(row[0].double().numpy(), 128)
        assert_close(dequantize_rows(q, scale)[0], torch.from_numpy(naive).float(), 1e-6)


def test_s74_the_clamp_saturates_not_the_cast() -> None:
    """An amax of the group just below a wider value's rounding must not reach e4m3's NaN."""
    row = torch.linspace(-300, 300, 128)[None]
    q, _ = quantize_rows(row)
    assert float(q.float().max()) == 448.0
    w = torch.full((128, 128), 1e30)
    assert bool(quantize_blocks(w)[0].float().isfinite().all())


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-38, 1e-42])
def test_s73_tiny_groups_stay_finite(value: float) -> None:
    row = torch.zeros(1, 256)
    row[0, :128], row[0, 128:] = value, 3.0
    q, scale = quantize_rows(row)
    back = dequantize_rows(q, scale)
    assert bool(back.isfinite().all())
    assert bool((back[0, :128] == 0).all()), "below the floor of 1e-10 a group becomes zeros"
    assert float(scale[0, 0]) == pytest.approx(1e-10 / 448, rel=1e-6)
    assert_close(back[0, 128:], row[0, 128:], 1e-6)
    blocks = torch.full((128, 128), value)
    w, w_scale = quantize_blocks(blocks)
    assert bool(dequantize_blocks(w, w_scale).isfinite().all())
    assert float(w_scale) > 0


@settings(max_examples=30)
@given(exponent=st.integers(-30, 30), seed=st.integers(0, 2**16), group=st.sampled_from([64, 128]))
def test_quantize_rows_error_is_that_of_e4m3(exponent: int, seed: int, group: int) -> None:
    values = torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scale = quantize_rows(values, group)
    back = dequantize_rows(q, scale)
    step = scale.repeat_interleave(group, dim=1)
    # Half a step: 1/16 of a normal value, 2^-10 scales of a subnormal one.
    bound = torch.maximum(values.abs() / 16, step * 2.0**-10) * 1.001
    floor = (scale <= 1.001e-10 / 448).repeat_interleave(group, dim=1)
    assert bool(((back - values).abs() <= torch.where(floor, values.abs() + 1e-10, bound)).all())


def test_nan_and_inf_in_a_group() -> None:
    """A NaN leaves its neighbours as they are; an Inf takes its group along, and no other."""
    row = torch.randn(1, 256, generator=torch.Generator().manual_seed(2))
    clean = row.clone()
    clean[0, 5] = 0
    q_clean, scale_clean = quantize_rows(clean)
    row[0, 5] = math.nan
    q, scale = quantize_rows(row)
    assert_same(scale, scale_clean)
    assert bool(q.float()[0, 5].isnan())
    assert int(q.float().isnan().sum()) == 1
    clean_values = q_clean.float()
    clean_values[0, 5] = math.nan
    assert_same(q.float(), clean_values)
    row[0, 5] = math.inf
    q, scale = quantize_rows(row)
    assert bool(scale[0, 0].isinf())
    assert_same(q[:, 128:].float(), q_clean[:, 128:].float())
    assert_same(scale[:, 1], scale_clean[:, 1])


def test_quantize_blocks_equals_the_definition() -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    w[:128, :128] = 0
    w[128:, 256:] *= 1e6
    q, scale = quantize_blocks(w)
    assert q.dtype == FP8 and q.shape == w.shape and scale.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            block = w[row * 128 :, column * 128 :][:128, :128].float().numpy()
            one = np.maximum(np.abs(block).max(), np.float32(1e-10)) / np.float32(448)
            assert float(scale[row, column]) == float(one)
            expected = torch.from_numpy(to_e4m3((block / one).astype(np.float64))).float()
            got = q[row * 128 :, column * 128 :][:128, :128].float()
            assert_same(got, expected, f"block {row}, {column}")
    assert_close(dequantize_blocks(q, scale), w.float(), 0.03)


def test_gate_up_interleave_and_back() -> None:
    w = torch.arange(64 * 3.0).reshape(64, 3)
    mixed = interleave_gate_up(w)
    assert_same(mixed[:8], w[:8])
    assert_same(mixed[8:16], w[32:40])
    assert_same(mixed[16:24], w[8:16])
    assert_same(deinterleave_gate_up(mixed), w)


# -- rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer() -> object:
    with mm.MegaMoEContext(make_config(hidden_size=256, num_experts=8), device="cpu") as context:
        yield make_layer(context)


def test_minus_one_and_rows_without_an_expert(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 7)
    ids[1], ids[3, 0], ids[4, 1] = -1, -1, -1
    got = layer(x, ids, weights)
    assert not got[1].any()
    assert bool(got[[0, 2, 3, 4, 5, 6]].any(dim=1).all())
    for row, kept in ((3, 1), (4, 0)):
        both = random_inputs(layer.context.config, 7)
        alone = both[2][row : row + 1].clone()
        alone[0, 1 - kept] = 0  # a weight of zero adds zeros
        assert_same(got[row : row + 1], layer(x[row : row + 1], both[1][row : row + 1], alone))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weights"])
def test_a_bad_value_stays_in_its_row(layer: mm.MegaMoE, where: str, value: float) -> None:
    x, ids, weights = random_inputs(layer.context.config, 7)
    clean = layer(x, ids, weights)
    (x if where == "x" else weights)[2, 1] = value
    got = layer(x, ids, weights)
    others = [0, 1, 3, 4, 5, 6]
    assert_same(got[others], clean[others])
    assert not bool(got[2].isfinite().all()), "the fault must not vanish"


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_s75_rows_past_num_valid_are_never_read(layer: mm.MegaMoE, value: float) -> None:
    x, ids, weights = random_inputs(layer.context.config, 8)
    clean = layer(x[:5], ids[:5], weights[:5])
    x[5:], weights[5:], ids[5:] = value, value, 10**6
    before = layer.context.invalid_id_count
    got = layer(x, ids, weights, num_valid=5)
    assert_same(got[:5], clean)
    assert not got[5:].any()
    assert layer.context.invalid_id_count == before


def test_s73_zero_rows_and_zero_groups(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 4)
    clean = layer(x, ids, weights)
    x[1], x[2, :128] = 0, 0
    x[3] = 1e-38
    got = layer(x, ids, weights)
    assert bool(got.isfinite().all())
    assert not got[1].any()
    assert bool(got[2].any())
    assert not got[3].any()
    assert_same(got[:1], clean[:1])


def test_s74_largest_bf16_beside_small_ones(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 3)
    x[1, 0] = torch.finfo(torch.bfloat16).max
    clean = layer(x[::2].contiguous(), ids[::2], weights[::2])
    got = layer(x, ids, weights)
    assert_same(got[::2], clean)
    assert_same(got, oracle(layer, (x, ids, weights)))


def test_s76_experts_without_tokens_and_a_poisoned_allocator(layer: mm.MegaMoE) -> None:
    x, ids, weights = random_inputs(layer.context.config, 9)
    ids %= 4  # half of the experts get nothing
    expected = layer(x, ids, weights)
    part = layer(x, ids, weights, num_valid=4)
    with poisoned_allocator():
        for _ in range(2):
            assert_same(layer(x, ids, weights), expected)
        assert_same(layer(x, torch.full_like(ids, -1), weights), torch.zeros_like(expected))
        assert_same(layer(x[:0], ids[:0], weights[:0]), expected[:0])
        assert_same(layer(x, ids, weights, num_valid=4), part)
    assert bool(expected.isfinite().all())


def test_deterministic(layer: mm.MegaMoE) -> None:
    inputs = random_inputs(layer.context.config, 33)
    expected = layer(*inputs)
    for _ in range(5):
        assert_same(layer(*inputs), expected)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64])
def test_a_token_alone_equals_itself_in_a_batch(layer: mm.MegaMoE, tokens: int) -> None:
    """S13 in small: no step in the error at any batch size."""
    inputs = random_inputs(layer.context.config, tokens)
    got = layer(*inputs)
    last = tuple(t[-1:] for t in inputs)
    assert_close(got[-1:], layer(*last), 4e-3)  # another batch, another order of fp32 sums


def test_all_tokens_to_one_expert(layer: mm.MegaMoE) -> None:
    """S08: dropless at full capacity."""
    config = layer.context.config
    x, ids, weights = random_inputs(config, config.max_tokens_per_rank)
    for expert in (0, config.num_experts - 1):
        got = layer(x, torch.full_like(ids, expert), weights)
        assert bool(got.any(dim=1).all())
        single = layer(x[-1:], torch.full_like(ids[:1], expert), weights[-1:])
        assert_close(got[-1:], single, 4e-3)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_padding_of_the_intermediate_changes_nothing(fp8: bool) -> None:
    """An intermediate of 128 padded to 256 by whole zero blocks: the same numbers."""
    import dataclasses

    from megamoe_compile.weights import (
        CheckpointWeights,
        PreparedWeights,
        WeightGeometry,
        write_expert,
    )

    config = make_config()
    checkpoint = random_checkpoint(config, fp8=fp8)
    inputs = random_inputs(config, 9)
    results = []
    for padded in (128, 256, 512):
        geometry = dataclasses.replace(
            WeightGeometry.of(config, rank=0, ep_size=1, alignment=128, device=torch.device("cpu")),
            padded_intermediate_size=padded,
        )
        weights = PreparedWeights.allocate(geometry)
        for expert in range(config.num_experts):
            source = CheckpointWeights(*checkpoint[expert])  # type: ignore[arg-type]
            write_expert(weights, expert, geometry, source)
        assert weights.w13.shape == (4, 2 * padded, 128)
        results.append(
            moe_reference(*inputs, weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)
        )
    for other in results[1:]:
        assert_close(other, results[0], 1e-3)  # zeros may change the order of fp32 sums
    assert bool(results[0].any())


# -- staging --------------------------------------------------------------------------------------


def test_stage_counts_and_skips_out_of_range_ids() -> None:
    x, ids, weights = random_inputs(make_config(), 6)
    ids[0, 0], ids[1, 1], ids[2, 0], ids[5, 0] = 4, -2, -1, 99
    valid = torch.tensor([5], dtype=torch.int32)
    q, scale, staged, routed, invalid = stage(
        x, ids, weights, valid, num_experts=4, num_local_experts=4
    )
    assert int(invalid) == 2  # -1 is no fault, and row 5 is not valid
    assert staged[0, 0] == staged[1, 1] == staged[2, 0] == -1
    assert bool((staged[5] == -1).all())
    assert bool((routed[staged == -1] == 0).all())
    assert q.dtype == FP8 and not q[5].float().any()
    assert_same(routed[3], weights[3])
    assert float(scale[5, 0]) == pytest.approx(1e-10 / 448, rel=1e-6)


def test_stage_places_shared_experts_behind_each_rank() -> None:
    """4 experts on 2 ranks with 2 shared: rank 0 holds rows 0, 1 and shared 2, 3; rank 1 4 to 7."""
    x, _, weights = random_inputs(make_config(), 2)
    ids = torch.tensor([[0, 3], [1, 2]])
    valid = torch.tensor([2], dtype=torch.int32)
    for rank, shared in ((0, [2, 3]), (1, [6, 7])):
        _, _, staged, routed, _ = stage(
            x,
            ids,
            weights,
            valid,
            num_experts=4,
            num_local_experts=2,
            num_shared_experts=2,
            rank=rank,
            routed_scaling_factor=2.0,
        )
        assert staged.tolist() == [[0, 5, *shared], [1, 4, *shared]]
        assert_same(routed[:, :2], weights * 2)
        assert bool((routed[:, 2:] == 1).all())


def test_shared_experts_take_rows_without_a_routed_expert() -> None:
    with mm.MegaMoEContext(make_config(num_shared_experts=1), device="cpu") as context:
        layer = make_layer(context)
        x, ids, weights = random_inputs(context.config, 4)
        ids[1] = -1
        got = layer(x, ids, weights, num_valid=3)
        assert_same(got, oracle(layer, (x, ids, weights), num_valid=3))
        assert bool(got[1].any()), "the shared expert still takes this row"
        assert not got[3].any(), "a pad row gets no shared expert either (S30)"
