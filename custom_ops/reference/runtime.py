"""The `reference` backend: the recipe behind the op, on CPU or CUDA, over any group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import Call, LayerSpec
from .recipe import BLOCK, combine, dequantize_rows, expert_slots, stage


class ReferenceRuntime:
    """The `reference` backend of one rank: the recipe above, on CPU or CUDA, over any group.

    With several ranks each launch gathers all ranks' staged tokens, runs the local experts, and
    sums the slots: exactly one rank contributes to a slot, so the sum is exact and the result is
    that of one rank with all experts.
    """

    native = None  # nothing here is launched from C++
    intermediate_group = BLOCK

    def __init__(
        self, spec: LayerSpec, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.spec = spec
        self.invalid_count = torch.zeros(1, dtype=torch.int32, device=device)
        self.dense = device.type == "cuda"  # a CUDA stream may be capturing; the CPU never is

    def launch(self, call: Call) -> None:
        """See `library.Runtime`."""
        spec, x = self.spec, call.x
        q, scale, ids, routing, num_invalid = stage(
            x,
            call.topk_ids,
            call.topk_weights,
            call.num_valid,
            num_experts=spec.num_experts,
            num_local_experts=spec.num_experts // self.world_size,
            num_shared_experts=spec.num_shared_experts,
            rank=self.rank,
            routed_scaling_factor=spec.routed_scaling_factor,
        )
        call.launch_count.add_(1)
        self.invalid_count += num_invalid
        staged = (dequantize_rows(q, scale), ids, routing)
        tokens, longest = x.shape[0], x.shape[0]
        if self.group is not None:
            longest = self._longest(tokens, x.device)
            staged = tuple(self._gather(t, longest) for t in staged)  # type: ignore[assignment]
        slots = expert_slots(
            *staged,
            call.weights,
            first_expert=self.rank * call.weights.w13.shape[0],
            form=spec.swiglu,
            dense=self.dense,
        )
        if self.group is not None:
            dist.all_reduce(slots, group=self.group)
            slots = slots[self.rank * longest :]
        call.out.copy_(combine(slots[:tokens]))

    buffer_bytes = 0  # it stages into fresh memory

    def warmup(self, token_counts: object, weights: object, launch_count: object) -> None:
        """Nothing to compile."""

    def reset(self) -> None:
        """No state outside of a launch."""

    def close(self) -> None:
        """Nothing to free."""

    def _longest(self, tokens: int, device: torch.device) -> int:
        count = torch.tensor([tokens], dtype=torch.int64, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.group)
        return int(count)

    def _gather(self, rows: Tensor, longest: int) -> Tensor:
        """[T, C] of each rank -> [ranks * longest, C]; rows past a rank's T route nowhere."""
        padded = rows.new_full((longest, rows.shape[1]), -1)
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty(self.world_size * longest, rows.shape[1])
        # torch 2.13 gave it another name, and warns about the old one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, padded, group=self.group)
        return gathered
