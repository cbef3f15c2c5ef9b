"""What is said of published and served weights is backed by a checkpoint or a step, or it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from rollbook.replay.claims.backed import BACKING, find_unbacked, unbacked
from rollbook.replay.step.step import replay_step
from rollbook.replay.stretch.stretch import history_of, prove_stretch
from rollbook.store import Event, Store
from rollbook.store.events import CheckpointWritten, PolicyActivated, PolicyPublished, StepCommitted

Stores = Callable[..., Store]


def written(log: Store, *records: Any, run: str = "demo") -> list[str]:
    """Append records to a lane of their own; their events' ids."""
    events = [Event(record, run) for record in records]
    with log.writer("forged") as writer:
        writer.append(events).result()
    return [event.event_id for event in events]


def test_what_a_training_says_is_backed(trained: Stores) -> None:
    """All of it; also a version without a checkpoint that an engine serves: the step that made it has it."""
    log = trained()
    steps = [event.record for event in log.events_of({StepCommitted.KIND})]
    [step] = [record for record in steps if isinstance(record, StepCommitted) and record.policy_version == 3]
    written(log, PolicyActivated("actor", 3, "http://e", step.digests["weights"], ""))
    assert find_unbacked(log) == []


FORGED: dict[str, PolicyPublished | PolicyActivated] = {
    "published": PolicyPublished("actor", 4, 0, "checkpoints/x", "f" * 64),
    "published, of a version that nothing made": PolicyPublished("actor", 99, 12, "checkpoints/x", "f" * 64),
    "a reference": PolicyPublished("actor.reference", 8, 0, "checkpoints/x", "f" * 64),
    "activated": PolicyActivated("actor", 0, "http://e", "f" * 64, "checkpoints/x"),
    "activated, of a version that nothing made": PolicyActivated("actor", 99, "http://e", "f" * 64, ""),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_nothing_backs_is_named(trained: Stores, what: str) -> None:
    """With its event, and by a replay of whichever step."""
    log = trained()
    [event_id] = written(log, FORGED[what])
    [odd] = find_unbacked(log, "demo")
    assert (odd.event_id, odd.digest, odd.policy_version) == (event_id, "f" * 64, FORGED[what].policy_version)
    assert find_unbacked(log, "other") == []
    if what == "published":
        result = prove_stretch(log, history_of(log, None, "actor"), 0, 0)
        assert ([step.replay.equal for step in result.steps if step.replay], result.equal) == ([True], False)
        assert result.unbacked == [odd]


@pytest.mark.parametrize(("what", "step"), [("published", 3), ("activated", 0), ("activated", 3)])
def test_a_replay_of_a_step_names_it(trained: Stores, what: str, step: int) -> None:
    """If it is of the version that the step starts from, or makes; of others it says nothing."""
    log = trained()
    [event_id] = written(log, FORGED[what])
    result = replay_step(log, step)
    if what == "activated" and step == 3:
        assert result.bit_for_bit
        return
    assert (result.equal, result.differs_in, result.differs_at_step) == (False, "backed", step)
    assert event_id in result.stages["backed"].why


def test_what_cannot_be_known_is_not_said() -> None:
    """Of a policy that was never trained here, and of a version whose events are gone."""
    served = Event(PolicyActivated("actor", 7, "http://e", "a" * 64, ""), "run", "e2")
    assert unbacked([served]) == []
    trained = Event(CheckpointWritten("actor", 0, "c", "b" * 64, None, None, 1), "run", "e1")
    assert [odd.known for odd in unbacked([served, trained])] == [()]
    assert unbacked([served, trained], whole=False) == []
    other = Event(CheckpointWritten("actor", 7, "c", "b" * 64, None, None, 1), "run", "e3")
    [odd] = unbacked([served, other], whole=False)
    assert odd.known == ("b" * 64,)
    assert {event.kind for event in (served, other)} <= BACKING


def test_verify_looks_at_weights(trained: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Where it is asked to; else it says that it does not. Damage, what is missing and what is not backed."""
    log = trained()
    code, out, _ = cli("store", "verify", "--store", log.path)
    assert code == 0
    assert "checkpoints were not read: --weights" in out
    code, out, _ = cli("store", "verify", "--store", log.path, "--weights")
    assert code == 0
    assert "6 checkpoints are what the log says" in out
    [event_id] = written(log, FORGED["activated"])
    folder = log.path / "checkpoints/demo/actor"
    shutil.rmtree(folder / "v00000004")
    file = folder / "v00000008" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    shutil.rmtree(folder / "v00000011")
    shutil.copytree(folder / "v00000012", folder / "v00000011")
    (folder / "v00000012" / "config.json").write_text("{ }")
    code, out, _ = cli("store", "verify", "--store", log.path, "--weights", "--json")
    assert code == 1
    faults = json.loads(out)["weights"]["faults"]
    wanted = (
        "v00000004.*is not there",
        "v00000008.*optimizer damaged",
        "v00000011.*its weights have",
        "v00000012.*config.json: not the sha256",
        event_id,
    )
    assert len(faults) == len(wanted)
    for fault, part in zip(faults, wanted, strict=True):
        assert all(words in fault for words in part.split(".*")), fault
