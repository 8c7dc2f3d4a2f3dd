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

from .launch import KernelLibrary, builds_kernels

MAX_RANGES = 16
_ARGTYPES = (ctypes.c_void_p, ctypes.c_void_p)  # request, stream
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


class CudaInputCopier(TorchInputCopier):
    """Copies with one launch. Construction loads the kernel.

    Args:
        num_valid: on the CUDA device that the calls run on.
        library: for tests; default the one built from csrc.

    Raises:
        BackendUnavailable: the kernel can't be built or can't run on this device.
    """

    def __init__(self, num_valid: Tensor, library: ctypes.CDLL | None = None) -> None:
        super().__init__(num_valid)
        self._library = KernelLibrary(
            "replay_copy", "cuda", _ARGTYPES, num_valid.device, loaded=library
        )
        self._index = num_valid.get_device()
        self._current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
        self._current_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", int
        )

    def prepare(self, targets: Sequence[Tensor], num_tokens: int) -> Write:
        """See `TorchInputCopier.prepare`."""
        # It keeps the targets and num_valid, to which the request has raw pointers.
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
        at, pointers = ctypes.addressof(request), request.sources  # the latter keeps the request
        library, launch = self._library, self._library.function
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
                raise library.failure(error)

        return write


def _fits(t: Tensor, index: int) -> bool:
    # A subclass may keep its data elsewhere; the index of a host tensor is -1.
    return type(t) is Tensor and t.get_device() == index and t.is_contiguous()


def input_copier(num_valid: Tensor) -> TorchInputCopier:
    """The quickest one for the device of `num_valid`; torch's where there is no nvcc."""
    kind = CudaInputCopier if builds_kernels(num_valid.device) else TorchInputCopier
    return kind(num_valid)
