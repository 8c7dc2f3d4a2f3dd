"""What a launch asks of CUDA's current state: the stream, the device, and whether it captures."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..errors import MegaMoEError, NotWarmedUp, mismatch


class CurrentStream:
    """Called, it returns the address of the current stream of `device`.

    Raises:
        MegaMoEError: another device is current.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._raw_stream = torch._C._cuda_getCurrentRawStream  # 20 times faster than the object
        self._current_device = torch._C._cuda_getDevice

    def __call__(self) -> int:
        if self._current_device() != self._index:
            check_current(self._device)
        return int(self._raw_stream(self._index))


def check_current(device: torch.device) -> None:
    """MegaMoEError where a device other than `device`, which has an index, is current."""
    current = torch.cuda.current_device()
    if current != device.index:
        raise MegaMoEError(
            mismatch(
                "current CUDA device",
                device,
                current,
                "Call under torch.cuda.device(context.device).",
            )
        )


def refuse_cold_capture(tokens: int, warm: Collection[int]) -> None:
    """NotWarmedUp where the current stream captures; for a number of tokens not launched yet."""
    if torch.cuda.is_current_stream_capturing():
        raise NotWarmedUp(
            mismatch(
                f"capture of {tokens} tokens",
                "a kernel compiled and loaded by warm-up",
                f"warm-up of {sorted(warm) or 'nothing'}",
                f"Call context.warmup([{tokens}, ...]) on all ranks before capture.",
            )
        )
