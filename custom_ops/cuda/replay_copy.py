"""Write what a replay reads: its inputs into static buffers, and the number of real tokens.

`TorchInputCopier` does it with torch's operators, from anywhere. `CudaInputCopier` launches
csrc/cuda/replay_copy.cu, once for all inputs: a third of the host time. It takes contiguous CUDA
tensors of its device, and leaves a call with any other to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import BackendUnavailable, mismatch
from . import build as cuda_build

MAX_RANGES = 16
# The sources of one call, in the order of the targets; None leaves the targets as they are.
Write = Callable[[Sequence[Tensor] | None], None]


class TorchInputCopier:
    """Copies with torch's operators; never waits for the device.

    Args:
        num_valid: int32 [1], gets the number of real tokens.
    """

    def __init__(self, num_valid: Tensor) -> None:
        self.num_valid = num_valid

    def prepare(self, targets: Sequence[Tensor], num_tokens: int) -> Write:
        """What writes the calls of `num_tokens` tokens. A source has its target's shape and dtype.

        The caller has switched off gradients.
        """
        kept, num_valid = list(targets), self.num_valid

        def write(sources: Sequence[Tensor] | None) -> None:
            if sources is not None:
                torch._foreach_copy_(kept, list(sources), True)
            num_valid.fill_(num_tokens)

        return write


class _Request(ctypes.Structure):
    """MegaMoEReplayCopy of csrc/cuda/replay_copy.cu, field by field."""

    _fields_ = [
        ("sources", ctypes.c_void_p * MAX_RANGES),
        ("targets", ctypes.c_void_p * MAX_RANGES),
        ("bytes", ctypes.c_int64 * MAX_RANGES),
        ("num_valid", ctypes.c_void_p),
        ("value", ctypes.c_int32),
        ("count", ctypes.c_int32),
    ]


def build_library(capability: tuple[int, int]) -> ctypes.CDLL:
    """Compile csrc/cuda/replay_copy.cu for a compute capability, or find an earlier build.

    Raises:
        BackendUnavailable: no nvcc, a failed build, or a library that does not load.
    """
    arch = f"{capability[0]}{capability[1]}"
    library = cuda_build.load(cuda_build.build("replay_copy", ["cuda/replay_copy.cu"], arch))
    library.megamoe_replay_copy_error_string.argtypes = (ctypes.c_int,)
    library.megamoe_replay_copy_error_string.restype = ctypes.c_char_p
    library.megamoe_replay_copy_prepare.argtypes = ()
    library.megamoe_replay_copy_prepare.restype = ctypes.c_int
    library.megamoe_replay_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.megamoe_replay_copy.restype = ctypes.c_int
    return library


class CudaInputCopier(TorchInputCopier):
    """Copies with one launch. Construction loads the kernel.

    Args:
        num_valid: on the CUDA device that the calls run on.

    Raises:
        BackendUnavailable: the kernel can't be built or can't run on this device.
    """

    def __init__(self, num_valid: Tensor, library: ctypes.CDLL | None = None) -> None:
        super().__init__(num_valid)
        device = num_valid.device
        if library is None:
            library = build_library(torch.cuda.get_device_capability(device))
            with torch.cuda.device(device):
                error = library.megamoe_replay_copy_prepare()
            if error:
                raise BackendUnavailable(
                    mismatch(
                        f"replay_copy kernel on {torch.cuda.get_device_name(device)}",
                        "a kernel that loads",
                        _error_string(library, error),
                        "Check the driver: the toolkit of nvcc may be newer than it.",
                    )
                )
        self._library = library
        self._index = num_valid.get_device()
        self._current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
        self._current_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", int
        )

    def prepare(self, targets: Sequence[Tensor], num_tokens: int) -> Write:
        """See `TorchInputCopier.prepare`."""
        with_torch = super().prepare(targets, num_tokens)
        index = self._index
        if len(targets) > MAX_RANGES or not all(_fits(target, index) for target in targets):
            return with_torch
        request = _Request(
            targets=tuple(target.data_ptr() for target in targets),
            bytes=tuple(target.nbytes for target in targets),
            num_valid=self.num_valid.data_ptr(),
            value=num_tokens,
            count=len(targets),
        )
        kept = (*targets, self.num_valid)  # the request has raw pointers
        at, pointers = ctypes.addressof(request), request.sources
        library, launch = self._library, self._library.megamoe_replay_copy
        current_device, current_stream = self._current_device, self._current_stream

        def write(sources: Sequence[Tensor] | None) -> None:
            if sources is None or current_device() != index:
                with_torch(sources)
                return
            for place, source in enumerate(sources):
                if not _fits(source, index):
                    with_torch(sources)
                    return
                pointers[place] = source.data_ptr()
            error = launch(at, current_stream(index))
            if error:
                raise RuntimeError(
                    mismatch(
                        f"launch that copies {len(kept) - 1} inputs",
                        "success",
                        _error_string(library, error),
                        "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1.",
                    )
                )

        return write


def _fits(t: Tensor, index: int) -> bool:
    # A subclass may keep its data elsewhere; the index of a host tensor is -1.
    return type(t) is Tensor and t.get_device() == index and t.is_contiguous()


def _error_string(library: ctypes.CDLL, error: int) -> str:
    text: bytes = library.megamoe_replay_copy_error_string(error)
    return f"CUDA error {error} ({text.decode()})"


def input_copier(num_valid: Tensor) -> TorchInputCopier:
    """The quickest one for the device of `num_valid`; torch's where there is no nvcc."""
    if not num_valid.is_cuda:
        return TorchInputCopier(num_valid)
    try:
        cuda_build.find_nvcc()
    except BackendUnavailable:  # a backend without kernels of ours needs none
        return TorchInputCopier(num_valid)
    return CudaInputCopier(num_valid)
