"""MegaMoE: the experts of one MoE layer as an nn.Module around the one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .config import MegaMoEConfig
from .context import MegaMoEContext
from .custom_ops.library import LAYOUT_VERSION, fused_moe
from .errors import MegaMoEError, mismatch
from .parallel.step_settings import check_rows
from .weights import (
    BIAS_NAMES,
    WEIGHT_NAMES,
    ExpertWeights,
    PreparedWeights,
    adopt,
    can_adopt,
    check_checkpoint,
    write_expert,
)


class MegaMoE(ExpertWeights):
    """The routed (and shared) experts of one layer.

    Args:
        context: shared by all layers of one geometry.
        validate: check in eager calls that every id is -1 or an expert. It reads the ids on the
            host, so it synchronizes and cannot be captured; without it such slots are skipped and
            counted in `context.invalid_id_count`.
    """

    launch_count: Tensor
    num_valid: Tensor

    def __init__(self, context: MegaMoEContext, *, validate: bool = False) -> None:
        super().__init__()
        self.context = context
        self.validate = validate
        self.index = context.add_layer(self)
        # Registered, not only referenced: a module's buffers have static addresses in a graph.
        self.register_buffer("launch_count", context.launch_count, persistent=False)
        self.register_buffer("num_valid", context.num_valid, persistent=False)
        self._chunked = context.config.over_capacity == "chunk"
        self._constants = (
            context.context_id,
            context.config.top_k,
            context.config.max_tokens_per_rank,
            LAYOUT_VERSION,
        )

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
        buffers = self._buffers  # attribute access would search three dictionaries per tensor
        w13 = buffers["w13"]
        if w13 is None:
            raise MegaMoEError(
                mismatch(
                    "weights of the layer", "loaded", "none", "Call load_weights or load_expert."
                )
            )
        if (hidden_states.requires_grad or topk_weights.requires_grad) and torch.is_grad_enabled():
            raise MegaMoEError(
                mismatch(
                    "gradient of hidden_states and topk_weights",
                    "none: the kernels have no backward",
                    "requires_grad=True",
                    "Call under torch.no_grad() or torch.inference_mode().",
                )
            )
        if self.validate and not torch.compiler.is_compiling():
            _check_ids(topk_ids, self.context.config.num_experts)
        if num_valid is None:
            num_valid = buffers["num_valid"]
        else:
            num_valid = _as_tensor(num_valid, hidden_states)
        if self._chunked:
            return self._in_chunks(hidden_states, topk_ids, topk_weights, num_valid)
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
                *self._constants,
            ),
        )

    def _in_chunks(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_valid: Tensor | None
    ) -> Tensor:
        """As many launches as every other rank makes, of at most the capacity each.

        A chunk without rows is launched too. A row does not see the other rows of its launch, so
        the result is that of one launch, but for the kernel that the number of rows picks.
        """
        prepared = tuple(self._buffers[name] for name in WEIGHT_NAMES + BIAS_NAMES)
        capacity = self.context.config.max_tokens_per_rank
        chunks = self.context.chunks_of(x.shape[0])
        if chunks == 1:
            rest = (*prepared, num_valid, self.launch_count, *self._constants)
            return cast(Tensor, fused_moe(x, ids, weights, *rest))
        assert num_valid is not None
        for name, t in (("topk_ids", ids), ("topk_weights", weights)):  # before any launch
            check_rows(f"{name}.shape[0]", t.shape[0], x.shape[0], "rows of hidden_states")
        parts = []
        for start in range(0, chunks * capacity, capacity):
            rows = slice(start, start + capacity)
            valid = (num_valid - start).clamp(min=0)  # of this chunk's rows
            rest = (*prepared, valid, self.launch_count, *self._constants)
            parts.append(fused_moe(x[rows], ids[rows], weights[rows], *rest))
        return torch.cat(parts)

    def load_weights(
        self,
        w13: Tensor,
        w13_scale: Tensor | None,
        w2: Tensor,
        w2_scale: Tensor | None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Load all routed experts of this rank; all is checked before anything is written.

        Args:
            w13: [E, 2I, H] e4m3 or bf16, gate rows before up rows. E is all experts, or this
                rank's. w13_scale: [E, 2I/128, H/128] fp32 or float8_e8m0fnu; None for bf16.
            w2: [E, H, I] in the dtype of w13. w2_scale: [E, H/128, I/128], or None for bf16.
            w13_bias, w2_bias: [E, 2I], gate before up, and [E, H], fp32 or bf16, where the config
                has expert_bias; they are copied.

        The first load of FP8 weights takes over w13 and w2 where they hold exactly this rank's
        experts without padding: they are rearranged in place and must not be used again. Any later
        load writes into the layer's storage, so that captured graphs see the new weights.

        Raises:
            ValueError: wrong shape, layout, dtype, scales or biases.
        """
        geometry = self.context.weight_geometry
        self.context.check_open()
        check_checkpoint(
            geometry,
            (geometry.num_experts, geometry.num_local_experts),
            w13,
            w13_scale,
            w2,
            w2_scale,
            w13_bias,
            w2_bias,
        )
        self._refuse_own(w13, w2)
        with torch.inference_mode(False), torch.no_grad():
            if (
                not self.loaded
                and w13_scale is not None
                and w2_scale is not None
                and can_adopt(geometry, w13, w2)
            ):
                self.install(adopt(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias))
                return
            # Global experts: this rank's slice. With one rank both readings are the same.
            first = geometry.first_expert if w13.shape[0] == geometry.num_experts else 0
            prepared = self._storage()
            for row in range(geometry.num_local_experts):
                source = first + row
                write_expert(
                    prepared,
                    row,
                    geometry,
                    w13[source],
                    None if w13_scale is None else w13_scale[source],
                    w2[source],
                    None if w2_scale is None else w2_scale[source],
                    None if w13_bias is None else w13_bias[source],
                    None if w2_bias is None else w2_bias[source],
                )
            self.install(prepared)

    def load_expert(
        self,
        expert: int,
        w13: Tensor,
        w13_scale: Tensor | None,
        w2: Tensor,
        w2_scale: Tensor | None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Load one expert ([2I, H], [H, I], [2I], [H], and scales as in `load_weights`).

        Args:
            expert: global id of a routed expert of this rank, or num_experts + s for the shared
                expert s. Experts that were never loaded compute zeros.
        """
        geometry = self.context.weight_geometry
        self.context.check_open()
        if expert >= geometry.num_experts:
            row = geometry.num_local_experts + expert - geometry.num_experts
        else:
            row = expert - geometry.first_expert
        shared = row >= geometry.num_local_experts
        if not 0 <= row < geometry.num_rows or shared != (expert >= geometry.num_experts):
            last = geometry.first_expert + geometry.num_local_experts - 1
            raise ValueError(
                mismatch(
                    "expert",
                    f"{geometry.first_expert} to {last}, or a shared one from "
                    f"{geometry.num_experts} (there are {geometry.num_shared_experts})",
                    expert,
                    "Each rank loads its own experts.",
                )
            )
        parts = (w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
        check_checkpoint(
            geometry, (1,), *cast(Any, [None if t is None else t.unsqueeze(0) for t in parts])
        )
        self._refuse_own(w13, w2)
        with torch.inference_mode(False), torch.no_grad():
            prepared = self._storage()
            write_expert(prepared, row, geometry, *parts)
            self.install(prepared)

    def _refuse_own(self, *sources: Tensor) -> None:
        if self.loaded:
            own = {getattr(self, name).untyped_storage().data_ptr() for name in WEIGHT_NAMES}
            if any(source.untyped_storage().data_ptr() in own for source in sources):
                raise ValueError(
                    mismatch(
                        "w13 and w2",
                        "checkpoint weights",
                        "the layer's own prepared storage",
                        "It is rearranged already; load from the checkpoint.",
                    )
                )

    def _storage(self) -> PreparedWeights:
        """The layer's storage, or new storage to install once it is written."""
        if not self.loaded:
            return PreparedWeights.allocate(self.context.weight_geometry)
        return self.prepared

    def get_extra_state(self) -> dict[str, Any]:
        """Goes with state_dict: the layout that the saved weights are in, and whose they are."""
        first = self.context.weight_geometry.first_expert
        return {"layout_version": LAYOUT_VERSION, "first_expert": first}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name, expected in self.get_extra_state().items():
            if state.get(name) != expected:
                raise ValueError(
                    mismatch(
                        f"{name} of the saved weights",
                        expected,
                        state.get(name),
                        "Load the original checkpoint.",
                    )
                )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Check everything before anything is written; a layer without storage gets some."""
        extra = state_dict.get(f"{prefix}_extra_state")
        if extra is not None:
            self.set_extra_state(extra)
        names = WEIGHT_NAMES + (BIAS_NAMES if self.context.weight_geometry.expert_bias else ())
        saved = {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}
        if len(saved) == len(names):
            with torch.inference_mode(False):
                prepared = self._storage()
            for name, got in saved.items():
                own = getattr(prepared, name)
                if got.shape != own.shape or got.dtype != own.dtype:
                    raise ValueError(
                        mismatch(
                            f"{prefix}{name}: shape and dtype",
                            f"{list(own.shape)} {own.dtype}",
                            f"{list(got.shape)} {got.dtype}",
                            "Load the original checkpoint.",
                        )
                    )
            self.install(prepared)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MegaMoE:
        """Keep the recipe's dtypes under model.to(dtype), and refuse to leave the device."""
        device = fn(torch.empty(0, device=self.context.device)).device
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
