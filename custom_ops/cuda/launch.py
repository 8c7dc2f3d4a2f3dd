"""Load a library of CUDA kernels, prepare it on a device, and say what its error codes mean.

csrc/cuda/library.cuh is the other side. A launch is a plain call of `KernelLibrary.function`, with
nothing of Python between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import BackendUnavailable, mismatch
from . import build as cuda_build


class KernelLibrary:
    """The library of csrc/FOLDER/NAME.cu on a device. Construction builds it, or finds an earlier
    build, and loads every kernel, so that no launch has to.

    Args:
        argtypes: of its function `megamoe_NAME`, which returns a CUDA error code.
        device: of all calls; on a CPU `loaded` is a stand-in.
        config: address of what does not change between calls, for the library to check.
        arch: as in `build`; default: that of the device.
        expected, cure: of the error where the library refuses the device or the config.
        loaded: the library, where it is loaded already.

    Attributes:
        function: `megamoe_NAME`. 0 is success; anything else is for `failure`.

    Raises:
        BackendUnavailable: no nvcc, a failed build, a library that does not load, kernels that
            can't run on the device, or a config that they don't take.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        argtypes: Sequence[Any],
        device: torch.device,
        config: int | None = None,
        *,
        arch: str | None = None,
        expected: str = "kernels that load",
        cure: str = "Check the driver: the toolkit of nvcc may be newer than it.",
        loaded: ctypes.CDLL | None = None,
    ) -> None:
        if loaded is None:
            arch = arch or "{}{}".format(*torch.cuda.get_device_capability(device))
            loaded = cuda_build.load(cuda_build.build(name, [f"{folder}/{name}.cu"], arch))
        self.name = name
        self.function = getattr(loaded, f"megamoe_{name}")
        self.function.argtypes = tuple(argtypes)
        self.function.restype = ctypes.c_int
        self._error_string = loaded.megamoe_error_string
        self._error_string.argtypes = (ctypes.c_int,)
        self._error_string.restype = ctypes.c_char_p
        prepare = loaded.megamoe_prepare
        prepare.argtypes = (ctypes.c_void_p,)
        prepare.restype = ctypes.c_int
        with on_device(device):
            error = prepare(config)
        if error:
            where = torch.cuda.get_device_name(device) if device.type == "cuda" else device
            raise BackendUnavailable(
                mismatch(f"{name} kernels on {where}", expected, self._text(error), cure)
            )

    def failure(self, error: int) -> RuntimeError:
        """What to raise where `function` returned `error`."""
        return RuntimeError(
            mismatch(
                f"call of {self.name}",
                "success",
                self._text(error),
                "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1. If none has, "
                "report it with the versions of torch, CUDA and the driver.",
            )
        )

    def _text(self, error: int) -> str:
        text: bytes = self._error_string(error)
        return f"CUDA error {error} ({text.decode()})"


def on_device(device: torch.device) -> torch.cuda.device:
    """A context in which `device` is the current one; on a CPU it changes nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def builds_kernels(device: torch.device) -> bool:
    """Whether `device` is a CUDA device and there is an nvcc.

    A backend without kernels of ours needs none: what they would only speed up goes without.
    """
    if device.type != "cuda":
        return False
    try:
        cuda_build.find_nvcc()
    except BackendUnavailable:
        return False
    return True
