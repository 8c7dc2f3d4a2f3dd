"""`megamoe plan`: the memory that a model's experts take on one rank, before anything is allocated.

The symmetric buffer is the one of DeepGEMM's SM90 kernel. Two layouts are known here, that of the
0.1.x wheels and that of 0.2.0 to 0.2.2; they differ in the tiles that the kernel may choose. Both
sizes equal the wheels' own size query to the byte. From 0.2.3 on the buffer is laid out anew;
0.2.5 takes less.

The query, asked for the capacities 128, 1280, 4096 and 8192 as they are, answers 0.13, 0.77, 2.33
and 4.60 GB (0.1.x, hidden 4096, intermediate 2048, 256 experts, top-k 6, 8 ranks), and so does
`_buffer_bytes`. But a context rounds its capacity up to the least common multiple of the tiles
first, as DeepGEMM's own allocation does, and so does `symmetric_buffer_bytes`: 128 tokens take what
384 take, 0.28 GB, and under 0.2.0 what 1920 take, 1.14 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from ..config import BLOCK, MegaMoEConfig
from ..custom_ops.deep_gemm.api import INTERMEDIATE_ALIGNMENT
from ..errors import mismatch
from ..models.presets import PRESETS
from ..weights import WeightGeometry


@dataclasses.dataclass(frozen=True)
class Generation:
    """Wheels that lay the buffer out alike. block_m: tokens per tile that the kernel may choose."""

    wheels: str
    block_m: tuple[int, ...]

    @property
    def capacity_alignment(self) -> int:
        return math.lcm(*self.block_m)


GENERATIONS = {
    "0.1": Generation("sgl-deep-gemm 0.1.x, SM90", (8, 16, 32, 64, 96, 128, 192)),
    "0.2": Generation("sgl-deep-gemm 0.2.0 to 0.2.2, SM90", (8, 16, 32, 64, 96, 128, 192, 240)),
}
BARRIER_BYTES = 32
DTYPES = {
    "weight": torch.float8_e4m3fn,
    "weight_scale": torch.float32,
    "activation": torch.bfloat16,
    "staged_activation": torch.float8_e4m3fn,
    "staged_scale": torch.float32,
}


def symmetric_buffer_bytes(config: MegaMoEConfig, ep_size: int, generation: str = "0.1") -> int:
    """Bytes of one rank's symmetric buffer, which all layers of the geometry share.

    `config.max_tokens_per_rank` counts the tokens of ONE rank. The buffer has room for the tokens
    of all ranks, so a number that was already multiplied by the ranks takes `ep_size` times the
    memory; no check can tell such a number from a long prefill.

    Args:
        ep_size: ranks of the expert-parallel group.
        generation: "0.1" or "0.2", see GENERATIONS.

    Raises:
        ValueError: `ep_size` does not divide the experts.
    """
    wheels = GENERATIONS[generation]
    # A shared expert is one more local expert and one more slot of every token.
    return _buffer_bytes(
        hidden=config.hidden_size,
        intermediate=config.padded_intermediate_size(INTERMEDIATE_ALIGNMENT),
        experts_per_rank=config.num_local_experts(ep_size) + config.num_shared_experts,
        top_k=config.num_slots,
        ranks=ep_size,
        capacity=_align(config.max_tokens_per_rank, wheels.capacity_alignment),
        block_m=wheels.block_m,
    )


def _buffer_bytes(
    *,
    hidden: int,
    intermediate: int,
    experts_per_rank: int,
    top_k: int,
    ranks: int,
    capacity: int,
    block_m: tuple[int, ...],
) -> int:
    received = ranks * capacity
    # The pool holds every received token once per local expert it can choose, and each expert's
    # last tile may be all but one row empty.
    pool_tokens = _align(
        received * min(top_k, experts_per_rank) + experts_per_rank * (max(block_m) - 1),
        math.lcm(*block_m),
    )
    pool_blocks = pool_tokens // min(block_m)
    # Scales are stored per tile, and a tile's scales are padded to 128 rows.
    scale_tokens = max(pool_tokens // block * _align(block, 128) for block in block_m)
    workspace = _align(
        BARRIER_BYTES
        + 2 * 8 * experts_per_rank * ranks  # send and receive counts
        + 8 * experts_per_rank
        + 4 * _align(pool_blocks, 2)
        + 8 * pool_blocks
        + 4 * experts_per_rank * ranks * received  # where each token came from
        + 12 * pool_tokens,
        16,
    )
    staged = capacity * (hidden + hidden // 32 + 8 * top_k + 4 * top_k)
    gemm1_input = pool_tokens * hidden + scale_tokens * (hidden // 32) + 4 * pool_tokens
    gemm2_input = pool_tokens * intermediate + scale_tokens * (intermediate // 16)
    combine = capacity * top_k * 2 * hidden
    return workspace + staged + gemm1_input + gemm2_input + combine


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank. `weight_bytes` and `total_bytes` are None where `layers` is unknown."""

    model: str
    config: MegaMoEConfig
    ranks: int
    layers: int | None
    generation: str = "0.1"

    @property
    def wheels(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def capacity(self) -> int:
        return _align(self.config.max_tokens_per_rank, self.wheels.capacity_alignment)

    @property
    def weight_bytes_per_layer(self) -> int:
        geometry = WeightGeometry.of(
            self.config,
            rank=0,
            ep_size=self.ranks,
            alignment=INTERMEDIATE_ALIGNMENT,
            device=torch.device("cpu"),
        )
        return geometry.nbytes()

    @property
    def weight_bytes(self) -> int | None:
        return None if self.layers is None else self.layers * self.weight_bytes_per_layer

    @property
    def buffer_bytes(self) -> int:
        return symmetric_buffer_bytes(self.config, self.ranks, self.generation)

    @property
    def total_bytes(self) -> int | None:
        return None if self.weight_bytes is None else self.weight_bytes + self.buffer_bytes

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "model": self.model,
            "generation": self.wheels.wheels,
            "ranks": self.ranks,
            "experts_per_rank": self.config.num_local_experts(self.ranks),
            "max_tokens_per_rank": self.config.max_tokens_per_rank,
            "capacity": self.capacity,
            "layers": self.layers,
            "weight_bytes_per_layer": self.weight_bytes_per_layer,
            "weight_bytes": self.weight_bytes,
            "buffer_bytes": self.buffer_bytes,
            "total_bytes": self.total_bytes,
            "dtypes": {
                name: {"dtype": str(dtype).removeprefix("torch."), "bytes": dtype.itemsize}
                for name, dtype in DTYPES.items()
            },
            "config": dataclasses.asdict(self.config),
        }

    def to_text(self) -> str:
        """The aligned table that a person reads."""
        config = self.config
        padded = config.padded_intermediate_size(INTERMEDIATE_ALIGNMENT)
        weight, scale = DTYPES["weight"], DTYPES["weight_scale"]
        rows = [
            ("model", self.model),
            (
                "shape",
                f"hidden {config.hidden_size}, intermediate {config.intermediate_size}"
                + (f" (padded to {padded})" if padded != config.intermediate_size else "")
                + f", {config.num_experts} experts, top-{config.top_k}",
            ),
            ("ranks", f"{self.ranks}, {config.num_local_experts(self.ranks)} experts on each"),
            (
                "tokens",
                f"{config.max_tokens_per_rank} per rank, not of all ranks "
                f"(the buffer has room for {self.capacity})",
            ),
            (
                "weights per layer",
                f"{human_bytes(self.weight_bytes_per_layer)} ({_dtype(weight)}, a "
                f"{_dtype(scale)} scale per {BLOCK}x{BLOCK})",
            ),
            (
                "weights",
                "unknown: pass --layers"
                if self.weight_bytes is None
                else f"{human_bytes(self.weight_bytes)} for {self.layers} layers",
            ),
            (
                "symmetric buffer",
                f"{human_bytes(self.buffer_bytes)}, one for all layers ({self.wheels.wheels})",
            ),
        ]
        if self.total_bytes is not None:
            rows.append(("per rank", human_bytes(self.total_bytes)))
        return format_rows(rows)


def _dtype(dtype: torch.dtype) -> str:
    return f"{dtype.itemsize} B {str(dtype).removeprefix('torch.')}"


def human_bytes(count: int) -> str:
    """Three digits and a decimal unit: 275762464 -> '276 MB'."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_rows(rows: list[tuple[str, str]]) -> str:
    """Names in one column, values in the next; further lines of a value are indented."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(
        f"{name:<{width}}" + value.replace("\n", "\n" + " " * width) for name, value in rows
    )


def resolve_model(model: str, max_tokens_per_rank: int) -> tuple[MegaMoEConfig, int | None]:
    """The config of a preset or of a directory with config.json, and its MoE layers if known.

    Raises:
        ValueError: neither a preset nor such a directory.
    """
    if model in PRESETS:
        return MegaMoEConfig.preset(model, max_tokens_per_rank=max_tokens_per_rank), None
    file = Path(model) / "config.json"
    if not file.is_file():
        raise ValueError(
            mismatch(
                "model",
                f"one of {', '.join(sorted(PRESETS))}, or a directory with config.json",
                repr(model),
                "Check the spelling or the path.",
            )
        )
    config = MegaMoEConfig.from_pretrained(Path(model), max_tokens_per_rank=max_tokens_per_rank)
    return config, moe_layers(json.loads(file.read_text()))


def moe_layers(hf_config: dict[str, Any]) -> int | None:
    """Layers with experts in a config.json; None where it does not say."""
    fields = {**hf_config, **(hf_config.get("text_config") or {})}
    total = fields.get("num_hidden_layers")
    if not isinstance(total, int):
        return None
    dense = set(range(fields.get("first_k_dense_replace") or 0))
    dense |= set(fields.get("mlp_only_layers") or ())
    step = fields.get("decoder_sparse_step") or fields.get("moe_layer_freq") or 1
    if not isinstance(step, int):  # a list: one flag per layer
        return sum(map(bool, step))
    if "decoder_sparse_step" in fields:
        dense |= {layer for layer in range(total) if (layer + 1) % step}
    else:
        dense |= {layer for layer in range(total) if layer % step}
    return total - len(dense & set(range(total)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a preset's name, or a model directory")
    parser.add_argument("--ranks", type=int, required=True, help="expert-parallel ranks")
    parser.add_argument(
        "--max-tokens", type=int, required=True, help="capacity in tokens of ONE rank"
    )
    parser.add_argument(
        "--layers", type=int, help="layers with experts; default: what the directory says"
    )
    parser.add_argument(
        "--generation",
        choices=sorted(GENERATIONS),
        default="0.1",
        help="of the sgl-deep-gemm wheel: 0.1 for torch 2.11, 0.2 for torch 2.13; default: 0.1",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan. argparse.ArgumentError for arguments that make none."""
    if args.layers is not None and args.layers < 1:
        raise argparse.ArgumentError(None, f"--layers: expected at least 1, got {args.layers}.")
    try:
        config, layers = resolve_model(args.model, args.max_tokens)
        plan = MemoryPlan(args.model, config, args.ranks, args.layers or layers, args.generation)
        report = plan.to_dict()
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    print(json.dumps(report) if args.json else plan.to_text())
    return 0
