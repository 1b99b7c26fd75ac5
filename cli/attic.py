"""The flags of the attic, and what they come to for one model and policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from h2o_gguf.attic import LIMIT
from h2o_gguf.cli.flags import FromEnvironment, mark_environment
from h2o_gguf.cli.render import notice, show_bytes
from h2o_gguf.errors import OptionError
from h2o_gguf.models import memory

if TYPE_CHECKING:
    from h2o_gguf.cli.options import CacheFlags

__all__ = ["ATTIC", "AtticFlag", "LimitFlag", "RecallFlag", "TypeFlag", "attic_options", "read_bytes"]

ATTIC = "ram"  # of commands that evict, where nobody says otherwise

AtticFlag = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--attic",
        envvar="H2O_GGUF_ATTIC",
        metavar="ram|disk|off",
        show_default=f"{ATTIC}, where entries are evicted",
        callback=mark_environment,
        help="Where evicted entries stay, so that a question can fetch back what it attends to: in memory, "
        "in a file that ends with the command, or nowhere.",
    ),
]
LimitFlag = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--attic-limit",
        envvar="H2O_GGUF_ATTIC_LIMIT",
        metavar="SIZE",
        show_default=show_bytes(LIMIT),
        callback=mark_environment,
        help="Most bytes of them, such as 512M or 2G; beyond it the least attended to are lost.",
    ),
]
TypeFlag = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--attic-type",
        envvar="H2O_GGUF_ATTIC_TYPE",
        metavar="TYPE",
        show_default="the cache's",
        callback=mark_environment,
        help=f"Type they are kept as: {', '.join(memory.CACHE_TYPES)}.",
    ),
]
RecallFlag = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--recall-every",
        envvar="H2O_GGUF_RECALL_EVERY",
        metavar="N",
        min=0,
        show_default="as often as costs little",
        callback=mark_environment,
        help="Fetch back while writing too, every N tokens; 0: only what is read does.",
    ),
]


def attic_options(cache: CacheFlags, why_never: str) -> dict[str, Any]:
    """The attic's options of H2OLlama.

    why_never : why nothing is ever evicted here; "" where it is. Then there is no attic, and what the
    environment says of one does not count.

    Raises: OptionError, an attic is asked for where there is none to be, or a size is none.
    """
    values: dict[str, Any] = {
        "--attic": cache.attic,
        "--attic-limit": cache.attic_limit,
        "--attic-type": cache.attic_type,
        "--recall-every": cache.recall_every,
    }
    is_off = cache.attic is not None and cache.attic.strip().lower() == "off"
    if why_never or is_off:
        why = why_never or "--attic is off"
        given = [(name, value) for name, value in values.items() if value is not None]
        for name, value in given[is_off:]:
            if not isinstance(value, FromEnvironment):
                raise OptionError(f"{name} is {value}, but {why}: leave {name} out", "attic")
            notice(f"${_variable(name)} is {value}, which does not count: {why}")
        return {"attic": "off"}
    return {
        "attic": ATTIC if cache.attic is None else cache.attic.strip().lower(),
        "attic_limit": None if cache.attic_limit is None else read_bytes(cache.attic_limit, "--attic-limit"),
        "attic_type": cache.attic_type,
        "recall_every": cache.recall_every,
    }


def read_bytes(text: str, name: str) -> int:
    """Bytes, with K, M, G, T or a longer unit behind them; the short ones are powers of 1,024.

    name : of the option.  Raises: OptionError.
    """
    word = text.strip()
    if word[-1:].upper() in ("K", "M", "G", "T"):
        word += "iB"
    try:
        n = int(TypeAdapter(ByteSize).validate_python(word))
    except ValidationError:
        n = 0
    if n < 1:
        must = "it must be bytes, such as 512M, 2G or 800000000"
        raise OptionError(f"{name} is {text!r}: {must}", "attic_limit")
    return n


def _variable(flag: str) -> str:
    return f"H2O_GGUF_{flag[2:].upper().replace('-', '_')}"
