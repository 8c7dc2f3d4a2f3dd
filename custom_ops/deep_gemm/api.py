"""The generations of the sgl-deep-gemm wheels. The only file that imports deep_gemm.

They differ in binding and in arguments; `load_api` picks one by the wheel's version, once. Nothing
here looks at a signature.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call import LayerSpec
from ..errors import BackendUnavailable, mismatch
from ..reference.recipe import FP8
from .native import TvmCall

DISTRIBUTION = "sgl-deep-gemm"
MAX_INTERMEDIATE = 4096  # the kernel tracks 64 column blocks of 64 in one mask
# One row's scales, 4 bytes per 128 columns, must fill 16-byte units, by an assertion of the wheel:
# on the hardware 256 columns met it, 512 ran.
HIDDEN_ALIGNMENT = 512
INTERMEDIATE_ALIGNMENT = 256  # its tiles of w13 are 512 rows at the most
Version = tuple[int, ...]

# torch release -> (lowest wheel, first wheel that no longer fits, wheel to install). A wheel links
# against one torch; a wrong pair often imports and fails at the first call. 2.11 was run, the
# others follow SGLang's pins.
WHEELS: dict[Version, tuple[str, str, str]] = {
    (2, 11): ("0.1.4.post1", "0.1.5.post3", "0.1.5.post1"),
    (2, 13): ("0.1.5.post3", "0.2.2", "0.2.0"),
    (2, 14): ("0.2.2", "1", "0.2.5"),
}


def parse_version(text: str) -> Version:
    """Release numbers, then the post number (0 if none): "0.1.5.post1" -> (0, 1, 5, 1)."""
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:\.post(\d+))?", text)
    if match is None:
        raise ValueError(mismatch("version", "digits and dots", repr(text), "Reinstall the wheel."))
    return tuple(int(part or 0) for part in match.groups())


def installed_version() -> str | None:
    """Version of the installed wheel, without importing it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def wheel_problem(wheel: str | None, torch_version: str) -> str | None:
    """Why this wheel cannot work with this torch, and what to install; None if it can."""
    release = parse_version(torch_version)[:2]
    known = WHEELS.get(release)
    if known is None:
        if wheel is not None:
            return None  # a torch that this table does not know: the real call decides
        return mismatch(
            DISTRIBUTION,
            f"a wheel built for torch {torch_version}",
            "none installed",
            f"Wheels are known for torch {', '.join('.'.join(map(str, r)) for r in WHEELS)}.",
        )
    lowest, too_new, right = known
    cure = f"Run: pip install --no-deps {DISTRIBUTION}=={right}"
    if parse_version(right) < (0, 2, 3):
        cure += " apache-tvm-ffi==0.1.11"
    expected = f"{right} for torch {torch_version}"
    if wheel is None:
        return mismatch(DISTRIBUTION, expected, "none installed", cure)
    if not parse_version(lowest) <= parse_version(wheel) < parse_version(too_new):
        return mismatch(DISTRIBUTION, expected, wheel, cure)
    return None


def shape_problem(
    wheel: str, hidden_size: int, intermediate_size: int, num_slots: int, ep_size: int
) -> str | None:
    """What the kernel refuses about a shape (intermediate_size as padded), or None.

    The probe adds which backend runs it all the same.
    """
    if hidden_size % HIDDEN_ALIGNMENT:
        return mismatch(
            "hidden_size",
            f"a multiple of {HIDDEN_ALIGNMENT} ({DISTRIBUTION} {wheel})",
            hidden_size,
            "The kernel takes no other.",
        )
    if intermediate_size > MAX_INTERMEDIATE or intermediate_size % INTERMEDIATE_ALIGNMENT:
        return mismatch(
            "padded intermediate_size",
            f"a multiple of {INTERMEDIATE_ALIGNMENT}, at most {MAX_INTERMEDIATE}",
            intermediate_size,
            "The kernel takes no other.",
        )
    if num_slots > 32 or ep_size > 72:
        return mismatch(
            "(top_k + num_shared_experts, ranks)",
            "at most (32, 72)",
            (num_slots, ep_size),
            "The kernel takes no other.",
        )
    return None


def arithmetic_problem(spec: LayerSpec) -> str | None:
    """What the kernel of no known wheel computes, or None."""
    for name, expected, got in (
        ("swiglu_alpha", 1.0, spec.swiglu.alpha),
        ("swiglu_beta", 0.0, spec.swiglu.beta),
        ("expert_bias", False, spec.expert_bias),
    ):
        if got != expected:
            return mismatch(
                name,
                f"{expected} (the kernel of {DISTRIBUTION} has no argument for it)",
                got,
                "The triton backend computes it.",
            )
    return None


class Api(Protocol):
    """What this project needs of one generation of the wheel."""

    wheel: str
    intermediate_group: int  # columns per scale of the second GEMM's input
    early_trigger: bool  # whether the mega kernel waits in a programmatic launch

    def token_alignment(self) -> int: ...

    def buffer_bytes(self, layout: Sequence[object]) -> int: ...

    def input_views(self, buffer: Tensor, layout: Sequence[object]) -> list[Tensor]:
        """x, x_scale, topk_ids and topk_weights inside the buffer."""

    def bind(
        self,
        buffer: Tensor,
        pointers: list[int],
        rank: int,
        capacity: int,
        num_experts: int,
        num_slots: int,
        swiglu_limit: float | None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]:
        """The launch: (y, w13, w13_scale, w2, w2_scale) on the current stream."""

    def get_num_sms(self) -> int: ...

    def set_num_sms(self, num_sms: int) -> None: ...


RECIPE = (128, 128, 128)


class TvmFfiApi:
    """Wheels up to 0.2.2: functions of a tvm-ffi module. Run on hardware with 0.1.5.post1."""

    intermediate_group = 64
    early_trigger = False

    def __init__(self, wheel: str, deep_gemm: Any) -> None:
        self.wheel = wheel
        self._c = deep_gemm._C

    def token_alignment(self) -> int:
        return int(self._c.get_token_alignment_for_mega_moe())

    def buffer_bytes(self, layout: Sequence[object]) -> int:
        return int(self._c.get_symm_buffer_size_for_sm90_mega_moe(*layout)[0])

    def input_views(self, buffer: Tensor, layout: Sequence[object]) -> list[Tensor]:
        slice_buffer = self._c.get_symm_buffer_size_for_sm90_mega_moe(*layout)[1]
        views = [
            view if isinstance(view, Tensor) else torch.utils.dlpack.from_dlpack(view)
            for view in slice_buffer(buffer)[:4]
        ]
        views[0] = views[0].view(FP8)  # e4m3 travels as bytes
        return views

    def bind(
        self,
        buffer: Tensor,
        pointers: list[int],
        rank: int,
        capacity: int,
        num_experts: int,
        num_slots: int,
        swiglu_limit: float | None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]:
        import tvm_ffi

        # Converted once: a launch then converts only the output and the weights.
        fixed = (
            None,
            tvm_ffi.from_dlpack(buffer),
            tvm_ffi.convert(pointers),
            rank,
            capacity,
            num_experts,
            num_slots,
            tvm_ffi.convert(RECIPE),
            "swiglu",
            swiglu_limit,
            True,
        )
        return TvmCall(self._c.fp8_mega_moe, fixed)

    def get_num_sms(self) -> int:
        return int(self._c.get_num_sms())

    def set_num_sms(self, num_sms: int) -> None:
        self._c.set_num_sms(num_sms)


class TorchOpsApi:
    """Wheels 0.2.3 and 0.2.4: torch.ops.deep_gemm. Checked against schemas, not run on hardware."""

    intermediate_group = 64
    early_trigger = False
    takes_bound = False
    alignment_op = "get_token_alignment_for_mega_moe"

    def __init__(self, wheel: str, ops: Any) -> None:
        self.wheel = wheel
        self._ops = ops

    def token_alignment(self) -> int:
        return int(getattr(self._ops, self.alignment_op).default())

    def buffer_bytes(self, layout: Sequence[object]) -> int:
        return int(self._ops.get_symm_buffer_size_for_sm90_mega_moe.default(*layout))

    def input_views(self, buffer: Tensor, layout: Sequence[object]) -> list[Tensor]:
        return list(self._ops.slice_symm_buffer_for_sm90_mega_moe.default(buffer, *layout)[:4])

    def bind(
        self,
        buffer: Tensor,
        pointers: list[int],
        rank: int,
        capacity: int,
        num_experts: int,
        num_slots: int,
        swiglu_limit: float | None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]:
        kernel = self._ops.fp8_mega_moe.default
        fixed = (
            None,
            buffer,
            pointers,
            rank,
            capacity,
            num_experts,
            num_slots,
            RECIPE,
            "swiglu",
            swiglu_limit,
            True,
        )
        if self.takes_bound and len(pointers) == 1:

            def launch(y: Tensor, *weights: Tensor) -> None:
                kernel(y, *weights, *fixed, y.shape[0])

        else:
            # The bound must hold on every rank, and this rank knows only its own tokens: 0 stands
            # for the capacity.
            def launch(y: Tensor, *weights: Tensor) -> None:
                kernel(y, *weights, *fixed)

        return launch

    def get_num_sms(self) -> int:
        return int(self._ops.get_num_sms.default())

    def set_num_sms(self, num_sms: int) -> None:
        self._ops.set_num_sms.default(num_sms)


class BoundedApi(TorchOpsApi):
    """Wheels from 0.2.5: `num_tokens_bound`, a scale per 128 columns between the GEMMs, and a mega
    kernel that waits for its predecessor. Checked against schemas, not run on hardware."""

    intermediate_group = 128
    early_trigger = True
    takes_bound = True
    alignment_op = "get_token_alignment_for_sm90_mega_moe"


def load_api() -> Api:
    """Import deep_gemm and wrap the generation that is installed.

    Raises:
        BackendUnavailable: no wheel, one for another torch, or one that does not load.
    """
    wheel = installed_version()
    problem = wheel_problem(wheel, torch.__version__)
    if wheel is None or problem is not None:
        raise BackendUnavailable(problem)
    try:
        import deep_gemm
    except Exception as error:  # a wrong pair fails in many ways: OSError, ImportError, ...
        raise BackendUnavailable(
            mismatch(
                f"import of {DISTRIBUTION} {wheel}",
                f"a library that loads with torch {torch.__version__}",
                f"{type(error).__name__}: {error}",
                "Reinstall the wheel that fits this torch, with --no-deps.",
            )
        ) from error
    version = parse_version(wheel)
    if version < (0, 2, 3):
        return TvmFfiApi(wheel, deep_gemm)
    ops = torch.ops.deep_gemm
    return BoundedApi(wheel, ops) if version >= (0, 2, 5) else TorchOpsApi(wheel, ops)


def masked_grouped_gemm() -> Callable[..., None]:
    """The wheel's masked grouped FP8 GEMM, by itself: `GroupedGemm` of unfused/."""
    import deep_gemm

    gemm = deep_gemm.fp8_m_grouped_gemm_nt_masked
    return lambda a, a_scale, b, b_scale, *rest: gemm((a, a_scale), (b, b_scale), *rest)
