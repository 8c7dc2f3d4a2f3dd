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

# A module imports only modules of lower levels. A module that is not named here is above them all.
LEVELS = {
    "presets": 0,
    "config": 1,
    "capability": 2,
    "weights": 2,
    "backends": 3,
    "agreement": 0,
    "step_settings": 1,
    "step_plan": 2,
    "parallel": 3,
    "paths": 4,
    "context": 5,
    "module": 6,
    "watched": 0,
    "capture_report": 0,
    "graph_outputs": 0,
    "graph": 7,
}
# The only files that may import these, at whatever level.
OWNERS = {
    "deep_gemm": {"custom_ops/deep_gemm.py"},
    "tvm_ffi": {"custom_ops/deep_gemm.py"},
    "matplotlib": {"megamoe_compile/bench_report.py"},
}
# Files whose code runs at construction or as a command, and may read the environment.
READS_ENVIRONMENT = {
    "custom_ops/cuda_build.py",
    "custom_ops/deep_gemm.py",
    "custom_ops/deep_gemm_check.py",
    "custom_ops/symmetric.py",
    "megamoe_compile/decode.py",
    "megamoe_compile/decode_ranks.py",
    "megamoe_compile/doctor.py",
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


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imports_of(file: Path) -> Iterator[str]:
    """Dotted names that `file` imports anywhere, but for annotations only."""
    tree = ast.parse(file.read_text())
    skipped = type_checking_nodes(tree)
    package = name_of(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
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


def level(module: str) -> int:
    parts = module.removeprefix(LIBRARY).strip(".").split(".")
    return LEVELS.get(parts[0], max(LEVELS.values()) + 1)


def test_the_files_are_found() -> None:
    names = set(map(name_of, library_files()))
    assert {LIBRARY, f"{OPS}.library", f"{LIBRARY}.graph"} <= names
    known = {name.split(".")[1] for name in names if name.count(".") == 1}
    assert set(LEVELS) - {"backends"} <= known, "LEVELS names a module that is gone"


def test_ops_are_a_leaf() -> None:
    for file in library_files():
        for target in imports_of(file) if name_of(file).startswith(OPS) else ():
            inside = target == LIBRARY or target.startswith(f"{LIBRARY}.")
            assert not inside or target.startswith(OPS), f"{file} imports {target}"


def test_library_imports_point_down() -> None:
    wrong = [
        f"{name_of(file)} (level {level(name_of(file))}) imports {target} (level {level(target)})"
        for file in library_files()
        if not name_of(file).startswith(OPS) and file.name != "__init__.py"
        for target in imports_of(file)
        if target.startswith(f"{LIBRARY}.")
        and not target.startswith(OPS)
        and level(name_of(file)) <= max(LEVELS.values())
        and level(target) >= level(name_of(file))
        and (name_of(file), target) != (f"{LIBRARY}.config", f"{LIBRARY}.hf_config")  # at the call
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """Also for what LEVELS does not name, and for imports inside functions."""
    graph = {name_of(file): set(imports_of(file)) for file in library_files()}
    graph.pop(LIBRARY)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name in graph and name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


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
import megamoe_compile.cli
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
