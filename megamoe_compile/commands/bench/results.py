"""What `megamoe bench` finds out: a cell per column and batch size."""

from __future__ import annotations

import dataclasses

from .measure import HostTime, KernelShare, StepTime


@dataclasses.dataclass
class Cell:
    """One column at one batch size."""

    batch: int
    implementation: str
    time: StepTime
    tokens_per_s: float
    gigabytes: float  # read per step, at least
    gigabytes_per_s: float
    touched_experts: float  # per MoE layer and step
    compile_s: float | None
    capture_s: float | None
    peak_bytes: int | None = None  # allocated by torch while this cell was made, weights included
    host: HostTime | None = None  # of a replay
    share: KernelShare | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ColumnResult:
    name: str
    cells: list[Cell] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None
    build_s: float | None = None
    build_peak_bytes: int | None = None
    buckets: list[int] = dataclasses.field(default_factory=list)  # captured together
    capture_s: float | None = None  # of all these buckets, after warm-up
