"""Which backend can run a config on a device, or why not, and what to install or change."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ..config import MegaMoEConfig
from ..custom_ops.deep_gemm.api import arithmetic_problem
from ..errors import BackendUnavailable, mismatch
from .runtimes import layer_spec

OTHERWISE = "backend='triton' runs here without it, and backend='reference' slowly."


@dataclasses.dataclass(frozen=True)
class Capability:
    """The verdict of `probe`.

    Attributes:
        backend: the backend that runs here, or None.
        reason: one sentence: why this one, or what stands against it and the cure.
        details: what was looked at, for reports.
    """

    backend: str | None
    reason: str
    details: Mapping[str, Any]


def probe(config: MegaMoEConfig, device: torch.device | str) -> Capability:
    """Decide which backend runs `config` on `device`. Never raises, never falls back in silence."""
    details: dict[str, Any] = {"torch": torch.__version__}
    if not isinstance(config, MegaMoEConfig):
        cure = "Build one, or use MegaMoEConfig.preset or from_pretrained."
        return Capability(None, mismatch("config", "a MegaMoEConfig", type(config), cure), details)
    details["requested"] = config.backend
    try:
        device = torch.device(device)
        details["device"] = str(device)
        return _decide(config, device, details)
    except Exception as error:  # the contract: a verdict, not a traceback
        return Capability(None, f"probing {device} failed: {error}", details)


def _decide(config: MegaMoEConfig, device: torch.device, details: dict[str, Any]) -> Capability:
    if device.type != "cpu" and (device.type != "cuda" or not torch.cuda.is_available()):
        return Capability(
            None,
            f"no backend for device {device}: expected a CPU or an available CUDA device "
            f"(torch.cuda.is_available() is {torch.cuda.is_available()}). Install a CUDA build of "
            "torch and a driver, or pass device='cpu'.",
            details,
        )
    if config.backend == "reference":
        return Capability("reference", "asked for by backend='reference'", details)
    if device.type == "cpu":
        if config.backend == "auto":
            return Capability("reference", "a CPU device runs the PyTorch reference", details)
        if config.backend == "triton" and _import_triton(details)[0]:
            reason = "asked for; Triton's interpreter runs it on CPU tensors, for tests only"
            return Capability("triton", reason, details)
        return Capability(
            None,
            f"backend '{config.backend}' needs a CUDA device, got {device}. "
            "Pass device='cuda' on a machine with a GPU, or backend='reference'.",
            details,
        )
    return _decide_cuda(config, device, details)


def _decide_cuda(
    config: MegaMoEConfig, device: torch.device, details: dict[str, Any]
) -> Capability:
    capability = torch.cuda.get_device_capability(device)
    details["gpu"] = torch.cuda.get_device_name(device)
    details["compute_capability"] = list(capability)
    name = f"{details['gpu']} (SM{capability[0]}{capability[1]})"
    arithmetic = arithmetic_problem(layer_spec(config, "triton"))
    if config.backend == "triton" or (
        config.backend == "auto" and (capability[0] != 9 or arithmetic is not None)
    ):
        problem = _triton_problem(name, capability, details)
        if problem is not None:
            return Capability(None, problem, details)
        asked = "asked for"
        if config.backend == "auto":
            asked = "the mega kernel needs an SM90 GPU"
            if capability[0] == 9:
                asked = f"the mega kernel does not compute this model ({arithmetic})"
        return Capability("triton", f"{asked}, and {name} runs Triton's kernels", details)
    if capability[0] != 9:
        reason = f"the deep_gemm backend needs an SM90 GPU (H100, H200, H20), got {name}."
        return Capability(None, f"{reason} Pass backend='triton'.", details)
    problem = arithmetic or _deep_gemm_problem(config, device, details)
    if problem is not None:
        # Never a silent fallback: this GPU could run the fast kernel, and the cure is known.
        return Capability(None, f"{problem} {OTHERWISE}", details)
    asked = "asked for" if config.backend == "deep_gemm" else "an SM90 GPU"
    return Capability("deep_gemm", f"{asked}, and a launch of the kernel was right", details)


def _import_triton(details: dict[str, Any]) -> tuple[bool, str | None]:
    """Import the kernels: (whether triton interprets them in this process, what failed)."""
    if importlib.util.find_spec("triton") is None:
        return False, "none installed"
    try:
        import triton

        from ..custom_ops.triton.kernels import INTERPRETED
    except Exception as error:  # a triton that does not fit fails in many ways
        return False, f"{type(error).__name__}: {error}"
    details["triton"] = triton.__version__
    return INTERPRETED, None


def _triton_problem(name: str, capability: tuple[int, int], details: dict[str, Any]) -> str | None:
    """What stands between this GPU and the Triton kernels."""
    from ..custom_ops.triton.runtime import MIN_COMPUTE_CAPABILITY

    if capability < MIN_COMPUTE_CAPABILITY:
        return mismatch(
            "GPU of the triton backend",
            "SM80 or later (A100, RTX 30 and later)",
            name,
            "backend='reference' runs here, slowly.",
        )
    interprets, failure = _import_triton(details)
    if failure is not None:
        return mismatch(
            f"triton for torch {torch.__version__}",
            "one that imports (3.6 to 3.8 are known)",
            failure,
            "Install the triton that this torch requires (pip show torch).",
        )
    if interprets:
        return mismatch(
            "triton on a CUDA device",
            "compiled kernels",
            "its interpreter (TRITON_INTERPRET=1)",
            "Unset the variable and start again.",
        )
    return None


def _deep_gemm_problem(
    config: MegaMoEConfig, device: torch.device, details: dict[str, Any]
) -> str | None:
    """What stands between this machine and the mega kernel, cheapest look first."""
    from ..custom_ops.cuda import build as cuda_build
    from ..custom_ops.deep_gemm import api as deep_gemm
    from ..custom_ops.deep_gemm import check as deep_gemm_check

    wheel = deep_gemm.installed_version()
    details["deep_gemm"] = wheel
    problem = deep_gemm.wheel_problem(wheel, torch.__version__)
    if problem is not None or wheel is None:
        return problem
    try:
        details["nvcc"] = str(cuda_build.find_nvcc())
        details["cxx"] = str(cuda_build.find_cxx())
    except BackendUnavailable as error:
        return str(error)
    padded = config.padded_intermediate_size(deep_gemm.INTERMEDIATE_ALIGNMENT)
    problem = deep_gemm.shape_problem(wheel, config.hidden_size, padded, config.num_slots, 1)
    if problem is None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        shape = deep_gemm_check.Shape(config.hidden_size, padded, config.top_k, index)
        failure = deep_gemm_check.run_check(shape)
        if failure is not None:
            problem = (
                f"{deep_gemm.DISTRIBUTION} {wheel} with torch {torch.__version__}: expected one "
                f"right launch for hidden_size={config.hidden_size}, "
                f"intermediate_size={padded}, top_k={config.top_k}, got: {failure}. Reinstall the "
                "wheel that fits this torch, and check nvcc and the driver."
            )
    return problem
