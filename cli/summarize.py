"""`h2o-gguf summarize`: a document of any length, read once."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.cuts import say_cut
from h2o_gguf.cli.flags import expand_flags
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.interrupt import cancel_on_interrupt
from h2o_gguf.cli.opening import open_model, pinned_spans
from h2o_gguf.cli.options import CacheFlags, ModelFlags, SamplingFlags
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.prompts import open_document, warn_replaced
from h2o_gguf.cli.render import evicted_line, notice, show_bytes, speed, where
from h2o_gguf.cli.sampling import max_tokens, sampling_options, seed_of
from h2o_gguf.cli.streaming import Printer
from h2o_gguf.cli.streams import well_formed_option
from h2o_gguf.errors import INTERRUPTED

__all__ = ["summarize"]

BUDGET = 1024


@expand_flags(temp=0.0, repeat_penalty=1.1, predict=512)
@guarded
def summarize(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The text; - is stdin.")],
    *,
    question: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            callback=well_formed_option,
            show_default="a summary",
            help="What to answer at the end of the document.",
        ),
    ] = None,
    instruction: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--instruction",
            metavar="TEXT",
            callback=well_formed_option,
            show_default="to read it",
            help="What to say before the document.",
        ),
    ] = None,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--system-prompt",
            "-sys",
            metavar="TEXT",
            callback=well_formed_option,
            show_default=False,
            help="System message; never evicted.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the answer and what it took as JSON.")
    ] = False,
    model: ModelFlags,
    cache: CacheFlags,
    sampling: SamplingFlags,
) -> None:
    """Read a text of any length once, in a KV cache that never grows, and summarize it on stdout.

    The instruction before the text and the question after it are never evicted. Without --kv-budget 1,024
    entries per KV head are kept, or what the model allows; what was evicted stays in the attic, and the
    question fetches back what it attends to.
    """
    with open_document(file) as document, open_model(model, cache, BUDGET) as llm:
        from h2o_gguf import summarize as library

        printer = Printer(silent=as_json)
        with cancel_on_interrupt() as cancel, LateBar("reading") as bar:

            def write(piece: str) -> None:
                bar.close()
                printer.write(piece)

            summary = library.summarize(
                llm,
                document,
                instruction=library.INSTRUCTION if instruction is None else instruction,
                question=library.QUESTION if question is None else question,
                system=system,
                sampling=sampling_options(sampling),
                seed=seed_of(sampling),
                max_tokens=max_tokens(sampling),
                pin=pinned_spans(cache),
                progress=lambda p: bar.update(p.n_read, p.n_total),
                on_text=write,
                cancel=cancel,
            )
        printer.end()
        warn_replaced(document)
        if as_json:
            result = {
                "text": summary.text,
                "finish_reason": summary.finish_reason,
                "model": str(llm.model_path),
                "usage": {
                    "document_tokens": summary.n_document,
                    "prompt_tokens": summary.n_read,
                    "completion_tokens": summary.n_written,
                    "total_tokens": summary.n_read + summary.n_written,
                },
                "replaced": summary.n_replaced,
                "kv": summary.kv.as_dict(),
                "seconds": {"read": round(summary.read_s, 3), "write": round(summary.write_s, 3)},
            }
            sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        notice(
            f"read {speed(summary.n_read, summary.read_s)}, wrote {speed(summary.n_written, summary.write_s)}"
        )
        kept = summary.kv.attic
        attic = f", the attic {show_bytes(kept.bytes)} {where(kept)}" if kept is not None else ""
        notice(f"{evicted_line(summary.kv)}; the KV cache takes {show_bytes(summary.kv.bytes)}{attic}")
        if summary.finish_reason == "length":
            say_cut(summary, summary.kv)
        if summary.finish_reason == "cancelled":
            raise typer.Exit(INTERRUPTED)
