"""MegaMoE: the experts of one MoE layer as an nn.Module around the one op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from .config import MegaMoEConfig
from .context import MegaMoEContext
from .custom_ops.library import LAYOUT_VERSION, fused_moe
from .errors import MegaMoEError, as_int, mismatch
from .loading import LoadedExperts
from .parallel.step_settings import check_rows
from .tracing import as_graph_input, begin_below, begins_graph, copy_of
from .weights import BIAS_NAMES, WEIGHT_NAMES


class MegaMoE(LoadedExperts):
    """The routed (and shared) experts of one layer.

    Args:
        context: shared by all layers of one geometry.
        validate: check in eager calls that every id is -1 or an expert. It reads the ids on the
            host, so it synchronizes and cannot be captured; without it such slots are skipped and
            counted in `context.invalid_id_count`. Check in loads that all weights are finite.
    """

    launch_count: Tensor
    num_valid: Tensor

    def __init__(self, context: MegaMoEContext, *, validate: bool = False) -> None:
        super().__init__(context, validate)
        self.index = context.add_layer(self)
        # Registered, not only referenced: a module's buffers have static addresses in a graph.
        self.register_buffer("launch_count", context.launch_count, persistent=False)
        self.register_buffer("num_valid", context.num_valid, persistent=False)
        self._handle = context.handle
        self._context_id = context.context_id
        self._chunked = context.config.over_capacity == "chunk"
        begin_below(MegaMoE.forward, as_graph_input, begins_graph)
        config, weights = context.config, context.weight_geometry
        sizes = (weights.num_rows, weights.hidden_size, weights.padded_intermediate_size)
        self._constants = (config.top_k, config.max_tokens_per_rank, LAYOUT_VERSION)
        self._compiled_run = _run_of(*sizes, *self._constants[:2])

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor | int | None = None,
    ) -> Tensor:
        """Run the experts.

        Args:
            hidden_states: [T, H] bf16, T from 0 to max_tokens_per_rank; rows may be strided. With
                over_capacity="chunk" an eager T may be larger; over several ranks every call is
                then inside `context.step(plan)`.
            topk_ids: [T, K] int32 or int64, global expert ids; -1 skips a slot.
            topk_weights: [T, K] fp32 or bf16.
            num_valid: rows at or above it are not routed. None reads `context.num_valid`; an int
                must be at most T; a device tensor (int32, [] or [1]) is read on the device.

        Returns:
            [T, H] bf16, new memory. A row without an expert is exact zeros.

        Raises:
            ValueError: shape, dtype or stride. CapacityError: T. ContextClosed, MegaMoEError.
        """
        if torch.compiler.is_compiling():  # traced as a part of a larger graph
            return self._run(hidden_states, topk_ids, topk_weights, num_valid, self._traced_id())
        if not begins_graph():  # eager
            if self.validate:
                _check_ids(topk_ids, self.context.config.num_experts)
            return self._run(hidden_states, topk_ids, topk_weights, num_valid, self._context_id)
        return self._compiled_run(
            self,
            as_graph_input(hidden_states, own_rows=False),
            as_graph_input(topk_ids, own_rows=True),
            as_graph_input(topk_weights, own_rows=True),
            as_graph_input(num_valid, own_rows=False)
            if isinstance(num_valid, Tensor)
            else num_valid,
        )

    def _traced_id(self) -> int:
        """The context's id where it is traced: a size, which a graph takes anew in each call."""
        if torch.compiler.is_exporting():
            return self._context_id
        return self._handle.shape[0]

    def _run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor | int | None,
        context_id: int | None = None,
    ) -> Tensor:
        buffers = self._buffers  # attribute access would search three dictionaries per tensor
        w13 = buffers["w13"]
        if w13 is None:
            raise MegaMoEError(self._not_loaded)
        if (hidden_states.requires_grad or topk_weights.requires_grad) and torch.is_grad_enabled():
            raise MegaMoEError(
                mismatch(
                    "gradient of hidden_states and topk_weights",
                    "none: the kernels have no backward",
                    "requires_grad=True",
                    "Call under torch.no_grad() or torch.inference_mode().",
                )
            )
        if num_valid is None:
            num_valid = buffers["num_valid"]
        else:
            num_valid = _as_tensor(num_valid, hidden_states)
        if context_id is None:  # the first function of a graph
            context_id = self._traced_id()
        if self._chunked:
            return self._in_chunks(hidden_states, topk_ids, topk_weights, num_valid, context_id)
        return cast(
            Tensor,
            fused_moe(
                hidden_states,
                topk_ids,
                topk_weights,
                w13,
                buffers["w13_scale"],
                buffers["w2"],
                buffers["w2_scale"],
                buffers["w13_bias"],
                buffers["w2_bias"],
                num_valid,
                buffers["launch_count"],
                context_id,
                *self._constants,
            ),
        )

    def _in_chunks(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_valid: Tensor | None, context_id: int
    ) -> Tensor:
        """As many launches as every other rank makes, of at most the capacity each.

        A chunk without rows is launched too. A row does not see the other rows of its launch, so
        the result is that of one launch, but for the kernel that the number of rows picks.
        """
        prepared = tuple(self._buffers[name] for name in WEIGHT_NAMES + BIAS_NAMES)
        constants = (context_id, *self._constants)
        capacity = self.context.config.max_tokens_per_rank
        chunks = self.context.chunks_of(x.shape[0])
        if chunks == 1:
            rest = (*prepared, num_valid, self.launch_count, *constants)
            return cast(Tensor, fused_moe(x, ids, weights, *rest))
        assert num_valid is not None
        for name, t in (("topk_ids", ids), ("topk_weights", weights)):  # before any launch
            check_rows(f"{name}.shape[0]", t.shape[0], x.shape[0], "rows of hidden_states")
        parts = []
        for start in range(0, chunks * capacity, capacity):
            rows = slice(start, start + capacity)
            valid = (num_valid - start).clamp(min=0)  # of this chunk's rows
            rest = (*prepared, valid, self.launch_count, *constants)
            parts.append(fused_moe(x[rows], ids[rows], weights[rows], *rest))
        return torch.cat(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MegaMoE:
        """Keep the recipe's dtypes under model.to(dtype), and refuse to leave the device."""
        device = fn(torch.empty(0, dtype=torch.float32, device=self.context.device)).device
        if device != self.context.device:
            raise MegaMoEError(
                mismatch(
                    "device of the layer",
                    f"{self.context.device}, where its context's buffer is",
                    device,
                    "Build the context on the device you want and load the weights there.",
                )
            )
        return self

    def extra_repr(self) -> str:
        config: MegaMoEConfig = self.context.config
        return (
            f"backend={self.context.backend}, hidden_size={config.hidden_size}, "
            f"intermediate_size={config.intermediate_size}, num_experts={config.num_experts}, "
            f"top_k={config.top_k}, rank={self.context.rank}/{self.context.world_size}"
        )


@functools.cache
def _run_of(*sizes: int) -> Callable[..., Tensor]:
    """`MegaMoE._run` for a graph of these sizes, which are fixed in it.

    With one code object for all, the ninth geometry of a process would fail.
    """
    return copy_of(MegaMoE._run, "experts_" + "_".join(map(str, sizes)))


def _check_ids(topk_ids: Tensor, num_experts: int) -> None:
    bad = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(bad.any()):
        row, slot = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            mismatch(
                f"topk_ids[{row}, {slot}]",
                f"-1 or 0 to {num_experts - 1}",
                int(topk_ids[row, slot]),
                "Fix the router; -1 skips a slot.",
            )
        )


def _as_tensor(num_valid: Tensor | int, rows: Tensor) -> Tensor:
    """num_valid as int32 [1] on the device, without a synchronization."""
    if isinstance(num_valid, Tensor):
        one = num_valid.dtype == torch.int32 and num_valid.numel() == 1
        if not one or num_valid.device != rows.device:
            raise ValueError(
                mismatch(
                    "num_valid",
                    f"one int32 on {rows.device}",
                    f"{num_valid.dtype} {list(num_valid.shape)} on {num_valid.device}",
                    "Pass torch.tensor([n], dtype=torch.int32) on the layer's device.",
                )
            )
        return num_valid.reshape(1)
    if type(num_valid) is not int:
        num_valid = as_int("num_valid", num_valid)
    if num_valid < 0 or num_valid > rows.shape[0]:
        raise ValueError(
            mismatch(
                "num_valid",
                f"0 to {rows.shape[0]}, the rows of hidden_states",
                num_valid,
                "Count this call's own rows.",
            )
        )
    # A fill kernel, not a copy from the host.
    return torch.full((1,), num_valid, dtype=torch.int32, device=rows.device)
