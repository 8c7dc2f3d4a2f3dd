"""The small-batch kernel beside a backend's: which contexts have both, and by which facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ..config import MegaMoEConfig
from ..custom_ops import triton as triton_package
from ..custom_ops.cuda.build import default_cache_dir, sources_digest
from ..custom_ops.library import LAYOUT_VERSION
from ..custom_ops.paths.choice import (
    BASES,
    SMALL_BATCH,
    ChoiceStore,
    PathChoice,
    PathName,
    check_pins,
)
from ..custom_ops.small_batch import kernel as small_batch_kernel
from ..errors import BackendUnavailable, mismatch, require
from ..version import __version__
from .runtimes import layer_spec

if TYPE_CHECKING:
    from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime
    from ..custom_ops.small_batch.kernel import SmallBatch
    from ..custom_ops.triton.runtime import TritonRuntime
    from .runtimes import AnyRuntime


def _may_have_two(backend: str, config: MegaMoEConfig, device: torch.device) -> bool:
    """Whether one rank's context may have the small-batch kernel, which needs SM90, beside it."""
    return config.backend == "auto" and backend in BASES and _is_sm90(device)


def _is_sm90(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def check_paths(
    backend: str,
    config: MegaMoEConfig,
    device: torch.device,
    world_size: int,
    paths: Mapping[int, PathName],
) -> None:
    """ValueError unless the pins name paths that a context of `backend` may have.

    The outcome is the same on all ranks that pass the same.
    """
    allowed = tuple(base for base in BASES if base == backend)
    if world_size == 1 and _may_have_two(backend, config, device):
        allowed += (SMALL_BATCH,)
    cure = "Only backend='auto' on one rank of an SM90 GPU has two paths."
    check_pins(paths, config.max_tokens_per_rank, allowed, cure)


def add_small_batch(
    runtime: AnyRuntime,
    backend: str,
    config: MegaMoEConfig,
    device: torch.device,
    num_sms: int | None,
    paths: Mapping[int, PathName],
) -> tuple[AnyRuntime, str]:
    """The backend's runtime with the small-batch kernel beside it, where both can run.

    Returns:
        (the runtime for the context, what to add to the context's reason).

    Raises:
        BackendUnavailable, ValueError: a bucket is pinned to the small-batch kernel, and it cannot
        run here, or not with so many tokens.
    """
    if not _may_have_two(backend, config, device):
        return runtime, ""
    base = cast("DeepGemmRuntime | TritonRuntime", runtime)
    if base.world_size > 1:
        return runtime, f"; over several ranks every call takes {backend}"
    kernel, problem = None, f"num_sms={num_sms} leaves SMs free, and it takes all"
    if num_sms is None:
        kernel, problem = _small_batch(base, backend, config, device)
    pinned = max((bucket for bucket, path in paths.items() if path == SMALL_BATCH), default=0)
    if kernel is None:
        if pinned:
            cure = "Drop the pin, or mend what stands against it."
            raise BackendUnavailable(mismatch(f"paths[{pinned}]", SMALL_BATCH, problem, cure))
        return runtime, f"; every call takes it, without {SMALL_BATCH}: {problem}"
    most = kernel.max_tokens
    cure = f"Pin larger buckets to {backend}, or leave them out."
    require(pinned <= most, f"bucket pinned to {SMALL_BATCH}", f"at most {most}", pinned, cure)
    from ..custom_ops.cuda.timing import time_in_turn
    from ..custom_ops.paths.measured import MeasuredRuntime, SmallBatchPath

    name = cast(PathName, backend)
    measured = MeasuredRuntime(
        base,
        SmallBatchPath(kernel, device, config.top_k),
        PathChoice(name, config.max_tokens_per_rank, paths),
        ChoiceStore(name, _facts(base, backend, config, device), default_cache_dir() / "paths"),
        num_experts=config.num_experts,
        top_k=config.top_k,
        timer=time_in_turn,
    )
    return measured, f"; warm-up picks it or {SMALL_BATCH} per bucket, by time"


def _small_batch(
    base: DeepGemmRuntime | TritonRuntime,
    backend: str,
    config: MegaMoEConfig,
    device: torch.device,
) -> tuple[SmallBatch | None, str]:
    """The small-batch kernel, or None and what stands against it."""
    from ..custom_ops.small_batch import kernel as small_batch_cuda

    spec = layer_spec(config, backend)
    try:
        kernel = small_batch_cuda.SmallBatch(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_experts=spec.num_experts,
            num_shared_experts=spec.num_shared_experts,
            top_k=spec.top_k,
            capacity=spec.capacity,
            swiglu_limit=spec.swiglu.limit,
            swiglu_alpha=spec.swiglu.alpha,
            swiglu_beta=spec.swiglu.beta,
            expert_bias=spec.expert_bias,
            routed_scaling_factor=spec.routed_scaling_factor,
            device=device,
            invalid_count=base.invalid_count,
        )
    except (BackendUnavailable, ValueError) as error:  # ValueError: a geometry it does not take
        return None, str(error)
    return (kernel, "") if kernel.max_tokens else (None, "it does not take this geometry")


def _facts(
    base: DeepGemmRuntime | TritonRuntime,
    backend: str,
    config: MegaMoEConfig,
    device: torch.device,
) -> dict[str, object]:
    """What the time of a bucket depends on."""
    gpu = torch.cuda.get_device_properties(device)
    spec = layer_spec(config, backend)
    launchers = [Path(small_batch_kernel.__file__)]
    if backend == "triton":
        launchers += sorted(Path(triton_package.__path__[0]).glob("*.py"))
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        backend: base.version,
        "megamoe-compile": __version__,
        "layout_version": LAYOUT_VERSION,
        "kernel_sources": sources_digest(*launchers),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_experts": spec.num_experts,
        "num_shared_experts": spec.num_shared_experts,
        "top_k": spec.top_k,
        "capacity": spec.capacity,
        "swiglu": list(spec.swiglu),
        "expert_bias": spec.expert_bias,
    }
