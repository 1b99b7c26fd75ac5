"""`h2o-gguf chat`: a conversation without end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.chat_commands import COMMANDS, LEAVE, handle
from h2o_gguf.cli.chat_input import LineInput, MessageInput, TerminalInput
from h2o_gguf.cli.conversation import Conversation
from h2o_gguf.cli.flags import expand_flags
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.history import history_file
from h2o_gguf.cli.interrupt import no_echo
from h2o_gguf.cli.opening import open_model, pinned_spans
from h2o_gguf.cli.options import CacheFlags, ModelFlags, SamplingFlags
from h2o_gguf.cli.prompts import read_text
from h2o_gguf.cli.render import notice, show_bytes
from h2o_gguf.cli.sampling import max_tokens, sampling_options, seed_of
from h2o_gguf.cli.streams import well_formed_option
from h2o_gguf.errors import OptionError

__all__ = ["chat"]

BUDGET = 2048


@expand_flags(predict=2048)
@guarded
def chat(
    *,
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            show_default=False,
            callback=well_formed_option,
            help="First message.",
        ),
    ] = None,
    file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--file", "-f", metavar="FILE", show_default=False, help="Read the first message from a file."
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
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history", help="Do not keep what is typed; $H2O_GGUF_HISTORY names another file for it."
        ),
    ] = False,
    model: ModelFlags,
    cache: CacheFlags,
    sampling: SamplingFlags,
) -> None:
    """Talk to a model, for as long as you like; /help lists what it understands.

    Without --kv-budget 2,048 entries per KV head are kept, or what the model allows; when they are used up,
    the policy chooses what leaves, never the system message; each message fetches back what it attends to.
    With stdin piped each line is a message.
    """
    if file == "-":
        raise OptionError("a chat reads its messages from stdin; -f must name a file", "file")
    first = [text for text in (None if file is None else read_text(file), prompt) if text]
    is_terminal = sys.stdin.isatty()
    with open_model(model, cache, BUDGET) as llm:
        from h2o_gguf.chat import ChatSession

        session = ChatSession(
            llm,
            system=system,
            sampling=sampling_options(sampling),
            seed=seed_of(sampling),
            max_tokens=max_tokens(sampling),
            pin=pinned_spans(cache),
            records=True,
        )
        messages: MessageInput = LineInput()
        if is_terminal:
            messages = TerminalInput(history_file(not no_history), list(COMMANDS))
            kv = session.report()
            notice(
                f"{Path(llm.model_path).stem}: {kv.policy}, {kv.budget:,} entries per KV head, "
                f"{show_bytes(kv.bytes)} of KV cache. /help lists what you can do."
            )
        if not session.template.is_own:
            notice("this model has no chat template; a plain one is used (a base model may ramble)")
        sets_off = is_terminal and sys.stdout.isatty()
        conversation = Conversation(session, sets_off=sets_off, verbose=model.verbose > 0)
        if first:
            conversation.say("\n\n".join(first))
        while (message := messages.read()) is not None:
            if message.is_command:
                with no_echo():
                    done = handle(conversation, message.text)
                if done == LEAVE:
                    return
            elif message.text.strip():
                conversation.say(message.text)
