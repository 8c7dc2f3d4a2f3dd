"""The tensors that captured graphs hold by address, and a check that none of them moved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..custom_ops.cuda import watched as watched_native
from ..errors import BackendUnavailable, MegaMoEError, mismatch

log = logging.getLogger(__name__)


class WatchedTensors:
    """Parameters and buffers of `modules`, by the names of the modules.

    A graph replays with the addresses it was captured with: a tensor that was replaced would be
    ignored, or its freed memory read.

    Args:
        native: ask the C++ check first; for a device where `builds_native_check` says so.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, native: bool = False) -> None:
        self._tensors = list(_tensors_of(modules))
        self._addresses = [owner[key].data_ptr() for _, owner, key in self._tensors]
        self._native: watched_native.NativeWatch | None = None
        if native:
            self._native = watched_native.NativeWatch(
                [
                    (owner, key, address)
                    for (_, owner, key), address in zip(self._tensors, self._addresses, strict=True)
                ]
            )

    def check(self) -> None:
        """Raise a MegaMoEError that names the first tensor whose storage is another now."""
        if self._native is not None and self._native.first_moved() < 0:
            return
        for (name, owner, key), address in zip(self._tensors, self._addresses, strict=True):
            tensor = owner.get(key)
            if tensor is None or tensor.data_ptr() != address:
                raise MegaMoEError(
                    mismatch(
                        f"address of {name}",
                        "the captured one",
                        "none" if tensor is None else "another",
                        "It was replaced after capture(), or a load of it failed half-way: write "
                        "into the old storage (reload_weights does), or capture again.",
                    )
                )


def builds_native_check(device: torch.device) -> bool:
    """Build the C++ check where a replay takes less time than the check in Python: on CUDA.

    Where it cannot be built this is False, with a warning: the check in Python finds the same.
    """
    if device.type != "cuda":
        return False
    try:
        watched_native.build_library()
    except BackendUnavailable as error:
        log.warning("Replays are slower, and check their tensors in Python: %s", error)
        return False
    return True


def _tensors_of(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, dict[str, Any], str]]:
    seen: set[tuple[int, str]] = set()
    for name, module in modules.items():
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and (id(owner), key) not in seen:
                    seen.add((id(owner), key))
                    yield f"{name}.{key}", owner, key
