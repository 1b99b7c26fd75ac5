"""`h2o-gguf run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from h2o_gguf.cli.cuts import say_cut
from h2o_gguf.cli.flags import expand_flags
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.interrupt import cancel_on_interrupt
from h2o_gguf.cli.opening import open_model, pinned_spans
from h2o_gguf.cli.options import CacheFlags, ModelFlags, SamplingFlags
from h2o_gguf.cli.prompts import gather_prompt
from h2o_gguf.cli.render import evicted_line, notice, speed
from h2o_gguf.cli.sampling import max_tokens, sampling_options, seed_of
from h2o_gguf.cli.streaming import Printer
from h2o_gguf.cli.streams import well_formed_option
from h2o_gguf.errors import INTERRUPTED, OptionError

if TYPE_CHECKING:
    from h2o_gguf.chat import ChatSession

__all__ = ["run"]

BUDGET = 4096


@expand_flags()
@guarded
def run(
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="PROMPT", show_default=False, callback=well_formed_option, help="The prompt; - is stdin."
        ),
    ] = None,
    *,
    text: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            show_default=False,
            callback=well_formed_option,
            help="The prompt, as an option.",
        ),
    ] = None,
    file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            show_default=False,
            help="Read the prompt from a file; - is stdin.",
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the answer and what it took as JSON.")
    ] = False,
    model: ModelFlags,
    cache: CacheFlags,
    sampling: SamplingFlags,
) -> None:
    """Answer one prompt on stdout.

    Piped stdin goes before a file, a file before the prompt. Without --kv-budget up to 4,096 entries per KV
    head are kept, or what the model allows; the cache stays that size, however long prompt and answer are.
    """
    if raw and system is not None:
        raise OptionError(
            "--raw and --system-prompt contradict each other: a raw prompt has no messages", "raw"
        )
    question = gather_prompt(prompt, text, file)
    with open_model(model, cache, BUDGET) as llm:
        from h2o_gguf.chat import ChatSession
        from h2o_gguf.chat_template import ChatTemplate

        template = ChatTemplate.raw() if raw else ChatTemplate.of(llm)
        if not template.is_own and not raw and system is None:
            template = ChatTemplate.raw()
            notice("this model has no chat template: the prompt is continued as it is")
        session = ChatSession(
            llm,
            system=system,
            sampling=sampling_options(sampling),
            seed=seed_of(sampling),
            max_tokens=max_tokens(sampling),
            pin=pinned_spans(cache),
            template=template,
        )
        _answer(session, question, as_json=as_json, verbose=model.verbose > 0, model_path=str(llm.model_path))


def _answer(session: ChatSession, question: str, *, as_json: bool, verbose: bool, model_path: str) -> None:
    printer = Printer(silent=as_json, trims=not session.template.is_raw)
    with cancel_on_interrupt() as cancel:
        printer.show(lambda progress: session.ask(question, progress=progress, cancel=cancel))
    turn, kv = session.last, session.report()
    assert turn is not None
    if as_json:
        result: dict[str, Any] = {
            "text": printer.text,
            "finish_reason": turn.finish_reason,
            "model": model_path,
            "usage": {
                "prompt_tokens": turn.n_read,
                "completion_tokens": turn.n_written,
                "total_tokens": turn.n_read + turn.n_written,
            },
            "kv": kv.as_dict(),
            "seconds": {"read": round(turn.read_s, 3), "write": round(turn.write_s, 3)},
        }
        sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    if verbose:
        notice(f"read {speed(turn.n_read, turn.read_s)}, wrote {speed(turn.n_written, turn.write_s)}")
    if kv.evicted or verbose:
        notice(evicted_line(kv))
    if turn.finish_reason == "length":
        say_cut(turn, kv)
    if turn.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)
