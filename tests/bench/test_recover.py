"""The recover benchmark, in small: processes are really killed, and what is lost or changed is seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook import store as rb
from rollbook.bench import recover
from rollbook.bench.crash import PHASES, fingerprint
from rollbook.bench.rounds import Limit
from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError

TINY = recover.Plan(kills=3, of_a_store=2, life_s=0.4, limit=Limit(2, 30.0), commits=3)


def test_killed_writers_lose_no_acknowledged_event(tmp_path: Path) -> None:
    """Events that three killed processes acknowledged in two stores are unchanged; kills are counted."""
    rounds: list[None] = []
    measured = recover.measure(tmp_path, TINY, lambda: rounds.append(None))
    killed = measured.killed
    assert (killed.kills, killed.lost, killed.changed) == (3, 0, 0)
    assert killed.acknowledged > 0
    assert sum(killed.phases.values()) == 3
    assert set(killed.phases) <= set(PHASES)
    assert len(rounds) == TINY.steps == 5
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["store-0", "store-2", "whole"]
    assert sum(1 for _ in rb.open(tmp_path / "store-0").events()) > 0
    # The lane whose recovery is timed holds what the plan says, and its size counts header frames too.
    whole = rb.open(tmp_path / "whole")
    assert whole.head() == {"crash": 3 * 40}
    assert 1_600_000 < measured.lane_bytes < 1_800_000
    figures = {f.figure: f for f in recover.outcome(measured).figures}
    assert list(figures) == ["recover.lost", "recover.changed", "recover.s_per_gib"]
    assert [f.value for f in figures.values()][:2] == [0.0, 0.0]
    assert f"{killed.acknowledged} acknowledged events, 3 kills" in str(figures["recover.lost"].against)


def test_what_is_lost_or_changed_is_counted(
    store: Store, notes: Callable[..., list[Event]], tmp_path: Path
) -> None:
    """An id that is not in the log is lost; one whose event differs, or is there twice, is changed."""
    events = notes(4)
    with store.writer("crash") as writer:
        writer.append(events).result(30)
    victims = recover._Victims(tmp_path / "other", recover.Killed(), random.Random(0))
    victims._log = store
    acknowledged = {e.event_id: fingerprint(e) for e in events}
    victims._compare(acknowledged, {})
    assert (victims._killed.lost, victims._killed.changed) == (0, 0)
    victims._compare(acknowledged | {"missing": b"0" * 16, events[1].event_id: b"1" * 16}, {})
    assert (victims._killed.lost, victims._killed.changed) == (1, 1)
    victims._compare(acknowledged, {"crash": 3})
    assert (victims._killed.lost, victims._killed.changed) == (1 + 3, 1)


def test_fingerprints_tell_events_apart(story: dict[str, list[Event]]) -> None:
    """Every event of the story has its own; one bit of an array, a type or a time changes it."""
    events = [event for lane in story.values() for event in lane]
    assert len({fingerprint(event) for event in events}) == len(events)
    turn = next(e for e in events if e.kind == "turn.completed")
    record: Any = turn.record
    others = [
        replace(record, logprobs=np.nextafter(record.logprobs, np.float32(0))),
        replace(record, prompt_ids=record.prompt_ids.astype(np.int64)),
        replace(record, version_spans=()),
        replace(record, reply={}),
        replace(record, logprobs=None),
    ]
    changed = [replace(turn, record=other) for other in others] + [replace(turn, time_us=turn.time_us + 1)]
    assert len({fingerprint(e) for e in [turn, *changed]}) == len(changed) + 1


def test_acknowledgements_of_a_killed_process_are_parsed() -> None:
    """Messages are ids and fingerprints, 52 bytes an event; one with a mark says what is damaged."""
    ids = ["a" * 36, "b" * 36, "c" * 36]
    first = ids[0].encode() + b"0" * 16 + ids[1].encode() + b"1" * 16
    messages = [b"", first, ids[2].encode() + b"2" * 16]
    assert recover._parse(messages) == {ids[0]: b"0" * 16, ids[1]: b"1" * 16, ids[2]: b"2" * 16}
    with pytest.raises(CorruptionError, match="damage after a kill: lane 'x'"):
        recover._parse([b"", b"!lane 'x'"])


def test_a_process_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    """The kill is what is tested: a victim that cannot begin (its lane is held) is reported."""
    victims = recover._Victims(tmp_path / "store", recover.Killed(), random.Random(0))
    with victims._log.writer("crash"), pytest.raises((RuntimeError, EOFError)):
        victims._live(5.0, None)


def test_loss_is_in_the_figures() -> None:
    """Lost and changed events are the values that are printed."""
    killed = recover.Killed(9, 100, 2, 1, 4, 3, Counter({"sealing": 9}))
    from rollbook.bench.rounds import Lap

    laps = {"recover": [Lap(0.5, 0.5)], "read": [Lap(0.25, 0.25)]}
    outcome = recover.outcome(recover.Measured(killed, laps, 1 << 29))
    assert [f.value for f in outcome.figures] == [2.0, 1.0, 1.0]
    assert "0.500 s/GiB" in str(outcome.figures[2].against)
    by_name = {s.what: s.middle for s in outcome.spreads}
    assert by_name["kills: left an unfinished frame"] == 4
    assert by_name["kills: sealing"] == 9
    assert by_name["recovery over reading"] == 2.0
