"""One rank's layer on two paths: the backend's, and the small-batch kernel where it is faster.

Warm-up times both per bucket under graph replay, on the layers' own weights, and keeps the faster.
A call looks its path up by its number of rows: nothing is timed and no choice is made in a forward.
Both paths read the same weights and write every row; they differ within the stated tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..call import Call, Weights, idle_call
from ..cuda.stream import CurrentStream, refuse_cold_capture
from ..library import Runtime
from .choice import SMALL_BATCH, ChoiceStore, Decision, PathChoice, PathName, faster

if TYPE_CHECKING:
    from ..deep_gemm.native import NativeLaunch
    from ..small_batch.kernel import SmallBatch

# Calls of one graph. Fresh rows and ids in each, and another layer's weights where there are
# several, so that no call finds its experts in the L2 cache because the one before read the same.
CALLS = 8

Timer = Callable[[Mapping[PathName, Sequence[Callable[[], None]]]], Mapping[PathName, float]]


class BasePath(Runtime, Protocol):
    """What the measured runtime needs of the backend's runtime, beside `launch`."""

    @property
    def native(self) -> NativeLaunch | None: ...

    @property
    def warm(self) -> set[int]: ...

    buffer_bytes: int
    invalid_count: Tensor
    intermediate_group: int

    def warmup(
        self, token_counts: Sequence[int], weights: Callable[[], Weights], launch_count: Tensor
    ) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class SmallBatchPath:
    """The small-batch kernel behind the interface of a runtime.

    Attributes:
        max_tokens: most rows that the kernel takes at this geometry, 0 for none.
        workspace_bytes: that it holds on the device.
        intermediate_group: columns of one scale between the GEMMs.
    """

    def __init__(self, kernel: SmallBatch, device: torch.device, top_k: int) -> None:
        self.max_tokens: int = kernel.max_tokens
        self.intermediate_group: int = kernel.intermediate_group
        self.workspace_bytes: int = kernel.workspace_bytes
        self._kernel = kernel
        self._top_k = top_k
        self._stream = CurrentStream(device)
        self._warm: set[int] = set()

    def launch(self, call: Call) -> None:
        """See `library.Runtime`."""
        tokens = call.x.shape[0]
        if tokens not in self._warm:
            # It compiles nothing per number of tokens. But what a capture needs must not depend on
            # which path was faster here.
            refuse_cold_capture(tokens, self._warm)
            self._warm.add(tokens)
        weights = call.weights
        self._kernel(
            *call[:3],
            call.num_valid,
            call.launch_count,
            *weights[:4],
            call.out,
            self._stream(),
            w13_bias=weights.w13_bias,
            w2_bias=weights.w2_bias,
        )

    def warmup(
        self, token_counts: Sequence[int], weights: Callable[[], Weights], launch_count: Tensor
    ) -> None:
        """Launch each of these numbers of tokens once, with nothing routed."""
        any_weights = weights()
        for tokens in sorted({0, *token_counts}):
            self.launch(idle_call(tokens, self._top_k, any_weights, launch_count))

    def reset(self) -> None:
        """Zero the kernel's counters."""
        self._kernel.reset()


class MeasuredRuntime:
    """The runtime of a context that has both paths: one rank on SM90.

    Args:
        base, small: the paths. They share the counter of invalid ids.
        choice: the decisions so far (pins), which `measure` adds to.
        store: the times that earlier starts have measured.
        num_experts: routed ones. top_k: columns of ids.
        timer: microseconds per call of each path's calls, which can be captured.
    """

    def __init__(
        self,
        base: BasePath,
        small: SmallBatchPath,
        choice: PathChoice,
        store: ChoiceStore,
        *,
        num_experts: int,
        top_k: int,
        timer: Timer,
    ) -> None:
        self.choice = choice
        self.native = base.native
        self.buffer_bytes = base.buffer_bytes + small.workspace_bytes
        self.invalid_count = base.invalid_count
        self._base = base
        self._small = small
        self._takes_small = choice.takes_small
        self._store = store
        self._num_experts = num_experts
        self._top_k = top_k
        self._timer = timer

    def launch(self, call: Call) -> None:
        """See `library.Runtime`."""
        self.path_of(call.x.shape[0]).launch(call)

    def path_of(self, tokens: int) -> BasePath | SmallBatchPath:
        """What a call of so many rows takes."""
        return self._small if self._takes_small[tokens] else self._base

    def warmup(
        self, token_counts: Sequence[int], weights: Callable[[], Weights], launch_count: Tensor
    ) -> None:
        """Prepare both paths for these numbers of tokens."""
        any_weights = weights()
        self._base.warmup(token_counts, lambda: any_weights, launch_count)
        small = [count for count in token_counts if count <= self._small.max_tokens]
        self._small.warmup(small, lambda: any_weights, launch_count)
        self._enter_native()

    def measure(
        self, buckets: Sequence[int], layers: Sequence[Weights], launch_count: Tensor
    ) -> None:
        """Decide the buckets that have no decision yet; they are warm.

        Args:
            layers: prepared weights of loaded layers. Without any, only what is stored decides;
                the other buckets stay on the base path until a warm-up that has weights.
            launch_count: counts the timed launches too.
        """
        undecided = self.choice.undecided(buckets)
        most = self._small.max_tokens
        known = self._store.read() if undecided else {}
        measured = {}
        for bucket in undecided:
            if bucket > most:
                reason = f"{SMALL_BATCH} takes at most {most} tokens"
                self.choice.decide(Decision(bucket, self.choice.base, reason))
            elif bucket in known:
                times = known[bucket]
                self.choice.decide(Decision(bucket, faster(times), "stored", times))
            elif layers:
                times = measured[bucket] = self._timer(self._calls(bucket, layers, launch_count))
                self.choice.decide(Decision(bucket, faster(times), "measured", times))
        if measured:
            self._store.write(measured)
        self._enter_native()

    def _enter_native(self) -> None:
        """Let C++ launch the mega kernel for what is warm and does not take the other."""
        if self.native is not None:
            self.native.keep_warm(n for n in self._base.warm if not self._takes_small[n])

    def _calls(
        self, tokens: int, layers: Sequence[Weights], launch_count: Tensor
    ) -> dict[PathName, list[Callable[[], None]]]:
        """The same calls for both paths: random rows and routing, the layers in turn."""
        device, hidden = launch_count.device, layers[0].w13.shape[2]
        generator = torch.Generator(device).manual_seed(tokens)  # not the user's random state

        def random(columns: int) -> Tensor:
            shape = (CALLS, tokens, columns)
            return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

        rows = random(hidden).bfloat16()
        scores, ids = random(self._num_experts).softmax(-1).topk(self._top_k)
        valid = torch.full_like(launch_count, tokens)
        out = torch.empty_like(rows[0])

        calls = [
            Call(rows[n], ids[n], scores[n], layers[n % len(layers)], valid, launch_count, out)
            for n in range(CALLS)
        ]

        def calls_of(path: BasePath | SmallBatchPath) -> list[Callable[[], None]]:
            return [functools.partial(path.launch, call) for call in calls]

        return {self.choice.base: calls_of(self._base), SMALL_BATCH: calls_of(self._small)}

    def reset(self) -> None:
        """Zero the base path's state and the small-batch kernel's counters."""
        self._base.reset()
        self._small.reset()

    def close(self) -> None:
        """Wait for this rank's launches, of both paths, and let go of the buffer."""
        self._base.close()
