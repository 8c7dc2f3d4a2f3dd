"""Comparing decode steps, and what `megamoe decode` reports."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Parity:
    """Compares steps as they come. All bounds are relative to a row's largest eager logit."""

    tolerance: float
    max_relative_error: float = 0.0
    tokens: int = 0
    decided: int = 0  # tokens that lead the second by more than the tolerance
    first_fault: str | None = None

    def compare(
        self, where: str, actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
    ) -> None:
        """Compare (logits [T, V], tokens [T]) of one step, T >= 1; `where` names it in a fault."""
        for got, want in zip(actual, expected, strict=True):
            if got.shape != want.shape:
                self._fault(f"{where}: shape {list(got.shape)}, not {list(want.shape)}")
                return
        logits = expected[0].float()
        scale = logits.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        errors = (actual[0].float() - logits).abs().amax(-1) / scale
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        columns = (errors, (first - second) / scale, *(t[1] for t in (actual, expected)))
        for row, (error, lead, token, best) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            self.tokens += 1
            # A NaN compares false with anything: ask what holds, not what fails.
            if not error <= self.max_relative_error:
                self.max_relative_error = error if math.isfinite(error) else math.inf
            if not error <= self.tolerance:
                self._fault(f"{where}, row {row}: logits differ by {error:.3g}")
            if lead > self.tolerance:
                self.decided += 1
                if token != best:
                    self._fault(f"{where}, row {row}: token {token}, not {best}")

    def _fault(self, text: str) -> None:
        self.first_fault = self.first_fault or text

    @property
    def holds(self) -> bool:
        return self.first_fault is None and self.tokens > 0


@dataclasses.dataclass
class BucketReport:
    """One bucket. `idle` of its `steps` had no token; the times are of those that had some."""

    bucket: int
    path: str
    backend: str
    steps: int = 0
    idle: int = 0
    tokens: int = 0
    ms_per_step: float | None = None  # median
    tokens_per_second: float | None = None

    def fill(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Take the sizes of this bucket's steps and their times."""
        busy = [time for size, time in zip(sizes, seconds, strict=True) if size]
        self.steps, self.idle, self.tokens = len(sizes), len(sizes) - len(busy), sum(sizes)
        if busy:
            self.ms_per_step = statistics.median(busy) * 1e3
            self.tokens_per_second = self.tokens / sum(busy)

    def row(self) -> str:
        times = (self.ms_per_step, self.tokens_per_second)
        ms, rate = ("-" if t is None else f"{t:.2f}" for t in times)
        return (
            f"{self.bucket:6d}  {self.path:10s}  {self.backend:10s}  {self.steps:5d}  "
            f"{self.idle:4d}  {self.tokens:6d}  {ms:>8s}  {rate:>8s}"
        )


@dataclasses.dataclass
class DecodeReport:
    """What `decode` found. Tokens per second are real tokens over the time of their replays."""

    parity: bool
    max_relative_error: float
    tolerance: float
    first_fault: str | None
    tokens: int
    decided_tokens: int
    steps: int
    backend: str
    reason: str
    device: str
    graphs_compiled: int
    capture_seconds: float
    tokens_per_second: float
    buckets: list[BucketReport]

    def as_dict(self) -> dict[str, Any]:
        """The --json object. An infinite error is null there."""
        fields = dataclasses.asdict(self)
        if not math.isfinite(self.max_relative_error):
            fields["max_relative_error"] = None
        return fields

    def table(self) -> str:
        titles = "bucket  path        backend     steps  idle  tokens   ms/step  tokens/s"
        rows = [titles, *(bucket.row() for bucket in self.buckets)]
        return "\n".join(rows) + (
            f"\n{self.graphs_compiled} graph(s) compiled, {len(self.buckets)} buckets captured in "
            f"{self.capture_seconds:.1f} s; {self.tokens} tokens in {self.steps} steps, "
            f"{self.tokens_per_second:.1f} tokens/s"
        )

    def verdict(self) -> str:
        error = f"max relative error {self.max_relative_error:.2g}, bound {self.tolerance:g}"
        if not self.parity:
            return f"NO PARITY: {self.first_fault or 'no token was compared'} ({error})"
        return (
            f"PARITY: captured equals eager; {error}; all {self.decided_tokens} tokens of "
            f"{self.tokens} that lead by more than the bound are equal"
        )
