"""MegaMoEContext: owner of the group, the backend's runtime and buffer, and the step state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .backends.capability import Capability, probe
from .backends.paths import add_small_batch, check_paths
from .backends.runtimes import intermediate_alignment, make_runtime
from .config import MegaMoEConfig
from .custom_ops.call import Weights
from .custom_ops.library import as_size, register_runtime
from .custom_ops.paths.choice import Decision, PathChoice, PathName
from .custom_ops.paths.measured import MeasuredRuntime
from .custom_ops.triton.runtime import StepRows
from .errors import (
    BackendUnavailable,
    CapacityError,
    ContextClosed,
    MegaMoEError,
    as_int,
    mismatch,
)
from .parallel.step_plan import StepPlan
from .weights import ExpertWeights, PreparedWeights, WeightGeometry

if TYPE_CHECKING:
    from .backends.runtimes import AnyRuntime

ALL_VALID = 2**31 - 1  # the value of num_valid that leaves no row out


class MegaMoEContext:
    """One expert-parallel group's buffer and step state, shared by all layers of one geometry.

    Construction is collective over `group`: every rank builds it at the same point of the program
    with the same config, and all of them succeed or raise. No call allocates symmetric memory.

    Launches of two contexts on one GPU have to follow each other, on one stream or ordered by
    events. The blocks of a launch wait for each other, and two launches side by side may each hold
    SMs that the other waits for, for ever. Contexts whose `num_sms` fit into the GPU together may
    overlap.

    Args:
        config: the geometry. group: the expert-parallel process group; None means one rank.
        device: where the layers run; default: the current CUDA device if there is one, else CPU.
        num_sms: SMs that the deep_gemm kernel may take, even; None for all. Fewer leave room for
            a side stream: the kernel spins until its whole grid is resident.
        paths: number of tokens to the backend or "small_batch", for a context with both paths
            (backend="auto" on one rank of an SM90 GPU). A bucket named here is not measured; calls
            of fewer tokens, down to the next bucket that is decided, go with it.
        num_valid: that of another context whose layers run in the same steps; see MegaMoEContexts.

    Attributes:
        backend: name of the backend, the same on all ranks. reason: why this one, and whether
            there is a second path.
        rank, world_size: of the group. buffer_bytes: bytes of this rank's buffers,
            those of the second path included.
        num_valid: int32 [1] on the device. Rows at or above it are not routed; default: none.
        launch_count: int32 [1] on the device, launches so far, replays included.

    Raises:
        BackendUnavailable: on every rank, if the backend cannot run on any of them.
        ValueError: on every rank, if the ranks' configs or paths differ, if they don't divide the
            experts, or for a path that this context does not have.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        *,
        num_sms: int | None = None,
        paths: Mapping[int, PathName] | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                mismatch(
                    "group",
                    "one that this rank belongs to",
                    f"global rank {dist.get_rank()} outside of it",
                    "Build the context on the group's ranks only.",
                )
            )
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.world_size = 1 if self.group is None else dist.get_world_size(self.group)
        self.device = _device(device)
        if num_valid is not None:
            _check_num_valid(num_valid, self.device)
        pins = {} if paths is None else paths
        capability = self._agree(pins)
        assert capability.backend is not None
        self.backend: str = capability.backend
        check_paths(self.backend, config, self.device, self.world_size, pins)
        self.weight_geometry = WeightGeometry.of(
            config,
            rank=self.rank,
            ep_size=self.world_size,
            alignment=intermediate_alignment(self.backend),
            device=self.device,
        )
        self._step_rows = StepRows()
        # Normal tensors even if the caller is in inference mode: graphs made outside it mutate
        # them. Static addresses, or reduce-overhead would skip its graphs "due to mutated inputs".
        with torch.inference_mode(False):
            self.launch_count = torch.zeros(1, dtype=torch.int32, device=self.device)
            if num_valid is None:
                num_valid = torch.full((1,), ALL_VALID, dtype=torch.int32, device=self.device)
            self.num_valid = num_valid
            made = make_runtime(
                self.backend, config, self.device, self.group, num_sms, self._step_rows
            )
            made, second_path = add_small_batch(
                made, self.backend, config, self.device, num_sms, pins
            )
        self._runtime: AnyRuntime | None = made
        self._choice: PathChoice | None = made.choice if isinstance(made, MeasuredRuntime) else None
        self.reason = capability.reason + second_path
        self.buffer_bytes = self._runtime.buffer_bytes
        for tensor in (self.launch_count, self.num_valid):
            torch._dynamo.mark_static_address(tensor, guard=False)
        geometry = self.weight_geometry
        self.context_id = register_runtime(
            self._runtime,
            (geometry.num_rows, 2 * geometry.padded_intermediate_size, geometry.hidden_size),
            self._runtime.native,
            expert_bias=geometry.expert_bias,
        )
        self.handle = as_size(self.context_id, self.device)
        self._layers: weakref.WeakSet[ExpertWeights] = weakref.WeakSet()
        self._chunks: int | None = None  # launches per call in the step of `step()`

    def _agree(self, paths: Mapping[int, PathName]) -> Capability:
        """Probe on every rank and come to one verdict on all, or raise on all."""
        mine = probe(self.config, self.device)
        verdicts: list[tuple[MegaMoEConfig, Any, Capability]] = [(self.config, paths, mine)]
        if self.group is not None:
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, verdicts[0], group=self.group)
            verdicts = gathered
        for rank, (config, pins, capability) in enumerate(verdicts):
            for name, got, first in (
                ("config", config, verdicts[0][0]),
                ("paths", pins, verdicts[0][1]),
            ):
                if got != first:
                    raise ValueError(
                        mismatch(f"{name} of rank {rank}", first, got, "Pass the same everywhere.")
                    )
            if capability.backend is None:
                raise BackendUnavailable(f"rank {rank}: {capability.reason}")
            if capability.backend != verdicts[0][2].backend:
                raise BackendUnavailable(
                    mismatch(
                        f"backend of rank {rank}",
                        f"{verdicts[0][2].backend}, as on rank 0",
                        f"{capability.backend} ({capability.reason})",
                        "Make the ranks' machines alike, or pass backend= explicitly.",
                    )
                )
        self.config.num_local_experts(self.world_size)
        return mine

    @property
    def closed(self) -> bool:
        return self._runtime is None

    @property
    def max_tokens_per_rank(self) -> int:
        """The capacity, of the config."""
        return self.config.max_tokens_per_rank

    @property
    def layers(self) -> list[ExpertWeights]:
        """The live layers of this context, in the order they were made."""
        return sorted(self._layers, key=lambda layer: layer.index)

    def named_layers(self) -> dict[str, ExpertWeights]:
        """The live layers by the name that messages call them."""
        return {f"MegaMoE[{layer.index}]": layer for layer in self.layers}

    def add_layer(self, layer: ExpertWeights) -> int:
        """Called by a new layer; returns its index."""
        self.check_open()
        index = 1 + max((known.index for known in self._layers), default=-1)
        self._layers.add(layer)
        return index

    def check_open(self) -> None:
        """Raise ContextClosed after close()."""
        if self.closed:
            raise ContextClosed(
                mismatch(
                    f"context {self.context_id}",
                    "open",
                    "closed",
                    "Build a new MegaMoEContext, its layers and its graphs.",
                )
            )

    def warmup(self, buckets: Sequence[int]) -> None:
        """Compile and load every kernel that calls of these numbers of tokens reach. Collective.

        Zero tokens are always prepared too: any rank may be idle. Launches count as others do.

        Where the context has two paths, each bucket is timed on both, on the weights of its loaded
        layers, unless it is decided already: by `paths`, by a warm-up before, or by what an earlier
        start stored. Without a loaded layer nothing is timed, and such buckets take the backend's
        path until a warm-up that finds one.

        Raises:
            CapacityError: a bucket above max_tokens_per_rank. MegaMoEError: inside a capture.
        """
        self.check_open()
        assert self._runtime is not None
        buckets = [as_int("buckets of warmup", count) for count in buckets]
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                mismatch("warmup", "a call outside of captures", "one inside", "Call it before.")
            )
        too_many = [count for count in buckets if count > self.config.max_tokens_per_rank]
        if too_many:
            raise CapacityError(
                mismatch(
                    "buckets",
                    f"at most {self.config.max_tokens_per_rank} tokens (max_tokens_per_rank)",
                    too_many,
                    "Raise max_tokens_per_rank or drop the buckets.",
                )
            )
        self.barrier()
        with torch.no_grad():
            self._runtime.warmup(buckets, self._any_weights, self.launch_count)
            if isinstance(self._runtime, MeasuredRuntime):
                self._runtime.measure(buckets, self._loaded_weights(), self.launch_count)
        self.barrier()

    def _loaded_weights(self) -> list[Weights]:
        return [layer.prepared for layer in self.layers if layer.loaded]

    def _any_weights(self) -> Weights:
        """Weights of this geometry for a launch that routes nothing."""
        for weights in self._loaded_weights():
            return weights
        return PreparedWeights.allocate(self.weight_geometry)

    def barrier(self) -> None:
        """Wait for the device and then for all ranks. Collective; not for a captured region."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(group=self.group)

    @contextlib.contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Inside, layers run as `plan` says: all ranks with the same number of launches per call.

        An eager step over several ranks needs it where a rank may be over max_tokens_per_rank: one
        rank's own count cannot tell how often the others launch. The runner does it by itself.

        Raises:
            CapacityError: the same on every rank, before any launch: a rank of the plan is over
            max_tokens_per_rank, and over_capacity is "error". ValueError: a plan of other ranks.
        """
        before = self._chunks, self._step_rows.rows
        self._chunks = self.launches_per_call(plan)
        self._step_rows.rows = None if plan.bucket is None else plan.padded_tokens
        try:
            yield
        finally:
            self._chunks, self._step_rows.rows = before

    def launches_per_call(self, plan: StepPlan) -> int:
        """Launches of one layer call in an eager step of `plan`; the errors of `step`."""
        self.check_open()
        if (plan.rank, plan.num_ranks) != (self.rank, self.world_size):
            raise ValueError(
                mismatch(
                    "(rank, ranks) of the plan",
                    f"{(self.rank, self.world_size)}, as in the context's group",
                    (plan.rank, plan.num_ranks),
                    "Agree on the plan over the ranks of the context.",
                )
            )
        chunks = plan.chunks(self.config.max_tokens_per_rank)
        if chunks > 1 and self.config.over_capacity == "error":
            raise CapacityError(
                mismatch(
                    "largest number of tokens on a rank",
                    f"at most {self.config.max_tokens_per_rank} (max_tokens_per_rank) for each of "
                    f"{plan.attn_tp} attention TP ranks",
                    f"{plan.max_tokens} of {plan.tokens_per_rank}",
                    "Raise max_tokens_per_rank, split the batch, or set over_capacity='chunk'.",
                )
            )
        return chunks

    def chunks_of(self, rows: int) -> int:
        """Launches of one layer call with `rows` rows, where over_capacity is "chunk".

        Over several ranks only a plan can say, and a call without one is refused whatever its
        rows: by every rank, so that none waits for another.
        """
        capacity = self.config.max_tokens_per_rank
        chunks = self._chunks
        if chunks is None:
            if self.world_size > 1:
                raise MegaMoEError(
                    mismatch(
                        f"plan of the step, with over_capacity='chunk' on {self.world_size} ranks",
                        "one in force",
                        "none",
                        "Call the model inside `with context.step(plan):`, on every rank.",
                    )
                )
            return 1 if rows <= capacity else int((rows + capacity - 1) // capacity)
        if rows > chunks * capacity:
            raise CapacityError(
                mismatch(
                    "tokens on this rank",
                    f"at most {chunks} x {capacity}, by the plan of the step",
                    int(rows),
                    "Count them in the plan.",
                )
            )
        return chunks

    def backend_for(self, num_tokens: int) -> str:
        """What a call of num_tokens tokens (0 to max_tokens_per_rank) takes now.

        The backend, or "small_batch" where that path was faster.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        return self.backend if self._choice is None else self._choice.path_for(num_tokens)

    def intermediate_group_for(self, num_tokens: int) -> int:
        """Columns of one scale of the rows between the two GEMMs, in a call of num_tokens tokens.

        It is what separates the numbers of one path or backend from another's.
        """
        self.check_open()
        num_tokens = as_int("num_tokens", num_tokens)
        runtime = self._runtime
        assert runtime is not None
        if isinstance(runtime, MeasuredRuntime):
            return runtime.path_of(num_tokens).intermediate_group
        return runtime.intermediate_group

    def decision_for(self, num_tokens: int) -> Decision | None:
        """Why a call of num_tokens tokens takes its path, and both paths' times.

        None where there is one path only, and where no bucket that holds it is decided yet.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        return None if self._choice is None else self._choice.decision_for(num_tokens)

    @property
    def invalid_id_count(self) -> int:
        """Slots of valid rows so far whose id was neither -1 nor an expert. Synchronizes."""
        self.check_open()
        assert self._runtime is not None
        return int(self._runtime.invalid_count)

    def reset(self) -> None:
        """Zero the buffer after an aborted launch. Collective; all ranks have stopped launching.

        The kernel keeps its barriers' state in the buffer: after a launch that one rank did not
        finish this is the only way back. `launch_count` and `num_valid` start anew too.
        """
        self.check_open()
        assert self._runtime is not None
        self._runtime.reset()
        self.launch_count.zero_()
        self.num_valid.fill_(ALL_VALID)

    def close(self) -> None:
        """Free the buffer. Idempotent; any later call through this context raises.

        Waits for this rank's own launches and for no peer, so that the order with the other
        ranks' close() and with destroy_process_group is free.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse copy, deepcopy and pickle: a copy's counter and mask would not be the kernel's."""
        raise MegaMoEError(
            mismatch(
                "copies of a MegaMoEContext",
                "none",
                "copy, deepcopy or pickle",
                "Build another context and its layers, and use state_dict() for the weights.",
            )
        )

    def __enter__(self) -> MegaMoEContext:
        self.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_num_valid(num_valid: torch.Tensor, device: torch.device) -> None:
    got = f"{num_valid.dtype} {list(num_valid.shape)} on {num_valid.device}"
    if got != f"{torch.int32} [1] on {device}":
        raise ValueError(
            mismatch(
                "num_valid of the context",
                f"{torch.int32} [1] on {device}",
                got,
                "Pass the num_valid of another context of this device.",
            )
        )
