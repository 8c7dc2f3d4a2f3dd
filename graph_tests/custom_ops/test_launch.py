"""One way to load, declare and prepare a library of kernels, and one wording of its errors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refuses
from kernel_mocks import MockKernels

from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.cuda.launch import KernelLibrary, builds_kernels
from megamoe_compile.custom_ops.errors import BackendUnavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # on a CPU only its name is asked for
DEMO = """
static void* prepared;
int megamoe_prepare(void* config) { prepared = config; return config == (void*)1 ? 801 : 0; }
const char* megamoe_error_string(int error) { return error == 801 ? "no such feature" : "other"; }
int megamoe_demo(void* at, int value) { return at == prepared ? value : -1; }
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the same C interface, without CUDA."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo.c").write_text(DEMO)
    command = ["gcc", "-shared", "-fPIC", str(folder / "demo.c"), "-o", str(folder / "demo.so")]
    subprocess.run(command, check=True, timeout=60)
    return folder / "demo.so"


@pytest.fixture
def built(demo: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the compiler, which makes the demo of it."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_build, "build", lambda *args: asked.append(args) or demo)
    return asked


def load(config: int | None = None, **options: Any) -> KernelLibrary:
    argtypes = (ctypes.c_void_p, ctypes.c_int)
    return KernelLibrary("demo", "folder", argtypes, CPU, config, **{"arch": "90a", **options})


def test_a_library_is_built_declared_and_prepared(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = 0x7F12_3456_789A  # more than an int, which ctypes would make of it undeclared
    library = load(config)
    assert library.function(config, 5) == 5 and library.function(config + (1 << 32), 5) == -1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    load(arch=None)
    assert built == [("demo", ["folder/demo.cu"], arch) for arch in ("90a", "89")]


def test_a_refused_config_says_what_and_how(built: list[tuple[Any, ...]]) -> None:
    with refuses(
        BackendUnavailable,
        "demo kernels on cpu: expected kernels that load, got CUDA error 801 (no such feature). "
        "Check the driver",
    ):
        load(1)
    with refuses(BackendUnavailable, "on cpu: expected an SM90 GPU, got CUDA error 801", "Buy it."):
        load(1, expected="an SM90 GPU", cure="Buy it.")
    assert len(built) == 2


def test_a_failed_call_has_one_wording(built: list[tuple[Any, ...]]) -> None:
    failure = load().failure(801)
    assert type(failure) is RuntimeError
    assert str(failure).startswith(
        "call of demo: expected success, got CUDA error 801 (no such feature). "
        "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1."
    )


def test_a_loaded_library_is_not_built(built: list[tuple[Any, ...]], demo: Path) -> None:
    assert load(loaded=ctypes.CDLL(str(demo))).function(None, 3) == 3
    mock: Any = MockKernels("demo", lambda at, value: 2 * value)
    assert load(7, loaded=mock).function(0, 3) == 6 and mock.configs == [7]
    assert built == []


def test_kernels_are_built_on_cuda_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: Path("nvcc"))
    assert builds_kernels(CUDA) and not builds_kernels(CPU)

    def none() -> Path:
        raise BackendUnavailable("no nvcc")

    monkeypatch.setattr(cuda_build, "find_nvcc", none)
    assert not builds_kernels(CUDA)
