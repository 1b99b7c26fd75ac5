"""Imports point one way: a module imports of its own room and of those it may look into (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"h2o_gguf": "h2o_gguf"} | {name: f"h2o_gguf.{name}" for name in ("bindings", "models", "cli")}

BASICS = {"errors", "view"}
BELOW = {*BASICS, "bindings", "models", "policies"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "view": {"errors"},
    "bindings": BASICS,
    "models": {"errors"},
    "policies": BASICS,
    "engine": BELOW,
    "benchmark": {*BELOW, "engine"},
    "evaluation": {*BELOW, "engine", "benchmark"},
    "explain": {*BELOW, "engine"},
    "chat": {*BELOW, "engine", "explain"},
    "cli": {"errors", "models", "policies", "engine", "benchmark", "evaluation", "explain", "chat"},
}
ROOMS = {
    "errors": "errors",
    "view": "view",
    "observation": "view",
    "rows": "view",
    "chat": "chat",
    "__main__": "cli",
}
LLAMA_CPP = {"h2o_gguf/native.py", "bindings/library.py", "h2o_gguf/benchmark/worker.py"}
NUMPY_ONLY = {"__future__", "numpy", "h2o_gguf"}


def room_of(module: str) -> str | None:
    """None: the package itself, which has its version and where it lies."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return parts[1] if parts[1] in MAY_IMPORT else ROOMS.get(parts[1], "engine")


def sources() -> Iterator[tuple[Path, str, ast.Module]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts])
            yield path, name.removesuffix(".__init__"), ast.parse(path.read_bytes())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            source = node.module or ""
            names = [f"{source}.{alias.name}" for alias in node.names]
            # Of the package itself come either submodules or what it passes on from them.
            yield from names if source == "h2o_gguf" else [source]


def test_rooms_import_only_what_they_may() -> None:
    wrong = [
        f"{name} imports {other}"
        for _, name, tree in sources()
        for other in imported(tree)
        if other.partition(".")[0] == "h2o_gguf"
        and (room := room_of(name)) is not None
        and (target := room_of(other)) not in (None, room)
        and not other.endswith(".__version__")
        and target not in MAY_IMPORT[room]
    ]
    assert not wrong


def test_llama_cpp_is_imported_in_three_places() -> None:
    found = set()
    for path, _, tree in sources():
        called = {
            str(node.args[0].value).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and ast.unparse(node.func).endswith("import_module")
        }
        if "llama_cpp" in called | {name.partition(".")[0] for name in imported(tree)}:
            found.add(path.relative_to(ROOT).as_posix())
    assert found == LLAMA_CPP


def test_cffi_is_named_in_the_bindings_only() -> None:
    named = {
        path.relative_to(ROOT).parts[0]
        for path, _, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "ffi")
        or (isinstance(node, ast.Import | ast.ImportFrom) and "cffi" in ast.unparse(node))
    }
    assert named == {"bindings"}


@pytest.mark.parametrize("path", sorted((ROOT / "h2o_gguf" / "policies").glob("*.py")), ids=lambda p: p.stem)
def test_a_policy_needs_numpy_alone(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported(ast.parse(path.read_bytes()))}
    assert tops - NUMPY_ONLY <= sys.stdlib_module_names
