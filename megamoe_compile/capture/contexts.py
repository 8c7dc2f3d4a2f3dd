"""Several contexts of one step: a model whose MoE layers have more than one geometry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..context import MegaMoEContext
from ..custom_ops.paths.choice import Decision
from ..errors import MegaMoEError, mismatch
from ..parallel.step_plan import StepPlan
from ..weights import ExpertWeights

if TYPE_CHECKING:
    from types import TracebackType


class MegaMoEContexts:
    """One context per geometry, used where a step takes one: by GraphRunner, by `with`, by close().

    Its layers see the rows of one step, so the contexts share one `num_valid`: build the later ones
    with `MegaMoEContext(..., num_valid=first.num_valid)`. They also share group, device and
    capacity.

    Args:
        contexts: in an order that is the same on every rank, since warm-up is collective.

    Attributes:
        contexts: the contexts given, in their order.
        num_valid: int32 [1] on the device, the one of all contexts.
        device, group, rank, world_size: theirs. max_tokens_per_rank: their capacity.

    Raises:
        ValueError: no context, or contexts that don't share what they have to.
    """

    def __init__(self, contexts: Sequence[MegaMoEContext]) -> None:
        self.contexts = tuple(contexts)
        if not self.contexts:
            raise ValueError(mismatch("contexts", "at least one", "none", "Pass the contexts."))
        first = self.contexts[0]
        for number, other in enumerate(self.contexts):
            for what, expected, got in (
                ("group", first.group, other.group),
                ("device", first.device, other.device),
                ("capacity", first.max_tokens_per_rank, other.max_tokens_per_rank),
                ("over_capacity", first.config.over_capacity, other.config.over_capacity),
            ):
                if got != expected:
                    raise ValueError(
                        mismatch(
                            f"{what} of contexts[{number}]", expected, got, "Build them alike."
                        )
                    )
            if other.num_valid is not first.num_valid:
                raise ValueError(
                    mismatch(
                        f"num_valid of contexts[{number}]",
                        "the tensor of contexts[0]",
                        "one of its own",
                        "Build it with MegaMoEContext(..., num_valid=contexts[0].num_valid).",
                    )
                )
        self.num_valid: Tensor = first.num_valid
        self.device: torch.device = first.device
        self.group: dist.ProcessGroup | None = first.group
        self.rank, self.world_size = first.rank, first.world_size
        self.max_tokens_per_rank = first.max_tokens_per_rank

    @property
    def closed(self) -> bool:
        """Whether one of them is: no step runs without it."""
        return any(context.closed for context in self.contexts)

    @property
    def backend(self) -> str:
        return ", ".join(dict.fromkeys(context.backend for context in self.contexts))

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(context.reason for context in self.contexts))

    @property
    def buffer_bytes(self) -> int:
        return sum(context.buffer_bytes for context in self.contexts)

    @property
    def invalid_id_count(self) -> int:
        """As that of MegaMoEContext, over all of them. Synchronizes."""
        return sum(context.invalid_id_count for context in self.contexts)

    def named_layers(self) -> dict[str, ExpertWeights]:
        """The live layers by a name that tells the context too."""
        return {
            f"contexts[{number}].{name}": layer
            for number, context in enumerate(self.contexts)
            for name, layer in context.named_layers().items()
        }

    def check_open(self) -> None:
        """Raise ContextClosed after close() of any."""
        for context in self.contexts:
            context.check_open()

    def warmup(self, buckets: Sequence[int]) -> None:
        """MegaMoEContext.warmup of each, in their order. Collective."""
        for context in self.contexts:
            context.warmup(buckets)

    def barrier(self) -> None:
        """Wait for the device and then for all ranks. Collective; not for a captured region."""
        self.contexts[0].barrier()

    @contextlib.contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """MegaMoEContext.step of each."""
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context.step(plan))
            yield

    def launches_per_call(self, plan: StepPlan) -> int:
        """As that of each: capacity and policy are the same."""
        return max(context.launches_per_call(plan) for context in self.contexts)

    def backend_for(self, num_tokens: int) -> str:
        """What calls of num_tokens tokens take now: one name, or one per context that differs."""
        return ", ".join(dict.fromkeys(c.backend_for(num_tokens) for c in self.contexts))

    def decision_for(self, num_tokens: int) -> Decision | None:
        """None: the reasons differ from context to context. Ask each of `contexts`."""
        return None

    def reset(self) -> None:
        """MegaMoEContext.reset of each. Collective."""
        for context in self.contexts:
            context.reset()

    def close(self) -> None:
        """Close all. Idempotent; one that fails does not keep the others open."""
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.callback(context.close)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise MegaMoEError(
            mismatch("copies of MegaMoEContexts", "none", "copy, deepcopy or pickle", "Build anew.")
        )

    def __enter__(self) -> MegaMoEContexts:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


AnyContext = MegaMoEContext | MegaMoEContexts
