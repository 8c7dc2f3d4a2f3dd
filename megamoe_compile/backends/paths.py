"""The small-batch kernel beside the mega kernel: which contexts have both, and by which facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ..config import MegaMoEConfig
from ..custom_ops.cuda.build import default_cache_dir, sources_digest
from ..custom_ops.library import LAYOUT_VERSION
from ..custom_ops.paths.choice import (
    DEEP_GEMM,
    PATHS,
    SMALL_BATCH,
    ChoiceStore,
    PathChoice,
    PathName,
    check_pins,
)
from ..custom_ops.small_batch import kernel as small_batch_kernel
from ..errors import BackendUnavailable, mismatch, require
from ..version import __version__
from .runtimes import intermediate_alignment

if TYPE_CHECKING:
    from ..custom_ops.deep_gemm.runtime import DeepGemmRuntime
    from ..custom_ops.small_batch.kernel import SmallBatch
    from .runtimes import AnyRuntime


def check_paths(
    backend: str, config: MegaMoEConfig, world_size: int, paths: Mapping[int, PathName]
) -> None:
    """ValueError unless the pins name paths that a context of `backend` may have.

    The outcome is the same on all ranks that pass the same.
    """
    allowed: tuple[PathName, ...] = (DEEP_GEMM,) if backend == DEEP_GEMM else ()
    if allowed and config.backend == "auto" and world_size == 1:
        allowed = PATHS
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
    """The mega kernel's runtime with the small-batch kernel beside it, where both can run.

    Returns:
        (the runtime for the context, what to add to the context's reason).

    Raises:
        BackendUnavailable, ValueError: a bucket is pinned to the small-batch kernel, and it cannot
        run here, or not with so many tokens.
    """
    if config.backend != "auto" or backend != DEEP_GEMM:
        return runtime, ""
    mega = cast("DeepGemmRuntime", runtime)
    if mega.world_size > 1:
        return runtime, f"; over several ranks every call takes {DEEP_GEMM}"
    kernel, problem = None, f"num_sms={num_sms} leaves SMs free, and it takes all"
    if num_sms is None:
        kernel, problem = _small_batch(mega, config, device)
    pinned = max((bucket for bucket, path in paths.items() if path == SMALL_BATCH), default=0)
    if kernel is None:
        if pinned:
            cure = "Drop the pin, or mend what stands against it."
            raise BackendUnavailable(mismatch(f"paths[{pinned}]", SMALL_BATCH, problem, cure))
        return runtime, f"; every call takes it, without {SMALL_BATCH}: {problem}"
    most = kernel.max_tokens
    cure = "Pin larger buckets to deep_gemm, or leave them out."
    require(pinned <= most, f"bucket pinned to {SMALL_BATCH}", f"at most {most}", pinned, cure)
    from ..custom_ops.cuda.timing import time_in_turn
    from ..custom_ops.paths.measured import MeasuredRuntime, SmallBatchPath

    measured = MeasuredRuntime(
        mega,
        SmallBatchPath(kernel, device, config.top_k),
        PathChoice(config.max_tokens_per_rank, paths),
        ChoiceStore(_facts(mega, config, device), default_cache_dir() / "paths"),
        num_experts=config.num_experts,
        top_k=config.top_k,
        timer=time_in_turn,
    )
    return measured, f"; warm-up picks it or {SMALL_BATCH} per bucket, by time"


def _small_batch(
    mega: DeepGemmRuntime, config: MegaMoEConfig, device: torch.device
) -> tuple[SmallBatch | None, str]:
    """The small-batch kernel, or None and what stands against it."""
    from ..custom_ops.small_batch import kernel as small_batch_cuda

    try:
        kernel = small_batch_cuda.SmallBatch(
            hidden_size=config.hidden_size,
            intermediate_size=config.padded_intermediate_size(intermediate_alignment(DEEP_GEMM)),
            num_experts=config.num_experts,
            num_shared_experts=config.num_shared_experts,
            top_k=config.top_k,
            capacity=config.max_tokens_per_rank,
            swiglu_limit=config.swiglu_limit,
            routed_scaling_factor=config.routed_scaling_factor,
            device=device,
            invalid_count=mega.invalid_count,
        )
    except (BackendUnavailable, ValueError) as error:  # ValueError: a geometry it does not take
        return None, str(error)
    return (kernel, "") if kernel.max_tokens else (None, "it does not take this geometry")


def _facts(mega: DeepGemmRuntime, config: MegaMoEConfig, device: torch.device) -> dict[str, object]:
    """What the time of a bucket depends on."""
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "sgl-deep-gemm": mega.api.wheel,
        "megamoe-compile": __version__,
        "layout_version": LAYOUT_VERSION,
        "kernel_sources": sources_digest(Path(small_batch_kernel.__file__)),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.padded_intermediate_size(intermediate_alignment(DEEP_GEMM)),
        "num_experts": config.num_experts,
        "num_shared_experts": config.num_shared_experts,
        "top_k": config.top_k,
        "capacity": config.max_tokens_per_rank,
    }
