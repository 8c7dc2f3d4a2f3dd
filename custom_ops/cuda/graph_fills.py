"""Instantiate captured graphs with kernels in the place of their fills.

The host pays for a memset node of a graph, at each launch, what it pays for a hundred kernels, and
cuBLAS captures one in front of some GEMMs: a whole model at an unlucky batch size has one or two
per layer. csrc/cuda/graph_fills.cu replaces them between capture and instantiation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ..errors import BackendUnavailable, mismatch
from . import build as cuda_build

# Of a graph made with keep_graph=True, once, after its capture.
Instantiate = Callable[[torch.cuda.CUDAGraph], None]


def build_library(capability: tuple[int, int]) -> ctypes.CDLL:
    """Compile csrc/cuda/graph_fills.cu for a compute capability, or find an earlier build.

    Raises:
        BackendUnavailable: no nvcc, a failed build, or a library that does not load.
    """
    arch = f"{capability[0]}{capability[1]}"
    library = cuda_build.load(cuda_build.build("graph_fills", ["cuda/graph_fills.cu"], arch))
    library.megamoe_graph_fills_error_string.argtypes = (ctypes.c_int,)
    library.megamoe_graph_fills_error_string.restype = ctypes.c_char_p
    library.megamoe_graph_fills_prepare.argtypes = ()
    library.megamoe_graph_fills_prepare.restype = ctypes.c_int
    library.megamoe_graph_fills.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
    library.megamoe_graph_fills.restype = ctypes.c_int
    return library


class KernelFills:
    """Replaces the fills of a graph, then instantiates it. Construction loads the kernels.

    Args:
        device: a CUDA device, that of the graphs.

    Attributes:
        replaced: fills of the graph of the last call.

    Raises:
        BackendUnavailable: the kernels can't be built or can't run on this device.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        self._device = device
        self.replaced = 0
        if library is None:
            library = build_library(torch.cuda.get_device_capability(device))
            with torch.cuda.device(device):
                error = library.megamoe_graph_fills_prepare()
            if error:
                raise BackendUnavailable(
                    mismatch(
                        f"graph_fills kernels on {torch.cuda.get_device_name(device)}",
                        "kernels that load",
                        _error_string(library, error),
                        "Check the driver: the toolkit of nvcc may be newer than it.",
                    )
                )
        self._library = library

    def __call__(self, graph: torch.cuda.CUDAGraph) -> None:
        """Raises: RuntimeError: CUDA refused a change; the graph is of no use then."""
        replaced = ctypes.c_int32()
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            error = self._library.megamoe_graph_fills(
                graph.raw_cuda_graph(), ctypes.byref(replaced)
            )
        if error:
            raise RuntimeError(
                mismatch(
                    "fills of a captured graph",
                    "kernels in their place",
                    _error_string(self._library, error),
                    "Report it, with the versions of torch, CUDA and the driver.",
                )
            )
        self.replaced = replaced.value
        graph.instantiate()


def _error_string(library: ctypes.CDLL, error: int) -> str:
    text: bytes = library.megamoe_graph_fills_error_string(error)
    return f"CUDA error {error} ({text.decode()})"


def instantiator(device: torch.device) -> Instantiate:
    """`KernelFills` on a CUDA device; fills stay as they are where there is no nvcc."""
    if device.type != "cuda":
        return torch.cuda.CUDAGraph.instantiate
    try:
        cuda_build.find_nvcc()
    except BackendUnavailable:  # a backend without kernels of ours needs none
        return torch.cuda.CUDAGraph.instantiate
    return KernelFills(device)
