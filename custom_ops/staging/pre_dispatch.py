"""Stage a rank's tokens into the symmetric input buffer, in one launch.

`PreDispatch` launches csrc/staging/pre_dispatch.cu (SM90), `TritonPreDispatch` its Triton twin
(any GPU from SM80, or CPU tensors under the Triton interpreter). Both write what `stage` of the
recipe returns, bit for bit (a NaN's sign apart), with these limits of what they touch:

- ids and weights: rows [0, T), where rows at or above `num_valid` get ids -1 and weights 0;
- e4m3 rows and scales: rows [0, min(T, num_valid));
- nothing at or above row T.

Everything static is decided once, at construction; a call passes pointers and strides.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cuda.launch import KernelLibrary
from ..errors import require
from .rows import DTYPE_BITS, check_rows

GROUP = 128  # columns per scale
MAX_TOP_K = 32
MAX_SLOTS = 64  # top_k + num_shared_experts: one thread each in the kernel's smallest block


@dataclass(frozen=True)
class Routing:
    """Where expert ids point. The fields are the keyword arguments of `stage`."""

    num_experts: int
    num_local_experts: int
    num_shared_experts: int = 0
    rank: int = 0
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class StagingBuffer:
    """Contiguous views of one symmetric buffer; K+S is top-k plus shared experts.

    x: [capacity, H] e4m3. scale: [capacity, H/128] fp32.
    ids: [capacity, K+S] int64. weights: [capacity, K+S] fp32.

    Raises:
        ValueError: a shape, dtype, stride or device that does not fit.
    """

    x: Tensor
    scale: Tensor
    ids: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        capacity, hidden = self.x.shape
        require(
            hidden > 0 and hidden % GROUP == 0,
            "buffer x.shape[1]",
            f"a multiple of {GROUP}",
            hidden,
            "Pad hidden_size.",
        )
        slots = self.ids.shape[1]
        for name, shape, dtype in (
            ("x", (capacity, hidden), torch.float8_e4m3fn),
            ("scale", (capacity, hidden // GROUP), torch.float32),
            ("ids", (capacity, slots), torch.int64),
            ("weights", (capacity, slots), torch.float32),
        ):
            view: Tensor = getattr(self, name)
            got = (tuple(view.shape), view.dtype, view.is_contiguous(), view.device)
            expected = (shape, dtype, True, self.x.device)
            require(
                got == expected,
                f"buffer {name} (shape, dtype, contiguous, device)",
                expected,
                got,
                "Slice it from the symmetric buffer as the mega kernel lays it out.",
            )

    @property
    def capacity(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    def limits(self, top_k: int) -> tuple[int, int, int]:
        """What `check_rows` holds a call against."""
        return self.hidden, top_k, self.capacity


def _top_k(buffer: StagingBuffer, routing: Routing) -> int:
    """Check `routing` against `buffer`, and return K."""
    slots = buffer.ids.shape[1]
    top_k = slots - routing.num_shared_experts
    require(
        routing.num_shared_experts >= 0 and 1 <= top_k <= MAX_TOP_K and slots <= MAX_SLOTS,
        "slots per token (top_k, num_shared_experts)",
        f"1 <= top_k <= {MAX_TOP_K}, and at most {MAX_SLOTS} together",
        (top_k, routing.num_shared_experts),
        "The buffer's ids have one column per slot.",
    )
    require(
        routing.num_local_experts >= 1 and routing.num_experts % routing.num_local_experts == 0,
        "num_local_experts",
        f"a divisor of num_experts = {routing.num_experts}",
        routing.num_local_experts,
        "Experts are spread evenly over the ranks.",
    )
    return top_k


class _Config(ctypes.Structure):
    """MegaMoEPreDispatchConfig of csrc/staging/pre_dispatch.cu, field by field."""

    _fields_ = [
        ("buf_x", ctypes.c_void_p),
        ("buf_scale", ctypes.c_void_p),
        ("buf_ids", ctypes.c_void_p),
        ("buf_weights", ctypes.c_void_p),
        ("invalid_count", ctypes.c_void_p),
        ("capacity", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_local_experts", ctypes.c_int32),
        ("num_shared_experts", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("routed_scaling_factor", ctypes.c_float),
        ("pdl", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
    ]


_CALL_ARGTYPES = (
    ctypes.c_void_p,  # config
    ctypes.c_void_p,  # x
    ctypes.c_int64,
    ctypes.c_void_p,  # topk_ids
    ctypes.c_int64,
    ctypes.c_void_p,  # topk_weights
    ctypes.c_int64,
    ctypes.c_void_p,  # num_valid
    ctypes.c_void_p,  # launch_count
    ctypes.c_int32,  # num_tokens
    ctypes.c_int32,  # variant
    ctypes.c_void_p,  # stream
)


class PreDispatch:
    """Launcher of the CUDA kernel for one buffer. Construction compiles and loads every variant.

    Args:
        buffer: on the CUDA device that every call runs on.
        invalid_count: int32 [1]; grows by the number of ids in valid rows that are neither -1 nor
            an expert.
        pdl: launch with programmatic stream serialization, so that the kernel's launch overlaps the
            predecessor's tail. Always safe: the kernel waits before it touches memory.
        early_trigger: let a successor launched the same way start before this kernel ends. Only
            for a successor that executes griddepcontrol.wait: the SM90 mega kernel of DeepGEMM
            does from 0.2.5 on; the one of 0.1.5 and 0.2.2 never waits and would read stale rows.
        library: for tests; default the one built from csrc.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        BackendUnavailable: the kernel can't be built, or can't run on this device.
    """

    def __init__(
        self,
        buffer: StagingBuffer,
        routing: Routing,
        invalid_count: Tensor,
        *,
        pdl: bool = True,
        early_trigger: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self._buffer = buffer  # with the next two: kept alive, since the kernel has raw pointers
        self._invalid_count = invalid_count
        self._hidden = buffer.hidden
        self._top_k = _top_k(buffer, routing)
        self._config = _Config(
            buf_x=buffer.x.data_ptr(),
            buf_scale=buffer.scale.data_ptr(),
            buf_ids=buffer.ids.data_ptr(),
            buf_weights=buffer.weights.data_ptr(),
            invalid_count=invalid_count.data_ptr(),
            capacity=buffer.capacity,
            hidden=self._hidden,
            top_k=self._top_k,
            num_experts=routing.num_experts,
            num_local_experts=routing.num_local_experts,
            num_shared_experts=routing.num_shared_experts,
            rank=routing.rank,
            routed_scaling_factor=routing.routed_scaling_factor,
            pdl=pdl,
            early_trigger=early_trigger,
        )
        self._config_address = ctypes.addressof(self._config)
        self._library = KernelLibrary(
            "pre_dispatch",
            "staging",
            _CALL_ARGTYPES,
            buffer.x.device,
            self._config_address,
            arch="90a",
            expected="an SM90 GPU and a config the kernel takes",
            cure='backend="triton" runs on any GPU from SM80.',
            loaded=library,
        )
        self._launch = self._library.function

    @property
    def address(self) -> tuple[int, int]:
        """Addresses of the launch function and of its config, for a caller in C++."""
        launch = ctypes.cast(self._launch, ctypes.c_void_p).value
        assert launch is not None
        return launch, self._config_address

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
        stream: int,
    ) -> None:
        """Stage T rows on `stream`, a cudaStream_t of the buffer's device, which is current.

        Args:
            x: [T, H] bf16. topk_ids: [T, K] int32 or int64. topk_weights: [T, K] fp32 or bf16.
                Columns are dense, rows may be strided; T may be 0.
            num_valid: int32 [1]. launch_count: int32 [1], grows by one. Both on the device.

        Raises:
            ValueError, CapacityError: inputs that do not fit the buffer.
            RuntimeError: CUDA refused the launch.
        """
        tokens = x.shape[0]
        x_stride, x_column = x.stride()
        ids_stride, ids_column = topk_ids.stride()
        weights_stride, weights_column = topk_weights.stride()
        slots = (tokens, self._top_k)
        variant = DTYPE_BITS.get((x.dtype, topk_ids.dtype, topk_weights.dtype), -1)
        if (
            x.shape[1] != self._hidden
            or topk_ids.shape != slots
            or topk_weights.shape != slots
            or x_column != 1
            or (self._top_k > 1 and (ids_column != 1 or weights_column != 1))
        ):
            variant = -1  # the library refuses it; `check_rows` says why
        error = self._launch(
            self._config_address,
            x.data_ptr(),
            x_stride,
            topk_ids.data_ptr(),
            ids_stride,
            topk_weights.data_ptr(),
            weights_stride,
            num_valid.data_ptr(),
            launch_count.data_ptr(),
            tokens,
            variant,
            stream,
        )
        if error:
            check_rows(x, topk_ids, topk_weights, *self._buffer.limits(self._top_k))
            raise self._library.failure(error)


class TwinLaunch:
    """Launches the Triton twin, into rows of any stride. What no call changes is decided here.

    Args:
        outputs: x as uint8, scale, ids and weights, in the dtypes of `StagingBuffer`.
        strides: of the outputs, from row to row, in elements.
        invalid_count: see `PreDispatch`.
    """

    def __init__(
        self,
        outputs: tuple[Tensor, Tensor, Tensor, Tensor],
        strides: tuple[int, int, int, int],
        routing: Routing,
        invalid_count: Tensor,
        *,
        hidden: int,
        top_k: int,
    ) -> None:
        from .pre_dispatch_triton import pre_dispatch_kernel  # imports triton

        self._kernel: Any = pre_dispatch_kernel
        groups = hidden // GROUP
        groups_per_program = min(8, power_of_two(groups))
        self._parts = -(-groups // groups_per_program)
        self._outputs = (*outputs, invalid_count, routing.routed_scaling_factor)
        per_rank = routing.num_local_experts + routing.num_shared_experts
        self._constants = {
            "HIDDEN": hidden,
            "TOP_K": top_k,
            "NUM_EXPERTS": routing.num_experts,
            "NUM_LOCAL": routing.num_local_experts,
            "NUM_SHARED": routing.num_shared_experts,
            "FIRST_SHARED": routing.rank * per_rank + routing.num_local_experts,
            "GROUPS": groups_per_program,
            "SLOTS": power_of_two(top_k + routing.num_shared_experts),
        }
        names = ("X_STRIDE", "SCALE_STRIDE", "IDS_STRIDE", "WEIGHTS_STRIDE")
        self._constants |= dict(zip(names, strides, strict=True))

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
        rows: int,
    ) -> None:
        """Stage T rows on the current stream; see `PreDispatch.__call__`, but nothing is checked.

        Args:
            rows: rows [T, rows) get ids -1 and weights 0.
        """
        tokens = x.shape[0]
        self._kernel[(max(rows, 1), self._parts)](
            x,
            x.stride(0),
            topk_ids,
            topk_ids.stride(0),
            topk_weights,
            topk_weights.stride(0),
            num_valid,
            launch_count,
            tokens,
            rows,
            *self._outputs,
            ALIGNED=x.data_ptr() % 16 == 0 and (tokens <= 1 or x.stride(0) % 8 == 0),
            **self._constants,
        )


class TritonPreDispatch:
    """Launcher of the Triton twin: arguments, inputs and outputs of `PreDispatch`.

    The first call of each combination of dtypes and alignment compiles; warm-up makes it.
    """

    def __init__(self, buffer: StagingBuffer, routing: Routing, invalid_count: Tensor) -> None:
        top_k, slots = _top_k(buffer, routing), buffer.ids.shape[1]
        self._limits = buffer.limits(top_k)
        self._launch = TwinLaunch(
            (buffer.x.view(torch.uint8), buffer.scale, buffer.ids, buffer.weights),
            (buffer.hidden, buffer.hidden // GROUP, slots, slots),
            routing,
            invalid_count,
            hidden=buffer.hidden,
            top_k=top_k,
        )

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
    ) -> None:
        """Stage T rows on the current stream; see `PreDispatch.__call__`."""
        check_rows(x, topk_ids, topk_weights, *self._limits)
        self._launch(x, topk_ids, topk_weights, num_valid, launch_count, x.shape[0])


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()
