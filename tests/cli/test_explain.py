"""`h2o-gguf explain` and /why with a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_harness import RunCli, assert_refused

SMALL = ("--kv-budget", "160", "-ub", "32", "-n", "12")


@pytest.fixture
def text(home: Path) -> Path:
    path = home / "text.txt"
    path.write_text(
        "".join(f"Line {i} says that {i} and {i} are {2 * i}.\n" for i in range(30)) + "😀\x1b[1m\n",
        encoding="utf-8",
    )
    return path


def test_the_view_goes_to_stdout_without_colours(cli: RunCli, model: Path, text: Path) -> None:
    done = cli("explain", model, "-f", text, "-p", "What does line 3 say?", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "h2o+, budget 160: how much of each line is held, over 30 layers of 3 KV heads"
    )
    held = {line[5:]: line[:4] for line in lines if re.match(r" *\d+% ", line)}
    assert held["Read the following document. You will be asked about it at its end."] == "100%"  # pinned
    assert held["What does line 3 say?<|im_end|>"] == "100%"
    assert int(held["Line 9 says that 9 and 9 are 18."].rstrip("%")) < 100
    assert "😀␛[1m" in held
    assert "kept entries the answer looked at" in done.stdout
    assert re.search(r"evicted entries a full cache would have used, \d+\.\d% of its attention", done.stdout)


def test_what_the_question_fetched_back_is_listed_unless_there_is_no_attic(
    cli: RunCli, model: Path, text: Path
) -> None:
    arguments = ("explain", model, "-f", text, "-p", "What does line 3 say?", *SMALL)
    title = "entries that were evicted and fetched back"
    assert re.search(rf"{title}.*\n +\d+\.\d\d% ", cli(*arguments).stdout)
    without = cli(*arguments, "--attic", "off")
    assert without.returncode == 0 and title not in without.stdout


def test_a_page_is_written_and_the_answer_alone_goes_to_stdout(
    cli: RunCli, model: Path, text: Path, home: Path
) -> None:
    arguments = ("-f", text, "-p", "What does line 3 say?", *SMALL)
    done = cli("explain", "-m", model, *arguments, "--out", "why.html")
    summary = cli("summarize", text, "-m", model, "-p", "What does line 3 say?", *SMALL)  # the same reading
    assert done.returncode == 0, done.stderr
    assert done.stdout == summary.stdout
    page = (home / "why.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "Line 9" not in done.stdout
    assert not re.search(
        r"(src|href)=|https?:|@import|url\(", page.split('<script type="application/json"')[0]
    )
    assert "why.html (" in done.stderr


def test_what_cannot_be_explained_is_refused(cli: RunCli, model: Path, text: Path) -> None:
    assert_refused(cli("explain", model, "-f", text, "--policy", "none"), 2, "nothing is ever evicted")
    assert_refused(cli("explain", model, "-m", model, "-f", text), 2, "the model is given twice")
    assert_refused(cli("explain", model), 2, "--file")
    assert_refused(cli("explain", model, "-f", "nowhere.txt"), 2, "cannot read 'nowhere.txt'")


def test_the_environments_model_gives_way_to_the_argument(cli: RunCli, model: Path, text: Path) -> None:
    done = cli("explain", "nowhere.gguf", "-f", text, LLAMA_ARG_MODEL=str(model))
    assert_refused(done, 3, "nowhere.gguf")


def test_a_folder_that_is_missing_is_said_before_the_text_is_read(
    cli: RunCli, model: Path, text: Path
) -> None:
    done = cli("explain", model, "-f", text, *SMALL, "--out", "nowhere/why.html")
    assert_refused(done, 2, "cannot write 'nowhere/why.html'", "no folder 'nowhere'")
    done = cli("explain", model, "-f", text, *SMALL, "--out", "/proc/why.html")
    assert_refused(done, 2, "cannot write '/proc/why.html'", "name another file")


def test_why_explains_the_last_answer(cli: RunCli, model: Path, home: Path) -> None:
    lines = "/why\nSay hello to the rivers and the hills.\n/why\n/why 'my page.html'\n/why nowhere/x.html\n"
    done = cli("chat", "-m", model, "--kv-budget", "64", "-ub", "32", "-n", "60", "--temp", "0", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stderr.partition("h2o+, budget 64")
    assert "there is no answer to explain" in first
    assert "Say hello to the rivers" in rest and "kept entries the answer looked at" in rest
    assert "my page.html (" in rest and (home / "my page.html").is_file()
    assert "cannot write 'nowhere/x.html'" in rest
    assert "kept entries" not in done.stdout
