"""The facts about a machine and its versions that a result file must carry."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..custom_ops.deep_gemm.api import installed_version


def environment(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, date, and the commit: given, where the run has no repository."""

    def run(*command: str) -> str:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parent,  # git: this code's repository, not the caller's
            )
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        return done.stdout.partition("\n")[0].strip()  # one line per GPU: all have one driver

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    cuda = torch.cuda.is_available()
    driver = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "driver": driver if cuda else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "sgl-deep-gemm": installed_version(),
        "python": platform.python_version(),
        "commit": commit or run("git", "describe", "--always", "--dirty"),
    }
