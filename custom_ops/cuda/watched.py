"""Whether tensors in dictionaries are still at their addresses: csrc/cuda/watched.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from . import build as cuda_build


class _Watched(ctypes.Structure):
    """MegaMoEWatched of csrc/cuda/watched.cpp, field by field. ctypes keeps the objects alive."""

    _fields_ = [
        ("owner", ctypes.py_object),
        ("key", ctypes.py_object),
        ("address", ctypes.c_void_p),
        ("found", ctypes.c_void_p),  # C++ alone reads it
    ]


class _Watch(ctypes.Structure):
    """MegaMoEWatch of csrc/cuda/watched.cpp, field by field."""

    _fields_ = [
        ("entries", ctypes.POINTER(_Watched)),
        ("count", ctypes.c_int64),
        ("changes", ctypes.c_uint64),
    ]


@functools.cache
def build_library() -> ctypes.CDLL:
    """Compile csrc/cuda/watched.cpp for this torch and Python, or find an earlier build.

    Raises:
        BackendUnavailable: no C++ compiler, no headers of Python, a failed build, or a library
            that does not load.
    """
    built = cuda_build.build_extension("watched", ["cuda/watched.cpp"], python=True)
    library = cuda_build.load(built, ctypes.PyDLL)  # which keeps the GIL
    library.megamoe_watched_start.argtypes = (ctypes.c_void_p,)
    library.megamoe_watched_start.restype = ctypes.c_bool
    library.megamoe_watched_first_moved.argtypes = (ctypes.c_void_p, ctypes.c_bool)
    library.megamoe_watched_first_moved.restype = ctypes.c_int64
    return library


class NativeWatch:
    """Entries of dictionaries, and the addresses of the tensors there.

    Args:
        entries: dictionary, key and `data_ptr()` of each.

    Attributes:
        watches: whether the interpreter tells of changes of the dictionaries (Python 3.12 and
            later), so that entries need not be looked up before one changes.
    """

    def __init__(self, entries: Sequence[tuple[dict[str, Any], str, int]]) -> None:
        library = build_library()
        self._entries = (_Watched * len(entries))(*(_Watched(*entry) for entry in entries))
        self._watch = _Watch(self._entries, len(entries))
        self.watches: bool = library.megamoe_watched_start(ctypes.addressof(self._watch))
        self._arguments = ctypes.addressof(self._watch), self.watches
        self._first_moved = library.megamoe_watched_first_moved

    def first_moved(self) -> int:
        """The index of the first entry that is missing, no tensor, or elsewhere; -1 for none.

        A subclass that answers `data_ptr()` for data of its own may count as elsewhere.
        """
        index: int = self._first_moved(*self._arguments)
        return index
