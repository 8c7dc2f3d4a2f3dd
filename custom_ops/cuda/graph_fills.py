"""Instantiate captured graphs with kernels in the place of their fills.

The host pays for a memset node of a graph, at each launch, what it pays for a hundred kernels, and
cuBLAS captures one in front of some GEMMs: a whole model at an unlucky batch size has one or two
per layer. csrc/cuda/graph_fills.cu replaces them between capture and instantiation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .launch import KernelLibrary, builds_kernels, on_device

# Of a graph made with keep_graph=True, once, after its capture.
Instantiate = Callable[[torch.cuda.CUDAGraph], None]
_ARGTYPES = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))  # graph, how many were replaced


class KernelFills:
    """Replaces the fills of a graph, then instantiates it. Construction loads the kernels.

    Args:
        device: a CUDA device, that of the graphs.
        library: for tests; default the one built from csrc.

    Attributes:
        replaced: fills of the graph of the last call.

    Raises:
        BackendUnavailable: the kernels can't be built or can't run on this device.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        self._device = device
        self.replaced = 0
        self._library = KernelLibrary("graph_fills", "cuda", _ARGTYPES, device, loaded=library)

    def __call__(self, graph: torch.cuda.CUDAGraph) -> None:
        """Raises: RuntimeError: CUDA refused a change; the graph is of no use then."""
        replaced = ctypes.c_int32()
        with on_device(self._device):
            error = self._library.function(graph.raw_cuda_graph(), ctypes.byref(replaced))
        if error:
            raise self._library.failure(error)
        self.replaced = replaced.value
        graph.instantiate()


def instantiator(device: torch.device) -> Instantiate:
    """`KernelFills` on a CUDA device; fills stay as they are where there is no nvcc."""
    return KernelFills(device) if builds_kernels(device) else torch.cuda.CUDAGraph.instantiate
