"""Lineages back and forward: of a story with engines, drops and abandoned steps, and of a real training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories import fabric
from tests.fakes.stories.lineage import A, B

from rollbook import store as rb
from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.lineage.line import Line
from rollbook.lineage.records import Version
from rollbook.lineage.steps import policy_lineage, step_lineage
from rollbook.lineage.trajectories import (
    CUT_OFF,
    OTHER_SAMPLE,
    UNDELIVERED,
    token_lineage,
    trajectory_lineage,
)
from rollbook.store import Store
from rollbook.store import events as kinds
from rollbook.store.errors import ReplayError
from rollbook.store.sql.ledger_view import SHARES, shares
from rollbook.store.sql.sandbox import Connection
from rollbook.testing.asgi import serving


@pytest.fixture(scope="module")
def sql(lineages: Store) -> Iterator[Connection]:
    """SQL over the story."""
    with rb.connect(lineages.path) as connection:
        yield connection


@pytest.fixture
def lineage_of(lineages: Store, sql: Connection) -> Callable[..., Any]:
    """The lineage of a trajectory of the story, or of a sample of it."""
    return lambda name, leaf=None: trajectory_lineage(lineages, sql, lineages.head(), name, leaf)


@pytest.fixture
def token(lineages: Store, sql: Connection) -> Callable[..., Any]:
    """The lineage of a token of the story."""
    return lambda name, turn, index: token_lineage(lineages, sql, lineages.head(), name, turn, index)


def _numbers(versions: Any) -> list[int]:
    return [version.version for version in versions]


def _uses(uses: Any) -> list[tuple[Any, ...]]:
    return [(u.step, u.attempt, u.status, u.leaf_turn_id, u.micro_batch, u.trained_tokens) for u in uses]


def _terms(turn: Any) -> list[tuple[Any, ...]]:
    return [(s.version, s.tokens, s.term, s.rule) for s in turn.shares]


# Trajectories and samples -------------------------------------------------------------------------


def test_forward_to_every_version(lineage_of: Callable[..., Any]) -> None:
    """Each sample's step and place, with the tokens that are its own; the version, and all after it."""
    lineage = lineage_of("one")
    assert _uses(lineage.uses) == [
        (0, 1, "committed", "one.1", 0, 4),
        (0, 1, "committed", "one.2", 1, 3),
    ]
    assert [_terms(turn) for turn in lineage.turns] == [[(0, n, "trained", None)] for n in (2, 2, 3)]
    assert (_numbers(lineage.sampled_by), _numbers(lineage.made)) == ([0], [1])
    assert [(v.version, v.parent, v.abandoned) for v in lineage.descendants] == [
        (2, 1, False),
        (3, 2, True),
        (4, 2, False),
        (5, 4, False),
    ]
    assert [v.checkpoint for v in lineage.descendants] == ["c/2", None, "c/4", None]
    assert [e.reward for e in lineage.descendants[0].evaluations] == [0.75]


def test_a_late_reward_was_known_to_no_step(lineage_of: Callable[..., Any]) -> None:
    """A reward that the cut of the plan does not hold came after the training on it."""
    rewards = lineage_of("one").rewards
    assert [(r.reward, r.source, r.seen_by) for r in rewards] == [
        (0.25, "agent", (("demo", 0),)),
        (1.0, "judge", ()),
    ]


def test_back_to_engines_and_verified_syncs(lineage_of: Callable[..., Any], lineages: Store) -> None:
    """An engine that served what it had read; one that a sync gave the weights; and one where that failed."""
    lineage = lineage_of("one")
    [base] = lineage.sampled_by[0].engines
    assert (base.engine, base.syncs, base.verified is not None) == (A, (), True)
    synced, failed = lineage.made[0].engines
    assert [(s.sync_id, s.transport, s.status, s.bytes, s.seconds) for s in synced.syncs] == [
        (f"{A}/1", "tensor", "finished", 4096, 0.25)
    ]
    [place] = synced.activations
    activated = next(e for e in lineages.events() if e.event_id == place.event_id)
    assert (place.lane, place.seq) == (activated.lane, activated.seq)
    assert (activated.record.engine, activated.record.policy_version) == (A, 1)
    assert (failed.engine, failed.verified, failed.activations) == (B, None, ())
    assert [(s.status, s.error) for s in failed.syncs] == [("failed", "timed out")]


def test_a_dropped_one(lineage_of: Callable[..., Any]) -> None:
    """The rule, its numbers, and what became of the attempt; nothing was made of it."""
    two = lineage_of("two")
    [drop] = two.drops
    assert (drop.rule, drop.step, drop.status, drop.policy) == ("staleness", 0, "committed", "actor")
    assert (drop.leaf_turn_id, drop.detail) == ("two.0", {"staleness": 3})
    assert (two.uses, two.made, two.descendants) == ((), (), ())
    assert _terms(two.turns[0]) == [(0, 2, "dropped", "staleness")]


def test_attempts_and_versions_within_a_turn(lineage_of: Callable[..., Any]) -> None:
    """Both attempts are there, each with the sample as it had it: the second had four tokens of it."""
    three = lineage_of("three")
    assert _uses(three.uses) == [
        (1, 1, "failed", "three.1", 0, 3),
        (1, 2, "committed", "three.1", 0, 2),
    ]
    assert [_terms(turn) for turn in three.turns] == [
        [(0, 2, "trained", None), (1, 1, "trained", None)],
        [(1, 2, "kept out", "undelivered")],
    ]
    assert (_numbers(three.sampled_by), _numbers(three.made)) == ([0, 1], [2])


def test_an_adopted_one(lineage_of: Callable[..., Any], lineages: Store) -> None:
    """Its turns are where the lanes hold them, in order; tokens of no known version say so."""
    four = lineage_of("four")
    assert four.lanes == ("serve", "other")
    assert [turn.requested.lane for turn in four.turns] == ["serve", "other"]
    requested = {
        e.record.turn_id: (e.seq, e.event_id) for e in lineages.events_of([kinds.TurnRequested.KIND])
    }
    assert all((t.requested.seq, t.requested.event_id) == requested[t.turn_id] for t in four.turns)
    assert [_terms(turn) for turn in four.turns] == [
        [(0, 2, "waiting", None)],
        [(None, 2, "kept out", "no version")],
    ]


def test_an_abandoned_step(lineage_of: Callable[..., Any]) -> None:
    """What it consumed was consumed again; only the second time counts."""
    five = lineage_of("five")
    assert [use[:3] for use in _uses(five.uses)] == [(2, 1, "abandoned"), (3, 1, "committed")]
    assert (_numbers(five.made), five.descendants) == ([5], ())
    assert [e.engine for e in five.sampled_by[0].engines] == [A, B]


def test_one_that_others_were_compared_with(lineage_of: Callable[..., Any]) -> None:
    """Its reward had a part in a step that did not train on it."""
    [compared] = lineage_of("six").compared
    assert (compared.step, compared.attempt, compared.status, compared.reward) == (1, 2, "committed", 0.5)


def test_a_sample(lineage_of: Callable[..., Any]) -> None:
    """The turns of its path alone, and its own uses."""
    sample = lineage_of("one", "one.2")
    assert [turn.turn_id for turn in sample.turns] == ["one.0", "one.2"]
    assert [use.leaf_turn_id for use in sample.uses] == ["one.2"]
    with pytest.raises(ReplayError, match=r"one\.0 is the leaf of no sample; .* one\.1, one\.2"):
        lineage_of("one", "one.0")


# Tokens -------------------------------------------------------------------------------------------


def test_a_token(token: Callable[..., Any], lineages: Store) -> None:
    """The event that holds it has its id and logprob; it was trained in the sample that owns its turn."""
    lineage = token("one", None, 1)
    event = next(e for e in lineages.events() if e.event_id == lineage.turn.answered.event_id)
    assert (event.record.turn_id, event.lane, event.seq) == ("one.0", "serve", lineage.turn.answered.seq)
    assert (lineage.index, lineage.place) == (1, len(event.record.prompt_ids) + 1)
    assert (lineage.token_id, lineage.logprob) == (int(event.record.completion_ids[1]), -1.0)
    assert (lineage.version.version, lineage.version.weights_digest) == (0, "w0")
    assert [(u.use.leaf_turn_id, u.trained, u.why) for u in lineage.uses] == [
        ("one.1", True, None),
        ("one.2", False, OTHER_SAMPLE),
    ]
    assert lineage.reached
    assert token("one", "one.2", 2).token_id == token("one", None, 6).token_id == 7


def test_tokens_that_no_step_trained_on(token: Callable[..., Any]) -> None:
    """Cut off by the model's context, trained only in an attempt that failed; undelivered; dropped."""
    last = token("three", "three.0", 2)
    assert (last.version.version, last.reached) == (1, False)
    assert [(u.use.status, u.trained, u.why) for u in last.uses] == [
        ("failed", True, None),
        ("committed", False, CUT_OFF),
    ]
    unseen = token("three", "three.1", 0)
    assert [u.why for u in unseen.uses] == [UNDELIVERED, CUT_OFF]
    assert [d.rule for d in token("two", None, 0).drops] == ["staleness"]
    assert token("four", "four.1", 0).version is None


def test_no_such_token(token: Callable[..., Any]) -> None:
    """The message says which there are."""
    with pytest.raises(ReplayError, match=r"turn one\.2 has no sampled token 3: its tokens are 0 to 2"):
        token("one", "one.2", 3)
    with pytest.raises(ReplayError, match=r"trajectory 'one' has no sampled token 7: its tokens are 0 to 6"):
        token("one", None, 7)


# Steps and versions -------------------------------------------------------------------------------


def test_a_step(sql: Connection) -> None:
    """Back over all versions that sampled its batch; forward to what its version sampled, and its steps."""
    step = step_lineage(sql, 1, None, "actor")
    assert [(a.attempt, a.status, a.error) for a in step.attempts] == [
        (1, "failed", "out of memory"),
        (2, "committed", None),
    ]
    assert (step.attempt, step.input.version, step.output.version) == (2, 1, 2)
    [sample] = step.samples
    assert ([turn.turn_id for turn in sample.turns], sample.tokens) == (["three.0", "three.1"], 5)
    assert (sample.min_version, sample.max_version, sample.trajectory) == (0, 1, "three")
    assert [(by.version.version, by.turns, by.tokens) for by in step.sampled_by] == [(0, 1, 2), (1, 2, 3)]
    assert step.sampled is not None
    assert (step.sampled.trajectories, step.sampled.turns, step.sampled.tokens) == (1, 1, 2)
    assert [(c.step, c.output_version, c.tokens) for c in step.consumers] == [(3, 5, 2)]
    assert _numbers(step.descendants) == [3, 4, 5]
    assert step_lineage(sql, 0, "demo", "actor").drops == {"staleness": 1}
    gone = step_lineage(sql, 2, None, "actor")
    assert (gone.status, gone.output.abandoned, gone.descendants) == ("abandoned", True, ())


def test_a_version(sql: Connection) -> None:
    """Back to version 0, through another number of the same weights; forward to engines, tokens and steps."""
    version = policy_lineage(sql, 5, None, "actor")
    assert _numbers(version.back) == [4, 2, 1, 0]
    assert (version.version.step, version.version.weights_digest) == (3, "w5")
    again = version.back[0]
    assert (again.renumbered, again.parent, again.step, again.checkpoint) == (True, 2, None, "c/4")
    first = policy_lineage(sql, 1, "demo", "actor")
    assert (first.sampled.turns, first.sampled.tokens) == (2, 3)
    assert [(c.step, c.turns, c.tokens) for c in first.consumers] == [(1, 2, 3)]
    assert _numbers(first.descendants) == [2, 3, 4, 5]


def test_no_such_step_or_version(sql: Connection) -> None:
    """The message says how to list those there are."""
    with pytest.raises(ReplayError, match="this store has no step 9 of policy 'actor'; list them"):
        step_lineage(sql, 9, None, "actor")
    with pytest.raises(ReplayError, match="run 'demo' has no version 5 of policy 'critic'; list them"):
        policy_lineage(sql, 5, "demo", "critic")


parents = st.lists(st.integers(0, 30), min_size=1, max_size=20).map(
    lambda choices: [None, *(choice % (at + 1) for at, choice in enumerate(choices))]
)


@given(parents)
def test_back_and_forward_agree(made_from: list[int | None]) -> None:
    """One version descends from another exactly if the other is among those it goes back to."""
    line = Line("r", "p", {n: Version("r", "p", n, parent) for n, parent in enumerate(made_from)})
    for number in line.versions:
        descendants = set(_numbers(line.descendants([number])))
        assert descendants == {n for n in line.versions if number in _numbers(line.back(n))}


def test_a_circle_ends() -> None:
    """Of versions that name each other as parents, as a damaged log may say."""
    line = Line("r", "p", {1: Version("r", "p", 1, 2), 2: Version("r", "p", 2, 1)})
    assert (_numbers(line.back(1)), _numbers(line.descendants([1]))) == ([2], [2])


# A real training ----------------------------------------------------------------------------------


def test_it_says_of_tokens_what_the_ledger_says(lineages: Store, sql: Connection) -> None:
    """The shares of single trajectories are those that the ledger adds up."""
    columns = "run, trajectory_id, turn_id, policy, policy_version, term, rule, tokens"
    whole = sql.execute(f"SELECT {columns} FROM ({SHARES})").fetchall()
    assert len({row[1] for row in whole}) == 6
    for name in {row[1] for row in whole}:
        query = f"SELECT {columns} FROM ({shares('trajectory_id = $id')})"
        assert Counter(sql.execute(query, {"id": name}).fetchall()) == Counter(
            row for row in whole if row[1] == name
        )


def test_a_trained_step() -> None:
    """The tokens that its samples were trained on are those that the step counted itself."""
    log = rb.open(fabric.trained_path())
    with rb.connect(log.path) as connection:
        step = step_lineage(connection, 10, None, "actor")
        names = sorted({sample.trajectory_id for sample in step.samples})
        traced = [trajectory_lineage(log, connection, log.head(), name) for name in names]
        [(counted, digest)] = connection.execute(
            "SELECT CAST(metrics->>'$.trained_tokens' AS BIGINT), digests->>'$.weights' FROM steps "
            "WHERE step = 10"
        ).fetchall()
    uses = [use for lineage in traced for use in lineage.uses]
    assert {use.step for use in uses} == {10}
    assert [use.position for use in uses] == list(range(len(step.samples)))
    assert sum(use.trained_tokens for use in uses if use.trained_tokens is not None) == counted == 74
    assert sum(by.tokens for by in step.sampled_by) == counted
    assert step.output is not None
    assert (step.output.version, step.output.weights_digest) == (11, digest)
    assert step.output.checkpoint == "checkpoints/demo/actor/v00000011"


def test_a_training_with_an_engine(tmp_path: Path) -> None:
    """Each version leads to the sync that gave it to the engine, with the digest that its step recorded."""
    log = fabric.record_store(tmp_path / "store", groups=1)
    app = ScriptedSGLang(None, Options(model_path=str(fabric.model_folder()), weights="float32"))
    with serving(app) as url:
        sync = {"engines": [url], "transport": "tensor"}
        fabric.train(log, fabric.config(fabric.SFT, steps=2, sync=sync, optimizer={"lr": 1e-2}))
    commits: list[Any] = [e.record for e in log.events_of([kinds.StepCommitted.KIND])]
    with rb.connect(log.path) as connection:
        version = policy_lineage(connection, 2, None, "actor")
    for entry in (version.version, *version.back):
        [engine] = entry.engines
        assert (engine.engine, engine.verified is not None) == (url, True)
        assert [(s.status, s.transport) for s in engine.syncs] == [("finished", "tensor")]
    assert [v.weights_digest for v in (version.version, version.back[0])] == [
        commit.digests["weights"] for commit in commits[::-1]
    ]
