"""What a chat does with lines that begin with a slash."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from h2o_gguf.cli.chat_settings import change_setting, show_settings
from h2o_gguf.cli.conversation import Conversation
from h2o_gguf.cli.interrupt import cancel_on_interrupt
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import complain, kv_lines, notice, stderr
from h2o_gguf.cli.streams import well_formed
from h2o_gguf.cli.why import check_page, show, write_page
from h2o_gguf.errors import Cancelled, H2OError

__all__ = ["COMMANDS", "LEAVE", "handle"]

LEAVE = "leave"
MISSING = {
    "/save": "chats are in no file; H2OLlama.save_state() in Python saves what the cache holds",
    "/load": "chats are in no file; H2OLlama.load_state() in Python loads what save_state() saved",
}


@dataclass(frozen=True)
class Command:
    """One command.  usage : its argument.  does : in words.  run : called with the argument."""

    usage: str
    does: str
    run: Callable[[Conversation, str], str | None]


def handle(conversation: Conversation, line: str) -> str | None:
    """Obey a line that begins with a slash; LEAVE when the chat is over."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name.lower()) or COMMANDS.get(ALIASES.get(name.lower(), ""))
    if command is None:
        _unknown(name)
        return None
    argument = argument.strip()
    if argument and not command.usage:
        notice(f"{name} takes no argument, {argument!r} is unknown; nothing was done")
        return None
    try:
        return command.run(conversation, argument)
    except H2OError as error:
        complain(str(error))
        return None


def _unknown(name: str) -> None:
    if name in MISSING:
        notice(f"there is no {name}, nothing was done: {MISSING[name]}")
        return
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    notice(f"unknown command {name}: {hint}/help lists them; a message may begin with a slash after a space")


def _help(conversation: Conversation, _: str) -> None:
    lines = [(f"{name} {command.usage}".strip(), command.does) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in lines)
    out = stderr()
    for usage, does in lines:
        out.print(f"{usage:<{width}}  {does}", markup=False)
    out.print('""" begins and ends a message of many lines; pasted lines stay together', markup=False)
    out.print("Alt-Enter or Ctrl-J begins a new line, Tab completes commands, Up brings back", markup=False)
    out.print("what was typed; Ctrl-C stops an answer, Ctrl-D leaves", markup=False)


def _exit(conversation: Conversation, _: str) -> str:
    return LEAVE


def _clear(conversation: Conversation, _: str) -> None:
    conversation.session.clear()
    notice("forgotten; the system message stays" if conversation.session.system else "forgotten")


def _regen(conversation: Conversation, _: str) -> None:
    conversation.again()


def _read(conversation: Conversation, argument: str) -> None:
    if not argument:
        waiting = ", ".join(each.name for each in conversation.session.attachments)
        conversation.session.drop_attachments()
        notice(f"{waiting} will not be sent" if waiting else "/read FILE: which file?")
        return
    attachment = conversation.session.read_file(_path(argument))
    replaced = f", {attachment.n_replaced:,} places were no text" if attachment.n_replaced else ""
    notice(f"{attachment.name} ({len(attachment.text):,} characters{replaced}) goes with your next message")


def _path(argument: str) -> str:
    """The argument without quotes around it, and with ~ for the home folder."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    is_quoted = argument[:1] in "\"'" and len(words) == 1
    return os.path.expanduser(words[0] if is_quoted else argument)


def _system(conversation: Conversation, argument: str) -> None:
    session = conversation.session
    if not argument:
        notice(session.system or "there is no system message; /system TEXT sets one")
        return
    session.set_system(well_formed(argument))
    again = "; the conversation is read again with the next message" if len(session.messages) > 1 else ""
    notice(f"the system message is set and never evicted{again}")


def _set(conversation: Conversation, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not value.strip():
        for line in show_settings(conversation.session, name):
            stderr().print(line, markup=False)
        return
    notice(change_setting(conversation.session, name, value.strip()))


def _kv(conversation: Conversation, _: str) -> None:
    session = conversation.session
    out = stderr()
    for line in kv_lines(session.report()):
        out.print(line, markup=False)
    n = len(session.messages)
    messages = f"{n} {'message' if n == 1 else 'messages'}"
    out.print(
        f"this conversation: {messages}, {session.n_tokens_read:,} tokens read, "
        f"{session.n_tokens_written:,} written",
        markup=False,
    )


def _why(conversation: Conversation, argument: str) -> None:
    page = Path(_path(argument)) if argument else None
    if page is not None:
        check_page(page)
    try:
        with cancel_on_interrupt() as cancel, LateBar("reading it again") as bar:
            explanation = conversation.session.explain(progress=bar.update, cancel=cancel)
    except Cancelled:
        notice("stopped; the conversation goes on")
        return
    if page is None:
        show(explanation, stderr())
    else:
        write_page(explanation, page)


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/exit": Command("", "leave", _exit),
    "/clear": Command("", "forget the conversation, keep the system message", _clear),
    "/regen": Command("", "another answer to the last message", _regen),
    "/read": Command(
        "FILE", "put a text file of any length before your next message; alone: take it back", _read
    ),
    "/system": Command("TEXT", "set the system message", _system),
    "/set": Command("NAME VALUE", "change how answers are drawn; alone: show the settings", _set),
    "/why": Command(
        "FILE.html", "what was forgotten, what the last answer looked at (reads all twice); alone: here", _why
    ),
    "/kv": Command("", "how full the KV cache is, and what has come and gone", _kv),
}
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "/regenerate": "/regen"}
