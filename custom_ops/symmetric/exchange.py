"""Gather and reduce-scatter of rows through symmetric memory, for ranks that share a GPU.

NCCL refuses two ranks on one GPU, and gloo stages CUDA tensors through the host, which no CUDA
graph captures. Here each rank copies its rows into every peer's buffer, between barriers on the
device: only device work on one stream, so that it captures and replays. Meant for correctness on
few GPUs; where every rank has a GPU of its own, NCCL is faster.

A rank may be a whole call ahead of a slow peer. So a call first waits until every rank has come to
it: then all of them have read what the last call brought, and their buffers may be written. One
more wait, after the copies, says that all rows are there.

As ops they follow `fused_moe`: opaque, with one mutated argument that keeps every call, in program
order. With `order` = the counter of the layers' context, that order includes the layers: an
exchange and a launch that two ranks do in a different order wait for each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import library
from ..call import Rule
from ..errors import ContextClosed, as_int, mismatch
from .memory import SymmetricBuffer

_ARGUMENTS = "(Tensor rows, Tensor(a!) order, SymInt exchange_id, int num_ranks, int slot_bytes)"
ALIGNMENT = 16  # bytes, of a rank's slot


class Transport(Protocol):
    """What moves the rows. Collective: every rank makes the same calls with the same shapes."""

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """rows [L, ...] of every rank -> out [R * L, ...], in rank order."""

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        """rows [R * L, ...] of every rank -> out [L, ...]: the sum of all ranks' part r, on r."""


class SymmetricTransport:
    """Copies between buffers that are mapped into every rank. Construction is collective."""

    def __init__(
        self, slot_bytes: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._buffer = SymmetricBuffer(self.num_ranks * slot_bytes, device, group)
        self.nbytes = self.num_ranks * slot_bytes
        self._own = self._buffer.peer(self.rank).view(torch.uint8).view(self.num_ranks, slot_bytes)
        start = self.rank * slot_bytes
        # Where this rank writes on each peer; each rank begins with another peer.
        self._slots = [
            (peer, self._buffer.peer(peer).view(torch.uint8)[start : start + slot_bytes])
            for peer in ((self.rank + turn) % self.num_ranks for turn in range(self.num_ranks))
        ]

    def gather(self, rows: Tensor, out: Tensor) -> None:
        mine = _bytes(rows)
        received = self._exchange([mine] * self.num_ranks)
        _bytes(out).view(self.num_ranks, -1).copy_(received)

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        parts = list(_bytes(rows).view(self.num_ranks, -1))
        received = self._exchange(parts).view(rows.dtype)
        total = received[0].float() if rows.is_floating_point() else received[0].clone()
        for part in received[1:]:  # in rank order on every rank
            total += part
        out.view(-1).copy_(total)

    def reset(self) -> None:
        """Zero the buffers. Collective; every rank must have stopped launching."""
        self._buffer.reset()

    def _exchange(self, parts: list[Tensor]) -> Tensor:
        """parts[r], uint8 [n], goes to rank r; -> uint8 [R, n], what came from each rank."""
        self._buffer.barrier()
        size = parts[0].numel()
        for peer, slot in self._slots:
            slot[:size].copy_(parts[peer])
        self._buffer.barrier()
        return self._own[:, :size]


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)


class SymmetricExchange:
    """Stands in for the group in `dp_gather`, `dp_scatter` and `attn_tp_gather`.

    Construction is collective over `group`, and allocates; calls don't.

    Args:
        max_rows: rows that one rank brings at most. row_bytes: bytes of a row at most.
        device: of the rows, CUDA. group: the ranks; None means one rank.
        order: the counter that keeps calls in program order, `context.launch_count` where the
            same program runs layers of a context; default: one of its own.

    Attributes:
        rank, num_ranks: of the group. slot_bytes: room for the rows of one rank.

    Raises:
        ValueError: sizes, or a device without symmetric memory. BackendUnavailable: on every rank.
    """

    def __init__(
        self,
        max_rows: int,
        row_bytes: int,
        *,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        order: Tensor | None = None,
    ) -> None:
        max_rows = as_int("max_rows and row_bytes", max_rows, "at least 1", 1)
        row_bytes = as_int("max_rows and row_bytes", row_bytes, "at least 1", 1)
        group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.slot_bytes = math.ceil(max_rows * row_bytes / ALIGNMENT) * ALIGNMENT
        device = torch.device(device)
        with torch.inference_mode(False):
            self._transport: Transport | None = self._connect(device, group)
            self.order = (
                torch.zeros(1, dtype=torch.int32, device=device) if order is None else order
            )
        torch._dynamo.mark_static_address(self.order, guard=False)
        self.exchange_id = library.register_runtime(cast(Any, self._transport))
        self._handle = library.as_size(self.exchange_id, device)

    def _connect(self, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
        if device.type != "cuda":
            raise ValueError(
                mismatch(
                    "device of a SymmetricExchange",
                    "a CUDA device",
                    device,
                    "On a CPU pass the gloo group itself.",
                )
            )
        return SymmetricTransport(self.slot_bytes, device, group)

    def _arguments(self) -> tuple[Tensor, int, int, int]:
        traced = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        number = self._handle.shape[0] if traced else self.exchange_id
        return self.order, number, self.num_ranks, self.slot_bytes

    def gather(self, rows: Tensor) -> Tensor:
        """[L, ...] of every rank -> [R * L, ...], in rank order; new memory."""
        return cast(Tensor, gather_rows(rows, *self._arguments()))

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """[R * L, ...] of every rank -> [L, ...], the sum of this rank's part; new memory.

        Floating-point rows are summed in fp32, in rank order, and rounded once.
        """
        return cast(Tensor, reduce_scatter_rows(rows, *self._arguments()))

    def close(self) -> None:
        """Free the buffer. Idempotent; any later call raises ContextClosed."""
        if self._transport is not None and self.order.is_cuda:
            torch.cuda.synchronize(self.order.device)
        self._transport = None


def _transport(exchange_id: int) -> Transport:
    transport = library.find_runtime(exchange_id)
    if transport is None:
        raise ContextClosed(
            mismatch(
                f"exchange {exchange_id}",
                "an open SymmetricExchange",
                "one that was closed, collected or never made in this process",
                "Keep it alive and open while its graphs run.",
            )
        )
    return cast(Transport, transport)


def _requirements(rows: Tensor, parts: int, slot_bytes: int) -> Iterator[Rule]:
    yield (
        rows.dim() >= 1,
        ValueError,
        "rows.dim()",
        "at least 1",
        rows.dim(),
        "Dimension 0 counts rows.",
    )
    yield (
        rows.shape[0] % parts == 0,
        ValueError,
        "rows.shape[0]",
        f"a multiple of {parts} (ranks)",
        rows.shape[0],
        "Pass as many rows for every rank.",
    )
    yield (
        rows.numel() * rows.element_size() <= slot_bytes * parts,
        ValueError,
        "bytes of one rank's rows",
        f"at most {slot_bytes} (max_rows * row_bytes)",
        rows.numel() * rows.element_size() // parts,
        "Make the SymmetricExchange for the largest step.",
    )


def _check(rows: Tensor, parts: int, slot_bytes: int) -> None:
    for condition, error, *report in _requirements(rows, parts, slot_bytes):
        if not condition:
            raise error(mismatch(*report))  # type: ignore[arg-type]


def _check_fake(rows: Tensor, parts: int, slot_bytes: int) -> None:
    for condition, _, *report in _requirements(rows, parts, slot_bytes):
        torch._check(condition, lambda report=report: mismatch(*report))


def _gathered(rows: Tensor, num_ranks: int) -> Tensor:
    return rows.new_empty(num_ranks * rows.shape[0], *rows.shape[1:])


def _scattered(rows: Tensor, num_ranks: int) -> Tensor:
    return rows.new_empty(rows.shape[0] // num_ranks, *rows.shape[1:])


def _gather_rows(
    rows: Tensor, order: Tensor, exchange_id: int, num_ranks: int, slot_bytes: int
) -> Tensor:
    transport = _transport(exchange_id)
    _check(rows, 1, slot_bytes)
    out = _gathered(rows, num_ranks)
    transport.gather(rows, out)
    return out


def _gather_rows_fake(
    rows: Tensor, order: Tensor, exchange_id: int, num_ranks: int, slot_bytes: int
) -> Tensor:
    _check_fake(rows, 1, slot_bytes)
    return _gathered(rows, num_ranks)


def _reduce_scatter_rows(
    rows: Tensor, order: Tensor, exchange_id: int, num_ranks: int, slot_bytes: int
) -> Tensor:
    transport = _transport(exchange_id)
    _check(rows, num_ranks, slot_bytes)
    out = _scattered(rows, num_ranks)
    transport.reduce_scatter(rows, out)
    return out


def _reduce_scatter_rows_fake(
    rows: Tensor, order: Tensor, exchange_id: int, num_ranks: int, slot_bytes: int
) -> Tensor:
    _check_fake(rows, num_ranks, slot_bytes)
    return _scattered(rows, num_ranks)


def _define() -> torch.library.Library:
    fragment = torch.library.Library(library.NAMESPACE, "FRAGMENT")
    for name, kernel, fake in (
        ("gather_rows", _gather_rows, _gather_rows_fake),
        ("reduce_scatter_rows", _reduce_scatter_rows, _reduce_scatter_rows_fake),
    ):
        fragment.define(
            f"{name}{_ARGUMENTS} -> Tensor",
            tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
        )
        for key in ("CPU", "CUDA"):
            fragment.impl(name, kernel, key)
        torch.library.register_fake(f"{library.NAMESPACE}::{name}", fake, lib=fragment)
    return fragment


# The ops live as long as this object, hence as long as the module; a reload keeps them.
if "_LIBRARY" not in globals():
    _LIBRARY = _define()

gather_rows = torch.ops.megamoe.gather_rows.default
reduce_scatter_rows = torch.ops.megamoe.reduce_scatter_rows.default
