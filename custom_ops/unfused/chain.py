"""The experts as separate FP8 kernels: what the mega kernel fuses, to measure it against.

Five kernels and a memset per call: quantize and permute, DeepGEMM's masked grouped GEMM, SwiGLU and
quantize, the same GEMM again, weighted combine. The numbers are the recipe of `reference/` with
two differences: gate and up are rounded to bf16, as the GEMM writes them, and the routing weight
enters at the combine.

    op = torch.ops.megamoe_bench.unfused_moe   # after importing this module

Every id must be an expert: nothing is masked here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import mismatch
from ..reference.recipe import BLOCK, FP8, dequantize_blocks, dequantize_rows

# The GEMM writes whole tiles, of up to 256 rows: an expert's room must end with one.
ROW_ALIGNMENT = 256

# (a [E, M, C], its scales [E, M, C/128] row-minor, b [E, N, C], its scales [E, N/128, C/128],
# out [E, M, N] bf16, rows per expert int32 [E], expected rows of an expert)
GroupedGemm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def unfused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float | None,
    gemm: GroupedGemm,
) -> Tensor:
    """The experts of one layer on one rank.

    Args:
        x: [T, H] bf16. topk_ids: [T, K] int64 or int32, all in range. topk_weights: [T, K].
        w13: [E, 2I, H] e4m3, gate rows before up rows: not interleaved. w13_scale: fp32
            [E, 2I/128, H/128]. w2: [E, H, I], w2_scale: [E, H/128, I/128].
        limit: of the SwiGLU, or None. gemm: see `GroupedGemm`.

    Returns:
        [T, H] bf16.
    """
    import triton

    from .kernels import combine_kernel, permute_quantize_kernel, swiglu_quantize_kernel

    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    experts, intermediate = w13.shape[0], w13.shape[1] // 2
    if hidden % BLOCK or intermediate % BLOCK:
        raise ValueError(
            mismatch(
                "(H, I)", f"multiples of {BLOCK}", (hidden, intermediate), "Take another shape."
            )
        )
    x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    capacity = -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
    slots, expected = tokens * top_k, -(-tokens * top_k // experts)

    def room(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(experts, capacity, columns, dtype=dtype, device=x.device)

    def scale_room(columns: int) -> Tensor:
        # Row-minor: the layout that the GEMM's loads want, or it would transpose them first.
        shape = (experts, columns // BLOCK, capacity)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    count = torch.zeros(experts, dtype=torch.int32, device=x.device)
    rows = torch.empty(slots, dtype=torch.int32, device=x.device)
    q, q_scale = room(hidden, torch.uint8), scale_room(hidden)
    permute_quantize_kernel[(slots,)](
        x,
        topk_ids,
        count,
        rows,
        q,
        q_scale,
        capacity,
        HIDDEN=hidden,
        TOP_K=top_k,
        GROUPS=triton.next_power_of_2(hidden // BLOCK),
    )
    gate_up = room(2 * intermediate, torch.bfloat16)
    gemm(q.view(FP8), q_scale.mT, w13, w13_scale, gate_up, count, expected)
    h, h_scale = room(intermediate, torch.uint8), scale_room(intermediate)
    swiglu_quantize_kernel[(slots,)](
        gate_up,
        topk_ids,
        rows,
        h,
        h_scale,
        capacity,
        limit or 0.0,
        INTERMEDIATE=intermediate,
        HAS_LIMIT=limit is not None,
        GROUPS=triton.next_power_of_2(intermediate // BLOCK),
    )
    y = room(hidden, torch.bfloat16)
    gemm(h.view(FP8), h_scale.mT, w2, w2_scale, y, count, expected)
    out = torch.empty_like(x)
    combine_kernel[(tokens, triton.cdiv(hidden, 512))](
        y,
        topk_ids,
        rows,
        topk_weights,
        out,
        capacity,
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK=512,
    )
    return out


def torch_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    count: Tensor,
    expected: int,
) -> None:
    """The grouped GEMM in fp32 PyTorch, for tests; reads the counts on the host."""
    for expert, rows in enumerate(count.tolist()):
        if rows:
            left = dequantize_rows(a[expert, :rows], a_scale[expert, :rows])
            out[expert, :rows] = left @ dequantize_blocks(b[expert], b_scale[expert]).T


def _cuda(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float | None,
) -> Tensor:
    from ..deep_gemm.api import masked_grouped_gemm

    weights = (w13, w13_scale, w2, w2_scale)
    return unfused_moe(x, topk_ids, topk_weights, *weights, limit, masked_grouped_gemm())


def _fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _define() -> torch.library.Library:
    library = torch.library.Library("megamoe_bench", "DEF")
    library.define(
        "unfused_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, "
        "Tensor w2, Tensor w2_scale, float? limit) -> Tensor"
    )
    library.impl("unfused_moe", _cuda, "CUDA")
    torch.library.register_fake("megamoe_bench::unfused_moe", _fake, lib=library)
    return library


# The op lives as long as this object, hence as long as the module; a reload keeps it.
if "_LIBRARY" not in globals():
    _LIBRARY = _define()
