"""`megamoe doctor`: what stands on this machine, what can run on it, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, get_args

import torch

from ..backends.capability import probe
from ..config import Backend, MegaMoEConfig
from ..errors import BackendUnavailable, mismatch
from ..models.presets import PRESETS
from ..version import __version__
from .plan import format_rows, human_bytes

DEFAULT_PRESET = "deepseek-v4-flash"
TRANSFORMERS = (5, 17)  # the first release whose experts can be replaced
SHAPE_OPTIONS = ("hidden_size", "intermediate_size", "num_experts", "top_k")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _deep_gemm() -> dict[str, Any]:
    """The wheel, without importing it, and whether it was built for this torch."""
    from ..custom_ops.deep_gemm.api import DISTRIBUTION, wheel_problem

    version = _installed(DISTRIBUTION)
    problem = None if version is None else wheel_problem(version, torch.__version__)
    if version is not None and torch.version.cuda is None:
        problem = mismatch(
            DISTRIBUTION, "a CUDA build of torch", torch.__version__, "Install a CUDA build."
        )
    return {"version": version, "fits_torch": version and problem is None, "problem": problem}


def _compiler() -> dict[str, Any]:
    """What torch.compile and Triton build their code with: a C++ compiler and Python's headers."""
    name = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    problem = None
    if shutil.which(name) is None:
        problem = mismatch(
            "C++ compiler", f"{name} on PATH", "none", "Run: apt-get install g++, or set CXX."
        )
    elif not header.is_file():
        problem = mismatch(
            "Python's headers", header, "no such file", "Run: apt-get install python3-dev."
        )
    return {"cxx": shutil.which(name), "python_header": header.is_file(), "problem": problem}


def _transformers() -> dict[str, Any]:
    version = _installed("transformers")
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    problem = None
    if numbers < TRANSFORMERS:
        problem = mismatch(
            "transformers",
            f"{'.'.join(map(str, TRANSFORMERS))} or later",
            version or "none",
            "Run: pip install 'megamoe-compile[hf]'",
        )
    return {"version": version, "problem": problem}


def _nvcc() -> dict[str, Any]:
    from ..custom_ops.cuda.build import find_nvcc

    try:
        nvcc = find_nvcc()
        output = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (BackendUnavailable, OSError, subprocess.TimeoutExpired) as error:
        return {"path": None, "version": None, "problem": str(error)}
    release = re.search(r"release ([\d.]+)", output)
    return {"path": str(nvcc), "version": release and release[1], "problem": None}


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", file.read_text() if file.exists() else "")
    return match and match[1]


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return gpus


def examine(config: MegaMoEConfig, device: torch.device) -> dict[str, Any]:
    """Everything that `--json` prints. `ok` says whether `megamoe decode` can run on `device`."""
    verdict = probe(config, device)
    report: dict[str, Any] = {
        "megamoe_compile": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "triton": _installed("triton"),
        "deep_gemm": _deep_gemm(),
        "transformers": _transformers(),
        "compiler": _compiler(),
        "gpus": _gpus(),
        "driver": _driver(),
        "nvcc": _nvcc(),
        "config": dataclasses.asdict(config),
        "device": str(device),
        "backend": verdict.backend,
        "reason": verdict.reason,
        "details": {name: str(value) for name, value in verdict.details.items()},
    }
    needs = {
        "backend": verdict.reason if verdict.backend is None else None,
        "transformers": report["transformers"]["problem"],
        "compiler": report["compiler"]["problem"],
    }
    report["problems"] = {name: text for name, text in needs.items() if text is not None}
    report["ok"] = not report["problems"]
    return report


def to_text(report: dict[str, Any]) -> str:
    """The aligned table that a person reads."""
    torch_, wheel, nvcc = report["torch"], report["deep_gemm"], report["nvcc"]
    config, compiler = report["config"], report["compiler"]
    gpus = [
        f"{gpu['name']}, SM{gpu['capability'][0]}{gpu['capability'][1]}, "
        f"{human_bytes(gpu['memory_bytes'])}, {gpu['multiprocessors']} SMs"
        for gpu in report["gpus"]
    ]
    fits = "fits this torch" if wheel["fits_torch"] else f"does not fit: {wheel['problem']}"
    rows = [
        ("megamoe-compile", report["megamoe_compile"]),
        ("python", f"{report['python']}, {report['platform']}"),
        (
            "torch",
            f"{torch_['version']}, " + (f"CUDA {torch_['cuda']}" if torch_["cuda"] else "no CUDA"),
        ),
        ("triton", report["triton"] or "none"),
        ("deep_gemm", f"{wheel['version']}, {fits}" if wheel["version"] else "none"),
        ("transformers", report["transformers"]["version"] or "none"),
        (
            "compiler",
            f"{compiler['cxx'] or 'none'}, Python.h {'' if compiler['python_header'] else 'not '}"
            "found",
        ),
        ("nvcc", f"{nvcc['version']}, {nvcc['path']}" if nvcc["path"] else "none"),
        ("GPU", "\n".join(gpus) or "none"),
        ("driver", report["driver"] or "none"),
        (
            "config",
            f"hidden {config['hidden_size']}, intermediate {config['intermediate_size']}, "
            f"{config['num_experts']} experts, top-{config['top_k']}, "
            f"backend {config['backend']} on {report['device']}",
        ),
        ("backend", f"{report['backend'] or 'none'}: {report['reason']}"),
    ]
    if report["driver"] and not report["gpus"]:
        rows.append(("note", "a driver is here, but this torch sees no GPU: see torch and driver"))
    rows += [("cure", text) for name, text in report["problems"].items() if name != "backend"]
    rows.append(
        (
            "verdict",
            "megamoe decode can run here"
            if report["ok"]
            else f"megamoe decode cannot run here: see {', '.join(report['problems'])}",
        )
    )
    return format_rows(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default=DEFAULT_PRESET, help="the shape to ask about"
    )
    for name in SHAPE_OPTIONS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, help=f"{name} other than the preset's"
        )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per rank; default: 128")
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="default: auto"
    )
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if the main job, `megamoe decode`, can run here, else 1."""
    shape = {name: getattr(args, name) for name in SHAPE_OPTIONS}
    try:
        config = MegaMoEConfig.preset(
            args.preset,
            max_tokens_per_rank=args.max_tokens,
            backend=args.backend,
            **{name: value for name, value in shape.items() if value is not None},
        )
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise argparse.ArgumentError(None, f"--device: {str(error).splitlines()[0]}") from error
    report = examine(config, device)
    print(json.dumps(report) if args.json else to_text(report))
    return 0 if report["ok"] else 1
