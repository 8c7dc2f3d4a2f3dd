"""The rules of the layout: which way imports point, what an import may do, where switches live."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = {"library": 520, "benchmarks": 520, "csrc": 600, "graph_tests": 700}
LIBRARY = "megamoe_compile"
OPS = f"{LIBRARY}.custom_ops"

# Rooms from the ground up: a room imports only rooms before it, and files of its own. A file that
# is named stands in the room of its own; docs/design.md draws the same order.
ROOMS = (
    f"{OPS}.errors",
    f"{OPS}.call",
    f"{OPS}.library",
    f"{OPS}.cuda",
    f"{OPS}.reference",
    f"{OPS}.symmetric",
    f"{OPS}.staging",
    f"{OPS}.small_batch",
    f"{OPS}.deep_gemm",
    f"{OPS}.triton",
    f"{OPS}.unfused",
    f"{OPS}.paths",
    f"{LIBRARY}.errors",
    f"{LIBRARY}.version",
    f"{LIBRARY}.models",
    f"{LIBRARY}.config",
    f"{LIBRARY}.weights",
    f"{LIBRARY}.parallel",
    f"{LIBRARY}.backends",
    f"{LIBRARY}.context",
    f"{LIBRARY}.loading",
    f"{LIBRARY}.tracing",
    f"{LIBRARY}.module",
    f"{LIBRARY}.capture",
    f"{LIBRARY}.engines",
    f"{LIBRARY}.integrations",
    f"{LIBRARY}.commands",
)
# These hold one engine or one command each, and only what is named may be imported by another.
INNER = {
    f"{LIBRARY}.engines": ("seam", "transformers"),
    f"{LIBRARY}.commands": ("arguments", "environment", "plan", "doctor", "decode", "bench", "cli"),
}
# The only files that may import these, at whatever level.
OWNERS = {
    "deep_gemm": {"custom_ops/deep_gemm/api.py"},
    "tvm_ffi": {"custom_ops/deep_gemm/api.py"},
    "matplotlib": {"megamoe_compile/commands/bench/report.py"},
}
# Files whose code runs at construction or as a command, and may read the environment.
READS_ENVIRONMENT = {
    "custom_ops/cuda/build.py",
    "custom_ops/deep_gemm/api.py",
    "custom_ops/deep_gemm/check.py",
    "custom_ops/symmetric/memory.py",
    "megamoe_compile/commands/decode/command.py",
    "megamoe_compile/commands/decode/ranks.py",
    "megamoe_compile/commands/doctor.py",
}


def library_files() -> list[Path]:
    """Sources of the library, each once: custom_ops by its real path, not by the symlink."""
    folders = (ROOT / "custom_ops", ROOT / LIBRARY)
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [file for file in files if file.resolve() == file]


def name_of(file: Path) -> str:
    """Dotted name under which `file` is imported."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "custom_ops":
        parts.insert(0, LIBRARY)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> Iterator[str]:
    """Dotted names that `file` imports anywhere, for annotations too."""
    tree = ast.parse(file.read_text())
    package = name_of(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield str(node.module)
                continue
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *([node.module] if node.module else [])])
            modules = [f"{target}.{alias.name}" for alias in node.names]
            known = set(map(name_of, library_files()))
            yield from (name if name in known else target for name in modules)


def room_of(module: str) -> str:
    return max((r for r in ROOMS if f"{module}.".startswith(f"{r}.")), key=len, default=module)


def graph() -> dict[str, set[str]]:
    """Which modules each module imports; the fronts of the library, which import all, left out."""
    return {
        name_of(file): {t for t in imports_of(file) if f"{t}.".startswith(f"{LIBRARY}.")}
        for file in library_files()
        if name_of(file) not in (LIBRARY, OPS, f"{LIBRARY}.__main__")
    }


def test_every_file_has_a_room() -> None:
    names = set(map(name_of, library_files()))
    assert {LIBRARY, f"{OPS}.library", f"{LIBRARY}.capture.runner"} <= names
    homeless = {name for name in graph() if room_of(name) not in ROOMS}
    assert not homeless, "put it into a package, and a package into ROOMS"
    assert {room for room in ROOMS if not any(room_of(n) == room for n in names)} == set()


def test_ops_are_a_leaf() -> None:
    for name, targets in graph().items():
        for target in targets if name.startswith(OPS) else ():
            assert target.startswith(OPS), f"{name} imports {target}"


def test_rooms_import_only_rooms_below() -> None:
    order = {room: number for number, room in enumerate(ROOMS)}
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if order[room_of(target)] > order[room_of(name)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", INNER)
def test_inner_packages_are_in_order(package: str) -> None:
    order = INNER[package]

    def place(module: str) -> int:
        return order.index(module.removeprefix(f"{package}.").split(".")[0])

    inside = {name: targets for name, targets in graph().items() if name.startswith(f"{package}.")}
    wrong = [
        f"{name} imports {target}"
        for name, targets in inside.items()
        for target in targets
        if target.startswith(f"{package}.") and place(target) > place(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """Among the files, for annotations and inside functions too."""
    imports = graph()
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name in imports and name not in done:
            for target in imports[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in imports:
        visit(name, ())


def test_the_order_is_the_drawn_one() -> None:
    """docs/design.md draws the rooms of the library; every arrow it draws points down here."""
    text = (ROOT / "docs" / "design.md").read_text()
    drawn = [line.split()[0] for line in text.split("```")[1].splitlines() if line.strip()]
    rooms = [room.removeprefix(f"{OPS}.").removeprefix(f"{LIBRARY}.") for room in reversed(ROOMS)]
    assert drawn == rooms


@pytest.mark.parametrize("package", OWNERS)
def test_optional_packages_have_one_door(package: str) -> None:
    for file in library_files():
        if any(target.split(".")[0] == package for target in imports_of(file)):
            assert str(file.relative_to(ROOT)) in OWNERS[package], f"{file} imports {package}"


def test_no_environment_variable_in_a_forward_path() -> None:
    for file in library_files():
        if str(file.relative_to(ROOT)) in READS_ENVIRONMENT:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in ("environ", "getenv"), f"{file}:{node.lineno} reads the environment"


def test_no_registry_keyed_by_identity() -> None:
    """`table[id(group)]` has no owner and outlives its key."""
    for file in library_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript):
                keys = [n for n in ast.walk(node.slice) if isinstance(n, ast.Call)]
                assert not any(ast.unparse(key.func) == "id" for key in keys), (
                    f"{file}:{node.lineno}"
                )


# Factories that take the default dtype or the default device where it is not said. A process may
# have set either, and transformers loads models under `torch.device("meta")`.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def unsaid(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each use of a factory that leaves dtype or device to the defaults."""
    calls = {
        id(node.func): {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            if node.attr in FACTORIES and not {"dtype", "device"} <= calls.get(id(node), set()):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where":
            # Of two Python numbers it makes a tensor of the default dtype.
            if isinstance(node.args[1], ast.Constant) and not isinstance(node.args[2], ast.Name):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, a.name) for a in node.names if a.name in FACTORIES)


def test_every_factory_says_its_dtype_and_device() -> None:
    files = [*library_files(), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files
        for line, name in unsaid(ast.parse(file.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text,count",
    [
        ("torch.zeros(3, dtype=d, device=e)", 0),
        ("torch.zeros(3, dtype=d)", 1),
        ("torch.zeros(3, device=e)", 1),
        ("t.new_zeros(3), torch.zeros_like(t)", 0),
        ("make = torch.empty", 1),
        ("from torch import full", 1),
        ("torch.where(mask, 0.0, float('-inf'))", 1),
        ("torch.where(mask, 0.0, t)", 0),
        ("from torch import Tensor", 0),
    ],
)
def test_the_rule_of_factories(text: str, count: int) -> None:
    assert len(list(unsaid(ast.parse(text)))) == count


@pytest.mark.parametrize("part", MAX_LINES)
def test_no_huge_file(part: str) -> None:
    files = library_files() if part == "library" else list((ROOT / part).rglob("*"))
    lines = {
        file.name: len(file.read_text().splitlines())
        for file in files
        if file.suffix in (".py", ".cu", ".cuh", ".h")
    }
    assert not {name: count for name, count in lines.items() if count > MAX_LINES[part]}


def test_import_is_light() -> None:
    """No CUDA context, no optional package, no compiler stack, one registration."""
    script = """
import json, sys
import megamoe_compile, torch
import megamoe_compile.commands.cli
names = ("transformers", "triton", "deep_gemm", "tvm_ffi", "matplotlib", "torch._inductor")
print(json.dumps({
    "loaded": [name for name in names if name in sys.modules],
    "cuda": torch.cuda.is_initialized(),
    "copies": sorted(name for name in sys.modules if name.endswith("custom_ops.library")),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "loaded": [],
        "cuda": False,
        "copies": [f"{OPS}.library"],
    }
    assert done.stderr == ""
