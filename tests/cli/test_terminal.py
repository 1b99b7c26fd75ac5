"""The chat as a person sees it, in a real terminal, with a real model."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from cli_harness import COMMAND, PROMPT, OpenTerminal, Terminal

LONG = "Tell me a very long story about the sea, with a hundred chapters."


def start(terminal: OpenTerminal, model: Path, *arguments: object, **extra: str) -> Terminal:
    chat = terminal("chat", "-m", model, "--seed", 1, "--kv-budget", 512, "-n", 200, *arguments, **extra)
    chat.wait(PROMPT)
    return chat


def test_three_pasted_lines_are_one_message(terminal: OpenTerminal, model: Path, home: Path) -> None:
    chat = start(terminal, model, "-n", 5)
    chat.paste("The fox is red.\nThe sea is blue.\nWhat colour is the sea?")
    chat.wait("What colour is the sea")
    chat.type("Enter")
    chat.wait("cut at 5 tokens|" + PROMPT)
    chat.wait(PROMPT)
    chat.enter("/kv")
    chat.wait("conversation: 2 messages")
    assert "+The fox is red.\n+The sea is blue.\n+What colour is the sea?\n" in (home / "history").read_text()


def test_ctrl_c_stops_the_answer_keeps_it_and_the_next_turn_works(
    terminal: OpenTerminal, model: Path
) -> None:
    chat = start(terminal, model)
    chat.enter(LONG)
    chat.wait(r"chapters\.\n\w+")
    chat.type("C-c")
    screen = chat.wait("stopped; what was said is kept")
    assert "^C" not in screen
    chat.wait(PROMPT)
    chat.enter("/set predict 5")
    chat.wait("predict is 5")
    chat.enter("Thank you.")
    chat.wait(r"Thank you\.\n\w+[\s\S]*" + PROMPT)
    chat.enter("/kv")
    chat.wait("conversation: 4 messages")


def test_lines_typed_ahead_are_sent_one_by_one_in_order(terminal: OpenTerminal, model: Path) -> None:
    chat = terminal("chat", "-m", model, "--seed", 1, "--kv-budget", 512, "-n", 30)
    chat.enter("/set top_k 7")  # while the model loads
    chat.enter(LONG)
    chat.wait(r"top_k is 7[\s\S]*chapters\.\n\w+")
    for line in ("/set top_k 8", "/kx", "Thank you.", "/kv"):  # while it answers
        chat.enter(line)
    chat.type("C-d")
    screen = chat.wait("EXIT 0")
    assert re.search(r"top_k is 8[\s\S]*unknown command /kx[\s\S]*^> Thank you\.\n\w+", screen, re.M)
    assert "conversation: 4 messages" in screen


def test_lines_typed_while_a_command_works_are_read_after_it(terminal: OpenTerminal, model: Path) -> None:
    chat = start(terminal, model)
    chat.enter(LONG)
    chat.wait(r"cut at 200 tokens[\s\S]*" + PROMPT)
    chat.enter("/why")
    chat.wait(r"^> /why\n")
    time.sleep(0.5)
    assert not re.search(PROMPT, chat.screen(), re.MULTILINE)  # the text is read twice again, for seconds
    chat.enter("/set top_k 9")
    chat.enter("/set top_k 8")
    before, after = chat.wait(r"top_k is 8[\s\S]*" + PROMPT).split("a full cache would have used", 1)
    assert "top_k" not in before
    assert re.search(r"^> /set top_k 9\n.*top_k is 9\n> /set top_k 8\n", after, re.M)


def test_ctrl_d_leaves_with_0(terminal: OpenTerminal, model: Path) -> None:
    chat = start(terminal, model)
    chat.type("C-d")
    chat.wait("EXIT 0")


def test_ctrl_c_at_an_empty_prompt_gives_a_hint_and_drops_a_started_line(
    terminal: OpenTerminal, model: Path
) -> None:
    chat = start(terminal, model)
    chat.type("C-c")
    chat.wait("Ctrl-D or /exit leaves")
    chat.type("half a line", "C-c")
    chat.wait(PROMPT)
    chat.enter("/exit")
    screen = chat.wait("EXIT 0")
    assert "half a line" not in screen


def test_triple_quotes_hold_lines_together(terminal: OpenTerminal, model: Path, home: Path) -> None:
    chat = start(terminal, model, "-n", 3)
    for line in ('"""one', "two", 'three"""'):
        chat.enter(line)
        time.sleep(0.2)
    chat.wait("cut at 3 tokens|" + PROMPT)
    chat.enter("/kv")
    chat.wait("conversation: 2 messages")
    assert '+"""one\n+two\n+three"""\n' in (home / "history").read_text()


def test_history_comes_back_with_the_arrow_and_can_be_switched_off(
    terminal: OpenTerminal, model: Path, home: Path
) -> None:
    chat = start(terminal, model)
    chat.enter("/set top_k 17")
    chat.wait("top_k is 17")
    chat.type("Up")
    chat.wait(r"^> /set top_k 17\Z")
    assert (home / "history").stat().st_mode & 0o077 == 0
    for arguments, extra in ((("--no-history",), {}), ((), {"H2O_GGUF_HISTORY": ""})):
        (home / "history").unlink(missing_ok=True)
        chat = start(terminal, model, *arguments, **extra)
        chat.enter("/set top_k 18")
        chat.wait("top_k is 18")
        assert not (home / "history").exists()


def test_an_unknown_command_is_answered_and_never_sent(terminal: OpenTerminal, model: Path) -> None:
    chat = start(terminal, model)
    chat.enter("/reed notes.txt")
    chat.wait("unknown command /reed: did you mean /read")
    chat.enter("/save chat.bin")
    chat.wait("there is no /save")
    chat.enter("/kv")
    chat.wait("conversation: 0 messages")


def test_kv_draws_how_full_the_cache_is(terminal: OpenTerminal, model: Path) -> None:
    chat = start(terminal, model, "-n", 5)
    chat.enter("Hello there!")
    chat.wait(r"Hello there!\n\w+[\s\S]*" + PROMPT)
    chat.enter("/kv")
    screen = chat.wait("conversation:")
    assert "█" in screen and "░" in screen
    assert "of 512 entries per KV head" in screen


def test_a_person_is_offered_the_default_model(terminal: OpenTerminal) -> None:
    chat = terminal("chat")
    chat.wait(r"Fetch it \(93\.8 MiB, Apache-2\.0\)\? \[Y/n\]")
    chat.enter("n")
    chat.wait("EXIT 3")


def test_run_stops_at_ctrl_c_with_130_and_keeps_what_was_said(terminal: OpenTerminal, model: Path) -> None:
    run = terminal("run", "-m", model, "-p", LONG, "--kv-budget", 512, "-n", 500)
    run.wait(r"\w")
    run.type("C-c")
    screen = run.wait("EXIT 130")
    assert "Traceback" not in screen


@pytest.mark.parametrize("command", [("run", "-"), ("summarize", "-")])
def test_one_ctrl_d_ends_a_typed_text(terminal: OpenTerminal, model: Path, command: tuple[str, ...]) -> None:
    typing = terminal(*command, "-m", model, "--kv-budget", 512, "-n", 3)
    typing.enter("The fox is red.")
    typing.type("C-d")
    typing.wait("EXIT 0")


def test_ctrl_z_suspends_a_chat_and_it_goes_on(terminal: OpenTerminal, model: Path) -> None:
    line = shlex.join([*COMMAND, "chat", "-m", str(model), "--kv-budget", "512", "-n", "3"])
    shell = terminal(command=["bash", "--norc"])
    shell.enter(line)
    shell.wait(PROMPT)
    shell.type("C-z")
    shell.wait(r"Stopped[\s\S]*[#$] ?\Z")
    shell.enter("fg")
    shell.wait(PROMPT)
    shell.enter("Hello")
    shell.wait("cut at 3 tokens")
    shell.wait(PROMPT)
    shell.type("C-d")
    shell.wait(r"[#$] ?\Z")
