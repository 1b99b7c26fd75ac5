"""Finds our build of llama.cpp, makes llama_cpp load it, and recognises any other."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from h2o_gguf.bindings.cpu import missing_features
from h2o_gguf.bindings.header import find_header, make_ffi
from h2o_gguf.errors import LibraryError

__all__ = ["ffi", "lib", "library_path", "point_llama_cpp_here", "version"]

LLAMA_CPP_VERSION = "0.3.36"
OURS = "h2og_version"
NAMES = {"darwin": "libllama.dylib", "win32": "llama.dll"}
FILE = NAMES.get(sys.platform, "libllama.so")

ffi = make_ffi(find_header())


def _vendored() -> list[Path]:
    """Folders that may hold the llama_cpp package this one was built with (native/install.cmake says why)."""
    import h2o_gguf

    return [Path(p) / "_vendor" for p in h2o_gguf.__path__]


def _candidates() -> list[Path]:
    chosen = os.environ.get("H2O_GGUF_LIB_PATH")
    if chosen:
        return [Path(chosen)]
    folders = [folder / "llama_cpp" / "lib" for folder in _vendored()]
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        folders.append(Path(os.environ["LLAMA_CPP_LIB_PATH"]))
    return folders


def library_path() -> Path:
    """Path of our libllama.

    Raises: LibraryError, it is not there.
    """
    for folder in _candidates():
        if (folder / FILE).is_file():
            return folder / FILE
    looked = ", ".join(str(folder) for folder in _candidates())
    raise LibraryError(
        f"the native runtime ({FILE}) is missing; looked in {looked}: "
        "install the package with its runtime (`make setup`, or `pip install .`)"
    )


def point_llama_cpp_here() -> None:
    """Make an `import llama_cpp` that is still to come load our library, if we have one.

    Whoever imports llama_cpp before h2o_gguf has loaded a library already; lib() tells.
    """
    if "llama_cpp" not in sys.modules:
        with contextlib.suppress(LibraryError):
            os.environ["LLAMA_CPP_LIB_PATH"] = str(library_path().parent)


def _load_llama_cpp(folder: Path) -> Path:
    """Import llama_cpp on our library; return the path of the library it really uses."""
    point_llama_cpp_here()
    vendored = [str(path) for path in _vendored() if path.is_dir()]
    sys.path[:0] = vendored  # before another version that may be installed
    try:
        module: Any = importlib.import_module("llama_cpp")
        low: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise LibraryError(f"llama-cpp-python {LLAMA_CPP_VERSION} cannot be imported: {error}") from error
    finally:
        for path in vendored:
            sys.path.remove(path)
    if module.__version__ != LLAMA_CPP_VERSION:
        raise LibraryError(
            f"llama-cpp-python {module.__version__} is installed, this runtime needs {LLAMA_CPP_VERSION}: "
            f"pip install llama-cpp-python=={LLAMA_CPP_VERSION}"
        )
    loaded = Path(low._lib._name)
    if not hasattr(low._lib, OURS):
        raise LibraryError(
            f"llama_cpp was imported before h2o_gguf and has loaded a stock llama.cpp ({loaded}): "
            f"import h2o_gguf first, or set LLAMA_CPP_LIB_PATH={folder}"
        )
    return loaded


@lru_cache(maxsize=1)
def lib() -> Any:
    """The native library, loaded and checked on the first call.

    Raises: LibraryError, it is missing, compiled for another CPU, a stock build of llama.cpp, or of another
        version than this package.
    """
    path = library_path()
    missing = missing_features(path.parent)
    if missing:
        raise LibraryError(
            f"the native runtime {path} uses instructions that this CPU lacks ({', '.join(missing)}): "
            "build it on this machine (`make setup`, or `CMAKE_ARGS=-DGGML_NATIVE=ON pip install .`)"
        )
    try:
        probe = ffi.dlopen(str(path))
    except OSError as error:
        raise LibraryError(f"the native runtime {path} cannot be loaded: {error}") from error
    if not hasattr(probe, OURS):
        raise LibraryError(
            f"{path} is a stock llama.cpp without eviction: build this package's runtime (`make setup`)"
        )
    loaded = _load_llama_cpp(path.parent)
    library = ffi.dlopen(str(loaded))
    found, wanted = _text(library.h2og_version()), expected_version()
    if found != wanted:
        raise LibraryError(
            f"the native runtime {loaded} is version {found}, this package needs {wanted}: run `make setup`"
        )
    return library


def expected_version() -> str:
    """What h2og_version() of a library that belongs to this package returns."""
    import h2o_gguf

    return f"{h2o_gguf.__version__} (llama-cpp-python {LLAMA_CPP_VERSION})"


def version() -> str:
    """Version of the loaded native library."""
    return _text(lib().h2og_version())


def _text(value: Any) -> str:
    return bytes(ffi.string(value)).decode("utf-8", "replace")


def last_error() -> str:
    """Text of the last native error on this thread."""
    return _text(lib().h2og_last_error())
