"""Checkpoint weights -> PreparedWeights: the one layout that all backends read.

Per local expert: `w13` [2I, H] e4m3 with gate and up rows interleaved in groups of 8, `w13_scale`
[2I/128, H/128] fp32 with the gate blocks before the up blocks, `w2` [H, I] e4m3, `w2_scale`
[H/128, I/128] fp32, and where the experts have biases `w13_bias` [2I] fp32 in the row order of
`w13`, `w2_bias` [H] fp32. I is the padded intermediate size; the padding holds zeros. FP8 weights
that need no padding and hold exactly this rank's experts are taken over and rearranged in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .config import BLOCK, MegaMoEConfig
from .custom_ops.call import Weights
from .custom_ops.reference.recipe import (
    FP8,
    deinterleave_gate_up,
    interleave_gate_up,
    quantize_blocks,
)
from .errors import mismatch

WEIGHT_NAMES = ("w13", "w13_scale", "w2", "w2_scale")
BIAS_NAMES = ("w13_bias", "w2_bias")
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
BIAS_DTYPES = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class WeightGeometry:
    """Shapes of one rank's prepared weights."""

    hidden_size: int
    intermediate_size: int  # of the checkpoint
    padded_intermediate_size: int  # of the backend
    num_experts: int  # routed, all ranks
    first_expert: int  # global index of this rank's first routed expert
    num_local_experts: int
    num_shared_experts: int
    device: torch.device
    expert_bias: bool = False

    @classmethod
    def of(
        cls,
        config: MegaMoEConfig,
        *,
        rank: int,
        ep_size: int,
        alignment: int,
        device: torch.device,
    ) -> WeightGeometry:
        local = config.num_local_experts(ep_size)
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.padded_intermediate_size(alignment),
            config.num_experts,
            rank * local,
            local,
            config.num_shared_experts,
            device,
            config.expert_bias,
        )

    @property
    def local_experts(self) -> range:
        """Global indices of this rank's routed experts."""
        return range(self.first_expert, self.first_expert + self.num_local_experts)

    @property
    def num_rows(self) -> int:
        """Experts that stand in the prepared tensors: the local routed ones, then the shared."""
        return self.num_local_experts + self.num_shared_experts

    def nbytes(self) -> int:
        """Bytes of one layer's prepared weights on one rank."""
        h, i = self.hidden_size, self.padded_intermediate_size
        scales = (2 * i // BLOCK) * (h // BLOCK) + (h // BLOCK) * (i // BLOCK)
        biases = 2 * i + h if self.expert_bias else 0
        return self.num_rows * (3 * h * i + 4 * (scales + biases))


class PreparedWeights(Weights):
    """One rank's weights in the layout above."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Those that there are, by name."""
        for name, tensor in zip(self._fields, self, strict=True):
            if tensor is not None:
                yield name, tensor

    @classmethod
    def allocate(cls, geometry: WeightGeometry) -> PreparedWeights:
        """Zero weights with scales of one: an expert that is not written computes exact zeros."""
        e, h, i = geometry.num_rows, geometry.hidden_size, geometry.padded_intermediate_size
        device = geometry.device

        def fp8(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=FP8, device=device)

        def fp32(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float32, device=device)

        return cls(
            fp8(e, 2 * i, h),
            fp32(1.0, e, 2 * i // BLOCK, h // BLOCK),
            fp8(e, h, i),
            fp32(1.0, e, h // BLOCK, i // BLOCK),
            *(fp32(0.0, e, n) if geometry.expert_bias else None for n in (2 * i, h)),
        )


class ExpertWeights(nn.Module):
    """One layer's prepared weights, as buffers: all that a context knows of its layers.

    Attributes:
        index: number of the layer among those of its context.
        loaded: whether the buffers have storage.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.index = 0
        self.loaded = False
        for name in WEIGHT_NAMES + BIAS_NAMES:
            self.register_buffer(name, None)

    @property
    def prepared(self) -> PreparedWeights:
        """The buffers. The layer is loaded."""
        return PreparedWeights(*(getattr(self, name) for name in WEIGHT_NAMES + BIAS_NAMES))

    def install(self, weights: PreparedWeights) -> None:
        """Take over written weights."""
        for name in WEIGHT_NAMES + BIAS_NAMES:
            setattr(self, name, getattr(weights, name))
        self.loaded = True


def check_checkpoint(
    geometry: WeightGeometry,
    experts: tuple[int, ...],
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    expert: int | None = None,
    validate: bool = False,
) -> None:
    """Raise a ValueError for the first thing that is wrong; nothing has been written by then.

    Scales and biases must be finite, which waits for the device once for each of them.

    Args:
        experts: the numbers of experts that may stand in dimension 0.
        expert: global id of the only expert; default: all experts, or those of this rank.
        validate: weights must be finite too.
    """
    h, i = geometry.hidden_size, geometry.intermediate_size
    layout = "w13 is [E, 2I, H] with gate before up, w2 is [E, H, I], both row-major."
    allowed = " or ".join(str(e) for e in sorted(set(experts)))
    for name, w, n, c in (("w13", w13, 2 * i, h), ("w2", w2, h, i)):
        if w.dim() != 3 or w.shape[0] not in experts or tuple(w.shape[1:]) != (n, c):
            raise ValueError(
                mismatch(f"{name}.shape", f"[{allowed}, {n}, {c}]", list(w.shape), layout)
            )
        if not w.is_contiguous():
            raise ValueError(
                mismatch(f"{name} layout", "contiguous", f"strides {w.stride()}", layout)
            )
        if w.dtype not in (FP8, torch.bfloat16):
            raise ValueError(
                mismatch(
                    f"{name}.dtype", f"{FP8} or torch.bfloat16", w.dtype, "Convert the checkpoint."
                )
            )
        _check_device(name, w)
    if w13.dtype != w2.dtype or w13.shape[0] != w2.shape[0]:
        raise ValueError(
            mismatch(
                "w2",
                f"dtype {w13.dtype} and {w13.shape[0]} experts, as in w13",
                f"{w2.dtype} and {w2.shape[0]}",
                "Both come from one checkpoint.",
            )
        )
    for name, scale, w in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        _check_scale(name, scale, w)
    for name, bias, n in (("w13_bias", w13_bias, 2 * i), ("w2_bias", w2_bias, h)):
        _check_bias(name, bias, [w13.shape[0], n] if geometry.expert_bias else None)
    if expert is None:
        expert = 0 if w13.shape[0] == geometry.num_experts else geometry.first_expert

    def place(at: list[int]) -> str:
        return f" of expert {expert + at[0]}" + (f", block {at[1:]}" if at[1:] else "")

    for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        if scale is not None:
            check_scale_values(name, scale, place)
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if bias is not None:
            bad_rows = (~bias.isfinite()).any(dim=1)
            _refuse_values(name, None, bad_rows, "finite numbers", place)
    for name, w in (("w13", w13), ("w2", w2)) if validate else ():
        bad = [_not_finite(rows).any() for rows in w]  # one expert of memory, and one wait
        _refuse_values(name, None, torch.stack(bad), "finite weights", place)


def check_scale_values(name: str, scale: Tensor, place: Callable[[list[int]], str]) -> None:
    """Refuse scales that are negative or not finite; a block of zeros may have the scale 0.

    Args:
        place: words for an index, of the message.
    """
    values = scale.float()  # isfinite knows no e8m0
    bad = ~(values.isfinite() & (values >= 0))
    _refuse_values(name, values, bad, "a finite number, at least 0", place)


def _refuse_values(
    name: str,
    values: Tensor | None,
    bad: Tensor,
    expected: str,
    place: Callable[[list[int]], str],
) -> None:
    if bool(bad.any()):
        at = [int(index) for index in bad.nonzero()[0]]
        got = "NaN or infinity" if values is None else float(values[tuple(at)])
        raise ValueError(mismatch(name + place(at), expected, got, "Mend the checkpoint."))


def _not_finite(w: Tensor) -> Tensor:
    if w.dtype == FP8:  # e4m3 has two NaNs and no infinity
        return (w.view(torch.uint8) & 0x7F) == 0x7F
    return ~w.isfinite()


def _check_device(name: str, t: Tensor) -> None:
    if t.device.type == "meta":
        raise ValueError(
            mismatch(
                f"{name}.device", "one with data", t.device, "Materialize the checkpoint first."
            )
        )


def _check_scale(name: str, scale: Tensor | None, w: Tensor) -> None:
    if w.dtype == torch.bfloat16:
        if scale is not None:
            raise ValueError(
                mismatch(name, "None for bf16 weights", f"a tensor {list(scale.shape)}", "Drop it.")
            )
        return
    if w.shape[1] % (2 * BLOCK if name == "w13_scale" else BLOCK) or w.shape[2] % BLOCK:
        raise ValueError(
            mismatch(
                f"intermediate_size behind {name}",
                f"a multiple of {BLOCK} for FP8 weights",
                list(w.shape),
                "A 128x128 scale block would straddle gate and up: pass bf16 weights instead.",
            )
        )
    shape = [w.shape[0], w.shape[1] // BLOCK, w.shape[2] // BLOCK]
    got: object = None if scale is None else list(scale.shape)
    if scale is None or got != shape:
        raise ValueError(
            mismatch(f"{name}.shape", shape, got, "FP8 weights need one scale per 128x128 block.")
        )
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            mismatch(
                f"{name}.dtype",
                f"one of {SCALE_DTYPES}",
                scale.dtype,
                "Unpack or cast it; ue8m0 exponents are torch.float8_e8m0fnu.",
            )
        )
    _check_device(name, scale)


def _check_bias(name: str, bias: Tensor | None, shape: list[int] | None) -> None:
    got = None if bias is None else list(bias.shape)
    if got != shape:
        cure = "Pass both biases where the config has expert_bias=True, and none elsewhere."
        raise ValueError(mismatch(f"{name}.shape", shape, got, cure))
    if bias is not None:
        if bias.dtype not in BIAS_DTYPES:
            raise ValueError(
                mismatch(f"{name}.dtype", f"one of {BIAS_DTYPES}", bias.dtype, "Cast it.")
            )
        _check_device(name, bias)


def write_expert(
    weights: PreparedWeights,
    row: int,
    geometry: WeightGeometry,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> None:
    """Write one checked expert ([2I, H], [H, I], their scales and biases) into row `row`."""
    i, padded = geometry.intermediate_size, geometry.padded_intermediate_size
    device = geometry.device
    w13, w2 = w13.to(device), w2.to(device)
    if padded != i:
        w13 = torch.cat([_pad_rows(half, padded) for half in w13.split(i)])
        w2 = (
            torch.nn.functional.pad(w2.view(torch.uint8), (0, padded - i)).view(w2.dtype)
            if (w2.dtype == FP8)
            else torch.nn.functional.pad(w2, (0, padded - i))
        )
    if w13_scale is None or w2_scale is None:
        w13, w13_scale = quantize_blocks(w13)
        w2, w2_scale = quantize_blocks(w2)
    else:
        w13_scale, w2_scale = w13_scale.to(device).float(), w2_scale.to(device).float()
        extra = (padded - i) // BLOCK
        if extra:
            w13_scale = torch.cat([_pad_ones(s, extra) for s in w13_scale.split(i // BLOCK)])
            w2_scale = torch.nn.functional.pad(w2_scale, (0, extra), value=1.0)
    weights.w13[row].copy_(interleave_gate_up(w13))
    weights.w13_scale[row].copy_(w13_scale)
    weights.w2[row].copy_(w2)
    weights.w2_scale[row].copy_(w2_scale)
    if weights.w13_bias is not None and weights.w2_bias is not None:
        assert w13_bias is not None and w2_bias is not None
        halves = [_pad_rows(half[:, None], padded) for half in w13_bias.split(i)]
        weights.w13_bias[row].copy_(interleave_gate_up(torch.cat(halves))[:, 0])
        weights.w2_bias[row].copy_(w2_bias)


def _pad_rows(half: Tensor, rows: int) -> Tensor:
    padded = half.new_zeros(rows, half.shape[1])
    padded[: half.shape[0]] = half
    return padded


def _pad_ones(scale: Tensor, rows: int) -> Tensor:
    return torch.cat([scale, scale.new_ones(rows, scale.shape[1])])


def can_adopt(geometry: WeightGeometry, w13: Tensor, w2: Tensor) -> bool:
    """Whether the checkpoint's own storage can hold the prepared weights."""
    return (
        w13.dtype == FP8
        and w13.shape[0] == geometry.num_rows
        and geometry.padded_intermediate_size == geometry.intermediate_size
        and w13.device == w2.device == geometry.device
    )


def adopt(
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> PreparedWeights:
    """Rearrange checked FP8 weights in place, expert by expert: one expert of extra memory.

    Call it outside inference mode, or a later load could not write into the result.
    """
    w13, w2 = _normal(w13), _normal(w2)
    w13_scale, w2_scale = (
        _normal(scale.to(w13.device, torch.float32).contiguous()) for scale in (w13_scale, w2_scale)
    )
    for done, expert in enumerate(w13):
        try:
            expert.copy_(interleave_gate_up(expert))
        except BaseException:  # another load of the same tensors must find them as they were
            for rearranged in w13[:done]:
                rearranged.copy_(deinterleave_gate_up(rearranged))
            raise
    if w13_bias is not None and w2_bias is not None:  # small: these are copied
        rows = torch.stack([interleave_gate_up(bias[:, None])[:, 0] for bias in w13_bias])
        w13_bias = _normal(rows.to(w13.device, torch.float32))
        w2_bias = _normal(w2_bias.to(w13.device, torch.float32, copy=True))
    return PreparedWeights(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share an element: their first and last bytes span one another."""
    (a_first, a_last), (b_first, b_last) = _span(a), _span(b)
    return a.device == b.device and a_first < b_last and b_first < a_last


def _span(t: Tensor) -> tuple[int, int]:
    length = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + length * t.element_size()


def same_place(source: Tensor, first: int, own: Tensor) -> bool:
    """Whether expert first + n of source stands where row n of own does, or nowhere in own."""
    return not overlap(source, own) or (
        source[first].data_ptr() == own.data_ptr()
        and source.dtype == own.dtype
        and source.shape[1:] == own.shape[1:]
        and source.stride() == own.stride()
    )


def _normal(t: Tensor) -> Tensor:
    """The storage of t as a tensor that may be written anywhere; t may be an inference tensor."""
    if not t.is_inference():
        return t.detach()
    alias = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
