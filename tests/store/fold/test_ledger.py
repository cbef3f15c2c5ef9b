"""What each clause of the ledger decides, by examples, and what `rollbook ledger` prints of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.records import step_planned, turn_completed
from tests.fakes.stories.views import EventViews

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.cli.show import ledger as print_ledger
from rollbook.cli.show.ledger import comparison_line
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.cut import format_cut
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.store.sql import balance
from rollbook.store.sql.balance import compare, ks_p_value, ks_statistic
from rollbook.testing.ledger import fold_ledger

ASK: Any = ("r", None, None, 0, [], {}, None, {}, {}, "c")


class Log:
    """A store that is told turns in a word each. Its lanes stay open for writing until it is closed."""

    def __init__(self, store: Store, views: EventViews) -> None:
        self.store, self._views = store, views
        self._time = 0
        self._writers: dict[str, LaneWriter] = {}

    def add(self, lane: str, *records: Any, run: str = "demo") -> list[Event]:
        """Append them, each a second after the one before."""
        events = [Event(r, run, time_us=(self._time + i) * 1_000_000) for i, r in enumerate(records)]
        self._time += len(records)
        if lane not in self._writers:
            self._writers[lane] = self.store.writer(lane)
        self._writers[lane].append(events).result(30)
        return events

    def close(self) -> None:
        """Close the lanes, as a sealer needs them; what is added later opens them anew."""
        while self._writers:
            self._writers.popitem()[1].close()

    def open(self, name: str, split: str = "train", lane: str = "serve", group: str | None = None) -> None:
        """Open a trajectory."""
        self.add(lane, kinds.TrajectoryOpened(name, name, group, None, split))

    def members(self, group: str, *names: str, delivered: bool = True) -> None:
        """Trajectories of a group, each of one turn of one token and of its name, that have ended."""
        for name in names:
            self.open(name, group=group)
            self.turn(name, name, 1, delivered=delivered)
            self.finish(name)

    def begin(self, size: int) -> None:
        """Begin a training that takes groups of so many trajectories."""
        self.add("train", kinds.RunOpened("train", {"demand": {"group_size": size}, "source": "tail"}))

    def turn(
        self,
        name: str,
        turn_id: str,
        length: int,
        parent: str | None = None,
        *,
        lane: str = "serve",
        delivered: bool = True,
        version: int | None = 0,
        semantics: Any = None,
    ) -> None:
        """Ask, answer and perhaps deliver a turn."""
        spans = () if version is None else (kinds.VersionSpan("actor", version, 0, length),)
        ids = np.arange(length, dtype=np.int32)
        done = turn_completed(
            name,
            turn_id,
            policy=None if version is None else "actor",
            policy_version=version,
            prompt_ids=ids[:0],
            completion_ids=ids,
            version_spans=spans,
            logprob_semantics=semantics or {},
        )
        sent = [kinds.TurnDelivered(name, turn_id, "sent")] if delivered else []
        self.add(lane, kinds.TurnRequested(name, turn_id, "r", parent, *ASK[1:]), done, *sent)

    def finish(self, name: str, lane: str = "serve") -> None:
        """End it."""
        self.add(lane, kinds.TrajectoryFinished(name))

    def step(
        self,
        used: Sequence[tuple[str, str]],
        drops: Sequence[tuple[str, str]] = (),
        *,
        step: int = 0,
        end: str = "committed",
        policy: str = "actor",
        **keys: Any,
    ) -> None:
        """An attempt at a step."""
        refs = [{"trajectory_id": name, "turn_id": leaf} for name, leaf in used]
        cut = format_cut(self.store.head())
        records: list[Any] = [kinds.SampleDropped(*ref, "staleness", "r", step, {}) for ref in drops]
        recipe = keys.pop("recipe", {})
        records += [
            step_planned(step, policy=policy, cut=cut, recipe=recipe, recipe_digest="d", samples=refs, **keys)
        ]
        if end == "committed":
            records += [kinds.StepCommitted(step, 1, policy, 1, {}, {})]
        self.add("train", *records)

    def terms(self) -> dict[str, int]:
        """Term or rule -> tokens, and the fold must agree with the view."""
        query = "SELECT term, rule, tokens FROM ledger"
        if any(current_units(self.store.path, lane) for lane in self.store.lanes()):
            rows = rb.connect(self.store.path).execute(query).fetchall()
        else:
            self._views.put(self.store.table(self.store.head()))
            rows = self._views.ask(query)
        terms: dict[str, int] = {}
        for term, rule, tokens in rows:
            terms[rule or term] = terms.get(rule or term, 0) + tokens
        folded: dict[str, int] = {}
        for (_, (term, rule)), entry in fold_ledger(self.store.events()).entries.items():
            folded[rule or term] = folded.get(rule or term, 0) + entry.tokens
        assert folded == terms
        return terms


@pytest.fixture(scope="module")
def views() -> EventViews:
    """Views that are made once."""
    return EventViews()


@pytest.fixture
def log(store: Store, views: EventViews) -> Iterator[Log]:
    """An empty store to tell things to."""
    new = Log(store, views)
    yield new
    new.close()


@pytest.fixture
def rollbook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the `rollbook` command as its entry point does: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollbook", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def _fork(log: Log) -> None:
    """A root of 10 tokens that two leaves share, of 1 and 2 tokens."""
    log.open("t")
    log.turn("t", "root", 10)
    log.turn("t", "z-first", 1, "root")
    log.turn("t", "a-second", 2, "root")
    log.finish("t")


def test_the_owner_decides_over_a_shared_turn(log: Log) -> None:
    """The second leaf is trained; the root belongs to the first, which was dropped."""
    _fork(log)
    log.step([("t", "a-second")], [("t", "z-first")])
    assert log.terms() == {"trained": 2, "staleness": 11}


def test_a_shared_turn_waits_with_its_owner(log: Log) -> None:
    """A sample trained on a turn only as context does not train it; its owner does later."""
    _fork(log)
    log.step([("t", "a-second")])
    assert log.terms() == {"trained": 2, "waiting": 11}
    log.step([("t", "z-first")], step=1)
    assert log.terms() == {"trained": 13}


def test_turn_order_over_an_adoption(log: Log) -> None:
    """The first lane's leaf comes before the second lane's, whatever their names and numbers."""
    log.add("x", kinds.RewardAssigned("other", None, 1.0), run="other")
    log.open("t", lane="x")
    log.turn("t", "root", 10, lane="x")
    log.turn("t", "first", 1, "root", lane="x")
    last = list(log.store.events())[-1].event_id
    log.add("b", kinds.TrajectoryAdopted("t", "x", last))
    log.turn("t", "second", 2, "root", lane="b")
    last = [e for e in log.store.events() if e.lane == "b"][-1].event_id
    log.add("a", kinds.TrajectoryAdopted("t", "b", last))
    log.turn("t", "third", 4, "second", lane="a")
    log.turn("t", "fourth", 8, "second", lane="a")
    log.finish("t", lane="a")
    log.step([("t", "first")])
    assert log.terms() == {"trained": 11, "waiting": 14}
    log.step([("t", "fourth")], step=1)
    assert log.terms() == {"trained": 19, "waiting": 6}


def test_only_committed_attempts_count(log: Log) -> None:
    """What an attempt without an end consumed or dropped is waiting still."""
    _fork(log)
    log.step([("t", "z-first")], [("t", "a-second")], end="nothing")
    assert log.terms() == {"waiting": 13}


def test_a_drop_is_of_the_policy_that_plans_next(log: Log) -> None:
    """Another policy's committed step of the same number, or another run's, does not make it final."""
    _fork(log)
    log.step([("t", "z-first")])
    log.step([], [("t", "a-second")], policy="critic", end="nothing")
    assert log.terms() == {"trained": 11, "waiting": 2}


def test_another_runs_plan_between(log: Log) -> None:
    """A drop that no plan followed yet waits for one of its own run."""
    _fork(log)
    log.add("train", kinds.SampleDropped("t", "a-second", "staleness", "r", 0, {}))
    plan = step_planned(0, policy="critic", cut="empty", recipe_digest="d")
    log.add("train", plan, run="other")
    log.step([("t", "z-first")])
    assert log.terms() == {"trained": 11, "staleness": 2}


def test_kept_out_and_why(log: Log) -> None:
    """Each reason has its tokens; an empty list of alterations is none."""
    for split, length in (("eval", 1), ("teacher", 2), ("quarantine", 4)):
        log.open(split, split)
        log.turn(split, split, length, version=None)
    log.open("t")
    log.turn("t", "altered", 8, semantics={"altered": ["logit_bias"]})
    log.turn("t", "undelivered", 16, delivered=False)
    log.turn("t", "no version", 32, version=None)
    log.turn("t", "empty", 0, version=None)
    log.turn("t", "plain", 64, semantics={"altered": []})
    kept = {"eval": 1, "teacher": 2, "quarantine": 4, "altered": 8, "text only": 0, "no version": 32}
    assert log.terms() == kept | {"in flight": 80}
    log.finish("t")
    assert log.terms() == kept | {"undelivered": 16, "waiting": 64}
    log.step([("teacher", "teacher"), ("t", "altered"), ("t", "no version")])
    assert log.terms() == {n: kept[n] for n in ("eval", "quarantine", "altered", "text only")} | {
        "trained": 34,
        "undelivered": 16,
        "waiting": 64,
    }


def test_a_delivery_that_came_too_late(log: Log) -> None:
    """A turn that was masked when its sample was consumed is not trained by its delivery afterwards."""
    log.open("t")
    log.turn("t", "root", 10, delivered=False)
    log.turn("t", "leaf", 1, "root")
    log.finish("t")
    log.step([("t", "leaf")])
    assert log.terms() == {"trained": 1, "undelivered": 10}
    log.add("serve", kinds.TurnDelivered("t", "root", "echoed"))
    assert log.terms() == {"trained": 1, "late": 10}
    log.step([("t", "leaf")], step=1)
    assert log.terms() == {"trained": 11}


def test_a_turn_of_several_versions_is_split(store: Store, story: dict[str, list[Event]]) -> None:
    """Each version has the tokens of its spans; turn u2 of the story was sampled by two."""
    with store.writer("serve") as writer:
        writer.append(story["serve"]).result(30)
    rows = rb.connect(store.path).execute(
        "SELECT policy_version, term, turns, tokens FROM ledger ORDER BY ALL"
    )
    assert rows.fetchall() == [(0, "waiting", 2, 3), (1, "waiting", 1, 2)]


def test_turns_of_one_name(log: Log) -> None:
    """A turn's id is its trajectory's own: two of the same name are two turns."""
    for name, length in (("t", 1), ("u", 2)):
        log.open(name)
        log.turn(name, "same", length)
    assert rb.connect(log.store.path).execute("SELECT turns, tokens FROM ledger").fetchall() == [(2, 3)]


# What was omitted -----------------------------------------------------------------------------------

ONCE: Any = {"schedule": {"slice": None}}
ABC = [(name, name) for name in "abc"]


@pytest.mark.more_but("False")
@pytest.mark.parametrize("sealed", [False, True])
def test_a_member_that_is_left_out_of_its_group(log: Log, *, sealed: bool) -> None:
    """Without a drop it is omitted; who ended after a whole group waits for another; so does a group of which
    none was used, and who ended after the step was planned."""
    log.members("g", *"abcde")
    log.members("h", *"wxyz")
    log.members("i", *"stu")
    log.begin(4)
    log.step([*ABC[:2], ("s", "s"), ("t", "t")], [("c", "c"), ("u", "u")], **ONCE)
    log.members("i", "v")
    if sealed:
        assert len(_sealed_paths(log)) == 13
    assert log.terms() == {"trained": 4, "staleness": 2, "omitted": 1, "waiting": 6}
    log.step([("d", "d")], step=1, **ONCE)
    assert log.terms() == {"trained": 5, "staleness": 2, "waiting": 6}


def test_whole_groups_omit_nobody(log: Log) -> None:
    """Also with a member of which there was nothing to train, though its reply was delivered later."""
    log.members("g", *"abc")
    log.members("g", "n", delivered=False)
    log.members("g", "e")
    log.begin(4)
    log.step(ABC, **ONCE)
    assert log.terms() == {"trained": 3, "undelivered": 1, "waiting": 1}
    log.add("serve", kinds.TurnDelivered("n", "n", "echoed"))
    assert log.terms() == {"trained": 3, "waiting": 2}


@pytest.mark.more_but("1-keys0", "4-keys1", "4-keys4")
@pytest.mark.parametrize(
    ("size", "keys"),
    [
        (1, ONCE),
        (4, {}),
        (4, {"schedule": {"slice": 0}}),
        (4, ONCE | {"recipe": {"splits": ["teacher"]}}),
        (4, ONCE | {"rollout_batch": {"first_step": 0, "number": 1, "steps": 2}}),
        (4, ONCE | {"rollout_batch": {"samples": [{"trajectory_id": n, "turn_id": n} for n in "abcd"]}}),
    ],
)
def test_what_omits_nobody(log: Log, size: int, keys: Any) -> None:
    """Samples that are used one by one, or in epochs; of a release that did not say; of other splits; a later
    step on a rollout batch, and one that names what its later steps will train."""
    log.members("g", *"abcd")
    log.begin(size)
    log.step(ABC, **keys)
    assert log.terms() == {"trained": 3, "waiting": 1}


def test_a_leaf_that_is_left_out(log: Log) -> None:
    """All leaves of a trajectory of a group are decided on together: of those that had been delivered."""
    _fork(log)
    log.open("u")
    log.turn("u", "1", 4)
    log.turn("u", "2", 8, delivered=False)
    log.finish("u")
    log.begin(2)
    log.step([("t", "a-second"), ("u", "1")], **ONCE)
    log.add("serve", kinds.TurnDelivered("u", "2", "echoed"))
    assert log.terms() == {"trained": 6, "omitted": 11, "waiting": 8}


# Paths of sealed units ------------------------------------------------------------------------------


def _sealed_paths(log: Log) -> list[tuple[Any, ...]]:
    """Seal and derive all of it: the rows of `internal.paths`, by trajectory and version."""
    log.close()
    for lane in log.store.lanes():
        for unit in seal_closed(log.store.path, lane, SealSettings(), all_of_it=True):
            build_derived(log.store.path, unit)
    rows = "SELECT trajectory_id, split, leaf_turn_id, policy, policy_version, turns, tokens"
    paths = rb.connect(log.store.path).execute(f"{rows} FROM internal.paths ORDER BY ALL").fetchall()
    return list(paths)


def test_paths_of_a_sealed_unit(log: Log) -> None:
    """A path has a row for each version; a failed turn takes nothing from it, and a step takes all of it."""
    log.open("p")
    log.turn("p", "1", 1)
    log.turn("p", "2", 2, "1", version=7)
    log.turn("p", "3", 4, "2", version=7)
    log.add("serve", kinds.TurnRequested("p", "4", "r", "3", *ASK[1:]), kinds.TurnFailed("p", "4", "gone"))
    log.finish("p")
    for name, split, length in (("q", "train", 8), ("e", "eval", 16)):
        log.open(name, split)
        log.turn(name, f"{name}.1", length, version=None)
        log.finish(name)
    assert _sealed_paths(log) == [
        ("e", "eval", "e.1", None, None, 1, 16),
        ("p", "train", "3", "actor", 0, 1, 1),
        ("p", "train", "3", "actor", 7, 2, 6),
        ("q", "train", "q.1", None, None, 1, 8),
    ]
    assert log.terms() == {"waiting": 7, "no version": 8, "eval": 16}
    log.step([("p", "2")], [("q", "q.1")])
    assert log.terms() == {"waiting": 7, "staleness": 8, "eval": 16}
    log.step([("p", "3")], step=1)
    assert log.terms() == {"trained": 7, "staleness": 8, "eval": 16}
    rows = rb.connect(log.store.path).execute("SELECT term, turns FROM ledger ORDER BY ALL").fetchall()
    assert rows == [("dropped", 1), ("kept out", 1), ("trained", 1), ("trained", 2)]


def test_what_is_no_path(log: Log) -> None:
    """What is open, forked, late, altered, without tokens or in another lane is looked at turn by turn."""
    log.open("open")
    log.turn("open", "1", 1)
    _fork(log)
    for name in ("altered", "empty", "undelivered", "late", "unanswered", "after"):
        log.open(name)
        log.turn(name, "1", 1)
    log.turn("altered", "2", 1, "1", semantics={"altered": ["logit_bias"]})
    log.turn("empty", "2", 0, "1")
    log.turn("undelivered", "2", 1, "1", delivered=False)
    log.turn("late", "2", 1, "1", delivered=False)
    log.add("serve", kinds.TurnRequested("unanswered", "2", "r", "1", *ASK[1:]))
    for name in ("altered", "empty", "undelivered", "late", "unanswered", "after"):
        log.finish(name)
    log.add("serve", kinds.TurnDelivered("late", "2", "sent"))
    log.turn("after", "2", 1, "1")
    log.open("moved")
    log.turn("moved", "1", 1)
    last = list(log.store.events())[-1].event_id
    log.add("other", kinds.TrajectoryAdopted("moved", "serve", last))
    log.turn("moved", "2", 1, "1", lane="other")
    last = [e for e in log.store.events() if e.lane == "other"][-1].event_id
    log.add("serve", kinds.TrajectoryAdopted("moved", "other", last))
    log.finish("moved")
    assert _sealed_paths(log) == []
    log.terms()
    turns = rb.connect(log.store.path).execute("SELECT turns FROM trajectories WHERE trajectory = 'moved'")
    assert turns.fetchall() == [(2,)]


# The command ----------------------------------------------------------------------------------------


def _biased(log: Log) -> None:
    """Twelve trained trajectories of 10 to 21 tokens, and twelve dropped ones of 100 to 111."""
    names = {f"{kind}{i}": base + i for kind, base in (("short", 10), ("long", 100)) for i in range(12)}
    for name, length in names.items():
        log.open(name)
        log.turn(name, f"{name}.0", length)
        log.finish(name)
    used = [(name, f"{name}.0") for name in names]
    log.step(used[:12], used[12:])


def test_the_command_prints_terms_rules_and_balance(
    log: Log, rollbook: Callable[..., tuple[int, str, str]]
) -> None:
    """A row per term, rules beneath, the share of each, a sentence on bias, and the balance in the end."""
    _biased(log)
    code, out, err = rollbook("ledger", "--store", log.store.path, "--by-version")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"run demo at {format_cut(log.store.head())}"
    assert [line.split() for line in lines[2:10]] == [
        ["term", "tokens", "turns", "share"],
        ["generated", "1,452", "24", "100.0", "%"],
        ["trained", "186", "12", "12.8", "%"],
        ["dropped", "1,266", "12", "87.2", "%"],
        ["staleness", "1,266", "12", "87.2", "%"],
        ["waiting", "0", "0", "0.0", "%"],
        ["in", "flight", "0", "0", "0.0", "%"],
        ["kept", "out", "0", "0", "0.0", "%"],
    ]
    assert lines[12].split() == ["actor", "0", "1,452", "186", "1,266", "0", "0", "0"]
    assert lines[14] == (
        "dropped trajectories are longer: median 106 against 15.5 tokens, p90 110 against 19.9; "
        "KS 1.00, p < 0.001 (12 dropped, 12 trained)"
    )
    assert lines[15].startswith("no sign that dropped trajectories differ in duration: median 4 against 4 s")
    assert lines[-1] == (
        "demo balances: 1,452 generated = 186 trained + 1,266 dropped + 0 waiting + 0 in flight + 0 kept out"
    )


def test_the_command_as_json(log: Log, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """The same for machines."""
    _biased(log)
    log.open("x")
    log.turn("x", "x", 3)
    code, out, _ = rollbook("ledger", "--store", log.store.path, "--json")
    printed = orjson.loads(out)
    assert (code, printed["balances"], printed["cut"]) == (0, True, format_cut(log.store.head()))
    [run] = printed["runs"]
    assert (run["run"], run["generated"], run["difference"]) == ("demo", {"turns": 25, "tokens": 1455}, 0)
    assert [(t["term"], t["rule"], t["turns"], t["tokens"]) for t in run["terms"]] == [
        ("dropped", None, 12, 1266),
        ("dropped", "staleness", 12, 1266),
        ("in flight", None, 1, 3),
        ("trained", None, 12, 186),
    ]
    assert run["terms"][2]["share"] == pytest.approx(3 / 1455)
    lengths = run["dropped_against_trained"]["tokens"]
    assert lengths["dropped"] == {"count": 12, "median": 105.5, "p90": pytest.approx(109.9)}
    assert lengths["ks_statistic"] == 1.0
    assert lengths["p_value"] == pytest.approx(ks_p_value(1.0, 12, 12))


def test_a_run_and_a_cut(log: Log, rollbook: Callable[..., tuple[int, str, str]]) -> None:
    """`--run` picks one of several, `--as-of` an earlier cut; a run that is not there is an error."""
    _fork(log)
    log.add("other", kinds.TrajectoryOpened("o", "o"), run="else")
    path = log.store.path
    assert rollbook("ledger", "--store", path, "--as-of", "serve=4", "--run", "demo")[1].endswith(
        "demo balances: 10 generated = 0 trained + 0 dropped + 0 waiting + 10 in flight + 0 kept out\n"
    )
    code, _, err = rollbook("ledger", "--store", path, "--run", "else")
    assert (code, err) == (
        2,
        "error: run 'else' has no completed turn at 'head'; runs that have: demo\n",
    )
    assert rollbook("ledger", "--store", path, "--as-of", "empty")[:2] == (0, "no completed turn at empty\n")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_ledger_that_does_not_balance(
    log: Log,
    rollbook: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    """Where the terms are not what was generated the exit code is 1 and the difference is told."""
    _fork(log)
    monkeypatch.setattr(balance, "SHARES", f"SELECT * FROM ({balance.SHARES}) WHERE turn_id <> 'a-second'")
    code, out, _ = rollbook("ledger", "--store", log.store.path, *options)
    assert code == 1
    if options:
        assert (orjson.loads(out)["balances"], orjson.loads(out)["runs"][0]["difference"]) == (False, 2)
    else:
        assert out.splitlines()[-1] == (
            "demo does not balance: 13 generated, 0 trained + 0 dropped + 11 waiting + 0 in flight + "
            "0 kept out; the difference is 2 tokens (by version: actor 0: 2). "
            "Check the store with rollbook store verify"
        )


# Two samples ----------------------------------------------------------------------------------------


def _numbers(*values: float) -> Any:
    return np.array(values, np.float64)


def test_the_statistic_is_the_largest_distance() -> None:
    """The largest distance between the two step functions, ties included."""
    assert ks_statistic(_numbers(1, 2, 3, 4), _numbers(1, 2, 3, 4)) == 0.0
    assert ks_statistic(_numbers(1, 2), _numbers(3, 4, 5)) == 1.0
    assert ks_statistic(_numbers(1, 2, 3, 4), _numbers(3, 4, 5, 6)) == 0.5
    assert ks_statistic(_numbers(1, 1, 1, 2), _numbers(1, 2, 2)) == pytest.approx(0.75 - 1 / 3)


@pytest.mark.parametrize(
    ("x", "p_value"), [(0.5, 0.963945), (0.8276, 0.5), (1.2238, 0.1), (1.3581, 0.05), (1.6276, 0.01)]
)
def test_the_p_value_agrees_with_tables(x: float, p_value: float) -> None:
    """The quantiles of Kolmogorov's distribution that tables give."""
    n, m = 800, 200
    assert ks_p_value(x / np.sqrt(n * m / (n + m)), n, m) == pytest.approx(p_value, rel=2e-3)
    assert ks_p_value(0.0, n, m) == 1.0


def test_the_test_is_calibrated() -> None:
    """Of samples of one distribution about one in twenty differs at the level of 0.05."""
    rng = np.random.default_rng(7)
    differs = [compare(rng.normal(size=80), rng.normal(size=60)).p_value < 0.05 for _ in range(1000)]
    assert 0.02 < np.mean(differs) < 0.06


def test_the_sentence_on_bias_names_the_direction() -> None:
    """Longer, shorter, differing, or nothing that can be told."""
    rng = np.random.default_rng(0)
    low, high = rng.uniform(0, 1, 100), rng.uniform(2, 3, 50)
    words = ("are longer", "are shorter", "length", "tokens")
    assert comparison_line(compare(high, low), *words).startswith(
        "dropped trajectories are longer: median 2."
    )
    assert comparison_line(compare(low, high), *words).startswith(
        "dropped trajectories are shorter: median 0."
    )
    assert "KS 1.00, p < 0.001 (100 dropped, 50 trained)" in comparison_line(compare(low, high), *words)
    wide = np.repeat(_numbers(0, 10, 20), 40)
    narrow = np.full(100, 10.0)
    assert comparison_line(compare(wide, narrow), *words).startswith(
        "dropped trajectories differ in length: median 10 "
    )
    assert comparison_line(compare(low, low), *words).startswith(
        "no sign that dropped trajectories differ in length"
    )
    assert print_ledger.SIGNIFICANT == 0.05
