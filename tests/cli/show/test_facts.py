"""What is said of a trajectory is what its events say, in values and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook.store import Event
from rollbook.store import events as kinds
from rollbook.store.errors import CutError
from rollbook.store.events import VersionSpan
from rollbook.store.fold.trajectory import fold
from rollbook.transcript.facts import Label, Reward, TrajectoryFacts
from rollbook.transcript.messages import Part
from rollbook.transcript.reading import facts_of, mean_and_lowest


@pytest.fixture
def facts(tale: list[Event]) -> TrajectoryFacts:
    """The tale's facts."""
    return facts_of(tale)


def test_the_head_counts_each_token_once(facts: TrajectoryFacts) -> None:
    """Head, outcome, rewards in force by source, labels, and counts that take each token once."""
    head = (facts.name, facts.trajectory_id, facts.run, facts.lane, facts.group, facts.task, facts.split)
    assert head == ("fix-readme", "T-1", "demo", "serve", "g-7", "repair it", "train")
    assert (facts.status, facts.success, facts.erased) == ("completed", True, None)
    assert facts.rewards == (Reward("agent", 1.0), Reward("judge", 0.75))
    assert (facts.labels, facts.added_labels) == ({"level": 2}, (Label("reviewed", True, "a person"),))
    assert (len(facts.turns), facts.tokens, facts.sampled, facts.versions()) == (7, 19, 10, [3, 4])
    assert facts.fidelity == "mixed"
    assert facts.finished_us is not None
    assert facts.finished_us - facts.opened_us == 11_500_000


def test_rewards_in_force_are_the_trajectorys(tale: list[Event]) -> None:
    """The last of a source that is not superseded, by whomever; as `Trajectory.reward` has it."""
    rewards = [
        kinds.RewardAssigned("T-1", None, 0.9),
        kinds.RewardAssigned("T-1", None, 0.1, "judge", "r-0"),
        kinds.RewardAssigned("T-1", "turn-aaaa0001", 2.0),
    ]
    late = [
        Event(record, "demo", f"r-{i}", tale[-1].time_us, "serve", len(tale) + i)
        for i, record in enumerate(rewards)
    ]
    facts, trajectory = facts_of([*tale, *late]), fold([*tale, *late])["T-1"]
    assert facts.rewards == (Reward("agent", 1.0), Reward("judge", 0.1))
    assert all(trajectory.reward(r.source) == r.reward for r in facts.rewards)
    assert [t.rewards for t in facts.turns[:2]] == [(Reward("agent", 2.0),), (Reward("judge", 0.25),)]


def test_each_turn_has_its_parent_end_and_duration(facts: TrajectoryFacts) -> None:
    """Where each hangs, how it ended, and how long it took."""
    assert [
        (t.number, t.parent and t.parent[-4:], t.root_reason, t.status, t.latency_ms) for t in facts.turns
    ] == [
        (1, None, "first_turn", "completed", 500.0),
        (2, "0001", None, "completed", 500.0),
        (3, "0001", None, "completed", 500.0),
        (4, "0002", None, "failed", 500.0),
        (5, None, "history_changed", "completed", 500.0),
        (6, None, "no_matching_turn", "completed", 500.0),
        (7, "0002", None, "running", None),
    ]
    second, third, fourth, fifth, sixth = facts.turns[1:6]
    assert (second.not_honoured, second.rewards, second.delivered) == (
        ("seed",),
        (Reward("judge", 0.25),),
        "echoed",
    )
    assert (third.labels, third.delivered) == ((Label("odd", "yes", "judge"),), None)
    assert (fourth.error, fourth.answer) == ("EngineError('the engine is gone')", None)
    assert (fifth.base, fifth.shared_messages) == ("turn-aaaa0002", 1)
    assert (sixth.endpoint, sixth.retry, sixth.choice) == ("/v1/messages", 1, None)
    assert facts.turns[0].endpoint == "/v1/chat/completions"


def test_a_completed_turn_has_tokens_logprobs_and_versions(facts: TrajectoryFacts) -> None:
    """Tokens, logprobs, versions, fidelity and reply of a completed turn."""
    second, third, fifth, sixth = (facts.turns[i].answer for i in (1, 2, 4, 5))
    assert None not in (second, third, fifth, sixth)
    assert second.spans == (VersionSpan("actor", 3, 0, 2), VersionSpan("actor", 4, 2, 4))
    assert (second.prompt_tokens, second.context_ids.tolist()) == (8, [7, 8])
    assert (second.mean_logprob, second.min_logprob) == (pytest.approx(-1.8875), -5.0)
    assert (third.finish_reason, third.flags) == ("length", ("malformed_tool_call",))
    assert (fifth.mean_logprob, fifth.min_logprob, fifth.spans) == (None, None, ())
    assert [x.fidelity for x in (second, fifth, sixth)] == ["exact", "exact", "text_only"]
    assert fifth.reply.parts == (Part("reasoning", "<think>so</think>"), Part("text", "ok"))


def test_new_messages_and_echoes(facts: TrajectoryFacts) -> None:
    """A turn has the messages it adds; the one that repeats the parent's reply is marked, no other is."""
    assert [(m.role, m.name, m.echo) for t in facts.turns for m in t.messages] == [
        *[("system", "", False), ("user", "", False)],
        *[("assistant", "", True), ("tool", "read_file", False)] * 2,
        *[("user", "", False)] * 3,
    ]


def test_fidelity_is_exact_text_only_or_null(tale: list[Event]) -> None:
    """Exact where every completed turn has its ids, text_only where none has, null where none completed."""
    without = [e for e in tale if getattr(e.record, "turn_id", "") != "turn-aaaa0006"]
    assert facts_of(without).fidelity == "exact"
    head = [e for e in tale if e.kind == "trajectory.opened"]
    assert (
        facts_of([*head, *(e for e in tale if getattr(e.record, "turn_id", "") == "turn-aaaa0006")]).fidelity
        == "text_only"
    )
    assert facts_of(head).fidelity is None
    assert (facts_of(head).status, facts_of(head).turns) == ("open", ())


def test_an_erased_turn_keeps_its_lengths(tale: list[Event]) -> None:
    """Of an erased turn the lengths stay; its text and ids are said to be erased."""
    mark = {"erased": True}
    events = []
    for event in tale:
        record: Any = event.record
        if isinstance(record, kinds.TurnCompleted):
            ids = np.full(len(record.completion_ids), -1, np.int32)
            record = replace(record, reply=mark, completion_ids=ids, logprobs=None, flags=["tokens_erased"])
        elif isinstance(record, kinds.TurnRequested):
            record = replace(record, messages=[mark] * len(record.messages), wire=mark, request=mark)
        elif isinstance(record, kinds.TrajectoryOpened):
            record = replace(record, task=None, labels=mark)
        events.append(replace(event, record=record))
    facts = facts_of(
        [*events, Event(kinds.TrajectoryErased("T-1", False, "a key", 7), "demo", lane="upkeep", seq=0)]
    )
    assert (facts.erased, facts.fidelity, facts.sampled) == ("a key", "erased", 10)
    first = facts.turns[0]
    assert first.answer is not None
    assert [m.parts for m in (*first.messages, first.answer.reply)] == [(Part("erased"),)] * 3


def test_json_has_arrays_only_if_asked(facts: TrajectoryFacts) -> None:
    """Plain values; arrays only if asked; numbers that JSON lacks as words."""
    value = orjson.loads(orjson.dumps(facts.as_json()))
    assert (value["name"], value["fidelity"], value["rewards"][1]) == (
        "fix-readme",
        "mixed",
        {"source": "judge", "reward": 0.75},
    )
    second, fourth = value["turns"][1], value["turns"][3]
    assert (second["parent"], second["not_honoured"], fourth["answer"]) == ("turn-aaaa0001", ["seed"], None)
    answer = second["answer"]
    assert (answer["prompt_tokens"], answer["context_tokens"], answer["completion_tokens"]) == (8, 2, 4)
    assert answer["spans"][1] == {"policy": "actor", "version": 4, "start": 2, "end": 4}
    assert answer["reply"]["parts"][0]["text"] == "y is unused"
    assert "completion_ids" not in answer
    full = facts.as_json(tokens=True)["turns"][1]["answer"]
    assert (full["completion_ids"], full["logprobs"]) == (
        [9, 10, 11, 12],
        [pytest.approx(x) for x in (-0.05, -0.5, -2, -5)],
    )
    odd = replace(facts, rewards=(Reward("agent", float("nan")), Reward("judge", float("-inf"))))
    assert [r["reward"] for r in odd.as_json()["rewards"]] == ["NaN", "-Infinity"]


def test_logprobs_that_are_no_numbers() -> None:
    """NaN counts for nothing; without any number there is no mean."""
    assert mean_and_lowest(np.array([np.nan, -1, -3], np.float32)) == (-2.0, -3.0)
    assert mean_and_lowest(np.array([np.nan], np.float32)) == (None, None)
    assert mean_and_lowest(np.array([], np.float32)) == (None, None)


def test_a_cut_before_the_opening(tale: list[Event]) -> None:
    """Events whose opening is not held are no trajectory."""
    with pytest.raises(CutError, match="not its opening"):
        facts_of(tale[1:])
