"""Comparing decode steps, and what `megamoe decode` reports."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...custom_ops.paths.choice import Decision


@dataclasses.dataclass
class Parity:
    """Compares steps as they come. All bounds are relative to a row's largest eager logit."""

    tolerance: float
    max_relative_error: float = 0.0
    tokens: int = 0
    decided: int = 0  # tokens that lead the second by more than the tolerance
    first_fault: str | None = None

    def compare(
        self,
        where: str,
        actual: tuple[Tensor, Tensor],
        expected: tuple[Tensor, Tensor],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Compare (logits [T, V], tokens [T]) of one step, T >= 1.

        Args:
            where: names the step in a fault. rows: names the tokens there; default: 0 to T-1.
        """
        for got, want in zip(actual, expected, strict=True):
            if got.shape != want.shape:
                self._fault(f"{where}: shape {list(got.shape)}, not {list(want.shape)}")
                return
        logits = expected[0].float()
        scale = logits.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        errors = (actual[0].float() - logits).abs().amax(-1) / scale
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        columns = (errors, (first - second) / scale, *(t[1] for t in (actual, expected)))
        named = range(len(logits)) if rows is None else rows
        for row, error, lead, token, best in zip(
            named, *(column.tolist() for column in columns), strict=True
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


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One step of all ranks: real tokens of each, how many were kept, and the slowest's time."""

    tokens: tuple[int, ...]
    kept: int
    seconds: float


@dataclasses.dataclass
class BucketReport:
    """One bucket. `idle` counts each rank's steps without a token, of ranks x steps.

    `tokens` went through the model; the times are of steps that had some, and tokens per second
    count those that were kept: with width 1 all of them.
    """

    bucket: int
    path: str
    backend: str
    decision: Decision | None = None
    steps: int = 0
    idle: int = 0
    tokens: int = 0
    ms_per_step: float | None = None  # median
    tokens_per_second: float | None = None

    def fill(self, steps: Sequence[StepTimes]) -> None:
        """Take this bucket's steps."""
        busy = [step.seconds for step in steps if any(step.tokens)]
        self.steps = len(steps)
        self.idle = sum(step.tokens.count(0) for step in steps)
        self.tokens = sum(sum(step.tokens) for step in steps)
        if busy:
            self.ms_per_step = statistics.median(busy) * 1e3
            self.tokens_per_second = sum(step.kept for step in steps) / sum(busy)

    def row(self) -> str:
        times = (self.ms_per_step, self.tokens_per_second)
        ms, rate = ("-" if t is None else f"{t:.2f}" for t in times)
        return (
            f"{self.bucket:6d}  {self.path:10s}  {self.backend:11s} {self.steps:5d}  "
            f"{self.idle:4d}  {self.tokens:6d}  {ms:>8s}  {rate:>8s}"
        )


@dataclasses.dataclass
class DecodeReport:
    """What `decode` found. Tokens per second are kept tokens over the time of their replays."""

    parity: bool
    max_relative_error: float
    tolerance: float
    first_fault: str | None
    tokens: int
    decided_tokens: int
    kept_tokens: int
    steps: int
    idle_steps: int  # each rank's steps without a token, of ranks x steps
    ranks: int
    width: int
    backend: str
    reason: str
    device: str
    graphs_compiled: int
    capture_seconds: float
    tokens_per_second: float
    buckets: list[BucketReport]

    @classmethod
    def of(
        cls,
        buckets: list[BucketReport],
        times: Mapping[int, Sequence[StepTimes]],
        parity: Parity,
        **fields: Any,
    ) -> DecodeReport:
        """The report of steps by bucket; `fields` are those that only the decoder knows."""
        for bucket in buckets:
            bucket.fill(times[bucket.bucket])
        steps = [step for of_bucket in times.values() for step in of_bucket]
        busy = sum(step.seconds for step in steps if any(step.tokens))
        kept = sum(step.kept for step in steps)
        return cls(
            parity=parity.holds,
            max_relative_error=parity.max_relative_error,
            tolerance=parity.tolerance,
            first_fault=parity.first_fault,
            tokens=parity.tokens,
            decided_tokens=parity.decided,
            kept_tokens=kept,
            idle_steps=sum(bucket.idle for bucket in buckets),
            tokens_per_second=kept / busy if busy else 0.0,
            buckets=buckets,
            **fields,
        )

    def as_dict(self) -> dict[str, Any]:
        """The --json object. An infinite error is null there."""
        fields = dataclasses.asdict(self)
        if not math.isfinite(self.max_relative_error):
            fields["max_relative_error"] = None
        return fields

    def table(self) -> str:
        titles = "bucket  path        backend     steps  idle  tokens   ms/step  tokens/s"
        rows = [titles, *(bucket.row() for bucket in self.buckets)]
        if self.ranks > 1 or self.width > 1:
            rows.append(
                f"{self.ranks} rank(s), width {self.width}: {self.idle_steps} of "
                f"{self.ranks * self.steps} steps of a rank idle; {self.kept_tokens} of "
                f"{self.tokens} tokens kept"
            )
        rows += [
            f"bucket {bucket.bucket}, one layer: {bucket.decision}"
            for bucket in self.buckets
            if bucket.decision is not None
        ]
        return "\n".join(rows) + (
            f"\n{self.graphs_compiled} graph(s) compiled, {len(self.buckets)} buckets captured in "
            f"{self.capture_seconds:.1f} s; {self.tokens} tokens in {self.steps} steps, "
            f"{self.tokens_per_second:.1f} tokens/s"
        )

    def verdict(self) -> str:
        error = f"max relative error {self.max_relative_error:.2g}, bound {self.tolerance:g}"
        if not self.parity:
            return f"NO PARITY: {self.first_fault or 'no token was compared'} ({error})"
        on_ranks, on_one = (f" on {self.ranks} ranks", " on one") if self.ranks > 1 else ("", "")
        return (
            f"PARITY: captured{on_ranks} equals eager{on_one}; {error}; "
            f"all {self.decided_tokens} tokens of "
            f"{self.tokens} that lead by more than the bound are equal"
        )
