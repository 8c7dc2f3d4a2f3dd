"""The two passes of `megamoe bench`: first all times, then all profiles.

What a profiler attaches to a process stays, and slows every launch after it, so nothing is
profiled before the last column is timed. A column is built again for its profile: the models of
all columns do not fit beside each other, and its code is in Inductor's cache by then.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator, Sequence

import torch

from ...engines.transformers.experts import is_experts
from ...errors import BackendUnavailable, mismatch
from .columns import Column, Options, Run, Say, built_column, peak_bytes
from .measure import HostTime, host_time, kernel_share, percent, step_bytes, time_steps
from .models import experts_shape, noting_ids
from .results import Cell, ColumnResult

# Its cost grows with every (token, expert) pair: once so many times slower than the best, it is not
# tried at larger batches. The others may lose at one token and win at eight.
PER_PAIR, HOPELESS = "batched_mm", 1.3
SAMPLED_STEPS = 3  # for the number of touched experts


def run_columns(names: Sequence[str], options: Options, say: Say) -> Iterator[ColumnResult]:
    """Time columns one after another; each is yielded as it ends, failed ones with their error."""
    for name in names:
        say(f"column {name}")
        result = ColumnResult(name)
        try:
            time_column(options, say, result)
        except Exception as error:  # one column's fault must not take the others' results
            _fail(result, _short(error), say)
        _free(result, options)
        yield result


def profile_columns(
    results: Sequence[ColumnResult], options: Options, say: Say
) -> Iterator[ColumnResult]:
    """Profile the captured cells, column after column; each is yielded as it ends, with its error
    where one failed."""
    for result in results:
        if not result.cells or result.name == "hf-eager":
            continue
        say(f"profile of column {result.name}")
        try:
            profile_column(options, say, result)
        except Exception as error:
            _fail(result, f"its profile: {_short(error)}", say)
        _free(result, options)
        yield result


def free_memory(device: torch.device) -> None:
    """Drop compiled code and cached memory of a column that is done."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


# -- one column ------------------------------------------------------------------------------------


def time_column(options: Options, say: Say, result: ColumnResult) -> None:
    """Fill `result` cell by cell: it holds what came before a fault.

    Raises:
        BackendUnavailable: the column, or all of its implementations, cannot run here. Anything
            that a kernel or a compiler raises, where there is but one implementation.
    """
    with built_column(result.name, options, say, result) as column:
        candidates = list(column.implementations)
        for batch in options.batches:
            touched = _touched(column, options, batch)
            if len(column.implementations) == 1:
                cell = _timed(column, options, batch, candidates[0], touched)
            else:
                cell = _best(column, options, batch, candidates, touched, say, result)
            result.cells.append(cell)
            say(_line(cell))
            options.keep(result)


def profile_column(options: Options, say: Say, result: ColumnResult) -> None:
    """Add the profiles to the cells of `result`."""
    only_timed = dataclasses.replace(options, buckets=options.batches)
    with built_column(result.name, only_timed, say, ColumnResult(result.name)) as column:
        for cell in result.cells:
            run = column.ready(cell.batch, cell.implementation)
            if run.implementation != cell.implementation:  # chosen by time, which may tie
                cell.notes.append(f"profiled with {run.implementation}")
            cell.share = kernel_share(run.call, options.tokens(cell.batch))
            say(f"  batch {cell.batch}: MoE {percent(cell.share)} of kernel time")
            options.keep(result)


def _best(
    column: Column,
    options: Options,
    batch: int,
    candidates: list[str],
    touched: float,
    say: Say,
    result: ColumnResult,
) -> Cell:
    """The fastest of the candidates, of which it takes hopeless ones away."""
    cells, notes = [], []
    for name in candidates:
        try:
            cell = _timed(column, options, batch, name, touched)
        except Exception as error:
            notes.append(f"{name}: {_short(error)}")
            say(f"  batch {batch}: {notes[-1]}")
            continue
        cells.append(cell)
        notes.append(f"{name}: {cell.time.median:.3f} ms")
        say(f"  candidate: {_line(cell).strip()}")
    if not cells:
        raise BackendUnavailable(
            mismatch(
                f"experts implementations of column {result.name}",
                f"one of {column.implementations} that runs",
                "; ".join(notes),
                "See the errors.",
            )
        )
    best = min(cells, key=lambda cell: cell.time.median)
    best.notes = notes
    if any(
        cell.implementation == PER_PAIR and cell.time.median > HOPELESS * best.time.median
        for cell in cells
    ):
        candidates.remove(PER_PAIR)
        result.notes.append(f"{PER_PAIR} not tried above batch {batch}")
    return best


def _timed(
    column: Column, options: Options, batch: int, implementation: str, touched: float
) -> Cell:
    run = column.ready(batch, implementation)
    step = column.step
    layers = sum(map(is_experts, step.model.modules()))
    _, hidden, intermediate = experts_shape(options.source.config)
    expert = 3 * hidden * intermediate * column.weight_bytes
    tokens = options.tokens(batch)
    measured = time_steps(run.call, tokens, options.steps, options.budget_s)
    read = step_bytes(step, batch, touched, expert)
    return Cell(
        batch,
        run.implementation,
        measured,
        tokens_per_s=batch / measured.median * 1e3,
        gigabytes=read / 1e9,
        gigabytes_per_s=read / 1e6 / measured.median,
        touched_experts=touched / layers,
        compile_s=run.compile_s,
        capture_s=run.capture_s,
        peak_bytes=peak_bytes(options.device),
        host=_host(run, tokens) if options.device.type == "cuda" else None,
    )


def _host(run: Run, tokens: torch.Tensor) -> HostTime | None:
    """Of a replay. Its caller has the tokens: cutting them out is no part of a call."""
    if run.capture_s is None:
        return None
    return host_time([functools.partial(run.call, row) for row in tokens.unbind()])


def _touched(column: Column, options: Options, batch: int) -> float:
    """Experts that one step touches, summed over its layers; by eager steps on the timed tokens."""
    tokens, position = options.tokens(batch), options.position()
    with (
        torch.compiler.set_stance("force_eager"),
        noting_ids(column.step.model) as taken,
    ):
        for index in range(SAMPLED_STEPS):
            column.step(tokens[index], position)
    return sum(int(ids.unique().numel()) for ids in taken) / SAMPLED_STEPS


# -- words -----------------------------------------------------------------------------------------


def _fail(result: ColumnResult, text: str, say: Say) -> None:
    result.error = result.error or text
    say(f"  failed: {text}")


def _free(result: ColumnResult, options: Options) -> None:
    try:
        free_memory(options.device)
    except Exception as error:  # a CUDA error that stays: the results so far are still good
        result.error = result.error or _short(error)


def _line(cell: Cell) -> str:
    return (
        f"  batch {cell.batch}, {cell.implementation}: {cell.time.median:.3f} ms "
        f"(+-{cell.time.spread:.3f}), {cell.tokens_per_s:.1f} tokens/s"
    )


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
