"""Compile sources of csrc/ into a shared library that ctypes loads; no ninja.

`build` takes CUDA sources: no torch headers, one build for every torch version. `build_extension`
takes C++ sources that need torch's headers: one build per torch version. All have a C interface.
Environment variables are read when a build is asked for, never by a launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import BackendUnavailable, MegaMoEError, mismatch

CSRC = Path(__file__).resolve().parents[2] / "csrc"
JIT_CACHE_VARIABLE = "DG_JIT_CACHE_DIR"  # read by DeepGEMM, when it first compiles
BUILD_SECONDS = 600  # a compiler that takes longer hangs


@dataclass(frozen=True)
class KernelResources:
    """What ptxas gave one kernel: registers per thread, and bytes of spills and of stack."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


def find_nvcc() -> Path:
    """The nvcc of CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda, in this order.

    Raises:
        BackendUnavailable: none of them has one.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise BackendUnavailable(
        mismatch(
            "CUDA compiler",
            "nvcc of CUDA 12.3 or later",
            "none at " + ", ".join(map(str, candidates)),
            "Install the CUDA toolkit, or set CUDA_HOME to it.",
        )
    )


def find_cxx() -> Path:
    """The C++ compiler that CXX names, or else g++, c++ or clang++ of PATH, in this order.

    Raises:
        BackendUnavailable: there is none.
    """
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["g++", "c++", "clang++"]
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise BackendUnavailable(
        mismatch(
            "C++ compiler",
            " or ".join(names) + " on PATH, with C++20",
            "none",
            "Run: apt-get install g++, or set CXX.",
        )
    )


def find_python_headers() -> Path:
    """The directory of Python.h.

    Raises:
        BackendUnavailable: this Python came without it.
    """
    directory = Path(sysconfig.get_paths()["include"])
    if not (directory / "Python.h").is_file():
        raise BackendUnavailable(
            mismatch(
                "Python's headers",
                f"Python.h in {directory}",
                "none",
                "Run: apt-get install python3-dev",
            )
        )
    return directory


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, -1, stdout=str(error))


def _checked(command: Sequence[str], what: str) -> str:
    result = _run(command)
    if result.returncode != 0:
        tail = "\n".join(result.stdout.strip().splitlines()[-20:])
        raise BackendUnavailable(
            mismatch(
                what,
                "exit status 0",
                f"{result.returncode} from `{' '.join(command)}`:\n{tail}\n",
                "Fix what the compiler names; CUDA_HOME and CXX select another one.",
            )
        )
    return result.stdout


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/megamoe_compile, or ~/.cache/megamoe_compile."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megamoe_compile"


def build(
    name: str, sources: Sequence[str], arch: str = "90a", cache_dir: Path | None = None
) -> Path:
    """Compile CUDA `sources` (names below csrc/) for sm_`arch`, or find an earlier build.

    Beside the library lies the compiler's log, which `resource_report` reads.

    Raises:
        BackendUnavailable: no nvcc, no sources, or a failed build (with its last lines).
    """
    flags = [
        "-O3",
        "-std=c++17",
        "-shared",
        "-Xcompiler=-fPIC",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-Xptxas=-v,-warn-spills",
    ]
    what = f"nvcc build of {name} for sm_{arch}"
    return _build(what, name, find_nvcc(), sources, flags, cache_dir)


def build_extension(
    name: str, sources: Sequence[str], cache_dir: Path | None = None, *, python: bool = False
) -> Path:
    """Compile C++ `sources` (names below csrc/) for the torch in use, or find an earlier build.

    Args:
        python: with the headers of the Python in use, too.

    Raises:
        BackendUnavailable: no C++ compiler, no headers of Python, no sources, or a failed build
            (with its last lines).
    """
    root = Path(torch.__file__).parent
    flags = [
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-isystem",
        str(root / "include"),
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    what = f"C++ build of {name} for torch {torch.__version__}"
    if python:
        flags += ["-isystem", str(find_python_headers()), "-ltorch_python"]
        what += f" and {sys.implementation.cache_tag}"
    return _build(what, name, find_cxx(), sources, flags, cache_dir)


def _build(
    what: str,
    name: str,
    compiler: Path,
    sources: Sequence[str],
    flags: Sequence[str],
    cache_dir: Path | None,
) -> Path:
    """The file name has a hash of the sources, the flags and the compiler's version. Processes may
    race: each writes its own temporary directory and renames the result into place."""
    paths = [CSRC / source for source in sources]
    digest = hashlib.sha256()
    version = _checked([str(compiler), "--version"], f"{compiler.name} --version")
    for part in (what, *flags, *sources, version):
        digest.update(part.encode() + b"\0")
    try:
        for path in (*paths, *sorted(CSRC.rglob("*.cuh"))):  # any header may be included
            digest.update(path.read_bytes() + b"\0")
    except OSError as error:
        raise BackendUnavailable(
            mismatch("sources", f"{list(sources)} in {CSRC}", error, "Install the package again.")
        ) from error
    directory = cache_dir if cache_dir is not None else default_cache_dir()
    library = directory / f"{name}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=directory, prefix=f"{name}-")
    except OSError as error:
        raise BackendUnavailable(
            mismatch(
                "cache of compiled kernels",
                f"a writable {directory}",
                error,
                "Set XDG_CACHE_HOME to a writable directory.",
            )
        ) from error
    with temporary as scratch:
        built = Path(scratch) / library.name
        # Libraries are named behind the sources that need them.
        log = _checked([str(compiler), *map(str, paths), *flags, "-o", str(built)], what)
        built.with_suffix(".log").write_text(log)
        # The library comes last: where it is, its log is too.
        built.with_suffix(".log").replace(library.with_suffix(".log"))
        built.replace(library)
    return library


def load(library: Path, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Load a library made by `build` or `build_extension`.

    Args:
        loader: ctypes.PyDLL for functions that need the GIL.

    Raises:
        BackendUnavailable: the loader refuses it, for instance on a cache shared with another OS.
    """
    try:
        return loader(str(library))
    except OSError as error:
        raise BackendUnavailable(
            mismatch(
                "compiled kernels",
                f"{library} to load",
                error,
                "Delete the file; the next construction builds it again.",
            )
        ) from error


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def resource_report(library: Path) -> list[KernelResources]:
    """Registers and spills of each kernel of a library made by `build`, from its log."""
    log = library.with_suffix(".log").read_text()
    return [
        KernelResources(
            name=match["name"],
            registers=int(match["registers"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
            stack=int(match["stack"]),
        )
        for match in _ENTRY.finditer(log)
    ]


def sources_digest(*launchers: Path) -> str:
    """A hash of all CUDA sources and of the Python files that launch and tune what is measured.

    For what is measured once per version of them.
    """
    digest = hashlib.sha256()
    for path in (*sorted([*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh")]), *launchers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def set_jit_cache_dir(path: str | os.PathLike[str]) -> None:
    """Keep the kernels that DeepGEMM compiles under `path`, for this process and its children.

    Raises:
        MegaMoEError: deep_gemm is imported already, and may have made its choice.
    """
    if "deep_gemm" in sys.modules:
        raise MegaMoEError(
            mismatch(
                "set_jit_cache_dir",
                "a call before the first context of the process",
                "deep_gemm imported already",
                "Call it first thing, before building a MegaMoEContext.",
            )
        )
    os.environ[JIT_CACHE_VARIABLE] = os.fspath(path)
