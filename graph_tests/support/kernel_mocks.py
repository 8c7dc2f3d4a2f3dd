"""Libraries of kernels without a GPU: a stand-in, and what a built one must have."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MockKernels:
    """What `KernelLibrary` asks of a library: `megamoe_NAME` is `function`, and preparing returns
    `refusal`, a CUDA error code.

    Attributes:
        configs: what was prepared, in order.
    """

    def __init__(self, name: str, function: Callable[..., int], refusal: int = 0) -> None:
        self.configs: list[int | None] = []

        def prepare(config: int | None) -> int:
            self.configs.append(config)
            return refusal

        # Objects that take attributes, as the functions of ctypes do.
        setattr(self, f"megamoe_{name}", functools.partial(function))
        self.megamoe_prepare = prepare
        self.megamoe_error_string: Any = lambda error: b"made up"


def assert_interface(built: Path, name: str) -> None:
    """The C names that `KernelLibrary` asks for. The text of an error needs no GPU."""
    library = ctypes.CDLL(str(built))
    assert library.megamoe_prepare and getattr(library, f"megamoe_{name}")
    library.megamoe_error_string.restype = ctypes.c_char_p
    assert library.megamoe_error_string(2) == b"out of memory"
