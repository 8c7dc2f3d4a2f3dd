"""From a config to a backend's runtime: the only place that knows all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..config import BLOCK, MegaMoEConfig
from ..custom_ops.reference.recipe import ReferenceRuntime
from ..custom_ops.triton.runtime import StepRows

if TYPE_CHECKING:
    from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime
    from ..custom_ops.paths.measured import MeasuredRuntime
    from ..custom_ops.triton.runtime import TritonRuntime

    AnyRuntime = ReferenceRuntime | DeepGemmRuntime | MeasuredRuntime | TritonRuntime


def intermediate_alignment(backend: str) -> int:
    """What the backend's kernels need the intermediate size to be a multiple of."""
    if backend == "deep_gemm":
        from ..custom_ops.deep_gemm.runtime import INTERMEDIATE_ALIGNMENT

        return INTERMEDIATE_ALIGNMENT
    return BLOCK


def make_runtime(
    backend: str,
    config: MegaMoEConfig,
    device: torch.device,
    group: dist.ProcessGroup | None,
    num_sms: int | None,
    step_rows: StepRows,
) -> AnyRuntime:
    """Build the backend's runtime, symmetric buffer included. Collective over the group.

    Args:
        step_rows: what the context says about the step in force, for a runtime that asks.
    """
    if backend == "reference":
        return ReferenceRuntime(
            num_experts=config.num_experts,
            num_shared_experts=config.num_shared_experts,
            swiglu_limit=config.swiglu_limit,
            routed_scaling_factor=config.routed_scaling_factor,
            device=device,
            group=group,
        )
    if backend == "deep_gemm":
        from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime

        return DeepGemmRuntime(
            hidden_size=config.hidden_size,
            intermediate_size=config.padded_intermediate_size(intermediate_alignment(backend)),
            num_experts=config.num_experts,
            num_shared_experts=config.num_shared_experts,
            top_k=config.top_k,
            capacity=config.max_tokens_per_rank,
            swiglu_limit=config.swiglu_limit,
            routed_scaling_factor=config.routed_scaling_factor,
            device=device,
            group=group,
            num_sms=num_sms,
        )
    from ..custom_ops.triton.runtime import TritonRuntime

    return TritonRuntime(
        hidden_size=config.hidden_size,
        intermediate_size=config.padded_intermediate_size(intermediate_alignment(backend)),
        num_experts=config.num_experts,
        num_shared_experts=config.num_shared_experts,
        top_k=config.top_k,
        capacity=config.max_tokens_per_rank,
        swiglu_limit=config.swiglu_limit,
        routed_scaling_factor=config.routed_scaling_factor,
        device=device,
        group=group,
        step_rows=step_rows,
    )
