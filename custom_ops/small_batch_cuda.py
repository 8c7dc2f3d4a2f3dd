"""The small-batch FP8 path of one rank on SM90: launcher of csrc/small_batch.cu.

No backend takes it yet: docs/design.md has what it reaches and what it still lacks.

Two kernels, joined by programmatic dependent launch, that read every touched expert's weights once.
They take the layer's inputs as they are (bf16 rows, raw expert ids): no staging kernel runs before.
With `staged`, they take rows that are quantized already, for instance gathered from other ranks.

Numbers are those of reference.py (`intermediate_group` 128), except that fp32 sums have their own
order and a slot's result is not rounded to bf16 before the sum. A token's result does not depend on
which other tokens are in the batch, and has the same bits in every run.

Behind the second kernel, an ordinary launch is always safe. One that is launched programmatically
must execute griddepcontrol.wait before it reads the output or writes any input.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from . import cuda_build
from .errors import BackendUnavailable, mismatch, require
from .pre_dispatch import require_rows
from .reference import BLOCK, FP8

MAX_PAIRS = 2048  # kMaxPairs of csrc/small_batch.cuh: (token, slot) pairs of one pair of launches
MAX_EXPERTS = 1024
LOADERS = ("threads", "tensor")  # cp.async by all lanes; one tensor copy per stage


@dataclass(frozen=True)
class Tuning:
    """How the kernels run; no field changes what they compute, and None or 0 picks a value.

    Attributes:
        pdl: launch each kernel with programmatic stream serialization.
        early_trigger: K1 lets K2 start at its own start, not when its last loads are under way.
        loader: one of LOADERS.
        stages: 2 KB stages per warp of K1's and of K2's ring of weights.
        min_blocks: least 128-column blocks per warp and unit; more mean fewer block barriers.
        cluster: blocks of K2 that share a group of output rows: 1, 2, 4 or 8.
        num_sms: blocks of K1, and about as many of K2; default all multiprocessors.
    """

    pdl: bool = True
    early_trigger: bool = False
    loader: str = "threads"
    stages: tuple[int, int] = (0, 0)
    min_blocks: int = 2
    cluster: int = 0
    num_sms: int | None = None


class _Config(ctypes.Structure):
    """MegaMoESmallBatchConfig of csrc/small_batch.cu, field by field."""

    _fields_ = [
        ("hidden", ctypes.c_void_p),
        ("spill", ctypes.c_void_p),
        ("invalid_count", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_shared", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
        ("num_routed", ctypes.c_int32),
        ("max_pairs", ctypes.c_int32),
        ("swiglu_limit", ctypes.c_float),
        ("routed_scaling_factor", ctypes.c_float),
        ("staged", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("pdl", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
        ("loader", ctypes.c_int32),
        ("stages1", ctypes.c_int32),
        ("stages2", ctypes.c_int32),
        ("min_blocks", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("max_clusters", ctypes.c_int32),
    ]


_POINTER, _STRIDE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_CALL_ARGTYPES = (
    _POINTER,  # config
    *(_POINTER, _STRIDE, _POINTER),  # x, its stride, its scales
    *(_POINTER, _STRIDE),  # topk_ids
    *(_POINTER, _STRIDE),  # topk_weights
    *(_POINTER, _POINTER),  # num_valid, launch_count
    *(_POINTER, _POINTER, _POINTER, _POINTER),  # w13, w13_scale, w2, w2_scale
    _POINTER,  # y
    *(_INT, _INT, _INT),  # num_tokens, variant, phases
    _POINTER,  # stream
)
_ID_BITS = {torch.int32: 0, torch.int64: 2}
_WEIGHT_BITS = {torch.float32: 0, torch.bfloat16: 1}
GATE_UP, DOWN = 1, 2  # phases


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the argument types of the library's functions."""
    library.megamoe_error_string.argtypes = (ctypes.c_int,)
    library.megamoe_error_string.restype = ctypes.c_char_p
    library.megamoe_small_batch_prepare.argtypes = (ctypes.c_void_p,)
    library.megamoe_small_batch_prepare.restype = ctypes.c_int
    library.megamoe_small_batch.argtypes = _CALL_ARGTYPES
    library.megamoe_small_batch.restype = ctypes.c_int
    return library


def build_library() -> ctypes.CDLL:
    """Compile csrc/small_batch.cu, or find an earlier build, and load it.

    Raises:
        BackendUnavailable: no nvcc, a failed build, or a library that does not load.
    """
    return declare(cuda_build.load(cuda_build.build("small_batch", ["small_batch.cu"])))


class SmallBatch:
    """One rank's layer at one geometry. Construction compiles, loads and allocates everything.

    Args:
        num_experts: of all ranks; an id is valid below it, and others than -1 are counted.
        top_k: columns of ids and weights. capacity: most tokens of a call.
        num_shared_experts: experts behind the routed ones in the weights, which take every valid
            row with weight 1.
        first_expert, num_local_experts: the routed experts of this rank; default all. Ids of
            others are skipped, so their part of the sum is zero.
        staged: x is e4m3 [T, H] with scales [T, H/128], as `stage` of reference.py returns it.
        invalid_count: int32 [1]; grows by the number of invalid ids in valid rows.
        library: for tests; default the one built from csrc.

    Raises:
        ValueError: a geometry that the kernels do not take.
        BackendUnavailable: they can't be built, or can't run on this device.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        capacity: int,
        device: torch.device,
        swiglu_limit: float | None = None,
        routed_scaling_factor: float = 1.0,
        num_shared_experts: int = 0,
        first_expert: int = 0,
        num_local_experts: int | None = None,
        staged: bool = False,
        invalid_count: Tensor | None = None,
        tuning: Tuning = Tuning(),
        library: ctypes.CDLL | None = None,
    ) -> None:
        routed = num_experts if num_local_experts is None else num_local_experts
        slots = top_k + num_shared_experts
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            require(size > 0 and size % BLOCK == 0, name, f"a multiple of {BLOCK}", size, "Pad it.")
        require(
            1 <= routed + num_shared_experts <= MAX_EXPERTS,
            "local experts, routed and shared",
            f"1 to {MAX_EXPERTS}",
            routed + num_shared_experts,
            "Spread the experts over more ranks.",
        )
        require(
            top_k >= 1 and slots <= 64,
            "slots per token (top_k + num_shared_experts)",
            "1 to 64",
            slots,
            "Use another backend.",
        )
        require(tuning.loader in LOADERS, "loader", LOADERS, tuning.loader, "Take one of them.")
        max_pairs = min(max(capacity, 1) * slots, MAX_PAIRS)
        self._hidden = torch.empty(max_pairs, intermediate_size, dtype=torch.float32, device=device)
        self._spill = torch.empty(max_pairs, hidden_size, dtype=torch.float32, device=device)
        self._invalid_count = invalid_count  # kept alive, since the kernels have raw pointers
        self._top_k = top_k
        self._capacity = capacity
        self._x_shape = hidden_size
        self._x_dtype = FP8 if staged else torch.bfloat16
        self._library = library if library is not None else build_library()
        self._launch = self._library.megamoe_small_batch
        num_sms = tuning.num_sms
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._config = _Config(
            hidden=self._hidden.data_ptr(),
            spill=self._spill.data_ptr(),
            invalid_count=0 if invalid_count is None else invalid_count.data_ptr(),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            num_shared=num_shared_experts,
            num_experts=num_experts,
            first_expert=first_expert,
            num_routed=routed,
            max_pairs=max_pairs,
            swiglu_limit=math.inf if swiglu_limit is None else swiglu_limit,
            routed_scaling_factor=routed_scaling_factor,
            staged=staged,
            num_sms=num_sms,
            pdl=tuning.pdl,
            early_trigger=tuning.early_trigger,
            loader=LOADERS.index(tuning.loader),
            stages1=tuning.stages[0],
            stages2=tuning.stages[1],
            min_blocks=tuning.min_blocks,
            cluster=tuning.cluster,
        )
        self._config_address = ctypes.addressof(self._config)
        with torch.cuda.device(device if device.type == "cuda" else -1):
            error = self._library.megamoe_small_batch_prepare(self._config_address)
        if error:
            raise BackendUnavailable(
                mismatch(
                    "small-batch kernels",
                    "an SM90 GPU and a geometry the kernels take",
                    self._error_string(error),
                    'backend="reference" runs on any GPU, slowly.',
                )
            )

    @property
    def cluster(self) -> int:
        """Blocks of K2 that share a group of output rows."""
        return int(self._config.cluster)

    def _error_string(self, error: int) -> str:
        text: bytes = self._library.megamoe_error_string(error)
        return f"CUDA error {error} ({text.decode()})"

    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        y: Tensor,
        stream: int,
        phases: int = GATE_UP | DOWN,
    ) -> None:
        """Write every row of `y` on `stream`, a cudaStream_t of the device, which is current.

        Args:
            x: [T, H] bf16, or e4m3 with `scale` [T, H/128] fp32 where staged. Columns are dense,
                rows may be strided (not where staged); T may be 0.
            topk_ids: [T, K] int32 or int64. topk_weights: [T, K] fp32 or bf16.
            num_valid: int32 [1]. launch_count: int32 [1], grows by one. Both on the device.
            w13 [E, 2I, H], w13_scale, w2 [E, H, I], w2_scale: prepared, contiguous.
            y: [T, H] bf16, contiguous. phases: for timing, one kernel alone.

        Raises:
            ValueError: inputs that do not fit. RuntimeError: CUDA refused a launch.
        """
        tokens = x.shape[0]
        x_stride, x_column = x.stride()
        ids_stride, ids_column = topk_ids.stride()
        weights_stride, weights_column = topk_weights.stride()
        slots = (tokens, self._top_k)
        variant = _ID_BITS.get(topk_ids.dtype, 8) + _WEIGHT_BITS.get(topk_weights.dtype, 8)
        if (
            tokens > self._capacity
            or x.dtype is not self._x_dtype
            or x.shape[1] != self._x_shape
            or x_column != 1
            or (scale is None) == (self._x_dtype is FP8)
            or topk_ids.shape != slots
            or topk_weights.shape != slots
            or (self._top_k > 1 and (ids_column != 1 or weights_column != 1))
        ):
            variant = -1  # the library refuses it; `_fail` says why
        error = self._launch(
            self._config_address,
            x.data_ptr(),
            x_stride,
            0 if scale is None else scale.data_ptr(),
            topk_ids.data_ptr(),
            ids_stride,
            topk_weights.data_ptr(),
            weights_stride,
            num_valid.data_ptr(),
            launch_count.data_ptr(),
            w13.data_ptr(),
            w13_scale.data_ptr(),
            w2.data_ptr(),
            w2_scale.data_ptr(),
            y.data_ptr(),
            tokens,
            variant,
            phases,
            stream,
        )
        if error:
            self._fail(error, x, scale, topk_ids, topk_weights)

    def _fail(
        self, error: int, x: Tensor, scale: Tensor | None, topk_ids: Tensor, topk_weights: Tensor
    ) -> NoReturn:
        tokens = x.shape[0]
        require(
            tokens <= self._capacity, "tokens", f"at most {self._capacity}", tokens, "Split them."
        )
        inputs = (
            ("x", x, self._x_shape, (self._x_dtype,)),
            ("topk_ids", topk_ids, self._top_k, tuple(_ID_BITS)),
            ("topk_weights", topk_weights, self._top_k, tuple(_WEIGHT_BITS)),
        )
        for name, view, columns, dtypes in inputs:
            require_rows(name, view, tokens, columns, dtypes, "geometry")
        require(
            (scale is not None) == (self._x_dtype is FP8),
            "scale",
            "given exactly where the layer is staged",
            scale,
            "Pass what `staged` promised.",
        )
        raise RuntimeError(
            mismatch(
                "small-batch launch",
                "success",
                self._error_string(error),
                "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1.",
            )
        )
