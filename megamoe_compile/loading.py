"""Loading and reloading: checks first, then writes in place, and no half-written layer runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .context import MegaMoEContext
from .custom_ops.library import LAYOUT_VERSION
from .errors import MegaMoEError, as_int, mismatch
from .weights import (
    BIAS_NAMES,
    WEIGHT_NAMES,
    ExpertWeights,
    PreparedWeights,
    adopt,
    can_adopt,
    check_checkpoint,
    check_scale_values,
    overlap,
    same_place,
    write_expert,
)

NOT_LOADED = mismatch("weights of the layer", "loaded", "none", "Call load_weights or load_expert.")


class LoadedExperts(ExpertWeights):
    """The weights of one layer, and the ways they get there.

    While a load writes into the layer's storage the buffers are None, and they stay so if it
    fails: eager and compiled calls then raise, and so does a GraphRunner, which finds them gone.

    Attributes:
        unfinished: the storage that a failed load has left, of which the rows `torn` hold old, new
            or mixed weights.
    """

    def __init__(self, context: MegaMoEContext, validate: bool) -> None:
        super().__init__()
        self.context = context
        self.validate = validate
        self.unfinished: PreparedWeights | None = None
        self.torn: set[int] = set()
        self._not_loaded = NOT_LOADED

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
        experts without padding: they are rearranged in place and must not be used again, but for
        `reload_weights`. Any later load writes into the layer's storage, so that captured graphs
        see the new weights.

        Raises:
            ValueError: wrong shape, layout, dtype, scales or biases; scales that are negative or
                not finite; with validate=True weights that are not finite.
        """
        parts = (w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
        self._check(parts)
        self._refuse_own(w13, w2)
        with torch.inference_mode(False), torch.no_grad():
            if self._storage() is None and can_adopt(self.context.weight_geometry, w13, w2):
                self.install(adopt(*cast(Any, parts)))
                return
            self._write(parts)

    def reload_weights(
        self,
        w13: Tensor,
        w13_scale: Tensor | None,
        w2: Tensor,
        w2_scale: Tensor | None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Replace all routed experts of this rank in the layer's storage, expert by expert.

        Captured graphs and compiled code stay valid and see the new weights. The arguments are
        those of `load_weights`. They may be the very tensors that `load_weights` took over, once
        new values in the layout of the checkpoint are written into them: these are rearranged
        again, in place. No launch of the layer may be under way.

        If a write fails, the layer refuses to run until all its experts are loaded again.

        Raises:
            ValueError: as `load_weights`; tensors that overlap the layer's storage elsewhere than
                at the same place. MegaMoEError: the layer has never been loaded.
        """
        parts = (w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
        self._check(parts)
        own = self._storage()
        if own is None:
            raise MegaMoEError(
                mismatch(
                    "weights to replace", "loaded ones", "none", "Call load_weights the first time."
                )
            )
        first = self._first_source(w13)
        for name, part in zip(WEIGHT_NAMES + BIAS_NAMES, parts, strict=True):
            if part is not None and not all(
                same_place(part, first, mine) if name == other else not overlap(part, mine)
                for other, mine in own.named()
            ):
                raise ValueError(
                    mismatch(
                        name,
                        "memory of its own, or exactly where the layer has it",
                        "another part of the layer's storage",
                        "Copy it, or pass the tensors that load_weights took over.",
                    )
                )
        with torch.inference_mode(False), torch.no_grad():
            self._write(parts)

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
        expert = as_int("expert", expert, "an int", -1)
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
        self._check([None if t is None else t.unsqueeze(0) for t in parts], expert)
        self._refuse_own(w13, w2)
        with torch.inference_mode(False), torch.no_grad(), self._writing([row]) as prepared:
            write_expert(prepared, row, geometry, *parts)

    def _check(self, parts: Iterable[Tensor | None], expert: int | None = None) -> None:
        """Check all experts of a checkpoint, or that one."""
        geometry = self.context.weight_geometry
        self.context.check_open()
        experts = (geometry.num_experts, geometry.num_local_experts) if expert is None else (1,)
        check_checkpoint(
            geometry, experts, *cast(Any, parts), expert=expert, validate=self.validate
        )

    def _first_source(self, w13: Tensor) -> int:
        """Where this rank's experts begin in a checkpoint of all experts, or of its own."""
        # With one rank both readings are the same.
        geometry = self.context.weight_geometry
        return geometry.first_expert if w13.shape[0] == geometry.num_experts else 0

    def _write(self, parts: tuple[Tensor | None, ...]) -> None:
        geometry = self.context.weight_geometry
        first = self._first_source(cast(Tensor, parts[0]))
        rows = range(geometry.num_local_experts)
        with self._writing(rows) as prepared:
            for row in rows:
                experts = [None if t is None else t[first + row] for t in parts]
                write_expert(prepared, row, geometry, *cast(Any, experts))

    @contextlib.contextmanager
    def _writing(self, rows: Iterable[int]) -> Iterator[PreparedWeights]:
        """The storage to write these rows into. It is the layer's again once all rows are whole."""
        storage = self._storage()
        prepared = storage or PreparedWeights.allocate(self.context.weight_geometry)
        if storage is not None:
            self.torn |= set(rows)
            self._put_aside(storage)
        yield prepared
        self.torn -= set(rows)
        if not self.torn:
            self.install(prepared)
        elif self.unfinished is not None:
            self._put_aside(self.unfinished)

    def _put_aside(self, storage: PreparedWeights) -> None:
        """Leave the layer without weights until no row is torn."""
        self.unfinished, self.loaded = storage, False
        for name, _ in storage.named():
            setattr(self, name, None)
        geometry = self.context.weight_geometry
        local = geometry.num_local_experts
        ids = [
            row + (geometry.first_expert if row < local else geometry.num_experts - local)
            for row in sorted(self.torn)
        ]
        self._not_loaded = mismatch(
            "weights of the layer",
            "whole",
            f"a load that failed half-way: experts {ids} are old, new or mixed",
            "Load them again, with reload_weights or each with load_expert.",
        )

    def install(self, weights: PreparedWeights) -> None:
        """Take over written weights."""
        super().install(weights)
        self.unfinished, self.torn, self._not_loaded = None, set(), NOT_LOADED

    def _refuse_own(self, *sources: Tensor) -> None:
        own = self._storage()
        if own is not None:
            pointers = {mine.untyped_storage().data_ptr() for _, mine in own.named()}
            if any(source.untyped_storage().data_ptr() in pointers for source in sources):
                raise ValueError(
                    mismatch(
                        "w13 and w2",
                        "checkpoint weights",
                        "the layer's own prepared storage",
                        "It is rearranged already. Load from the checkpoint, or call "
                        "reload_weights if new values in its layout are written there.",
                    )
                )

    def _storage(self) -> PreparedWeights | None:
        """What the layer's weights are, or were before a load that failed."""
        return self.prepared if self.loaded else self.unfinished

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
                prepared = self._storage() or PreparedWeights.allocate(self.context.weight_geometry)
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
                if name.endswith("scale"):
                    check_scale_values(f"{prefix}{name}", got, str)
            self.install(prepared)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
