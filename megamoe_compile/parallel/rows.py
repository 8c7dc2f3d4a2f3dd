"""The shape helpers of attention data and tensor parallelism; every size comes from a StepPlan.

Gathers are `torch.distributed`'s functional collectives (gloo, NCCL), called as ops: they compile
in one graph, have exact fakes, and give plain tensors that the device has waited for. Where ranks
share a GPU, pass a SymmetricExchange in place of the group: that captures in CUDA graphs too.

All checks of sizes are host-side and come before any communication.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines torch.ops._c10d_functional
from torch import Tensor

from ..custom_ops.symmetric.exchange import SymmetricExchange
from ..errors import MegaMoEError, as_int, mismatch
from .step_plan import StepPlan
from .step_settings import check_rows

Group = dist.ProcessGroup | SymmetricExchange | None


def dp_gather(x: Tensor, plan: StepPlan, group: Group) -> Tensor:
    """All ranks' rows, in rank order; new memory.

    Args:
        x: this rank's rows, [plan.local_rows, ...]. max_len: padded_tokens rows, of which the
            first num_tokens are real. sum_len: the real rows.
        plan: of this step, over the ranks of `group`.

    Returns:
        [plan.gathered_rows, ...]. `plan.real_rows` says which of them hold a token.

    Raises:
        ValueError: another number of rows or ranks, before anything is sent.
    """
    _check_plan(x, plan, group)
    if plan._gathered_at is None:
        check_rows("rows of x", x.shape[0], plan.padded_tokens, "plan.padded_tokens, max_len mode")
        return _all_gather(x, group)
    check_rows("rows of x", x.shape[0], plan.num_tokens, "plan.num_tokens, sum_len mode")
    gathered = _all_gather(_pad(x, plan.slot_rows), group)
    return gathered.index_select(0, plan._gathered_at.to(x.device, non_blocking=True))


def dp_scatter(
    y: Tensor,
    plan: StepPlan,
    group: Group,
    reduce: bool = False,
    num_valid: Tensor | None = None,
) -> Tensor:
    """The inverse of `dp_gather`: this rank's rows of a gathered buffer; new memory.

    Args:
        y: [plan.gathered_rows, ...], the same on every rank, or with `reduce` each rank's summand.
        reduce: sum over the ranks. Communicates; without it nothing is sent.
        num_valid: int32 [1] or [] on the device, read there, in place of plan.num_tokens: the
            real rows of a replay, e.g. `context.num_valid`. max_len mode only. A captured graph
            needs it: its plan takes all rows of the bucket for real.

    Returns:
        [plan.local_rows, ...]. Rows at or above num_tokens (num_valid) are zero, whatever y had.

    Raises:
        ValueError: another number of rows or ranks, before anything is sent.
    """
    _check_plan(y, plan, group)
    if plan._gathered_at is None or plan._own_at is None:
        slot = plan.padded_tokens
        rows = plan.num_ranks * slot
        check_rows("rows of y", y.shape[0], rows, "ranks x plan.padded_tokens, max_len mode")
        own = _reduce_scatter(y, group) if reduce else y.narrow(0, plan.rank * slot, slot)
        return _zero_pad_rows(own, plan._count if num_valid is None else num_valid)
    total = plan._gathered_at.shape[0]
    check_rows("rows of y", y.shape[0], total, "the sum of all counts, sum_len mode")
    if not reduce:
        return y.index_select(0, plan._own_at.to(y.device, non_blocking=True))
    slots = y.new_zeros(plan.num_ranks * plan.slot_rows, *y.shape[1:])
    slots = slots.index_copy(0, plan._gathered_at.to(y.device, non_blocking=True), y)
    return _reduce_scatter(slots, group).narrow(0, 0, plan.num_tokens).clone()


def attn_tp_split(x: Tensor, group: Group | tuple[int, int], fill: float = 0) -> Tensor:
    """This rank's part of rows that all ranks of an attention TP group hold; nothing is sent.

    Before the experts it keeps a token from being dispatched by every rank that holds it.

    Args:
        x: [n, ...], the same on every rank. group: the TP group, or (rank, size).
        fill: of the rows behind n; -1 for topk_ids, so that they are not routed.

    Returns:
        [ceil(n / size), ...], new memory.
    """
    rank, size = group if isinstance(group, tuple) else _place(group)
    _check_rows_dim(x)
    if not 0 <= rank < size:
        raise ValueError(
            mismatch("group", "(rank, size), rank below size", (rank, size), "Pass the TP rank.")
        )
    rows = (x.shape[0] + size - 1) // size
    # As many pad rows for every n, or torch.compile would make a graph for each n modulo size.
    padded = torch.cat([x, x.new_full((size + 1, *x.shape[1:]), fill)])
    return padded.narrow(0, rank * rows, rows).clone()


def attn_tp_gather(y: Tensor, num_tokens: int, group: Group) -> Tensor:
    """The inverse of `attn_tp_split`: all ranks' parts together; new memory.

    Args:
        y: [ceil(num_tokens / size), ...]. num_tokens: rows of the whole.

    Returns:
        [num_tokens, ...], the same on every rank.

    Raises:
        ValueError: another number of rows, before anything is sent.
    """
    if type(num_tokens) is not int:
        num_tokens = as_int("num_tokens", num_tokens)
    _, size = _place(group)
    _check_rows_dim(y)
    rows = (num_tokens + size - 1) // size
    check_rows("rows of y", y.shape[0], rows, "num_tokens over the ranks, rounded up")
    return _all_gather(y, group).narrow(0, 0, num_tokens)


def attn_tp_num_valid(num_valid: Tensor, rows: int, group: Group | tuple[int, int]) -> Tensor:
    """Real rows of this rank's part, for `MegaMoE.forward(num_valid=)`; computed on the device.

    Args:
        num_valid: int32 [1], real rows before the split, e.g. `context.num_valid`.
        rows: rows of a part: `attn_tp_split(x, group).shape[0]`.
    """
    rank, _ = group if isinstance(group, tuple) else _place(group)
    return (num_valid - rank * rows).clamp(min=0)


# -- what they share ------------------------------------------------------------------------------


def _place(group: Group) -> tuple[int, int]:
    """(rank, size) in the group."""
    if group is None:
        return 0, 1
    if isinstance(group, SymmetricExchange):
        return group.rank, group.num_ranks
    return group.rank(), group.size()


def _check_rows_dim(x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(
            mismatch("dimensions of the tensor", "at least 1", 0, "Dimension 0 counts rows.")
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise MegaMoEError(
            mismatch(
                "gradient of the rows",
                "none: gathers and scatters have no backward here",
                "requires_grad=True",
                "Call under torch.no_grad() or torch.inference_mode().",
            )
        )


def _check_plan(x: Tensor, plan: StepPlan, group: Group) -> None:
    _check_rows_dim(x)
    rank, size = _place(group)
    if plan.rank != rank or len(plan.tokens_per_rank) != size:
        raise ValueError(
            mismatch(
                "(rank, ranks) of the plan",
                f"{(rank, size)}, as in the group",
                (plan.rank, len(plan.tokens_per_rank)),
                "Gather over the group that the plan was agreed on.",
            )
        )


def _pad(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _zero_pad_rows(rows: Tensor, num_valid: Tensor | None) -> Tensor:
    """A copy with zeros from row num_valid on; NaN there leaves no trace."""
    if num_valid is None:
        return rows.clone()
    row = torch.arange(rows.shape[0], dtype=torch.int64, device=rows.device)
    real = row < num_valid.to(rows.device, non_blocking=True)
    real = real.reshape(-1, *[1] * (rows.dim() - 1))
    return torch.where(real, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def _all_gather(x: Tensor, group: Group) -> Tensor:
    if isinstance(group, SymmetricExchange):
        return group.gather(x)
    if group is None or group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if x.shape[0] == 0:  # as on every other rank
        return x.new_empty(0, *x.shape[1:])
    ops = torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    waited: Tensor = ops.wait_tensor(gathered)
    return waited


def _reduce_scatter(y: Tensor, group: Group) -> Tensor:
    if isinstance(group, SymmetricExchange):
        return group.reduce_scatter(y)
    if group is None or group.size() == 1:
        return y.clone(memory_format=torch.contiguous_format)
    if y.shape[0] == 0:
        return y.new_empty(0, *y.shape[1:])
    ops = torch.ops._c10d_functional
    part = ops.reduce_scatter_tensor(y.contiguous(), "sum", group.size(), group.group_name)
    waited: Tensor = ops.wait_tensor(part)
    return waited
