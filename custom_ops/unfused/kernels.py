# mypy: ignore-errors
"""The small kernels of the unfused chain; `chain.py` launches them.

A slot is one (token, expert) pair of the router. Rows of an expert stand together in [E, M, C], M
rows of room for each; which row a slot got is in `rows`.
"""

import triton
import triton.language as tl

from ..staging.pre_dispatch_triton import _encode_e4m3

GROUP = tl.constexpr(128)  # columns per scale


@triton.jit
def _store_quantized(values, q_ptr, scale_ptr, expert, row, capacity, group, inside, COLUMNS):
    """fp32 [G, 128] -> e4m3 codes and one scale per group, the scales row-minor: [E, C/128, M]."""
    amax = tl.max(tl.abs(values), axis=1)
    scale = tl.maximum(amax, 1e-10) / 448.0
    code = _encode_e4m3(values / scale[:, None]).to(tl.uint8)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(q_ptr + (expert * capacity + row) * COLUMNS + columns, code, mask=inside[:, None])
    at = (expert * (COLUMNS // GROUP) + group) * capacity + row
    tl.store(scale_ptr + at, scale, mask=inside)


@triton.jit
def permute_quantize_kernel(
    x_ptr,
    ids_ptr,
    count_ptr,
    rows_ptr,
    q_ptr,
    scale_ptr,
    capacity,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least HIDDEN / 128
):
    """Grid: (T * K,). Takes the next free row of the slot's expert and writes the token into it."""
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    row = tl.atomic_add(count_ptr + expert, 1)
    tl.store(rows_ptr + slot, row)
    group = tl.arange(0, GROUPS)
    inside = group < HIDDEN // GROUP
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + slot // TOP_K * HIDDEN + columns, mask=inside[:, None], other=0.0)
    _store_quantized(
        x.to(tl.float32), q_ptr, scale_ptr, expert, row, capacity, group, inside, HIDDEN
    )


@triton.jit
def swiglu_quantize_kernel(
    gate_up_ptr,
    ids_ptr,
    rows_ptr,
    q_ptr,
    scale_ptr,
    capacity,
    limit,
    INTERMEDIATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Grid: (T * K,). silu(gate) * up of the slot's row, quantized."""
    slot = tl.program_id(0)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    group = tl.arange(0, GROUPS)
    inside = group < INTERMEDIATE // GROUP
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = gate_up_ptr + (expert * capacity + row) * (2 * INTERMEDIATE) + columns
    gate = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + INTERMEDIATE, mask=inside[:, None], other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    _store_quantized(hidden, q_ptr, scale_ptr, expert, row, capacity, group, inside, INTERMEDIATE)


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    rows_ptr,
    weights_ptr,
    out_ptr,
    capacity,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (T, ceil(HIDDEN / BLOCK)). The weighted sum of a token's slots, in slot order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        row = tl.load(rows_ptr + slot)
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        y = tl.load(y_ptr + (expert * capacity + row) * HIDDEN + columns, mask=inside, other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + columns, total.to(tl.bfloat16), mask=inside)
