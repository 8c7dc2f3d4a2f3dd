"""The README keeps its word: its example runs, and what it lists is what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megamoe_compile as mm
from megamoe_compile.commands import cli
from megamoe_compile.custom_ops import errors

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def block(marker: str) -> str:
    """The fenced block behind <!-- marker -->."""
    match = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert match is not None, f"README.md has no block behind <!-- {marker} -->"
    return match[1]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    """Code words that begin the rows of a table."""
    return re.findall(r"^\| `([\w.-]+)`", text, re.MULTILINE)


def test_example_runs(tmp_path: Path) -> None:
    """On CPU, as a script in a folder of its own; it asserts its own result."""
    example = block("example")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "example.py").write_text(example + "    print(*runner.summary(), sep=chr(10))\n")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [f"bucket={n}," in done.stdout for n in (1, 4, 16)] == [True] * 3
    assert len(done.stdout.splitlines()) == 3


def test_plan_output_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, output = block("plan").partition("\n")
    assert cli.main(command.removeprefix("$ megamoe ").split()) == 0
    assert output == capsys.readouterr().out


def test_demo_output_is_of_this_program() -> None:
    model, titles, *rows, verdict = block("demo-output").splitlines()
    folder = ROOT / "megamoe_compile" / "commands" / "decode"
    sources = [file.read_text() for file in folder.glob("*.py")]
    assert any(f'"{titles}"' in source for source in sources), (
        "run `make demo` and paste what it prints"
    )
    assert model.startswith("model random Qwen3-MoE; backend reference on cpu")
    assert [int(row.split()[0]) for row in rows[:-1]] == [1, 2, 4, 8]
    assert verdict.startswith("PARITY: captured equals eager")


def test_error_table_is_complete() -> None:
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MegaMoEError)
    }
    assert set(first_column(section("Errors"))) == public | {"ValueError"}
    assert public <= set(mm.__all__)


def test_commands_are_those_of_the_program() -> None:
    assert re.findall(r"^megamoe (\w+)  ", section("Commands"), re.MULTILINE) == list(cli.COMMANDS)


def test_backends_are_those_of_the_config() -> None:
    listed = set(first_column(section("What runs where")))
    assert listed == {"reference", "deep_gemm", "triton"}
    for backend in listed:
        mm.MegaMoEConfig.preset("deepseek-v4-flash", max_tokens_per_rank=1, backend=backend)


def test_extras_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    text = section("Two commands")
    assert set(first_column(text)) == {name for name in extras if name.startswith("cu-")}
    for name, requirements in extras.items():
        assert f"`{name}`" in text
        if name.startswith("cu-"):
            wheel = next(r for r in requirements if r.startswith("sgl-deep-gemm"))
            assert f"| {wheel.partition('==')[2]} |" in text


def test_layout_names_files_that_exist() -> None:
    tree = section("Layout").split("```")[1]
    names = re.findall(r"([\w/]+(?:\.py|/))", tree)
    assert len(names) > 12
    for name in names:
        folders = (ROOT, ROOT / "megamoe_compile", ROOT / "custom_ops")
        places = [folder / name for folder in folders]
        places.append(ROOT / "megamoe_compile" / "engines" / name)
        assert any(place.exists() for place in places), name


def test_default_torch_is_that_of_the_setup() -> None:
    setup = (ROOT / ".ci" / "setup").read_text()
    default = re.search(r"^default_torch=(\S+)$", setup, re.MULTILINE)
    assert default is not None and f"`{default[1]}`" in README
