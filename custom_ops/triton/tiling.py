"""Sizes of the Triton GEMMs' programs: from a geometry, a number of pairs and a GPU, nothing else.

A pair is a (row, slot). The choice never depends on the routing: the grid of a captured graph must
hold for every routing.
"""

from __future__ import annotations

import dataclasses

import torch

from ..reference.recipe import BLOCK

FP8_COMPUTE_CAPABILITY = (8, 9)  # the first with a tensor core for e4m3
MAX_SPLITS = 4


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of tiles depends on.

    Attributes:
        shared_memory: bytes that one program may take.
        fp8_dot: multiply e4m3 as it is, or as fp16.
    """

    num_sms: int
    shared_memory: int
    fp8_dot: bool

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Of a CUDA device. The interpreter has an H200's sizes, but its e4m3 product drops NaN."""
        if device.type != "cuda":
            return cls(132, 232448, fp8_dot=False)
        from triton.runtime import driver

        properties = torch.cuda.get_device_properties(device)
        return cls(
            properties.multi_processor_count,
            driver.active.utils.get_device_properties(device.index)["max_shared_mem"],
            torch.cuda.get_device_capability(device) >= FP8_COMPUTE_CAPABILITY,
        )


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of the GEMMs' programs; see kernels.py for the names."""

    tiles: int  # of BLOCK_M pairs: an upper bound, whatever the routing
    block_m: int
    block_n: int  # of gate_up_kernel
    splits: int
    block_k: int
    gate_up_stages: int
    gate_up_warps: int
    down_block_n: int
    down_stages: int
    down_warps: int

    @property
    def partial_sums(self) -> bool:
        """Whether several programs share one scale of the intermediate, through memory."""
        return self.splits > 1 or self.block_n < BLOCK

    @classmethod
    def of(cls, pairs: int, experts: int, hidden: int, intermediate: int, device: Device) -> Tiling:
        """Tiles for `pairs` pairs at the most on `experts` experts."""
        per_expert = pairs / experts
        block_m = 16 if per_expert <= 8 else 32 if per_expert <= 24 else 64
        occupied = min(pairs, experts)
        tiles = occupied + (pairs - occupied) // block_m
        # Enough programs for every SM twice, or smaller ones.
        wanted = 2 * device.num_sms
        block_n, splits = BLOCK, 1
        if tiles * (intermediate // BLOCK) < wanted:
            block_n = 64
            while (
                splits < MAX_SPLITS
                and tiles * (intermediate // block_n) * splits < wanted
                and hidden // BLOCK >= 4 * splits
            ):
                splits *= 2
        down_block_n = BLOCK if tiles * (hidden // BLOCK) >= wanted else 64
        # Halves of 128 columns where a program has little shared memory.
        block_k = BLOCK if device.shared_memory >= 160 << 10 else BLOCK // 2

        def stages(weight_rows: int) -> int:  # so that two programs fit on an SM
            fitting = (device.shared_memory // 2 - 4096) // ((weight_rows + block_m) * block_k)
            return max(2, min(4, fitting))

        return cls(
            tiles=tiles,
            block_m=block_m,
            block_n=block_n,
            splits=splits,
            block_k=block_k,
            gate_up_stages=stages(2 * block_n),
            gate_up_warps=4 if block_n == 64 else 8,
            down_block_n=down_block_n,
            down_stages=stages(down_block_n),
            down_warps=4 if down_block_n == 64 else 8,
        )
