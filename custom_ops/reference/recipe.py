"""The number recipe in plain PyTorch: the fp32 oracle of every backend.

Activations: e4m3 with one fp32 scale per row and 128 columns, scale = max(amax, 1e-10) / 448.
Weights: e4m3 with one fp32 scale per 128x128 block. Between the two GEMMs: the bias if there is
one, SwiGLU with the gate clamped to at most `limit` and up to +-`limit`, times the routing weight,
quantized again. Each (token, slot) result, with the routing weight times the second bias, is
rounded to bf16; the slots of a token are summed in fp32 in slot order.
The recipe is that of DeepSeek-V3's FP8 experts as DeepGEMM's SM90 MegaMoE kernel computes it.

Weights come in the prepared layout: `w13` interleaves gate and up rows in groups of 8
(gate 0..7, up 0..7, gate 8..15, ...); `w13_scale` keeps all gate blocks before all up blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import PLAIN, Swiglu, Weights

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-10  # an all-zero group gets a finite scale, and its zeros stay zeros
BLOCK = 128  # columns of one activation scale, rows and columns of one weight scale
INTERLEAVE = 8  # rows of gate, then rows of up


def _scale_of(amax: Tensor) -> Tensor:
    # Divide by a tensor: CUDA turns a division by a Python number into a product with its
    # reciprocal, and the scales of all backends must agree bit for bit.
    return amax.clamp_min(AMAX_FLOOR) / amax.new_full((), FP8_MAX)


def quantize_rows(x: Tensor, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize x [T, C] to (e4m3 [T, C], fp32 scales [T, C/group]); C % group == 0.

    Saturates by clamp. A NaN element does not enter its group's amax and stays NaN; an Inf makes
    its own group's scale Inf.
    """
    rows, columns = x.shape
    values = x.float().reshape(rows, columns // group, group)
    magnitude = values.abs()
    amax = torch.where(magnitude.isnan(), 0.0, magnitude).amax(dim=-1, keepdim=True)
    scale = _scale_of(amax)
    q = (values * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.reshape(rows, columns), scale.reshape(rows, columns // group)


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """fp32 [T, C] from e4m3 [T, C] and fp32 scales [T, C/group]."""
    rows, columns = q.shape
    groups = scale.shape[1]
    values = q.float().reshape(rows, groups, columns // groups)
    return (values * scale.unsqueeze(-1)).reshape(rows, columns)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize w [N, C] to (e4m3 [N, C], fp32 scales [N/128, C/128]); N and C multiples of 128."""
    n, c = w.shape
    blocks = w.float().reshape(n // BLOCK, BLOCK, c // BLOCK, BLOCK)
    scale = _scale_of(blocks.abs().amax(dim=(1, 3), keepdim=True))
    q = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).reshape(n, c)
    return q, scale.reshape(n // BLOCK, c // BLOCK)


def dequantize_blocks(w: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, C] from e4m3 [N, C] and fp32 scales [N/128, C/128]."""
    n, c = w.shape
    blocks = w.float().reshape(n // BLOCK, BLOCK, c // BLOCK, BLOCK)
    return (blocks * scale[:, None, :, None]).reshape(n, c)


def interleave_gate_up(w13: Tensor) -> Tensor:
    """[gate; up] rows [2I, C] -> groups of 8 rows of gate, of up, of gate, ... (a new tensor)."""
    n, c = w13.shape
    return w13.reshape(2, n // (2 * INTERLEAVE), INTERLEAVE, c).transpose(0, 1).reshape(n, c)


def deinterleave_gate_up(w13: Tensor) -> Tensor:
    """The inverse of `interleave_gate_up`."""
    n, c = w13.shape
    return w13.reshape(n // (2 * INTERLEAVE), 2, INTERLEAVE, c).transpose(0, 1).reshape(n, c)


def swiglu(
    gate: Tensor, up: Tensor, limit: float | None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """g * sigmoid(alpha * g) * (u + beta) in fp32, of g = min(gate, limit) and of up in +-limit.

    No clamp where limit is None.
    """
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    # silu is not the same bits as its formula.
    gated = torch.nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return gated * (up if beta == 0.0 else up + beta)


def stage(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_valid: Tensor,
    *,
    num_experts: int,
    num_local_experts: int,
    num_shared_experts: int = 0,
    rank: int = 0,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the pre-dispatch kernel writes for one rank's tokens.

    Args:
        x: [T, H] bf16. topk_ids: [T, K] int32 or int64, global. topk_weights: [T, K] fp32 or bf16.
        num_valid: int32 [1]; rows at or above it are not routed.
        num_shared_experts: S slots behind the K routed ones, for experts that stand behind each
            rank's routed ones and take every row with weight 1.

    Returns:
        (e4m3 [T, H], fp32 scales [T, H/128], int64 ids [T, K+S], fp32 weights [T, K+S],
        number of out-of-range ids in valid rows, int64 []). A slot that is -1, out of range or in
        a row at or above `num_valid` gets id -1 and weight 0; such a row is staged as zeros.
    """
    tokens = x.shape[0]
    valid = torch.arange(tokens, dtype=torch.int64, device=x.device)[:, None] < num_valid
    q, scale = quantize_rows(torch.where(valid, x, 0.0))
    ids = topk_ids.long()
    in_range = (ids >= 0) & (ids < num_experts)
    num_invalid = (valid & ~in_range & (ids != -1)).sum()
    routed = valid & in_range
    if num_shared_experts:
        per_rank = num_local_experts + num_shared_experts
        ids = ids // num_local_experts * per_rank + ids % num_local_experts
        first = rank * per_rank + num_local_experts
        shared = first + torch.arange(num_shared_experts, dtype=torch.int64, device=x.device)
        ids = torch.cat([ids, shared.expand(tokens, -1)], dim=1)
        routed = torch.cat([routed, valid.expand(-1, num_shared_experts)], dim=1)
    weights = topk_weights.float() * routed_scaling_factor
    if num_shared_experts:
        weights = torch.cat([weights, weights.new_ones(tokens, num_shared_experts)], dim=1)
    return (
        q,
        scale,
        torch.where(routed, ids, -1),
        torch.where(routed, weights, 0.0),
        num_invalid,
    )


def _expert(
    rows: Tensor, routing: Tensor, weights: Weights, form: Swiglu, intermediate_group: int | None
) -> Tensor:
    """One expert, `weights` without E, on fp32 rows [M, H] and their routing [M] -> bf16 [M, H]."""
    w13, w13_scale, w2, w2_scale, w13_bias, w2_bias = weights
    gate_up = rows @ dequantize_blocks(deinterleave_gate_up(w13), w13_scale).T
    if w13_bias is not None:
        gate_up += deinterleave_gate_up(w13_bias[:, None])[:, 0]
    gate, up = gate_up.chunk(2, dim=1)
    hidden = swiglu(gate, up, *form) * routing[:, None]
    if intermediate_group is not None:
        hidden = dequantize_rows(*quantize_rows(hidden, intermediate_group))
    result = hidden @ dequantize_blocks(w2, w2_scale).T
    if w2_bias is not None:
        result += routing[:, None] * w2_bias
    return result.to(torch.bfloat16)


def expert_slots(
    rows: Tensor,
    ids: Tensor,
    routing: Tensor,
    weights: Weights,
    *,
    first_expert: int = 0,
    form: Swiglu = PLAIN,
    intermediate_group: int | None = BLOCK,
    dense: bool = False,
) -> Tensor:
    """Each slot's result on the local experts: fp32 rows [T, H] -> bf16 [T, K, H].

    Slots of other experts are exact zeros. `dense` runs every local expert on every slot and
    selects: no host synchronization, so that a CUDA stream can capture it.
    """
    tokens, slots = ids.shape
    flat_ids, flat_routing = ids.reshape(-1), routing.reshape(-1)
    out = rows.new_zeros(tokens * slots, rows.shape[1], dtype=torch.bfloat16)
    for local in range(weights.w13.shape[0]):
        mine = flat_ids == first_expert + local
        own = Weights(*(None if t is None else t[local] for t in weights))  # type: ignore[arg-type]
        if dense:
            repeated = rows.repeat_interleave(slots, dim=0)
            result = _expert(repeated, flat_routing, own, form, intermediate_group)
            out = torch.where(mine[:, None], result, out)
            continue
        (picked,) = mine.nonzero(as_tuple=True)
        if picked.numel():
            out[picked] = _expert(
                rows[picked // slots], flat_routing[picked], own, form, intermediate_group
            )
    return out.reshape(tokens, slots, rows.shape[1])


def combine(slots: Tensor) -> Tensor:
    """Sum bf16 slots [T, K, H] in fp32, in slot order, to bf16 [T, H]."""
    total = slots.new_zeros(slots.shape[0], slots.shape[2], dtype=torch.float32)
    for slot in range(slots.shape[1]):
        total += slots[:, slot]
    return total.to(torch.bfloat16)


def moe_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    num_valid: int | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    routed_scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    intermediate_group: int | None = BLOCK,
    quantize: bool = True,
) -> Tensor:
    """The oracle over all experts on one rank: x [T, H] bf16 -> [T, H] bf16.

    Args:
        w13 to w2_bias: prepared weights of all experts, see `Weights`; shared ones come last.
        intermediate_group: columns per scale of the second GEMM's input (64 in the DeepGEMM 0.1.x
            and 0.2.2 kernels, 128 from 0.2.5).
        quantize: False leaves out both activation quantizations, for error bounds.
    """
    experts = w13.shape[0] - num_shared_experts
    count = x.shape[0] if num_valid is None else num_valid
    q, scale, ids, weights, _ = stage(
        x,
        topk_ids,
        topk_weights,
        torch.tensor([count], dtype=torch.int32, device=x.device),
        num_experts=experts,
        num_local_experts=experts,
        num_shared_experts=num_shared_experts,
        routed_scaling_factor=routed_scaling_factor,
    )
    rows = dequantize_rows(q, scale) if quantize else x.float()
    return combine(
        expert_slots(
            rows,
            ids,
            weights,
            Weights(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias),
            form=Swiglu(swiglu_limit, swiglu_alpha, swiglu_beta),
            intermediate_group=intermediate_group if quantize else None,
        )
    )
