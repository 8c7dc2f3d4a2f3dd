"""The ways to run a layer's experts over several ranks that `expert_parallel` compares.

Each is built by all ranks alike, and says in words why it cannot run where it cannot.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe_compile as mm
from benchmarks.layers import Inputs, same_weights
from megamoe_compile.custom_ops.call import Swiglu
from megamoe_compile.custom_ops.reference.recipe import (
    combine,
    dequantize_rows,
    expert_slots,
    stage,
)
from megamoe_compile.custom_ops.symmetric.memory import ranks_on_my_device, this_peer

# Their older names warn from torch 2.13 on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ONE_GPU = "NCCL refuses two ranks on one GPU"


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where the ranks run.

    Attributes:
        group: gloo, of all ranks: plans, outcomes and symmetric memory.
        rows_group: what moves rows: NCCL with a GPU for each rank, gloo on CPUs, else None.
    """

    group: dist.ProcessGroup
    device: torch.device
    sharing_gpu: bool
    rows_group: dist.ProcessGroup | None

    @classmethod
    def join(cls, local_rank: int, group: dist.ProcessGroup, cuda: bool, timeout: float) -> Ranks:
        """Collective over `group`. timeout: seconds after which NCCL gives up on a peer."""
        if not cuda:
            return cls(group, torch.device("cpu"), False, group)
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        peers = gather_objects(this_peer(device), group)
        sharing = any(ranks_on_my_device(peers, rank) > 1 for rank in range(len(peers)))
        limit = datetime.timedelta(seconds=timeout)
        nccl = None if sharing else dist.new_group(backend="nccl", timeout=limit)
        return cls(group, device, sharing, nccl)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's object, in rank order, on every rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


class GatherChain:
    """Without expert-parallel kernels: all-gather, this rank's experts, reduce-scatter.

    Rows, ids and weights of a token travel as one row of bytes, so that there is one gather; with
    an even top_k the rows stay aligned to 16 bytes. Every rank brings equally many rows; pad rows
    have ids of -1. The sum over ranks is of bf16 rows.

    Args:
        layers: of the expert-parallel context, whose weights are used.
        max_tokens: of one rank.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[mm.MegaMoE], max_tokens: int) -> None:
        assert ranks.rows_group is not None
        self.group = ranks.rows_group
        self.context = local_context(ranks, layers[0].context.config, max_tokens)
        self.layers = {layer: same_weights(self.context, layer) for layer in layers}
        geometry = layers[0].context.weight_geometry
        first, experts = geometry.first_expert, geometry.num_local_experts
        # From a global id to this rank's, or -1. Id -1 reads the entry behind the last expert.
        ids = range(-first, geometry.num_experts - first)
        table = [n if n in range(experts) else -1 for n in ids]
        self.local_ids = torch.tensor([*table, -1], dtype=torch.int64, device=ranks.device)

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> Inputs:
        """x [T, H] bf16, ids [T, K], weights [T, K] fp32 -> those of all ranks, ids local."""
        parts = [t.contiguous().view(torch.uint8) for t in (x, ids.int(), weights)]
        mine = torch.cat(parts, dim=1)
        rows = mine.new_empty(self.group.size() * mine.shape[0], mine.shape[1])
        all_gather(rows, mine, group=self.group)
        x_all, ids_all, weights_all = rows.split([part.shape[1] for part in parts], dim=1)
        return (
            x_all.view(torch.bfloat16),
            self.local_ids[ids_all.view(torch.int32)],
            weights_all.view(torch.float32),
        )

    def __call__(self, layer: mm.MegaMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H] -> [T, H], as layer(x, ids, weights) with equally many rows on every rank."""
        partial = self.layers[layer](*self.gather(x, ids, weights))
        out = torch.empty_like(x)
        reduce_scatter(out, partial, group=self.group)
        return out


def local_context(ranks: Ranks, config: mm.MegaMoEConfig, max_tokens: int) -> mm.MegaMoEContext:
    """One rank's experts as a layer of their own, for the tokens of all ranks.

    backend="auto": the fastest that this project has for one rank.
    """
    local = dataclasses.replace(
        config,
        num_experts=config.num_local_experts(ranks.size),
        max_tokens_per_rank=ranks.size * max_tokens,
        backend="auto",
    )
    return mm.MegaMoEContext(local, None, ranks.device)


def triton_context(ranks: Ranks, config: mm.MegaMoEConfig) -> mm.MegaMoEContext:
    """The same layer over all ranks on the other backend. Raises BackendUnavailable on all."""
    config = dataclasses.replace(config, backend="triton")
    return mm.MegaMoEContext(config, ranks.group, ranks.device)


def local_oracle(
    layer: mm.MegaMoE, x: Tensor, local_ids: Tensor, weights: Tensor, group: int
) -> Tensor:
    """What this rank's experts add to the rows of all ranks, by the reference; fp32 [T, H].

    group: columns of a scale between the GEMMs, by which paths differ.
    """
    config, geometry = layer.context.config, layer.context.weight_geometry
    q, scale, ids, scaled, _ = stage(
        x,
        local_ids,
        weights,
        torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device),
        num_experts=geometry.num_local_experts,
        num_local_experts=geometry.num_local_experts,
        num_shared_experts=0,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    return combine(
        expert_slots(
            dequantize_rows(q, scale),
            ids,
            scaled,
            layer.prepared,
            form=Swiglu(config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta),
            intermediate_group=group,
        )
    ).float()
