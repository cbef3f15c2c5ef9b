"""`rollbook store secrets` finds every secret of the log, says where it is, and never what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store
from rollbook.cli.store.retention import run_secrets
from rollbook.store import Store
from rollbook.store.events import (
    Event,
    LabelAdded,
    RunOpened,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
    token_ids,
)
from rollbook.store.events.event_json import json_bytes
from rollbook.store.redaction import Scrubber
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.find_secrets import NAMED, find_secrets
from rollbook.store.upkeep.sealer import Sealer

OPENAI = "sk-" + "a1B2c3D4e5" * 4
AWS = "AKIAIOSFODNN7EXAMPLE"
PASSWORD = "hunter2-hunter2"


def _requested(turn: str, content: Any, **request: Any) -> TurnRequested:
    return turn_requested(
        "t",
        turn,
        request_id="q",
        root_reason="first_turn",
        messages=[{"role": "user", "content": content}],
        request=request,
        requested_model="m",
        context_key="k",
        wire={"endpoint": "/v1/chat/completions"},
    )


def _completed(turn: str, content: str) -> TurnCompleted:
    none, reply = token_ids([]), {"role": "assistant", "content": content}
    return turn_completed("t", turn, policy=None, prompt_ids=none, completion_ids=none, reply=reply)


def _written(path: Path) -> Store:
    """A log with secrets in ten places, as a release wrote it that took none out."""
    log = store.open(path, create=True)
    long = "x" * 9000 + f" {OPENAI}"
    records = [
        RunOpened("serve", {"engine_urls": [f"http://u:{PASSWORD}@h"]}),
        TrajectoryOpened("t", "named", task=AWS, labels={"password": PASSWORD}),
        _requested("u", f"my key is {OPENAI}, and again {OPENAI}", api_key=OPENAI, user="u", max_tokens=5),
        _completed("u", f"use {AWS}"),
        TurnDelivered("t", "u", "sent"),
        _requested("v", long, tools=[{"type": "mcp", "headers": {"authorization": f"Bearer {PASSWORD}"}}]),
        TurnFailed("t", "v", f"401: Cookie: sid={PASSWORD}"),
        LabelAdded("t", None, "api_key", PASSWORD, "judge"),
        TrajectoryOpened("clean", "clean", task="sk-learn", labels={"password": "[secret:0123456789ab]"}),
    ]
    with log.writer("serve") as writer:
        writer.append([Event(record, "r") for record in records]).result()
    return log


def _digest(log: Store, secret: str) -> str:
    return Scrubber(store_secret(log.path, SECRETS)).digest(secret)


@pytest.mark.parametrize("sealed", [False, True])
def test_every_secret_is_found_where_it_is(tmp_path: Path, sealed: bool) -> None:
    """In text and settings, in a large text that is stored apart, in the live log and sealed."""
    log = _written(tmp_path / "s")
    if sealed:
        Sealer(log).run_once()
    read: list[int] = []
    report = find_secrets(log, log.head(), Scrubber(store_secret(log.path, SECRETS)), read.append)
    places = {(p.kind, p.field, p.turn_id): (p.format, p.digest, n) for p, n in report.places.items()}
    openai, aws, password = (_digest(log, secret) for secret in (OPENAI, AWS, PASSWORD))
    login, cookie = _digest(log, f"u:{PASSWORD}"), _digest(log, f"sid={PASSWORD}")
    assert places == {
        ("run.opened", "config", None): (NAMED, login, 1),
        ("trajectory.opened", "task", None): ("aws", aws, 1),
        ("trajectory.opened", "labels", None): (NAMED, password, 1),
        ("turn.requested", "messages.0.content", "u"): ("openai", openai, 2),
        ("turn.requested", "request.api_key", "u"): ("openai", openai, 1),
        ("turn.completed", "reply.content", "u"): ("aws", aws, 1),
        ("turn.requested", "$body", "v"): ("openai", openai, 1),
        ("turn.requested", "request.headers", "v"): (NAMED, password, 1),
        ("turn.failed", "error", "v"): (NAMED, cookie, 1),
        ("label.added", "value", None): (NAMED, password, 1),
    }
    assert report.formats == {NAMED: 5, "aws": 2, "openai": 4}
    assert report.trajectories == ["t"]
    assert sum(read) == report.events == sum(log.head().values())


def test_a_cut_and_an_erasure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is behind the cut is not looked at; what was erased is gone, and the exit code says so."""
    log = _written(tmp_path / "s")
    path = str(tmp_path / "s")
    assert run_secrets(log.path, "serve=1", None, as_json=True) == 1
    assert orjson.loads(capsys.readouterr().out)["formats"] == {NAMED: 1}
    assert run_secrets(log.path, "head", None, as_json=False) == 1
    printed = capsys.readouterr().out
    assert f"rollbook store erase --store {path} --trajectory t --reason" in printed.replace("\n", "")
    assert "4 openai" in printed
    assert _digest(log, OPENAI)[8:-1] in printed
    for secret in (OPENAI, AWS, PASSWORD):
        assert secret not in printed
    erase_trajectory(log, "t", "a leaked key")
    report = find_secrets(log, log.head(), Scrubber(b"k"))
    assert {(p.kind, p.trajectory_id) for p in report.places} == {("run.opened", None)}


def test_a_store_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says so; exit code 0."""
    log = store.open(tmp_path / "s", create=True)
    with log.writer("serve") as writer:
        writer.append([Event(TrajectoryOpened("t", "t"), "r")]).result()
    assert run_secrets(log.path, "head", None, as_json=False) == 0
    assert capsys.readouterr().out == "no secrets in 1 events\n"


def test_more_places_than_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and nothing goes unsaid."""
    monkeypatch.setattr("rollbook.store.upkeep.find_secrets.LISTED", 3)
    log = _written(tmp_path / "s")
    report = find_secrets(log, log.head(), Scrubber(b"k"))
    assert (len(report.places), sum(report.formats.values())) == (3, 11)
    assert report.unlisted == 11 - sum(report.places.values())


def test_what_is_said_holds_no_secret(tmp_path: Path) -> None:
    """Not one of the values is in the JSON, and each of them was in the log."""
    log = _written(tmp_path / "s")
    dumped = orjson.dumps(find_secrets(log, log.head(), Scrubber(b"k")).as_json())
    logged = b"".join(json_bytes(event) for event in log.events())
    for secret in (OPENAI, AWS, PASSWORD):
        assert secret.encode() in logged
        assert secret.encode() not in dumped
