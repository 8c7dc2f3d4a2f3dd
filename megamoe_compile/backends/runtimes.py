"""From a config to a backend's runtime: the only place that knows all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..config import BLOCK, MegaMoEConfig
from ..custom_ops.call import LayerSpec, Swiglu
from ..custom_ops.reference.runtime import ReferenceRuntime
from ..custom_ops.triton.runtime import StepRows

if TYPE_CHECKING:
    from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime
    from ..custom_ops.paths.measured import MeasuredRuntime
    from ..custom_ops.triton.runtime import TritonRuntime

    AnyRuntime = ReferenceRuntime | DeepGemmRuntime | MeasuredRuntime | TritonRuntime


def intermediate_alignment(backend: str) -> int:
    """What the backend's kernels need the intermediate size to be a multiple of."""
    if backend == "deep_gemm":
        from ..custom_ops.deep_gemm.api import INTERMEDIATE_ALIGNMENT

        return INTERMEDIATE_ALIGNMENT
    return BLOCK


def layer_spec(config: MegaMoEConfig, backend: str) -> LayerSpec:
    """What the backend's runtime is made for."""
    return LayerSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.padded_intermediate_size(intermediate_alignment(backend)),
        num_experts=config.num_experts,
        top_k=config.top_k,
        capacity=config.max_tokens_per_rank,
        num_shared_experts=config.num_shared_experts,
        swiglu=Swiglu(config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta),
        routed_scaling_factor=config.routed_scaling_factor,
        expert_bias=config.expert_bias,
    )


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
    spec = layer_spec(config, backend)
    if backend == "reference":
        return ReferenceRuntime(spec, device, group)
    if backend == "deep_gemm":
        from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime

        return DeepGemmRuntime(spec, device, group, num_sms=num_sms)
    from ..custom_ops.triton.runtime import TritonRuntime

    return TritonRuntime(spec, device, group, step_rows=step_rows)
