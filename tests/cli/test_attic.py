"""--attic and its relatives, and what is said of an attic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_harness import RunCli, assert_refused

from h2o_gguf.attic import AtticReport
from h2o_gguf.cli.attic import ATTIC, attic_options, read_bytes
from h2o_gguf.cli.flags import NumberFromEnvironment, TextFromEnvironment
from h2o_gguf.cli.options import CacheFlags
from h2o_gguf.cli.render import kv_lines
from h2o_gguf.errors import OptionError
from h2o_gguf.report import KVReport

NEVER = "policy none evicts nothing"


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("1", 1), ("800000000", 800_000_000), ("512M", 512 * 2**20), ("2G", 2**31), ("2g", 2**31),
        ("1T", 2**40), ("64K", 2**16), (" 1.5G ", 3 * 2**29), ("512MiB", 512 * 2**20),
        ("512 MB", 512 * 10**6), ("2gib", 2**31),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, n: int) -> None:
    assert read_bytes(text, "--attic-limit") == n


@pytest.mark.parametrize("text", ["", "0", "0G", "-1", "-2G", "G", "2X", "2GG", "1e9", "inf", "2 2", "many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--attic-limit is .*: it must be bytes, such as 512M"):
        read_bytes(text, "--attic-limit")


def test_without_flags_there_is_the_default_attic_where_entries_are_evicted() -> None:
    assert attic_options(CacheFlags(), "") == {
        "attic": ATTIC, "attic_limit": None, "attic_type": None, "recall_every": None,
    }  # fmt: skip
    assert attic_options(CacheFlags(), NEVER) == {"attic": "off"}
    assert attic_options(CacheFlags(attic="off"), "") == {"attic": "off"}
    assert attic_options(CacheFlags(attic="OFF"), NEVER) == {"attic": "off"}


GIVEN: list[dict[str, Any]] = [
    {"attic": "ram"}, {"attic": "disk"}, {"attic_limit": "2G"}, {"attic_type": "q8_0"}, {"recall_every": 5},
]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_an_attic_that_is_asked_for_where_nothing_is_evicted_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=NEVER):
        attic_options(CacheFlags(**given), NEVER)


@pytest.mark.parametrize("given", GIVEN[2:])
def test_details_of_an_attic_that_is_off_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="--attic is off"):
        attic_options(CacheFlags(attic="off", **given), "")


def test_the_environments_attic_gives_way_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    flags = CacheFlags(
        attic=TextFromEnvironment("disk"), attic_limit=TextFromEnvironment("2G"),
        recall_every=NumberFromEnvironment(3),
    )  # fmt: skip
    assert attic_options(flags, NEVER) == {"attic": "off"}
    said = capsys.readouterr().err
    for variable in ("$H2O_GGUF_ATTIC is disk", "$H2O_GGUF_ATTIC_LIMIT is 2G", "$H2O_GGUF_RECALL_EVERY is 3"):
        assert variable in said
    assert attic_options(flags, "")["attic"] == "disk"


def test_the_cache_of_a_chat_says_what_the_attic_holds_and_what_came_back() -> None:
    attic = AtticReport("disk", 1234, 3 << 20, 1 << 30, 0, 12.34)
    lines = kv_lines(KVReport("h2o+", 60, 30, 1234, 1264, 4096, attic=attic))
    assert "attic    1,234 evicted entries per KV head within reach, 3.0 MiB of 1.0 GiB on disk" in lines
    assert "recalled 12.3 entries per KV head by the last turn" in lines
    full = AtticReport("ram", 1234, 1 << 30, 1 << 30, 1500, 0.0)
    text = "\n".join(kv_lines(KVReport("h2o+", 60, 30, 0, 30, 4096, attic=full)))
    assert "1.0 GiB of 1.0 GiB in memory; 1,500 were dropped for want of space" in text
    assert not any("attic" in line for line in kv_lines(KVReport("h2o+", 60, 30, 0, 30, 4096)))


SMALL = ("--kv-budget", "64", "-ub", "32", "-n", "8", "--temp", "0")


def test_a_chat_keeps_and_recalls_what_it_evicted(cli: RunCli, model: Path) -> None:
    lines = "The code of the vault is 7391, and the code of the barn is 4402.\n" + "Tell me more.\n" * 5
    typed = f"/kv\n{lines}/kv\n/regen\n/clear\nHello.\n/kv\n/exit\n"
    done = cli("chat", "-m", model, *SMALL, stdin=typed)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attic    0 evicted") == 2  # before the first message, and after /clear
    said = done.stderr.split("attic    ")[2]
    assert int(said.split()[0].replace(",", "")) > 64
    assert float(said.split("recalled ")[1].split()[0]) > 0


@pytest.mark.parametrize("place", ["ram", "disk", "off"])
def test_json_has_the_attic(cli: RunCli, model: Path, home: Path, place: str) -> None:
    (home / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    details = ("--attic-limit", "64M", "--attic-type", "q8_0", "--recall-every", "4")
    arguments = ("--attic", place, *(() if place == "off" else details))
    done = cli("summarize", "t.txt", "-m", model, "--kv-budget", "192", *SMALL[2:], *arguments, "--json")
    assert done.returncode == 0, done.stderr
    kv = json.loads(done.stdout)["kv"]
    if place == "off":
        assert kv["attic"] is None
    else:
        found = kv["attic"]
        assert (found["place"], found["limit"], found["dropped"]) == (place, 64 << 20, 0)
        assert found["entries"] == kv["evicted"] > 0
        per_token = 30 * 3 * 2 * 68  # layers, KV heads, keys and values of 64 as q8_0: 34 bytes for 32
        n_chunk = -(-found["entries"] // 256)
        assert found["bytes"] == pytest.approx(n_chunk * 256 * per_token, abs=n_chunk << 16)  # rounded up
    assert not [name for name in os.listdir("/tmp") if name.startswith("h2og-attic-")]


def test_policy_none_has_no_attic_unless_one_is_asked_for(cli: RunCli, model: Path) -> None:
    run = ("run", "-m", model, "-p", "Say yes.", "-n", "2", "--policy", "none")
    assert json.loads(cli(*run, "--json").stdout)["kv"]["attic"] is None
    assert_refused(cli(*run, "--attic", "ram"), 2, NEVER)
    done = cli(*run, "--json", H2O_GGUF_ATTIC="ram")
    assert json.loads(done.stdout)["kv"]["attic"] is None and "$H2O_GGUF_ATTIC is ram" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--attic", "tape"), "--attic is 'tape': it must be 'ram', 'disk' or 'off'"),
        (("--attic-type", "q9"), "--attic-type is 'q9'"),
        (("--attic-limit", "2k"), "2048 bytes are too few"),
        (("--attic-limit", "2X"), "--attic-limit is '2X'"),
    ],
)
def test_an_attic_that_cannot_be_is_a_usage_error(
    cli: RunCli, model: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert_refused(cli("run", "-m", model, "-p", "x", "-n", "2", *arguments), 2, words)


def test_inspect_says_how_far_the_attic_grows(cli: RunCli, model: Path) -> None:
    done = cli("inspect", model, "--attic-limit", "512M", "--attic-type", "q8_0", "--json")
    per_token = 30 * 3 * 2 * 68  # layers, KV heads, keys and values of two blocks of 34 bytes
    assert json.loads(done.stdout)["attic"] == {
        "place": "ram", "limit": 512 << 20, "type_k": "q8_0", "type_v": "q8_0",
        "token_bytes": per_token, "n_tokens": (512 << 20) // per_token,
    }  # fmt: skip
    assert "grows in memory to 1.0 GiB at most" in cli("inspect", model).stdout
    assert json.loads(cli("inspect", model, "--attic", "off", "--json").stdout)["attic"] is None
