"""Where the messages of a chat come from: a person at a terminal, or lines of stdin."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from h2o_gguf.cli.history import open_history
from h2o_gguf.cli.render import notice
from h2o_gguf.cli.streams import well_formed

__all__ = ["LineInput", "Message", "MessageInput", "TerminalInput", "is_open_quote", "parse"]

QUOTES = '"""'
HINT = "Ctrl-D or /exit leaves; Ctrl-C stops an answer."


@dataclass(frozen=True)
class Message:
    """What was typed.  is_command : the text is for the chat, not for the model."""

    text: str
    is_command: bool = False


class MessageInput(Protocol):
    """A source of messages."""

    def read(self) -> Message | None:
        """The next message; None at the end."""
        ...


def is_open_quote(text: str) -> bool:
    """Whether the text begins with triple quotes that are not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def parse(typed: str) -> Message:
    """The message, without triple quotes; a command is one unquoted line that begins with a slash.

    What is no UTF-8 in a message becomes U+FFFD, which is said; a command may name a file by it.
    """
    text = typed.strip()
    if typed.startswith("/") and "\n" not in text:
        return Message(text, is_command=True)
    if text != well_formed(text):
        text = well_formed(text)
        notice("the message is not all UTF-8; what is not was read as U+FFFD")
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].removesuffix(QUOTES).strip("\n")
    return Message(text)


class LineInput:
    """One message a line; triple quotes hold several lines together."""

    def read(self) -> Message | None:
        """The next message; None at the end."""
        line = sys.stdin.readline()
        if not line:
            return None
        while is_open_quote(line):
            more = sys.stdin.readline()
            if not more:
                notice("the triple quotes are never closed; what they hold is sent as it is")
                break
            line += more
        return parse(line)


class TerminalInput:
    """A line editor: pasted lines and lines in triple quotes stay together; the arrows bring back history."""

    def __init__(self, history: Path | None, commands: list[str]) -> None:
        """commands : what Tab completes."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output

        # With stdout piped the prompt must not end up among the answers.
        output = None if sys.stdout.isatty() else create_output(stdout=sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history),
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            multiline=True,
            enable_suspend=True,
            key_bindings=_keys(),
            output=output,
            prompt_continuation="  ",
        )
        _keep_lines_apart(self._session.input)

    def read(self) -> Message | None:
        """The next message; None at Ctrl-D."""
        while True:
            try:
                return parse(self._session.prompt("> "))
            except KeyboardInterrupt:
                notice(HINT)
            except EOFError:
                return None


def _keep_lines_apart(terminal: Any) -> None:
    """What was typed before there was an editor, where the terminal made Ctrl-J of Enter, is lines again."""
    from prompt_toolkit.input.typeahead import store_typeahead
    from prompt_toolkit.keys import Keys

    with terminal.raw_mode():
        typed = terminal.read_keys()
    for press in typed:
        if press.key == Keys.ControlJ:
            press.key = Keys.Enter
    store_typeahead(terminal, typed)


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        if is_open_quote(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def drop(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
