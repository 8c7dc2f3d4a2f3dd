"""Markers, skips with a reason, a fresh compiler per test, and ranks as processes."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from gpu_ranks import ranks_on_one_gpu
from helpers import RankPool, make_config, make_layer, triton_interprets
from hypothesis import settings
from path_fakes import Machine
from torch._dynamo.utils import counters

import megamoe_compile as mm

MARKERS = {
    "gpu": "needs a CUDA device; skipped, with the reason, where there is none",
    "multirank": "starts several processes, one per rank, and fails on a hang",
}
# The same examples in every run, nothing written into the checkout.
settings.register_profile("graph_tests", database=None, deadline=None, derandomize=True)
settings.load_profile("graph_tests")
NO_GPU = "needs a CUDA device: torch.cuda.is_available() is False"


def pytest_configure(config: pytest.Config) -> None:
    # Compiled code of an earlier session, perhaps of another version of the op, must not be found.
    torch.compiler.config.cache_key_tag = uuid.uuid4().hex
    # As in the ranks' processes: the order of a sum may depend on the number of threads.
    torch.set_num_threads(1)
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if "s" not in (config.option.reportchars or ""):
        config.option.reportchars = (config.option.reportchars or "") + "s"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test starts with no compiled code and counters at zero, from one seed."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield


@pytest.fixture
def context(request: pytest.FixtureRequest) -> Iterator[mm.MegaMoEContext]:
    """A CPU context; `@pytest.mark.parametrize("context", [{...}], indirect=True)` changes it."""
    with mm.MegaMoEContext(make_config(**getattr(request, "param", {})), device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def layer() -> Iterator[mm.MegaMoE]:
    """One layer on a CPU; a module's tests share it."""
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        yield make_layer(context)


@pytest.fixture(scope="module", params=[2, 4, 8])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """2, 4 and 8 processes on the one GPU, one pool for the tests of a module."""
    made = ranks_on_one_gpu(request.param, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Contexts of this test have two paths, fakes on the CPU, and store under tmp_path."""
    made = Machine()
    made.install(monkeypatch, tmp_path)
    return made


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process whose triton interprets kernels: triton reads its variable when it is imported."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()  # starts the process, with this environment
        assert pool.submit(triton_interprets).result()
        yield pool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: n gloo processes that live as long as the session; `.run(function, ...)`."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            folder: Path = tmp_path_factory.mktemp(f"ranks{world_size}")
            pools[world_size] = RankPool(world_size, folder)
        return pools[world_size]

    yield pool
    for made in pools.values():
        made.close()


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels from Inductor, where what is compared is not compiled code."""
    compiled = torch.compile

    def quick(step: Any, **settings: Any) -> Any:
        return compiled(step, fullgraph=True, dynamic=False, backend="eager")

    monkeypatch.setattr(torch, "compile", quick)
