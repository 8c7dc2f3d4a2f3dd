"""Stand-ins for the two kernels behind csrc/deep_gemm/fused_moe.cpp, on CPU tensors.

They get what the real ones get, through the same C interfaces, and together compute what the
reference backend computes: so a wrong pointer, shape or stride shows up as a wrong result.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from helpers import Inputs, op_arguments
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.call import Call, Weights, idle_call
from megamoe_compile.custom_ops.deep_gemm import native as fused_moe_native
from megamoe_compile.custom_ops.deep_gemm.native import CCall, NativeLaunch, TvmAny, address
from megamoe_compile.custom_ops.reference.runtime import ReferenceRuntime
from megamoe_compile.custom_ops.staging import pre_dispatch

STREAM, CONFIG, FUNCTION = 0x5EA0, 0xC0F0, 0xF00D
FIXED = (None, 3, -(2**40), True, 2.5, "swiglu")
# DLPack's (code, bits) -> dtype
DTYPES = {
    (0, 32): torch.int32,
    (2, 32): torch.float32,
    (4, 16): torch.bfloat16,
    (10, 8): torch.float8_e4m3fn,
}


class DLTensor(ctypes.Structure):
    """As the DLPack standard lays it out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]

    def tensor(self) -> Tensor:
        """The tensor that this describes, sharing its memory."""
        assert (self.device_type, self.device_id) == (1, 0) and self.lanes == 1
        assert self.byte_offset == 0
        shape, strides = self.shape[: self.ndim], self.strides[: self.ndim]
        return tensor_at(self.data, shape, strides, DTYPES[self.code, self.bits])


class Error(ctypes.Structure):
    """The head of a tvm-ffi error object: a header of 24 bytes, then kind and message."""

    _fields_ = [
        ("header", ctypes.c_uint64 * 3),
        ("kind", ctypes.c_char_p),
        ("kind_size", ctypes.c_size_t),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
    ]


def tensor_at(data: int | None, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    """Memory as a tensor, without a copy."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    assert data is not None
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (span * dtype.itemsize)).from_address(data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def strided(inputs: Inputs) -> Inputs:
    """The same values with a row stride that is odd in bytes."""

    def wide(t: Tensor) -> Tensor:
        out = t.new_zeros(2 * t.shape[0], t.shape[1] + 3)
        out[::2, : t.shape[1]] = t
        return out[::2, : t.shape[1]]

    return tuple(map(wide, inputs))  # type: ignore[return-value]


def wrong_calls(layer: mm.MegaMoE, inputs: Inputs) -> dict[str, tuple[Any, ...]]:
    """Arguments of the op that must be refused, each with one thing changed."""
    arguments = op_arguments(layer, inputs)
    names = [argument.name for argument in library.fused_moe._schema.arguments]
    x, ids, weights = inputs

    def changed(**changes: Any) -> tuple[Any, ...]:
        return tuple(changes.get(name, it) for name, it in zip(names, arguments, strict=True))

    def column_strided(t: Tensor) -> Tensor:
        return t.T.contiguous().T

    return {
        "x is fp32": changed(x=x.float()),
        "x has one axis": changed(x=x[0]),
        "x has three axes": changed(x=x[None]),
        "x is narrow": changed(x=x[:, :64]),
        "columns of x are strided": changed(x=column_strided(x)),
        "ids are int16": changed(topk_ids=ids.short()),
        "ids are for other rows": changed(topk_ids=ids[:2]),
        "ids have other slots": changed(topk_ids=ids[:, :1]),
        "columns of ids are strided": changed(topk_ids=column_strided(ids)),
        "weights are fp64": changed(topk_weights=weights.double()),
        "weights are for other rows": changed(topk_weights=weights[:2]),
        "columns of weights are strided": changed(topk_weights=column_strided(weights)),
        "top_k": changed(top_k=ids.shape[1] + 1),
        "capacity": changed(capacity=2),
        "layout_version": changed(layout_version=library.LAYOUT_VERSION + 1),
        "context_id": changed(context_id=10**6),
        "geometry of w13": changed(w13=layer.w13[:2]),
        "w13 is fp32": changed(w13=layer.w13.float()),
        "w13_scale": changed(w13_scale=layer.w13_scale[:, :1]),
        "w2": changed(w2=layer.w2[:1]),
        "w2 is bytes": changed(w2=layer.w2.view(torch.uint8)),
        "w2_scale is bf16": changed(w2_scale=layer.w2_scale.bfloat16()),
        "one bias": changed(w13_bias=torch.zeros(layer.w13.shape[:2])),
        "biases of a context without": changed(
            w13_bias=torch.zeros(layer.w13.shape[:2]), w2_bias=torch.zeros(layer.w2.shape[:2])
        ),
        "num_valid is int64": changed(num_valid=layer.num_valid.long()),
        "num_valid has two": changed(num_valid=layer.num_valid.repeat(2)),
    }


def reported(method: Callable[..., int]) -> Callable[..., int]:
    """ctypes drops an exception in a callback: keep it in `failures`, and return -1."""

    @functools.wraps(method)
    def call(self: MockRuntime, *args: Any) -> int:
        try:
            return method(self, *args)
        except BaseException:
            self.failures.append(traceback.format_exc())
            return -1

    return call


@dataclasses.dataclass
class Staged:
    """One call of the staging function, its inputs as tensors."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    num_valid: Tensor
    launch_count: Tensor
    variant: int
    stream: int
    config: int


class MockRuntime:
    """The reference backend, launched from Python, or from C++ through mocks of both kernels."""

    def __init__(
        self, reference: ReferenceRuntime, shape: tuple[int, int, int], top_k: int, capacity: int
    ) -> None:
        self._reference = reference
        self._top_k, self._hidden = top_k, shape[2]
        self.python_launches = 0
        self.warm: set[int] = set()
        self.buffer_bytes, self.invalid_count = 0, reference.invalid_count
        self.failures: list[str] = []
        self.order: list[str] = []  # what the mocks were called for
        self.staged: Staged | None = None
        self.fixed: list[tuple[int, int, Any]] = []
        self.views: list[DLTensor] = []
        self.stage_error = self.call_error = 0
        self.result: int | None = None  # handle of an object that the mega kernel returns
        self.released: list[int] = []
        self.in_mega: Callable[[], object] = lambda: None
        self._error = Error((0, 0, 0), b"ValueError", 10, b"the mega kernel said no, and more", 23)
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        any_pointer = ctypes.POINTER(TvmAny)
        out_pointer = ctypes.POINTER(pointer)
        self._callbacks = (  # as long as this object, and it outlives its entry in the table
            ctypes.CFUNCTYPE(integer, *pre_dispatch._CALL_ARGTYPES)(self._stage),
            ctypes.CFUNCTYPE(integer, pointer, any_pointer, ctypes.c_int32, any_pointer)(
                self._call
            ),
            ctypes.CFUNCTYPE(integer, out_pointer)(self._take_error),
            ctypes.CFUNCTYPE(integer, pointer)(self._release),
            ctypes.CFUNCTYPE(integer, ctypes.c_int32, out_pointer)(self._stream),
        )
        stage, call, take_error, release, stream = map(address, self._callbacks)
        self.native = NativeLaunch(
            stage=(stage, CONFIG),
            mega=CCall(call, take_error, release, FUNCTION, self._arguments()),
            current_stream=stream,
            device_index=-1,  # what torch calls the CPU
            w13_shape=shape,
            top_k=top_k,
            capacity=capacity,
            key="CPU",
        )

    def _arguments(self) -> Any:
        return (TvmAny * len(FIXED))(*map(TvmAny.of, FIXED))

    def launch(self, call: Call) -> None:
        """From Python; from then on this many tokens go to C++."""
        self.python_launches += 1
        self._reference.launch(call)
        tokens = call.x.shape[0]
        if tokens not in self.warm:
            self.warm.add(tokens)
            self.native.warm(tokens)

    def warmup(self, token_counts: Any, weights: Any, launch_count: Tensor) -> None:
        for tokens in sorted({0, *token_counts}):
            self.launch(idle_call(tokens, self._top_k, weights(), launch_count))

    @reported
    def _stage(
        self,
        config: int,
        x: int,
        x_stride: int,
        ids: int,
        ids_stride: int,
        weights: int,
        weights_stride: int,
        num_valid: int,
        launch_count: int,
        tokens: int,
        variant: int,
        stream: int,
    ) -> int:
        if self.stage_error:
            return self.stage_error
        self.order.append("stage")
        slots = (tokens, self._top_k)
        ids_dtype = torch.int64 if variant & 2 else torch.int32
        weights_dtype = torch.bfloat16 if variant & 1 else torch.float32
        self.staged = Staged(
            tensor_at(x, (tokens, self._hidden), (x_stride, 1), torch.bfloat16),
            tensor_at(ids, slots, (ids_stride, 1), ids_dtype),
            tensor_at(weights, slots, (weights_stride, 1), weights_dtype),
            tensor_at(num_valid, (1,), (1,), torch.int32),
            tensor_at(launch_count, (1,), (1,), torch.int32),
            variant,
            stream,
            config,
        )
        return 0

    @reported
    def _call(self, function: int, arguments: Any, count: int, result: Any) -> int:
        self.order.append("mega")
        assert function == FUNCTION and count == 5 + len(FIXED) and result[0].type_index == 0
        if self.call_error:
            return self.call_error
        assert all(arguments[i].type_index == 7 for i in range(5))
        views = [DLTensor.from_address(arguments[i].value.as_pointer) for i in range(5)]
        self.views = [DLTensor.from_buffer_copy(view) for view in views]
        self.fixed = [
            (arguments[i].type_index, arguments[i].small_length, bytes(arguments[i].value))
            for i in range(5, count)
        ]
        self.in_mega()
        y, *weights = (view.tensor() for view in views)
        s = self.staged
        assert s is not None
        call = Call(s.x, s.ids, s.weights, Weights(*weights), s.num_valid, s.launch_count, y)
        self._reference.launch(call)
        if self.result is not None:
            result[0].type_index, result[0].value.as_pointer = 71, self.result
        return 0

    @reported
    def _take_error(self, out: Any) -> int:
        out[0] = ctypes.addressof(self._error)
        return 0

    @reported
    def _release(self, handle: int) -> int:
        self.released.append(handle)
        return 0

    @reported
    def _stream(self, device: int, out: Any) -> int:
        assert device == -1
        out[0] = STREAM
        return 0


class SmallBatchMock:
    """The second path of a measured runtime, on the reference that a MockRuntime has."""

    workspace_bytes = 0
    intermediate_group = 32
    max_tokens = 64

    def __init__(self, mega: MockRuntime) -> None:
        self._reference = mega._reference
        self.launches = 0

    def launch(self, call: Call) -> None:
        self.launches += 1
        self._reference.launch(call)

    def warmup(self, token_counts: Any, weights: Any, launch_count: Any) -> None:
        """Nothing to compile."""


def install() -> ctypes.CDLL:
    """The C++ kernel under the CPU key, for the rest of this process."""
    return fused_moe_native.install("CPU")
