"""Whatever the log holds, nothing of it drives the terminal it is printed on; JSON keeps its exact values."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from rollbook import store as rb
from rollbook.cli.app import main
from rollbook.cli.progress import counted
from rollbook.cli.terminal import Console, LogFormatter, json_for_terminal, print_json, say
from rollbook.store import Event, Store
from rollbook.store import events as kinds

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x85\x7f\u202egpj\u2066\u200b[red]x[/red][link=http://evil]y[/link]:smile:\r"
"""Titles, a cleared screen, C1, a right-to-left override, and Rich's markup."""
FORBIDDEN = {chr(c) for c in (*range(0x20), *range(0x7F, 0xA0))} - {"\n"}
FORBIDDEN |= set("\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\ufeff")


def _harmless(text: str) -> bool:
    return not set(text) & FORBIDDEN


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose every text is hostile."""
    log = rb.open(tmp_path_factory.mktemp("evil") / "store", create=True)
    messages = [{"role": EVIL, "content": EVIL}]
    ask: Any = ({EVIL: EVIL}, EVIL, {"temperature": 1.0}, {EVIL: EVIL}, EVIL)
    records = [
        kinds.RunOpened(EVIL, {EVIL: EVIL}, EVIL, EVIL, EVIL, {EVIL: EVIL}),
        kinds.TrajectoryOpened("t", EVIL, EVIL, EVIL, "train", {EVIL: EVIL}),
        kinds.TurnRequested("t", "u1", EVIL, None, EVIL, None, 0, messages, *ask),
        kinds.TurnFailed("t", "u1", EVIL),
        kinds.RewardAssigned("t", None, 1.0, EVIL),
        kinds.LabelAdded("t", None, EVIL, EVIL, EVIL),
        kinds.TrajectoryFinished("t", EVIL, True),
        kinds.SampleDropped("t", "u1", EVIL, EVIL, 0, {EVIL: EVIL}),
        kinds.PolicyActivated(EVIL, 1, EVIL, EVIL, EVIL),
        kinds.PolicyPublished(EVIL, 1, 0, EVIL, EVIL),
        kinds.CheckpointWritten(EVIL, 1, "checkpoints/x", EVIL, None, EVIL, 1),
    ]
    with log.writer("serve") as writer:
        for record in records:
            writer.append([Event(record, EVIL)]).result(30)
    return log


COMMANDS = [
    ["tail", "--no-follow"],
    ["tail", "--no-follow", "--events"],
    ["tail", "--no-follow", "--json"],
    ["show", "t"],
    ["show", "t", "--full"],
    ["show", "t", "--json"],
    ["show", EVIL],
    ["show", f"{EVIL}x"],
    ["samples"],
    ["samples", "--json"],
    ["samples", "--trajectory", f"{EVIL}x"],
    ["ledger"],
    ["ledger", "--json"],
    ["ledger", "--run", f"{EVIL}x"],
    ["sql", "select * from events"],
    ["sql", "select run, extra from events limit 1"],
    ["sql", "select * from trajectories", "--format", "json"],
    ["sql", "select cast(run as int) from events"],
    ["sql", f'select 1 as "{EVIL}"'],
    ["sql", f"select {EVIL}"],
    ["sql", "select * from turns", "--as-of", EVIL],
    ["store", "verify"],
    ["store", "verify", "--json"],
    ["store", "info"],
    ["store", "info", "--json"],
    ["store", "rebuild-catalog"],
    ["store", "erase", "--trajectory", EVIL, "--run", EVIL, "--reason", EVIL],
    ["store", "erase", "--trajectory", f"{EVIL}x", "--reason", EVIL],
    ["store", "retain", "--keep", EVIL],
    ["store", "retire", "--run", EVIL, "--reason", EVIL, "--steps", "0"],
    ["replay", "step", "0"],
    ["replay", "step", "0", "--run", EVIL],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3])[:40])
def test_no_command_prints_control_characters(
    evil: Store, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what it finds nor what it complains of; and none ends with a traceback."""
    monkeypatch.setattr(sys, "argv", ["rollbook", *words, "--store", str(evil.path)])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert _harmless(out), repr(out)
    assert _harmless(err), repr(err)
    assert "Traceback" not in err
    assert stop.value.code in (0, 1, 2), err


def test_json_keeps_the_values(
    evil: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a program reads is what was recorded."""
    query = "select distinct run from events"
    monkeypatch.setattr(
        sys, "argv", ["rollbook", "sql", query, "--format", "json", "--store", str(evil.path)]
    )
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out) == [{"run": EVIL}]


def test_csv_is_exact_in_a_file_and_harmless_on_a_terminal(
    evil: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets the value, a terminal its escapes."""
    words = ["rollbook", "sql", "select distinct run from events", "--format", "csv"]
    monkeypatch.setattr(sys, "argv", [*words, "--store", str(evil.path)])
    with pytest.raises(SystemExit):
        main()
    assert EVIL in capsys.readouterr().out
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        main()
    assert _harmless(out.getvalue())
    assert "\\x1b]0;owned" in out.getvalue()


@given(st.text())
def test_any_text_is_harmless_in_every_output_format(text: str) -> None:
    """A line, a table's cell and head, a styled part, a log record and JSON: none lets through what acts."""
    text = text.encode(errors="replace").decode()
    out = io.StringIO()
    console = Console()
    console.file = out
    table = Table(text, title=text)
    table.add_row(text)
    console.print(text)
    console.print(table)
    console.tell("a ", (text, "bold"))
    say(text, out)
    out.write(LogFormatter().format(logging.LogRecord("x", 30, "x", 1, "%s", (text,), None)))
    out.write(json_for_terminal(orjson.dumps(text)))
    assert _harmless(out.getvalue())
    assert json.loads(json_for_terminal(orjson.dumps([text]))) == [text]


def test_rich_markup_in_values_is_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """No text is taken for Rich's markup, a link or an emoji, wherever it stands."""
    text = "[red]x[/red] [link=http://evil]y[/link] :smile: [/]"
    table = Table(text)
    table.add_row(text)
    for what in (text, table):
        Console().print(what, soft_wrap=True)
        assert text in capsys.readouterr().out


def test_only_our_own_styles_reach_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own styles reach a terminal; an escape sequence within a value does not."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Console().tell(("a\x1b[1mb", "red"))
    assert capsys.readouterr().out == "\x1b[31ma\\x1b[1mb\x1b[0m\n"


def test_a_bar_is_shown_on_a_terminal_and_not_beside_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where standard error is a file."""
    for terminal, shown, bar in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv(
            "FORCE_COLOR", raising=False
        )
        with counted("replaying steps", shown=shown) as ran:
            ran(0, 4)
            ran(4, 4)
        assert ("replaying steps" in capsys.readouterr().err) == bar


def test_values_without_json_are_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a path."""
    print_json({"at": Path("/a")})
    assert json.loads(capsys.readouterr().out) == {"at": "/a"}


def test_every_module_prints_through_the_terminal_module(root: Path) -> None:
    """No module of the product makes a console of Rich's own, writes markup, or prints JSON by itself."""
    wrong = []
    for folder in ("store", "ingest", "train", "replay", "demo"):
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text()
            for words in ("from rich.console import Console", "from rich import print", "rich.markup"):
                if words in source and path.name != "terminal.py":
                    wrong.append(f"{path.relative_to(root)}: {words}")
            if "print(orjson" in source or "traceback.format_exc" in source or "print_exc" in source:
                wrong.append(f"{path.relative_to(root)}: prints by itself")
            if 'TextColumn("{task.description}")' in source:
                wrong.append(f"{path.relative_to(root)}: a column of markup")
    assert wrong == []
