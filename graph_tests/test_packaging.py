"""The wheel and the sdist: what is in them, and that they work away from the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe_compile as mm
from megamoe_compile.custom_ops.deep_gemm.api import WHEELS

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("megamoe_compile", "custom_ops", "csrc", "pyproject.toml", "README.md", "LICENSE")
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
} | {"CUDA_VISIBLE_DEVICES": ""}

# By name of the distribution: looking for the module `pip` makes setuptools switch this process to
# the standard library's distutils, which Inductor then trips over.
HAVE = {distribution.name for distribution in importlib.metadata.distributions()}
needs_tools = pytest.mark.skipif(
    not {"pip", "setuptools"} <= HAVE, reason="needs pip and setuptools in this interpreter"
)
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
# Runs in an environment that has torch and this project, and nothing else of this checkout.
USE = """
import json, sys
from pathlib import Path
import torch
import megamoe_compile as mm
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.cuda import build

config = mm.MegaMoEConfig(
    hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, max_tokens_per_rank=8
)
with mm.MegaMoEContext(config, device="cpu") as context, torch.inference_mode():
    layer = mm.MegaMoE(context)
    layer.load_weights(
        torch.randn(4, 256, 256).bfloat16(), None, torch.randn(4, 256, 128).bfloat16(), None
    )
    ids = torch.tensor([[0, 3], [1, -1], [-1, -1]])
    y = layer(torch.randn(3, 256).bfloat16(), ids, torch.full((3, 2), 0.5))
print(json.dumps({
    "files": sorted({str(Path(m.__file__).parent) for m in (mm, library)}),
    "csrc": str(build.CSRC),
    "sources": sorted(p.name for p in build.CSRC.rglob("*.cu")),
    "finite": bool(y.isfinite().all()),
    "zero_row": bool((y[2] == 0).all()) and not bool((y[0] == 0).all()),
}))
"""


def call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a wheel or an sdist with the setuptools that is here: no isolation, no network."""
    target.mkdir(exist_ok=True)
    name = call(sys.executable, "-c", BUILD, kind, target, cwd=source).splitlines()[-1]
    return target / name


def python_files(folder: str) -> set[str]:
    root = (ROOT / folder).resolve()
    return {str(file.relative_to(root)) for file in root.rglob("*.py")}


def expected_files() -> set[str]:
    library = {f"megamoe_compile/{name}" for name in python_files("megamoe_compile")}
    ops = {f"megamoe_compile/custom_ops/{name}" for name in python_files("custom_ops")}
    csrc = {
        f"megamoe_compile/csrc/{file.relative_to(ROOT / 'csrc')}"
        for file in (ROOT / "csrc").rglob("*")
        if file.is_file()
    }
    return library | ops | csrc | {"megamoe_compile/py.typed"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, symlink included: builds leave nothing in the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    assert (copy / "megamoe_compile" / "custom_ops").is_symlink()
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def make_environment(folder: Path) -> Path:
    """An empty virtual environment that sees torch and what it needs, but no project of ours."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    packages = Path(call(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder))
    # A folder named in a .pth file is searched, but its own .pth files (an editable install of this
    # checkout) are not run.
    torch_home = Path(torch.__file__).parent.parent
    (Path(str(packages).strip()) / "torch.pth").write_text(f"{torch_home}\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    call(*pip, "--no-build-isolation", "-q", *what, cwd=python.parent)


def use(python: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "use.py").write_text(USE)
    report: dict[str, Any] = json.loads(call(python, "use.py", cwd=tmp_path))
    return report


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        links = [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0xA]
        assert not links
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@needs_tools
def test_wheel_has_every_source_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == expected_files()
    assert wheel.name == f"megamoe_compile-{mm.__version__}-py3-none-any.whl"


@needs_tools
def test_wheel_metadata(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Name"] == "megamoe-compile" and fields["Version"] == mm.__version__
    assert fields["License-Expression"] == "Apache-2.0" and fields["Requires-Python"] == ">=3.11"
    needs = [r for r in fields.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(needs) == ["numpy", "torch>=2.11"]
    assert {"hf", "plot", "test", "dev"} <= set(fields.get_all("Provides-Extra", []))


@needs_tools
def test_wheel_from_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert contents(build("wheel", source, tmp_path / "out")) == contents(wheel)


@needs_tools
def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv")
    install(python, wheel)
    report = use(python, tmp_path)
    home = next((tmp_path / "venv" / "lib").glob("python*/site-packages")) / "megamoe_compile"
    assert report["files"] == [str(home), str(home / "custom_ops")]
    assert report["csrc"] == str(home / "csrc")
    assert "pre_dispatch.cu" in report["sources"]
    assert report["finite"] and report["zero_row"]
    version = call(python.parent / "megamoe", "--version", cwd=tmp_path)
    assert version == f"megamoe-compile {mm.__version__}\n"


@needs_tools
def test_editable_install_runs_the_tree(tree: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv")
    source = tmp_path / "source"
    shutil.copytree(tree, source, symlinks=True)
    install(python, "-e", source)
    report = use(python, tmp_path)
    assert str(source / "megamoe_compile") in report["files"]
    assert all(Path(file).is_relative_to(source) for file in report["files"])
    assert report["csrc"] == str(source / "csrc")
    assert report["finite"] and report["zero_row"]


def test_each_gpu_extra_pairs_torch_with_the_wheel_that_fits() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    pairs = {}
    for name, requirements in extras.items():
        if name.startswith("cu-torch"):
            pins = dict(text.replace("~=", "==").split("==") for text in requirements)
            release = tuple(map(int, pins["torch"].split(".")[:2]))
            assert name == f"cu-torch{release[0]}{release[1]}"
            assert "triton" in pins
            # Up to 0.2.2 the wheel's binding is tvm-ffi, at exactly one version.
            old = tuple(map(int, pins["sgl-deep-gemm"].split(".")[:3])) < (0, 2, 3)
            assert ("apache-tvm-ffi" in pins) == old
            pairs[release] = pins["sgl-deep-gemm"]
    assert pairs == {release: right for release, (_, _, right) in WHEELS.items()}


def test_version_has_one_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert f"[{mm.__version__}]" in (ROOT / "CHANGELOG.md").read_text() or (
        "[Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    )


def test_missing_requirements_are_named(tmp_path: Path) -> None:
    """`make test PYTHON=...` with an interpreter that has nothing."""
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    command = [tmp_path / "venv" / "bin" / "python", ROOT / ".ci" / "missing.py", "hf", "test"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    for name in ("torch>=2.11", "numpy", "transformers>=5.17", "pytest>=8"):
        assert name in done.stderr
    mine = subprocess.run([sys.executable, ROOT / ".ci" / "missing.py"], capture_output=True)
    assert (mine.returncode, mine.stdout, mine.stderr) == (0, b"", b"")
