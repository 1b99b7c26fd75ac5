"""What a result depends on beside its cell: the text of the code behind it, and the native libraries."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from h2o_gguf.policies import is_policy

__all__ = ["POLICIES", "code_digest", "policy_key", "runtime_digest"]

OURS = "h2o_gguf"
POLICIES = "h2o_gguf.policies"


@lru_cache(maxsize=64)
def code_digest(module: str, leave_out: str = "") -> str:
    """A hash of a module's text and of all it imports, directly or not, from h2o_gguf and its own package.

    leave_out : a package that is not followed. A module without a file (a notebook's) has no text.
    """
    packages = {OURS, module.partition(".")[0]}
    todo, texts = [module], dict[str, bytes]()
    while todo:
        name = todo.pop()
        is_left_out = bool(leave_out) and f"{name}.".startswith(f"{leave_out}.")
        if name in texts or name.partition(".")[0] not in packages or is_left_out:
            continue
        path = _file(name)
        texts[name] = path.read_bytes() if path is not None else b""
        todo += _imported(name, texts[name])
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(name.encode() + b"\0" + texts[name])
    return digest.hexdigest()


def policy_key(policy: Any) -> str:
    """What a policy is and does, its knobs and the code behind it: a changed one is measured again."""
    kind = type(policy)
    if is_dataclass(policy):
        knobs = {field.name: getattr(policy, field.name) for field in fields(policy)}
    else:
        knobs = dict(vars(policy))
    words = {name: policy_key(value) if is_policy(value) else repr(value) for name, value in knobs.items()}
    return f"{kind.__qualname__} {words} {code_digest(kind.__module__)[:16]}"


@lru_cache(maxsize=4)
def runtime_digest(folder: Path) -> str:
    """A hash of the shared libraries in a folder, every byte: which of them are loaded, the CPU decides."""
    digest = hashlib.sha256()
    for path in sorted({path.resolve() for path in folder.glob("*") if _is_library(path)}):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _is_library(path: Path) -> bool:
    return not {".so", ".dylib", ".dll"}.isdisjoint(path.suffixes)


def _file(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # no such module, or one without a specification
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _imported(module: str, text: bytes) -> Iterator[str]:
    """Names of the modules that a module's text names, functions and type hints included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            yield from (_home(source, alias.name) for alias in node.names)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    path = _file(module)
    is_package = path is not None and path.name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def _home(module: str, name: str) -> str:
    """The module that `from module import name` gets it from, past packages that pass names on."""
    path = _file(module)
    if path is None or path.name != "__init__.py":
        return module
    if _file(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    return _passed_on(module).get(name, module)


@lru_cache(maxsize=256)
def _passed_on(package: str) -> dict[str, str]:
    path = _file(package)
    tree = ast.parse(path.read_bytes() if path is not None else b"")
    nodes: Sequence[ast.ImportFrom] = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: _absolute(package, node) for node in nodes for alias in node.names}
