"""The small-batch FP8 path of one rank on SM90: launcher of csrc/small_batch/small_batch.cu.

One kernel that reads every touched expert's weights once. It takes the layer's inputs as they are
(bf16 rows, raw expert ids): no staging kernel runs before it.

Numbers are those of reference/ with `intermediate_group` 32, except that fp32 sums have their own
order. A token's result does not depend on which other tokens are in the batch, and has the same
bits in every run.

Calls of one SmallBatch share its workspaces: they must be ordered, as on one stream. Calls of two
must be too: the blocks of a launch wait for each other, and two launches beside each other may each
hold multiprocessors that the other needs.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..cuda.launch import KernelLibrary
from ..errors import require
from ..reference.recipe import BLOCK
from ..staging.rows import DTYPE_BITS, check_rows

MAX_EXPERTS = 1024  # kMaxExperts of csrc/small_batch/routing.cuh
MAX_PAIRS = 1024  # kMaxPairs: (token, slot) pairs of one launch
MAX_COLUMNS = 32  # pairs of one expert in one product, at the most: kVariants of small_batch.cu
TILE_ROWS = 64  # kTileRows: output columns of one product
INTERMEDIATE_GROUP = 32  # kFine: intermediate columns of one scale


@dataclass(frozen=True)
class Tuning:
    """How the kernel runs; no field changes what it computes.

    Attributes:
        pdl: launch with programmatic stream serialization.
        stages: most stages of the ring of weights, at least 2; 0: as many as fit.
        in_flight: KiB of w13 and of w2 that a block has under way at a time, up to 16 tokens; 0: as
            the kernel has it.
        num_sms: blocks, at most one per multiprocessor; default: one on each.
    """

    pdl: bool = True
    stages: int = 0
    in_flight: tuple[int, int] = (0, 0)
    num_sms: int | None = None


class _Config(ctypes.Structure):
    """MegaMoESmallBatchConfig of csrc/small_batch/plan.cuh, field by field."""

    _fields_ = [
        ("x_rows", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("x_row_scale", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("invalid_count", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_shared", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
        ("num_routed", ctypes.c_int32),
        ("swiglu_limit", ctypes.c_float),
        ("swiglu_alpha", ctypes.c_float),
        ("swiglu_beta", ctypes.c_float),
        ("expert_bias", ctypes.c_int32),
        ("routed_scaling_factor", ctypes.c_float),
        ("num_sms", ctypes.c_int32),
        ("pdl", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("in_flight1", ctypes.c_int32),
        ("in_flight2", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
    ]


_POINTER, _STRIDE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_CALL_ARGTYPES = (
    _POINTER,  # config
    *(_POINTER, _STRIDE),  # x
    *(_POINTER, _STRIDE),  # topk_ids
    *(_POINTER, _STRIDE),  # topk_weights
    *(_POINTER, _POINTER),  # num_valid, launch_count
    *(_POINTER, _POINTER, _POINTER, _POINTER),  # w13, w13_scale, w2, w2_scale
    *(_POINTER, _POINTER),  # w13_bias, w2_bias
    _POINTER,  # y
    *(_INT, _INT),  # num_tokens, dtypes
    _POINTER,  # stream
)
_Biases = tuple[Tensor | None, Tensor | None]  # w13_bias, w2_bias


class SmallBatch:
    """One rank's layer at one geometry. Construction compiles, loads and allocates everything.

    Args:
        num_experts: of all ranks; an id is valid below it, and others than -1 are counted.
        top_k: columns of ids and weights. capacity: most tokens of the caller's batches; the
            workspaces have room for `max_tokens`, which may be fewer.
        num_shared_experts: experts behind the routed ones in the weights, which take every valid
            row with weight 1.
        swiglu_limit, swiglu_alpha, swiglu_beta: g sigmoid(alpha g) (u + beta), g = min(gate, limit)
            and u = up clamped to +-limit; None: no clamp. Alpha 1 and beta 0 are SwiGLU as most
            models have it, 1.702 and 1 with limit 7 that of gpt-oss and MiniMax-M3.
        expert_bias: every call has biases; without it none has.
        first_expert, num_local_experts: the routed experts of this rank; default all. Ids of
            others are skipped, so their part of the sum is zero.
        invalid_count: int32 [1]; grows by the number of invalid ids in valid rows.
        library: for tests; default the one built from csrc.

    Attributes:
        max_tokens: most tokens of one call, at most `capacity`: a call has at most 1024 (token,
            slot) pairs. 0 where one token has more than the kernel takes.

    Raises:
        ValueError: a geometry that the kernel does not take.
        BackendUnavailable: it can't be built, or can't run on this device.
    """

    intermediate_group = INTERMEDIATE_GROUP

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
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        expert_bias: bool = False,
        routed_scaling_factor: float = 1.0,
        num_shared_experts: int = 0,
        first_expert: int = 0,
        num_local_experts: int | None = None,
        invalid_count: Tensor | None = None,
        tuning: Tuning = Tuning(),
        library: ctypes.CDLL | None = None,
    ) -> None:
        routed = num_experts if num_local_experts is None else num_local_experts
        local = routed + num_shared_experts
        slots = top_k + num_shared_experts
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            require(size > 0 and size % BLOCK == 0, name, f"a multiple of {BLOCK}", size, "Pad it.")
        require(
            1 <= local <= MAX_EXPERTS,
            "local experts, routed and shared",
            f"1 to {MAX_EXPERTS}",
            local,
            "Spread the experts over more ranks.",
        )
        require(
            first_expert >= 0 and first_expert + routed <= num_experts,
            "routed experts of this rank",
            f"within 0 to {num_experts} (num_experts)",
            f"{first_expert} to {first_expert + routed}",
            "Pass the first of them, and how many there are.",
        )
        require(top_k >= 1, "top_k", "at least 1", top_k, "Route each token to an expert.")
        require(
            math.isfinite(swiglu_alpha) and swiglu_alpha > 0,
            "swiglu_alpha",
            "a finite number > 0",
            swiglu_alpha,
            "Pass 1.0 for the SiLU of the gate.",
        )
        require(
            math.isfinite(swiglu_beta),
            "swiglu_beta",
            "a finite number",
            swiglu_beta,
            "Pass 0.0 where the model adds nothing to up.",
        )
        # Of w13_bias and w2_bias.
        self._bias_shapes = (
            ((local, 2 * intermediate_size), (local, hidden_size)) if expert_bias else None
        )
        self._invalid_count = invalid_count  # kept alive, since the kernel has raw pointers
        self._top_k = top_k
        self._hidden_size = hidden_size
        num_sms = tuning.num_sms
        if device.type == "cuda":
            most = torch.cuda.get_device_properties(device).multi_processor_count
            num_sms = most if num_sms is None else num_sms
            # Blocks wait for each other: one that finds no multiprocessor hangs the others.
            require(num_sms <= most, "num_sms", f"at most {most}", num_sms, "Leave it out.")
        stages = tuning.stages
        require(stages == 0 or stages >= 2, "stages", "0, or 2 and more", stages, "Take 0.")
        in_flight = tuning.in_flight
        require(min(in_flight) >= 0, "in_flight", "KiB, or 0", in_flight, "Take 0.")
        require(num_sms is not None, "num_sms", "a number of blocks", num_sms, "Pass it on a CPU.")
        self._config = _Config(
            invalid_count=0 if invalid_count is None else invalid_count.data_ptr(),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            num_shared=num_shared_experts,
            num_experts=num_experts,
            first_expert=first_expert,
            num_routed=routed,
            swiglu_limit=math.inf if swiglu_limit is None else swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            expert_bias=expert_bias,
            routed_scaling_factor=routed_scaling_factor,
            num_sms=num_sms,
            pdl=tuning.pdl,
            stages=stages,
            in_flight1=in_flight[0],
            in_flight2=in_flight[1],
        )
        self._config_address = ctypes.addressof(self._config)
        self._library = KernelLibrary(
            "small_batch",
            "small_batch",
            _CALL_ARGTYPES,
            device,
            self._config_address,
            arch="90a",
            expected="an SM90 GPU and a geometry the kernel takes",
            cure='backend="deep_gemm" or "triton" does without it.',
            loaded=library,
        )
        self._launch = self._library.function
        self.max_tokens = min(capacity, int(self._config.max_tokens))
        pairs = max(self.max_tokens, 1) * slots
        # Chunks of up to MAX_COLUMNS rows: of each expert one that is not full, and the full ones.
        rows = min(local, pairs) * MAX_COLUMNS + pairs

        def workspace(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._workspaces = {
            "x_rows": workspace(torch.uint8, rows, hidden_size),
            "rows": workspace(torch.uint8, rows, intermediate_size),
            "x_row_scale": workspace(torch.float32, rows, hidden_size // BLOCK),
            "row_scale": workspace(torch.float32, rows, intermediate_size // INTERMEDIATE_GROUP),
            "results": workspace(torch.bfloat16, pairs, hidden_size),
            "counters": torch.zeros(
                4 + MAX_EXPERTS + MAX_PAIRS // 8 + hidden_size // TILE_ROWS,  # Counters
                dtype=torch.int32,
                device=device,
            ),
        }
        for name, tensor in self._workspaces.items():
            setattr(self._config, name, tensor.data_ptr())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that this object holds."""
        return sum(tensor.nbytes for tensor in self._workspaces.values())

    def reset(self) -> None:
        """Zero what blocks tell each other: after a launch that did not come to its end."""
        self._workspaces["counters"].zero_()

    def __call__(
        self,
        x: Tensor,
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
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Write every row of `y` on `stream`, a cudaStream_t of the device, which is current.

        Args:
            x: [T, H] bf16, dense columns, rows may be strided; T from 0 to `max_tokens`.
            topk_ids: [T, K] int32 or int64. topk_weights: [T, K] fp32 or bf16.
            num_valid: int32 [1]. launch_count: int32 [1], grows by one. Both on the device.
            w13 [E, 2I, H], w13_scale, w2 [E, H, I], w2_scale: prepared, contiguous.
            y: [T, H] bf16, contiguous.
            w13_bias [E, 2I], rows in the order of w13's, w2_bias [E, H]: fp32, contiguous. Both
                where `expert_bias`, else neither. The first is added to GEMM 1 before the clamp,
                the second times the routing weight to GEMM 2 before a slot is rounded to bf16.

        Raises:
            ValueError: inputs that do not fit. RuntimeError: CUDA refused a launch.
        """
        tokens = x.shape[0]
        x_stride, x_column = x.stride()
        ids_stride, ids_column = topk_ids.stride()
        weights_stride, weights_column = topk_weights.stride()
        slots = (tokens, self._top_k)
        dtypes = DTYPE_BITS.get((x.dtype, topk_ids.dtype, topk_weights.dtype), -1)
        if (
            x.shape[1] != self._hidden_size
            or x_column != 1
            or topk_ids.shape != slots
            or topk_weights.shape != slots
            or (self._top_k > 1 and (ids_column != 1 or weights_column != 1))
            or tokens > self.max_tokens
            or not self._takes((w13_bias, w2_bias))
        ):
            dtypes = -1  # the library refuses it; `_fail` says why
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
            w13.data_ptr(),
            w13_scale.data_ptr(),
            w2.data_ptr(),
            w2_scale.data_ptr(),
            None if w13_bias is None else w13_bias.data_ptr(),
            None if w2_bias is None else w2_bias.data_ptr(),
            y.data_ptr(),
            tokens,
            dtypes,
            stream,
        )
        if error:
            self._fail(error, x, topk_ids, topk_weights, (w13_bias, w2_bias))

    def _takes(self, biases: _Biases) -> bool:
        if self._bias_shapes is None:
            return biases[0] is None and biases[1] is None
        return all(
            bias is not None
            and bias.dtype is torch.float32
            and bias.shape == shape
            and bias.is_contiguous()
            for bias, shape in zip(biases, self._bias_shapes, strict=True)
        )

    def _fail(
        self, error: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, biases: _Biases
    ) -> NoReturn:
        check_rows(
            x,
            topk_ids,
            topk_weights,
            hidden_size=self._hidden_size,
            top_k=self._top_k,
            most=self.max_tokens,
            cure="Split them, or take the mega kernel.",
        )
        shapes = self._bias_shapes
        require(
            self._takes(biases),
            "w13_bias and w2_bias",
            f"contiguous fp32 {shapes[0]} and {shapes[1]}" if shapes else "none of them",
            " and ".join(_describe(bias) for bias in biases),
            "Pass both, as they are prepared." if shapes else "Construct it with expert_bias=True.",
        )
        raise self._library.failure(error)


def _describe(bias: Tensor | None) -> str:
    if bias is None:
        return "None"
    layout = "" if bias.is_contiguous() else ", not contiguous"
    return f"{str(bias.dtype).removeprefix('torch.')} {tuple(bias.shape)}{layout}"
