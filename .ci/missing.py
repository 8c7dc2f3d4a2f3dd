"""Say what an interpreter lacks of this project's requirements: missing.py EXTRA ...

Prints nothing and exits with 0 where all are there, else names them and the cure, and exits with 1.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit(f"{sys.executable}: expected Python 3.11 or later, got {sys.version.split()[0]}.")

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<limits>[^;]*)(;.*)?")


def numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*\d", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def problem(requirement: str) -> str | None:
    """The requirement, if the installed distribution does not meet its lower limit or pin."""
    match = REQUIREMENT.fullmatch(requirement)
    assert match is not None, requirement
    try:
        installed = importlib.metadata.version(match["name"])
    except importlib.metadata.PackageNotFoundError:
        return f"{match['name']}{match['limits'].strip()}"
    least = re.search(r">=\s*([\d.]+)", match["limits"])
    if least and numbers(installed) < numbers(least[1]):
        return f"{match['name']}{match['limits'].strip()}"
    return None


def main(extras: list[str]) -> int:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    requirements = list(project["project"]["dependencies"])
    for extra in extras:
        requirements += project["project"]["optional-dependencies"][extra]
    missing = [text for text in map(problem, requirements) if text is not None]
    if missing:
        listed = " ".join(f"'{text}'" for text in missing)
        print(
            f"{sys.executable} lacks {', '.join(missing)}.\n"
            f"Run: {sys.executable} -m pip install {listed}\n"
            "or leave PYTHON= out: make then sets up its own .venv.",
            file=sys.stderr,
        )
    return bool(missing)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
