"""The C declarations, read from the one copy of them: h2og.h."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

from h2o_gguf.errors import LibraryError

__all__ = ["find_header", "make_ffi"]

BEGIN, END = "// cffi: begin", "// cffi: end"


def find_header() -> Path:
    """Path of h2og.h: in the installed package, or beside the sources of a checkout.

    Raises: LibraryError, in neither place.
    """
    import h2o_gguf

    roots = [Path(p) for p in h2o_gguf.__path__]
    candidates = [root / "include" / "h2og.h" for root in roots]
    candidates += [root.parent / "native" / "include" / "h2og.h" for root in roots]
    for path in candidates:
        if path.is_file():
            return path
    looked = ", ".join(map(str, candidates))
    raise LibraryError(f"h2og.h is missing from the installed package; looked for {looked}: install it again")


def make_ffi(header: Path) -> FFI:
    """Return an FFI that knows the marked block of the header."""
    block = header.read_text(encoding="utf-8").split(BEGIN, 1)[1].split(END, 1)[0]
    ffi = FFI()
    ffi.cdef("struct llama_context;\n" + block.replace("H2OG_API ", ""))
    return ffi
