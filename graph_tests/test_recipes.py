"""docs/recipes.md keeps its word: its blocks run, and the names in its tables exist."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from step_helpers import Ranks

import megamoe_compile as mm

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text()


def blocks(marker: str | None = None) -> list[str]:
    """The Python blocks, or those behind <!-- run: marker -->."""
    before = "" if marker is None else rf"<!-- run: {marker} -->\n"
    return re.findall(rf"{before}^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def run_blocks(codes: list[str], namespace: dict[str, Any]) -> None:
    for code in codes:
        exec(compile(code, "docs/recipes.md", "exec"), namespace)


def ranks_blocks(rank: int, world_size: int) -> None:
    """In a rank's process; aot_eager, for the blocks are about ranks and not about Inductor."""
    torch.manual_seed(rank)
    compile_before = torch.compile
    torch.compile = functools.partial(compile_before, backend="aot_eager")  # type: ignore
    namespace: dict[str, Any] = {}
    try:
        run_blocks(blocks("2 ranks"), namespace)
    finally:
        torch.compile = compile_before
    namespace["context"].close()


@pytest.mark.multirank
def test_blocks_of_several_ranks_run(ranks: Ranks) -> None:
    assert len(blocks("2 ranks")) == 7
    ranks(2).run(ranks_blocks, timeout=120)


def test_blocks_of_one_rank_run() -> None:
    assert len(blocks("1 rank")) == 3
    run_blocks(blocks("1 rank"), {})


@pytest.mark.gpu
def test_blocks_of_a_gpu_run() -> None:
    run_blocks(blocks("1 rank") + blocks("gpu"), {})


def test_every_block_is_python_and_nearly_every_one_is_run() -> None:
    marked = [code for marker in ("2 ranks", "1 rank", "gpu") for code in blocks(marker)]
    others = [code for code in blocks() if code not in marked]
    for code in others:
        compile(code, "docs/recipes.md", "exec")
    assert len(others) == 1 and "destroy_process_group" in others[0]


def table_cells(column: int) -> Iterator[str]:
    for line in TEXT.splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) > column:
            yield cells[column]


def test_our_names_in_the_tables_exist() -> None:
    arguments = {
        name
        for call in (
            mm.MegaMoEConfig,
            mm.MegaMoEContext,
            mm.GraphRunner,
            mm.GraphRunner.__call__,
            mm.StepPlan.agree,
            mm.StepPlan.from_counts,
        )
        for name in inspect.signature(call).parameters
    }
    words = {word for cell in table_cells(1) for word in re.findall(r"`([^`]+)`", cell)}
    assert len(words) > 12
    for word in words:
        for name in re.findall(r"(\w+)=", word):
            assert name in arguments, word
        head = re.match(r"\w+", word.strip('"'))
        assert head is not None
        known = {*arguments, *mm.__all__, "runner", "plan", "sum_len"}
        assert head[0] in known, word


def test_every_public_name_is_real() -> None:
    for name in set(re.findall(r"\bmm\.(\w+)", TEXT)):
        assert hasattr(mm, name), name
    for owner, name in re.findall(r"\b(StepPlan|context|plan|runner)\.(\w+)", TEXT):
        kinds: dict[str, Any] = {
            "StepPlan": mm.StepPlan,
            "context": mm.MegaMoEContext,
            "plan": mm.StepPlan,
            "runner": mm.GraphRunner,
        }
        source = inspect.getsource(kinds[owner])
        assert hasattr(kinds[owner], name) or re.search(rf"\b{name}\b", source), f"{owner}.{name}"
