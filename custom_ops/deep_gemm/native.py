"""The C++ kernel of the op, csrc/deep_gemm/fused_moe.cpp: what it is given, for which contexts.

It takes the calls of a context that entered, once a number of tokens has been launched from Python;
all others go on to the Python kernel of library.py. A context enters when its mega kernel is a
`TvmCall`: the wheels whose binding is tvm-ffi. Wheels from 0.2.3 on, which bind through torch.ops
and were not run on hardware, stay in Python, and so does a launch that first sets DeepGEMM's number
of SMs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..cuda import build as cuda_build
from ..errors import BackendUnavailable, mismatch

TVM_FFI = (0, 1)  # the release whose C ABI is written down here and in csrc/deep_gemm/fused_moe.cpp


class _Value(ctypes.Union):
    _fields_ = [
        ("as_int", ctypes.c_int64),
        ("as_double", ctypes.c_double),
        ("as_pointer", ctypes.c_void_p),
        ("as_bytes", ctypes.c_char * 8),
    ]


class TvmAny(ctypes.Structure):
    """One argument of a tvm-ffi function, as C sees it."""

    _fields_ = [
        ("type_index", ctypes.c_int32),
        ("small_length", ctypes.c_uint32),
        ("value", _Value),
    ]

    @classmethod
    def of(cls, value: Any) -> TvmAny:
        """None, a bool, an int, a float, a short string, or an object of tvm_ffi."""
        if value is None:
            return cls(0, 0)
        if isinstance(value, bool):
            return cls(2, 0, _Value(as_int=value))
        if isinstance(value, int):
            return cls(1, 0, _Value(as_int=value))
        if isinstance(value, float):
            return cls(3, 0, _Value(as_double=value))
        if isinstance(value, str):
            text = value.encode()
            if len(text) > 7:  # longer ones are objects
                raise ValueError(mismatch("string", "at most 7 bytes", value, "Convert it."))
            return cls(11, len(text), _Value(as_bytes=text))
        handle = value.__chandle__()
        type_index = ctypes.c_int32.from_address(handle + 8).value  # of the object's header
        return cls(type_index, 0, _Value(as_pointer=handle))


@dataclass(frozen=True)
class CCall:
    """A tvm-ffi function by address, and its last arguments."""

    call: int  # TVMFFIFunctionCall
    take_error: int  # TVMFFIErrorMoveFromRaised
    release: int  # TVMFFIObjectDecRef
    function: int  # the function object
    arguments: ctypes.Array[TvmAny]
    keep_alive: object = None  # what `function` and `arguments` point to


class TvmCall:
    """A tvm-ffi function with its last arguments fixed; called from Python, or by address.

    Args:
        function: takes (y, w13, w13_scale, w2, w2_scale, *fixed).
        fixed: values that `TvmAny.of` takes.
    """

    def __init__(self, function: Any, fixed: Sequence[Any]) -> None:
        self._function = function
        self._fixed = tuple(fixed)

    def __call__(
        self, y: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
    ) -> None:
        self._function(y, w13, w13_scale, w2, w2_scale, *self._fixed)

    def in_c(self) -> CCall:
        """The same call, for C++.

        Raises:
            BackendUnavailable: a tvm-ffi with another C ABI than the one written down here.
        """
        tvm_ffi = ctypes.CDLL("libtvm_ffi.so")  # the one that is loaded: it has this name
        version = (ctypes.c_uint32 * 3)()
        tvm_ffi.TVMFFIGetVersion(version)
        if tuple(version[:2]) != TVM_FFI:
            raise BackendUnavailable(
                mismatch(
                    "apache-tvm-ffi",
                    f"{TVM_FFI[0]}.{TVM_FFI[1]}.x",
                    ".".join(map(str, version)),
                    "Run: pip install apache-tvm-ffi==0.1.11",
                )
            )
        return CCall(
            call=address(tvm_ffi.TVMFFIFunctionCall),
            take_error=address(tvm_ffi.TVMFFIErrorMoveFromRaised),
            release=address(tvm_ffi.TVMFFIObjectDecRef),
            function=self._function.__chandle__(),
            arguments=(TvmAny * len(self._fixed))(*map(TvmAny.of, self._fixed)),
            keep_alive=self,
        )


def address(function: Any) -> int:
    """Of a C function that ctypes found."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def current_stream_address() -> int:
    """Of torch's C function for the current CUDA stream of a device."""
    try:
        return address(ctypes.CDLL("libtorch_cuda.so").aoti_torch_get_current_cuda_stream)
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            mismatch(
                "aoti_torch_get_current_cuda_stream",
                "a function of libtorch_cuda.so",
                error,
                "Install a CUDA build of torch from its wheel.",
            )
        ) from error


class _Config(ctypes.Structure):
    """MegaMoEFusedMoEConfig of csrc/deep_gemm/fused_moe.cpp, field by field."""

    _fields_ = [
        ("stage", ctypes.c_void_p),
        ("stage_config", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("take_error", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("mega", ctypes.c_void_p),
        ("fixed", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("layout_version", ctypes.c_int64),
        ("num_fixed", ctypes.c_int32),
        ("device", ctypes.c_int32),
    ]


@functools.cache
def install(key: str = "CUDA") -> ctypes.CDLL:
    """Build and load the library, and make its kernel the op's under the dispatch key.

    Raises:
        BackendUnavailable: no C++ compiler, a failed build, or a library that does not load.
    """
    library = cuda_build.load(cuda_build.build_extension("fused_moe", ["deep_gemm/fused_moe.cpp"]))
    library.megamoe_fused_moe_install.argtypes = (ctypes.c_char_p,)
    library.megamoe_fused_moe_install.restype = ctypes.c_char_p
    library.megamoe_fused_moe_enter.argtypes = (ctypes.c_int64, ctypes.POINTER(_Config))
    library.megamoe_fused_moe_enter.restype = None
    library.megamoe_fused_moe_warm.argtypes = (ctypes.c_int64, ctypes.c_int64)
    library.megamoe_fused_moe_warm.restype = None
    library.megamoe_fused_moe_leave.argtypes = (ctypes.c_int64,)
    library.megamoe_fused_moe_leave.restype = None
    library.megamoe_fused_moe_launches.argtypes = (ctypes.c_int64,)
    library.megamoe_fused_moe_launches.restype = ctypes.c_int64
    problem = library.megamoe_fused_moe_install(key.encode())
    if problem is not None:
        raise BackendUnavailable(
            mismatch(
                f"registration of megamoe::fused_moe for {key}",
                "success",
                problem.decode(),
                "Import one copy of megamoe_compile only.",
            )
        )
    return library


class NativeLaunch:
    """One context's launches from C++.

    Args:
        stage: addresses of the staging function and of its config (`PreDispatch.address`).
        mega: the mega kernel, which takes y, w13, w13_scale, w2 and w2_scale before the rest.
        current_stream: address of a function (device index, stream out) -> error.
        keep_alive: what the addresses point to.
    """

    def __init__(
        self,
        *,
        stage: tuple[int, int],
        mega: CCall,
        current_stream: int,
        device_index: int,
        w13_shape: tuple[int, int, int],
        top_k: int,
        capacity: int,
        keep_alive: object = None,
        key: str = "CUDA",
    ) -> None:
        self._library = install(key)
        self._keep_alive = (mega, keep_alive)
        self._config = _Config(
            stage=stage[0],
            stage_config=stage[1],
            call=mega.call,
            take_error=mega.take_error,
            release=mega.release,
            mega=mega.function,
            fixed=ctypes.addressof(mega.arguments),
            current_stream=current_stream,
            experts=w13_shape[0],
            rows=w13_shape[1],
            hidden=w13_shape[2],
            top_k=top_k,
            capacity=capacity,
            num_fixed=len(mega.arguments),
            device=device_index,
        )
        self._context_id = -1

    def enter(self, context_id: int, layout_version: int) -> None:
        """Take the context's calls from now on; `leave` must come before this object dies."""
        self._config.layout_version = layout_version
        self._library.megamoe_fused_moe_enter(context_id, self._config)
        self._context_id = context_id

    def warm(self, tokens: int) -> None:
        """Take calls of this many tokens, of which Python has launched one."""
        self._library.megamoe_fused_moe_warm(self._context_id, tokens)

    def keep_warm(self, token_counts: Iterable[int]) -> None:
        """Take calls of these numbers of tokens and of no others, until `warm` adds some.

        Counts `launches` from 0 again. No effect before `enter` and after `leave`.
        """
        if self._context_id < 0:
            return
        self._library.megamoe_fused_moe_leave(self._context_id)
        self._library.megamoe_fused_moe_enter(self._context_id, self._config)
        for tokens in token_counts:
            self.warm(tokens)

    def leave(self) -> None:
        """Take no call any more; waits for one that is being launched. Idempotent."""
        self._library.megamoe_fused_moe_leave(self._context_id)
        self._context_id = -1

    @property
    def launches(self) -> int:
        """Calls taken so far, -1 after `leave`."""
        return int(self._library.megamoe_fused_moe_launches(self._context_id))
