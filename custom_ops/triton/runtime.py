"""The `triton` backend: Triton kernels on any CUDA GPU from SM80, over any number of ranks.

One rank: stage the rows, sort the (row, slot) pairs by expert, two GEMMs, sum over slots. Several
ranks: each gathers the staged rows of all, runs its own experts on them, and the sums are
reduced and scattered. All ranks bring the same number of rows to the exchange, see `_rows`.

A staged row is a record: e4m3 values, ids, scales, routing weights, side by side, so that one
gather moves everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import Call, LayerSpec, Weights, idle_call
from ..cuda.stream import check_current, refuse_cold_capture
from ..errors import CapacityError, ContextClosed, mismatch
from ..reference.recipe import BLOCK
from ..staging.pre_dispatch import Routing, TwinLaunch, power_of_two
from ..symmetric.exchange import SymmetricTransport, Transport
from ..symmetric.memory import agree, check_peers, ranks_on_my_device, this_peer
from .tiling import Device, Tiling

MIN_COMPUTE_CAPABILITY = (8, 0)
RECORD_ALIGNMENT = 128  # bytes: a cache line
SORT_CHUNK = 1024  # pairs that one program of the sort looks at together
COMBINE_BLOCK = 512  # columns of the output per program


@dataclasses.dataclass
class StepRows:
    """What the context tells its runtime about the step in force.

    Attributes:
        rows: rows that every rank brings to each launch, the same on all ranks; None: not known.
    """

    rows: int | None = None


class GroupTransport:
    """Exchange through the process group: gloo on CPU, NCCL where each rank has a GPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # torch 2.13 gave them other names, and warns about the old ones.
        self._gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce: Any = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    def gather(self, rows: Tensor, out: Tensor) -> None:
        self._gather(out, rows, group=self._group)

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        self._reduce(out, rows, group=self._group)


def make_transport(
    group: dist.ProcessGroup | None, slot_bytes: int, device: torch.device
) -> Transport | None:
    """What moves rows between the ranks, the same kind on all of them; None for one rank."""
    if group is None:
        return None
    if device.type != "cuda":
        return GroupTransport(group)
    peers: list[Any] = [None] * dist.get_world_size(group)
    own = (this_peer(device), "nccl" in str(dist.get_backend_config(group)))
    dist.all_gather_object(peers, own, group=group)
    places = [peer for peer, _ in peers]
    shared = any(ranks_on_my_device(places, rank) > 1 for rank in range(len(places)))
    if not shared and all(nccl for _, nccl in peers):
        return GroupTransport(group)
    check_peers(places)
    return SymmetricTransport(slot_bytes, device, group)


class _Record:
    """Where the parts of a staged row are, in bytes from its start."""

    def __init__(self, hidden: int, slots: int) -> None:
        self.ids = hidden
        self.scale = self.ids + 8 * slots
        self.weights = self.scale + 4 * (hidden // BLOCK)
        end = self.weights + 4 * slots
        self.nbytes = math.ceil(end / RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    def views(self, rows: Tensor, x_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, scale, ids and weights of uint8 rows [N, nbytes]: flat, from the first row's on.

        A kernel steps from row to row by `nbytes`, in elements.
        """
        flat = rows.view(-1)
        return (
            flat.view(x_dtype),
            flat.view(torch.float32)[self.scale // 4 :],
            flat.view(torch.int64)[self.ids // 8 :],
            flat.view(torch.float32)[self.weights // 4 :],
        )


class TritonRuntime:
    """One rank's workspaces and kernels. Construction is collective, and allocates everything.

    Args:
        spec: its intermediate_size is padded to a multiple of 128.
        step_rows: told by the context; see `_rows`.
        gpu: what to choose tiles for; default: the device.

    Raises:
        BackendUnavailable: on every rank, where ranks cannot exchange rows.
    """

    native = None  # nothing here is launched from C++
    intermediate_group = BLOCK

    def __init__(
        self,
        spec: LayerSpec,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        step_rows: StepRows | None = None,
        gpu: Device | None = None,
    ) -> None:
        self._kernels = agree(group, "importing the Triton kernels", _import_kernels)
        self.device = device
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.version: str = self._kernels.triton.__version__
        self.spec = spec
        self.capacity = spec.capacity
        self._hidden, self._intermediate = spec.hidden_size, spec.intermediate_size
        self._slots = spec.num_slots
        self._local = spec.num_experts // self.world_size
        self._experts = self._local + spec.num_shared_experts
        self._first_expert = self.rank * self._experts
        self._gpu = gpu or Device.of(device)
        self._step_rows = step_rows or StepRows()
        self.invalid_count = torch.zeros(1, dtype=torch.int32, device=device)
        self._record = _Record(self._hidden, self._slots)
        self._transport = make_transport(
            group, self.capacity * max(self._record.nbytes, 4 * self._hidden), device
        )
        self._tilings: dict[int, Tiling] = {}  # by rows of all ranks
        self.buffer_bytes = agree(group, "allocating the workspaces", self._allocate)
        if isinstance(self._transport, SymmetricTransport):
            self.buffer_bytes += self._transport.nbytes
        self._constants = self._make_constants()
        nbytes = self._record.nbytes
        self._twin = TwinLaunch(
            self._record.views(self._staged, torch.uint8),
            (nbytes, nbytes // 4, nbytes // 8, nbytes // 4),
            Routing(
                spec.num_experts,
                self._local,
                spec.num_shared_experts,
                self.rank,
                spec.routed_scaling_factor,
            ),
            self.invalid_count,
            hidden=self._hidden,
            top_k=spec.top_k,
        )
        self._warm: set[tuple[int, int]] = set()
        self._closed = False

    def _allocate(self) -> int:
        """Workspaces for the capacity, whatever the routing. Returns their bytes."""
        rows = self.world_size * self.capacity
        pairs = rows * self._slots
        hidden, intermediate = self._hidden, self._intermediate
        sums = counters = 0
        for count in range(1, rows + 1):
            tiling = self._tiling_of(count)
            if tiling.partial_sums:
                sums = max(sums, tiling.splits * count * self._slots)
                counters = max(counters, tiling.tiles)
        total = 0

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            nonlocal total
            total += math.prod(shape) * dtype.itemsize
            return torch.empty(shape, dtype=dtype, device=self.device)

        nbytes = self._record.nbytes
        self._staged = empty(self.capacity, nbytes, dtype=torch.uint8)
        self._gathered = self._staged
        if self._transport is not None:
            self._gathered = empty(rows, nbytes, dtype=torch.uint8)
            self._sums = empty(rows, hidden)
            self._reduced = empty(self.capacity, hidden)
        self._first = empty(self._experts, dtype=torch.int32)
        self._count = empty(self._experts, dtype=torch.int32)
        self._pairs = empty(pairs, dtype=torch.int32)
        self._partial = empty(sums * 2 * intermediate)
        self._arrived = empty(counters, intermediate // BLOCK, dtype=torch.int32).zero_()
        self._intermediate_codes = empty(pairs, intermediate, dtype=torch.uint8)
        self._intermediate_scale = empty(pairs, intermediate // BLOCK)
        self._slot_results = empty(pairs, hidden, dtype=torch.bfloat16)
        return total

    def _make_constants(self) -> dict[str, Any]:
        """Per kernel, its constexpr arguments that no call changes."""
        spec, hidden, slots, nbytes = self.spec, self._hidden, self._slots, self._record.nbytes
        geometry = {
            "HIDDEN": hidden,
            "INTERMEDIATE": self._intermediate,
            "SLOTS": slots,
            "ROUTING_STRIDE": nbytes // 4,
            "EXPERTS": self._experts,
            "EXPERTS_P2": power_of_two(self._experts),
            "FP8_DOT": self._gpu.fp8_dot,
        }
        return {
            "group": {"SLOTS": slots, "IDS_STRIDE": nbytes // 8, "CHUNK": SORT_CHUNK},
            "gate_up": geometry
            | {
                "X_STRIDE": nbytes,
                "SCALE_STRIDE": nbytes // 4,
                "CLAMP": spec.swiglu.limit is not None,
                "ALPHA": spec.swiglu.alpha,
                "BETA": spec.swiglu.beta,
            },
            "down": geometry,
            "combine": {
                "HIDDEN": hidden,
                "SLOTS": slots,
                "EXPERTS": self._experts,
                "IDS_STRIDE": nbytes // 8,
                "BLOCK": COMBINE_BLOCK,
            },
        }

    def _tiling(self, rows: int) -> Tiling:
        """For `rows` rows of all ranks together."""
        tiling = self._tilings.get(rows)
        if tiling is None:
            tiling = self._tilings[rows] = self._tiling_of(rows)
        return tiling

    def _tiling_of(self, rows: int) -> Tiling:
        return Tiling.of(
            rows * self._slots, self._experts, self._hidden, self._intermediate, self._gpu
        )

    # -- a launch ---------------------------------------------------------------------------------

    def launch(self, call: Call) -> None:
        """See `library.Runtime`. A number of rows that was never launched may compile here."""
        if self._closed:
            raise ContextClosed(
                mismatch(
                    "context of the launch", "open", "closed", "Keep it open while its graphs run."
                )
            )
        tokens = call.x.shape[0]
        rows = self._rows(tokens)
        if self.device.type == "cuda":
            self._check_cuda(tokens, rows)
        self._stage(call, rows)
        if rows == 0:
            return
        if self._transport is None:
            self._run_experts(rows, call.weights, call.out)
            return
        total = self.world_size * rows
        self._transport.gather(self._staged[:rows], self._gathered[:total])
        self._run_experts(total, call.weights, self._sums[:total])
        self._transport.reduce_scatter(self._sums[:total], self._reduced[:rows])
        call.out.copy_(self._reduced[:tokens])

    def _rows(self, tokens: int) -> int:
        """Rows that this rank brings to the exchange: as many as every other rank.

        One rank: its tokens. Several: what the step in force says, which is the bucket of a graph,
        or else the capacity. No rank's own count can say it, and neither can the largest count of
        an eager step: a graph that torch.compile keeps for a number of tokens would bake it in.
        """
        if self.world_size == 1:
            return tokens
        told = self._step_rows.rows
        rows = self.capacity if told is None else min(told, self.capacity)
        if tokens > rows:
            raise CapacityError(
                mismatch(
                    "tokens on this rank",
                    f"at most {rows}, the bucket of the step in force",
                    tokens,
                    "Count them in the plan.",
                )
            )
        return rows

    def _check_cuda(self, tokens: int, rows: int) -> None:
        check_current(self.device)
        if (tokens, rows) not in self._warm:
            refuse_cold_capture(tokens, {count for count, _ in self._warm})
            self._warm.add((tokens, rows))

    def _stage(self, call: Call, rows: int) -> None:
        inputs = call.x, call.topk_ids, call.topk_weights
        self._twin(*inputs, call.num_valid, call.launch_count, rows)

    def _run_experts(self, rows: int, weights: Weights, out: Tensor) -> None:
        """This rank's experts on `rows` staged rows: the sum over slots, in the dtype of out."""
        tiling, constants, kernels = self._tiling(rows), self._constants, self._kernels
        operand = torch.float8_e4m3fn if self._gpu.fp8_dot else torch.uint8
        x, x_scale, ids, routing = self._record.views(self._gathered, operand)
        places = rows * self._slots
        kernels.group_kernel[(self._experts,)](
            ids,
            self._first,
            self._count,
            self._pairs,
            places,
            self._first_expert,
            **constants["group"],
        )
        kernels.gate_up_kernel[(tiling.tiles, self._intermediate // tiling.block_n, tiling.splits)](
            x,
            x_scale,
            routing,
            self._first,
            self._count,
            self._pairs,
            weights.w13.view(operand),
            weights.w13_scale,
            weights.w13_bias,
            self._partial,
            self._arrived,
            self._intermediate_codes,
            self._intermediate_scale,
            self.spec.swiglu.limit or 0.0,
            places,
            **constants["gate_up"],
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            SPLITS=tiling.splits,
            STAGES=tiling.gate_up_stages,
            num_warps=tiling.gate_up_warps,
        )
        kernels.down_kernel[(tiling.tiles, self._hidden // tiling.down_block_n)](
            self._intermediate_codes.view(operand),
            self._intermediate_scale,
            self._first,
            self._count,
            self._pairs,
            weights.w2.view(operand),
            weights.w2_scale,
            weights.w2_bias,
            routing,
            self._slot_results,
            **constants["down"],
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.down_block_n,
            BLOCK_K=tiling.block_k,
            STAGES=tiling.down_stages,
            num_warps=tiling.down_warps,
        )
        kernels.combine_kernel[(rows, -(-self._hidden // COMBINE_BLOCK))](
            self._slot_results, ids, out, self._first_expert, **constants["combine"]
        )

    @property
    def warm(self) -> set[int]:
        """Numbers of tokens that were launched."""
        return {tokens for tokens, _ in self._warm}

    # -- around launches --------------------------------------------------------------------------

    def warmup(
        self, token_counts: Sequence[int], weights: Callable[[], Weights], launch_count: Tensor
    ) -> None:
        """Compile and load every kernel that these numbers of tokens reach. Collective.

        Over several ranks each number is launched as a bucket and padded to the capacity.
        """
        any_weights, top_k = weights(), self.spec.top_k
        self._warm_up_staging(idle_call(2, top_k, any_weights, torch.zeros_like(launch_count)))
        told = self._step_rows.rows
        for tokens in sorted({0, *token_counts}):
            call = idle_call(tokens, top_k, any_weights, launch_count)
            try:
                for rows in (None,) if self.world_size == 1 else (tokens, None):
                    self._step_rows.rows = rows
                    self.launch(call)
            finally:
                self._step_rows.rows = told

    def _warm_up_staging(self, call: Call) -> None:
        """Every combination of dtypes and alignment, of a call that is not counted."""
        odd = call.x.new_zeros(2, self._hidden + 1)[:, 1:]
        for x in (call.x, odd):
            for ids in (call.topk_ids, call.topk_ids.long()):
                for routing in (call.topk_weights, call.topk_weights.bfloat16()):
                    self._stage(call._replace(x=x, topk_ids=ids, topk_weights=routing), 0)

    def reset(self) -> None:
        """Forget launches that did not finish. Collective."""
        self._arrived.zero_()
        if isinstance(self._transport, SymmetricTransport):
            self._transport.reset()

    def close(self) -> None:
        """Wait for this rank's launches, then let go of the workspaces. Never waits for a peer."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._closed, self._transport = True, None
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor | TwinLaunch):
                delattr(self, name)


def _import_kernels() -> Any:
    from . import kernels as triton_moe  # imports triton

    return triton_moe
