"""README.md and docs/ keep their word: examples and commands run, and what they name is there.

docs/recipes.md has tests of its own, in test_recipes.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed.run
from pages import (
    BENCHMARKS,
    FENCE,
    PAGES,
    README,
    ROOT,
    SUPPORT,
    anchors,
    block,
    code_words,
    commands,
    first_column,
    links,
    rows,
    section,
)

import megamoe_compile as mm
from megamoe_compile.commands import cli
from megamoe_compile.custom_ops import errors
from megamoe_compile.custom_ops.symmetric.memory import OVERLAP_VARIABLE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RESULTS = ROOT / "benchmarks" / "results"

# Commands that run here: what is added so that they are quick, and what they then print.
QUICK = "--steps 4 --buckets 1"
RUN = {
    "make demo": (f'PYTHON={sys.executable} DEMO_ARGS="{QUICK}"', "PARITY: captured equals eager;"),
    "make test TESTS=graph_tests/custom_ops/test_op.py": (
        f"PYTHON={sys.executable} WORKERS=0 PYTEST_ARGS='-k refus -q'",
        "passed",
    ),
    "megamoe decode --ranks 4": (
        f"{QUICK} --ranks 2",
        "PARITY: captured on 2 ranks equals eager on one;",
    ),
    "megamoe doctor": ("", "backend          reference"),
    "megamoe plan --model deepseek-v4-flash --ranks 8 --max-tokens 128 --layers 43": (
        "",
        "per rank           34.9 GB",
    ),
    "megamoe bench --model tiny --device cpu --batch 1 2 --steps 3 --columns megamoe hf": (
        "--batch 1 --columns megamoe",
        "| 1 | megamoe | reference |",
    ),
    "python -m benchmarks.expert_parallel --spawn 4 --check-only": ("", "RIGHT"),
    "python -m megamoe_compile": ("--version", f"megamoe-compile {mm.__version__}"),
    "python -m pytest -q graph_tests/test_structure.py": ("-k cycle", "1 passed"),
}
# Commands that do not run here, and why. The program's own parser reads them.
DOWNLOADS = "downloads torch"
ITSELF = "this test is part of it"
GPU = "needs a Hopper GPU"
PARSED = {
    "make test": ITSELF,
    "make support-table": "graph_tests/engines/test_model_types.py makes the same table",
    "make check": "needs the extra dev, and is a step of CI of its own",
    "make test PYTHON=python3": ITSELF,
    "make demo TORCH=2.14.1": DOWNLOADS,
    'make demo TORCH="torch==2.13.0 --index-url URL"': DOWNLOADS,
    "make demo EXTRAS=cu-torch211": DOWNLOADS,
    'make test EXTRAS=cu-torch211 PYTEST_ARGS="-m gpu"': DOWNLOADS,
    "pip install '.[cu-torch211]'": DOWNLOADS,
    "pip install '.[cu-torch211,hf]'": DOWNLOADS,
    "python -m pytest -m gpu graph_tests/test_gpu_layer.py": GPU,
    "python -m benchmarks.layer --tokens 1 8 32 128 512 --out benchmarks/results/layer": GPU,
    "python -m benchmarks.small_batch --rounds 15 --out benchmarks/results/small_batch": GPU,
    "python -m benchmarks.pre_dispatch results.json": GPU,
    "python -m benchmarks.host": GPU,
    "megamoe decode": "make demo runs it",
    "megamoe bench": GPU,
    "megamoe bench --model qwen3-30b-a3b --batch 1 8 32 64 --context 1024 "
    "--out results/qwen3-30b-a3b": GPU,
    "megamoe bench --model deepseek-v3 --out results/deepseek-v3": GPU,
    "megamoe bench --model DIR": "needs a checkpoint",
    "megamoe bench --model qwen3-30b-a3b --layers 4 --parity --batch 1 2 4 8": GPU,
    "megamoe bench --model qwen3-30b-a3b --layers 4 --parity": GPU,
    "megamoe bench --parity": GPU,
    f"{OVERLAP_VARIABLE}=1 megamoe decode --ranks 4": GPU,
    "torchrun --nproc-per-node 8 -m benchmarks.expert_parallel --out benchmarks/results/ep8": (
        "needs 8 GPUs"
    ),
}


def shell(command: str, timeout: float = 280) -> str:
    """Run a command in the checkout with this interpreter and without a GPU; what it prints."""
    python = shlex.quote(sys.executable)
    command = re.sub(r"^megamoe ", f"{python} -m megamoe_compile ", command)
    command = re.sub(r"^python ", f"{python} ", command)
    changes = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# -- the pages -------------------------------------------------------------------------------------


def test_readme_is_short() -> None:
    assert len(PAGES[README].splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    missing = []
    for link in links(PAGES[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(Path(page).parent / path) if path else page
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(PAGES[target])):
            missing.append(link)
    assert not missing


def test_every_page_is_linked() -> None:
    reached = {
        os.path.normpath(Path(page).parent / link.partition("#")[0])
        for page, text in PAGES.items()
        for link in links(text)
    }
    assert PAGES.keys() - {README} <= reached


PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|cu|cuh|cpp|hpp|json|toml|ini|png))")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("needs the repository, to tell its files from others")
    files = [Path(name) for name in listed.stdout.splitlines()]
    known = {str(path) for file in files for path in (file, *file.parents)}
    ends = {part for path in known for part in _ends(path)}
    words = {word.split(" ")[0].rstrip("/") for word in code_words(PAGES[page]) if _is_path(word)}
    assert not {word for word in words if word.removeprefix("megamoe_compile/") not in ends}


def _is_path(word: str) -> bool:
    return PATH.fullmatch(word.split(" ")[0]) is not None and "NAME" not in word


def _ends(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


@pytest.mark.parametrize(
    "page", sorted(PAGES.keys() - {"docs/recipes.md", "docs/support-models.md"})
)
def test_code_words_are_those_of_the_code(page: str) -> None:
    """Every name in backquotes stands in some source: a renamed function is found here."""
    sources = "\n".join(
        file.read_text()
        for folder in ("megamoe_compile", "custom_ops", "csrc", "graph_tests", "benchmarks")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cu", ".cuh", ".cpp", ".hpp") and file != Path(__file__)
    )
    sources += (ROOT / "pyproject.toml").read_text()
    known = set(re.findall(r"\w+", sources)) | {"help", "sm_90a"}  # argparse's, and nvcc's
    unknown = set()
    for word in code_words(PAGES[page]):
        if re.fullmatch(r"(--)?[A-Za-z_][\w.-]*(\(.*\))?", word):
            name = word.partition("(")[0].removeprefix("--").removeprefix("no-")
            there = name in sources if "-" in name else known.issuperset(name.split("."))
            unknown |= set() if there else {word}
    assert not unknown


def test_error_table_is_complete() -> None:
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MegaMoEError)
    }
    assert set(first_column(section("Errors", SUPPORT))) == public | {"ValueError"}
    assert public <= set(mm.__all__)


def test_commands_are_those_of_the_program() -> None:
    listed = re.findall(r"^megamoe (\w+)  ", section("Commands", SUPPORT), re.MULTILINE)
    assert listed == list(cli.COMMANDS)
    assert all(f"`{name}`" in PAGES[README] for name in listed[1:])


def test_backends_are_those_of_the_config() -> None:
    chosen = first_column(section("Backends", SUPPORT))
    assert chosen == ["deep_gemm", "triton", "reference"]
    assert set(first_column(section("What was run", SUPPORT))) == set(chosen)
    for backend in chosen:
        mm.MegaMoEConfig.preset("deepseek-v4-flash", max_tokens_per_rank=1, backend=backend)


def test_extras_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    text = section("Extras", SUPPORT)
    assert set(first_column(text)) == {name for name in extras if name.startswith("cu-")}
    for name, requirements in extras.items():
        assert f"`{name}`" in text
        if name.startswith("cu-"):
            wheel = next(r for r in requirements if r.startswith("sgl-deep-gemm"))
            assert f"| {wheel.partition('==')[2]} |" in text


def test_default_torch_is_that_of_the_setup() -> None:
    setup = (ROOT / ".ci" / "setup").read_text()
    default = re.search(r"^default_torch=(\S+)$", setup, re.MULTILINE)
    assert default is not None and f"`{default[1]}`" in PAGES[README]


def test_layout_names_files_that_exist() -> None:
    text = section("Layout")
    names = re.findall(r"([\w/]+(?:\.py|/))", text.split("```")[1])
    assert len(names) > 24
    for name in names:
        folders = (ROOT, ROOT / "megamoe_compile", ROOT / "custom_ops")
        places = [folder / name for folder in folders]
        places.append(ROOT / "megamoe_compile" / "engines" / name)
        assert any(place.exists() for place in places), name
    packages = {file.parent.name for file in (ROOT / "custom_ops").glob("*/__init__.py")}
    packages |= {file.parent.name for file in (ROOT / "megamoe_compile").glob("*/__init__.py")}
    assert packages - {"integrations", "custom_ops"} <= {name.strip("/") for name in names}
    questions = rows(text)
    assert len(questions) == 4
    for place in re.findall(r"`([^`]+)`", text.split("```")[0]):
        assert (ROOT / place).exists(), place


# -- examples and outputs --------------------------------------------------------------------------


def run_example(marker: str, more: str, folder: Path) -> str:
    """On CPU, as a script in a folder of its own; what it prints."""
    (folder / "example.py").write_text(block(marker) + more)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_runs(tmp_path: Path) -> None:
    """It asserts its own result."""
    assert len([line for line in block("example").splitlines() if line.strip()]) <= 15
    printed = run_example("example", "    print(*runner.summary(), sep=chr(10))\n", tmp_path)
    assert [f"bucket={n}," in printed for n in (1, 4, 16)] == [True] * 3
    assert len(printed.splitlines()) == 3


def test_hugging_face_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")
    printed = run_example("hugging-face", "", tmp_path)
    shape = re.compile(r"reference: 16 tokens; FP8 experts change logits by (0\.\d{3})")
    match, said = shape.fullmatch(printed.strip()), shape.search(PAGES[README])
    assert match is not None and said is not None
    # Its weights are fresh in every run. A router that a rounding turns adds to it now and then.
    assert 0 < float(match[1]) < 0.1 and 0 < float(said[1]) < 0.1


@pytest.mark.gpu
def test_hugging_face_example_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("hugging-face"), README, "exec"), {})
    assert ": 16 tokens; FP8 experts change logits by 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"docs/recipes.md"}))
def test_every_python_block_is_one_of_these(page: str) -> None:
    blocks = [body for _, language, body in FENCE.findall(PAGES[page]) if language == "python"]
    tested = [block(marker) for marker in ("example", "hugging-face")]
    assert blocks == (tested if page == README else [])


def test_plan_output_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, output = block("plan", SUPPORT).partition("\n")
    assert cli.main(command.removeprefix("$ megamoe ").split()) == 0
    assert output == capsys.readouterr().out


@pytest.mark.parametrize(
    ("marker", "page", "verdict"),
    [
        ("demo-output", README, "PARITY: captured equals eager; max"),
        ("ranks-output", SUPPORT, "PARITY: captured on 4 ranks equals eager on one; max"),
    ],
)
def test_shown_output_is_of_this_program(marker: str, page: str, verdict: str) -> None:
    shown = block(marker, page).splitlines()
    model, titles, *table = shown[1:] if shown[0].startswith("$") else shown
    folder = ROOT / "megamoe_compile" / "commands" / "decode"
    sources = [file.read_text() for file in folder.glob("*.py")]
    assert any(f'"{titles}"' in source for source in sources), "run it and paste what it prints"
    assert model.startswith("model random Qwen3-MoE; backend reference on cpu")
    assert [int(row.split()[0]) for row in table[:4]] == [1, 2, 4, 8]
    assert table[-1].startswith(verdict)


# -- commands --------------------------------------------------------------------------------------


def test_every_command_is_run_or_parsed() -> None:
    found = {command for text in PAGES.values() for command in commands(text)}
    assert found == RUN.keys() | PARSED.keys()
    assert not RUN.keys() & PARSED.keys()


@pytest.mark.parametrize("command", RUN)
def test_commands_run(command: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")
    more, printed = RUN[command]
    assert printed in shell(f"{command} {more}")


class Parsed(BaseException):
    """Ends a program where its parser has read the arguments."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        raise Parsed(parse(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)


def parse_module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        importlib.import_module(name).main()


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("command", PARSED)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program itself; where it runs nothing without a dry run, by that."""
    words = shlex.split(command.removeprefix(f"{OVERLAP_VARIABLE}=1 "))
    if words[0] == "make":
        assert "python" in shell(f"make --dry-run {command.removeprefix('make ')}")
    elif words[0] == "pip":
        target = re.fullmatch(r"\.\[([\w,-]+)\]", words[2])
        assert words[1] == "install" and target is not None
        assert set(target[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    elif words[:3] == ["python", "-m", "pytest"]:
        assert "tests collected" in shell(f"{command} --collect-only -q")
    elif words[0] == "megamoe":
        pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")
        with pytest.raises(Parsed) as parsed:
            cli.main(words[1:])
        (arguments,) = parsed.value.args
        models = importlib.import_module("megamoe_compile.commands.bench.models").PRESETS
        assert getattr(arguments, "model", None) in {*models, "DIR", None}
    elif words[0] == "torchrun":
        with pytest.raises(Parsed) as parsed:
            torch.distributed.run.get_args_parser().parse_args(words[1:])
        (arguments,) = parsed.value.args
        assert arguments.module
        parse_module(arguments.training_script, arguments.training_script_args, monkeypatch)
    else:
        assert words[:2] == ["python", "-m"]
        parse_module(words[2], words[3:], monkeypatch)


# -- numbers ---------------------------------------------------------------------------------------


def stored(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def test_model_table_is_what_was_measured() -> None:
    columns = {column["name"]: column["cells"] for column in stored("qwen3-30b-a3b")["columns"]}
    expected = []
    for index, ours in enumerate(columns["megamoe"]):
        rates = [
            columns[name][index]["tokens_per_s"] for name in ("hf-eager", "hf", "chain", "megamoe")
        ]
        cells = [f"{ours['batch']}", *(f"{rate:.0f}" for rate in rates)]
        cells += [f"{rates[3] / rates[1]:.2f}", f"{rates[3] / rates[2]:.2f}"]
        cells += [f"{ours['share']['moe_block']:.0%}".replace("%", " %")]
        expected.append([*cells, f"{ours['gigabytes_per_s']:.0f}"])
    assert rows(section("Measured")) == [cells[:7] for cells in expected]
    assert rows(section("Qwen3-30B-A3B", BENCHMARKS)) == expected


def test_layer_table_is_what_was_measured() -> None:
    expected = [
        [
            f"{row['local_experts']}",
            f"{row['tokens']}",
            *(f"{row[name]:.1f}" for name in ("layer_us", "raw_us", "mega_us", "floor_us")),
            *(f"{row[name]:.3f}" for name in ("layer/raw", "layer/mega")),
            f"{row['relative_error']:.4f}",
        ]
        for row in stored("layer")["rows"]
    ]
    assert rows(section("One layer against the raw calls", BENCHMARKS)) == expected


def test_paths_table_is_what_was_measured() -> None:
    names = {
        "flash-256": "V4-Flash, 256 experts",
        "flash-32": "V4-Flash, 32 experts",
        "qwen3-30b": "Qwen3-30B-A3B",
    }

    def cell(row: dict[str, Any], name: str, digits: int) -> str:
        value = row.get(name)
        return f"{value:.{digits}f}" if isinstance(value, float) else "-"

    measured = [
        [
            names[row["shape"]],
            f"{row['tokens']}",
            *(cell(row, name, 1) for name in ("small_us", "mega_us", "auto_us")),
            row["choice"],
            cell(row, "floor_us", 1),
            *(cell(row, name, 2) for name in ("small/floor", "mega/floor")),
        ]
        for row in stored("small_batch")["rows"]
    ]
    shown = rows(section("Two paths on one rank", BENCHMARKS))
    assert len(shown) == 22
    assert [row for row in shown if row not in measured] == []
