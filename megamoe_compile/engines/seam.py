"""The seam between an engine and the layer: what an adapter gives, and what it need not write.

An adapter is one package beside this file. It gives

- the capacity: rows of the largest call on one rank, `max_tokens_per_rank`;
- the geometry of each layer: the fields of MegaMoEConfig that its weights fix;
- the weights of each layer, by `load_weights` or `load_expert`, where the engine has loaded them;
- the warm-up moment: an eager call of all layers before the first capture, and the numbers of
  tokens that will be captured; an engine that warms up contexts itself names none;
- the number of real rows of a padded step, where it has one: a device tensor, see `RealRows`.

    engine = EngineContexts(max_tokens_per_rank=8192, buckets=capture_sizes)
    layer = EngineLayer(engine.context_for(engine.config(**shape), device), engine, real_rows)
    layer.load_weights(...)         # when the engine has loaded this layer
    layer(rows, ids, weights)       # whenever it calls it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MegaMoEConfig
from ..context import MegaMoEContext
from ..errors import MegaMoEError, mismatch
from ..module import MegaMoE

RealRows = Callable[[], Tensor | None]
"""The number of real rows of the step that runs now, asked at every call on the host.

int32 with one element on the layer's device; a captured graph reads the address that it got at
capture, so the engine keeps it and writes there. None: `num_valid` of the context, all rows.
"""


class EngineContexts:
    """The contexts of one engine: one per geometry and device, shared where equal.

    The layers own the contexts: one that has lost its last layer is gone, and is made anew when
    asked for.

    Args:
        max_tokens_per_rank: capacity of one call. group: the expert-parallel group; None means one
            rank. With several ranks, all ask for the same contexts in the same order.
        buckets: numbers of tokens to warm up at a layer's first call; none: no warm-up here.
        config_changes: other fields of MegaMoEConfig, for all contexts.
    """

    def __init__(
        self,
        *,
        max_tokens_per_rank: int,
        group: dist.ProcessGroup | None = None,
        buckets: Sequence[int] = (),
        **config_changes: Any,
    ) -> None:
        self.group = group
        self.buckets = tuple(buckets)
        self._fields = {"max_tokens_per_rank": max_tokens_per_rank}
        self._changes = config_changes
        # Keyed by all that makes two contexts interchangeable.
        self._contexts: weakref.WeakValueDictionary[
            tuple[MegaMoEConfig, torch.device], MegaMoEContext
        ] = weakref.WeakValueDictionary()
        self._warm: weakref.WeakSet[MegaMoEContext] = weakref.WeakSet()

    def config(self, **shape: Any) -> MegaMoEConfig:
        """The config of a layer: its shape, the capacity, and the changes, which win."""
        return MegaMoEConfig(**{**self._fields, **shape, **self._changes})

    def context_for(
        self, config: MegaMoEConfig, device: torch.device, num_valid: Tensor | None = None
    ) -> MegaMoEContext:
        """The open context of this geometry and device; made now if there is none. Collective.

        Args:
            num_valid: for a new one: that of another context of the same steps.

        Raises:
            BackendUnavailable, ValueError: see MegaMoEContext.
        """
        context = self._contexts.get((config, device))
        if context is None or context.closed:
            context = MegaMoEContext(config, self.group, device, num_valid=num_valid)
            self._contexts[config, device] = context
        return context

    @property
    def contexts(self) -> list[MegaMoEContext]:
        """The open ones, in the order they were made."""
        return [context for context in self._contexts.values() if not context.closed]

    def warm_up(self, context: MegaMoEContext) -> None:
        """Warm up `context` for the buckets, once. Collective.

        Raises:
            MegaMoEError: under torch.compile or inside a capture. CapacityError: a bucket.
        """
        if context in self._warm:
            return
        require_eager(
            "first call of the experts",
            "Let the engine run one eager step, with all weights loaded, before it captures.",
        )
        context.warmup(self.buckets)
        self._warm.add(context)

    def close(self) -> None:
        """Close all. Idempotent."""
        for context in self.contexts:
            context.close()


class EngineLayer(MegaMoE):
    """A layer as an engine calls it: warmed up at its first call, told the real rows of each.

    Args:
        context: of the engine. engine: warms the context up; None: the caller does.
        real_rows: see RealRows; None: the engine has no such number.
    """

    def __init__(
        self,
        context: MegaMoEContext,
        engine: EngineContexts | None = None,
        real_rows: RealRows | None = None,
    ) -> None:
        super().__init__(context)
        self._cold = engine if engine is not None and engine.buckets else None
        self._real_rows = real_rows

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor | int | None = None,
    ) -> Tensor:
        """As MegaMoE.forward; `num_valid` is asked of the engine where it isn't passed."""
        if self._cold is not None:
            self._cold.warm_up(self.context)
            self._cold = None
        if num_valid is None and self._real_rows is not None:
            num_valid = self._real_rows()
        return super().forward(hidden_states, topk_ids, topk_weights, num_valid)


def require_eager(what: str, cure: str) -> None:
    """Raise MegaMoEError where torch.compile traces the call or the current stream captures it."""
    where = None
    if torch.compiler.is_compiling():
        where = "under torch.compile"
    elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        where = "inside a CUDA graph capture"
    if where is not None:
        raise MegaMoEError(mismatch(what, "an eager call", f"one {where}", cure))
