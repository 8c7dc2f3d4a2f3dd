"""Which backend can run a config on a device, or why not, and what to install or change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from .config import MegaMoEConfig


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
    details: dict[str, Any] = {"torch": torch.__version__, "requested": config.backend}
    try:
        device = torch.device(device)
        details["device"] = str(device)
        return _decide(config, device, details)
    except Exception as error:  # the contract: a verdict, not a traceback
        return Capability(None, f"probing {device} failed: {error}", details)


def _decide(config: MegaMoEConfig, device: torch.device, details: dict[str, Any]) -> Capability:
    if config.backend == "reference":
        return Capability("reference", "asked for by backend='reference'", details)
    if device.type == "cpu":
        if config.backend == "auto":
            return Capability("reference", "a CPU device runs the PyTorch reference", details)
        return Capability(
            None,
            f"backend '{config.backend}' needs a CUDA device, got {device}. "
            "Pass device='cuda' on a machine with a GPU, or backend='reference'.",
            details,
        )
    if device.type != "cuda" or not torch.cuda.is_available():
        return Capability(
            None,
            f"no backend for device {device}: expected a CPU or an available CUDA device "
            f"(torch.cuda.is_available() is {torch.cuda.is_available()}). Install a CUDA build of "
            "torch and a driver, or pass device='cpu'.",
            details,
        )
    return Capability(None, "no CUDA backend yet", details)
