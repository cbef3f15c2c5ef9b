"""Where samples come from: epochs at a cut, and a queue of units over a growing log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import RewardAssigned, TrajectoryAdopted, TurnDelivered
from rollbook.store.fold.history import History, fold_history
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.recipe import Drop
from rollbook.train.select.samples import all_samples
from rollbook.train.sources.queue_source import QueueSource
from rollbook.train.sources.source import EpochSource, EpochUnits, epoch_slice, make_source


def _queue(log: Store, history: History | None = None, **changes: Any) -> QueueSource:
    """A queue over the tail of the log, for groups of two."""
    values = {"algorithm": {"name": "grpo", "groups": 1, "group_size": 2}, "idle_timeout_s": 0.05}
    config = fabric.config(fabric.GRPO, **(values | changes))
    source = make_source(config, log, history or History(fabric.RUN, "actor"), "tail", {}, "family", 0)
    assert isinstance(source, QueueSource)
    return source


def _next(source: Any, version: int, evicted: list[Drop] | None = None) -> Any:
    """What a source gives to a trainer whose engines serve its version."""
    return source.take(version, version, (evicted if evicted is not None else []).extend)


def _names(selection: Any) -> list[str]:
    assert selection is not None
    return [s.name for s in selection.samples]


# Epochs -------------------------------------------------------------------------------------------


def _epochs(count: int, size: int, seed: int, steps: range) -> list[str]:
    """Names of the samples of these steps, of as many as `count` there are."""
    return [f"t{at}" for step in steps for at in epoch_slice(step, size, count, seed)]


def _source(store: Store, version: int = 0, done: int = 0, **changes: Any) -> EpochSource:
    """The samples of the store's head, in epochs."""
    config = fabric.config(fabric.SFT, **changes)
    cut = store.head()
    which = (config.run, config.recipe, config.algorithm, config.seed, version)
    return EpochSource(EpochUnits(store, cut, *which), cut, done)


def _take(source: EpochSource, steps: int) -> list[str]:
    return [name for _ in range(steps) for name in _names(_next(source, 0))]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=60)
def test_each_epoch_holds_every_sample_once(count: int, size: int, seed: int) -> None:
    """Whatever the batch size, each run of as many samples as there are is a permutation of them."""
    epochs = 3
    row = _epochs(count, size, seed, range(-(-epochs * count // size)))
    for epoch in range(epochs):
        assert sorted(row[epoch * count : (epoch + 1) * count]) == sorted(f"t{i}" for i in range(count))


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=60)
def test_epochs_go_on_where_they_stopped(count: int, size: int, done: int) -> None:
    """After `done` steps come those that would have come without a stop, for the same seed."""
    whole = _epochs(count, size, 5, range(done + 4))
    assert _epochs(count, size, 5, range(done, done + 4)) == whole[done * size :]


def test_a_source_gives_the_slices_of_its_seed(store: Store) -> None:
    """Whether it is new or goes on, and whether the step was read ahead or not."""
    fabric.append(store, [r for i in range(7) for r in fabric.records(f"t{i}")])
    changes: Any = {"seed": 5, "recipe": {}, "algorithm": {"name": "sft", "batch_size": 3}}
    assert _take(_source(store, **changes), 5) == _epochs(7, 3, 5, range(5))
    assert _take(_source(store, done=2, **changes), 3) == _epochs(7, 3, 5, range(2, 5))


def test_recorded_order(store: Store) -> None:
    """Trajectories by their ids, which tell the time, and paths by their turns; epoch after epoch, whatever
    the seed, and going on too."""
    fabric.append(store, [r for i in (4, 0, 2) for r in fabric.records(f"t{i}")])
    branches = [fabric.T(), fabric.T([5], [6], 0), fabric.T([7], [8], 0)]
    fabric.append(store, fabric.records("t1", branches), lane="other")
    changes: Any = {"seed": 5, "recipe": {"order": "recorded"}, "algorithm": {"name": "sft", "batch_size": 3}}
    row = ["t0", "t1", "t1", "t2", "t4"]
    assert _take(_source(store, **changes), 4) == [row[i % 5] for i in range(12)]
    assert _take(_source(store, done=2, **changes), 1) == [row[i % 5] for i in range(6, 9)]
    taken = _next(_source(store, **changes), 0)
    assert [s.leaf_turn_id for s in taken.samples] == ["t0.0", "t1.1", "t1.2"]
    with pytest.raises(ConfigError, match=r'recipe.order = "recorded".*see admission.order'):
        fabric.config(fabric.GRPO, recipe={"order": "recorded"})


def test_the_seed_decides_the_order() -> None:
    """Another seed is another order; each epoch of one seed is too."""
    first, second = (_epochs(20, 20, seed, range(2)) for seed in (1, 2))
    assert first != second
    assert first[:20] != first[20:]


def test_no_sample_at_the_cut(store: Store) -> None:
    """There is no step to take; what the recipe drops is told."""
    fabric.append(store, [*fabric.records("t", split="eval"), *fabric.records("old")])
    source = _source(store, 3, recipe={"max_staleness": 0})
    assert source.take(3, 3, lambda drops: None) is None
    assert [(drop.sample.trajectory_id, drop.rule) for drop in source.unfilled(3)] == [("old", "staleness")]


def test_unfinished_and_foreign_trajectories_are_not_sampled(store: Store) -> None:
    """At a cut, supervised samples are of the run's finished trajectories only."""
    fabric.append(store, [*fabric.records("a"), *fabric.records("open", finished=False)])
    fabric.append(store, fabric.records("b"), run="other")
    config = fabric.config(fabric.SFT, recipe={}, algorithm={"name": "sft", "batch_size": 4})
    source = make_source(config, store, History(fabric.RUN, "actor"), "cut", store.head(), "family", 0)
    assert _names(_next(source, 0)) == ["a"] * 4


# A queue over a growing log -----------------------------------------------------------------------


def test_a_group_is_complete_with_its_last_trajectory(store: Store) -> None:
    """Trajectories wait for their group; a group comes out once, in the order of completion."""
    source = _queue(store)
    with store.writer("serve") as writer:

        def add(name: str, group: str, reward: float, **options: Any) -> None:
            records = fabric.records(name, group=group, reward=reward, **options)
            writer.append(fabric.events(records)).result(30)

        add("a0", "a", 0.0)
        add("b0", "b", 0.0)
        with pytest.raises(TrainError, match="2 groups are incomplete"):
            _next(source, 0)
        add("b1", "b", 1.0, finished=False)
        with pytest.raises(TrainError, match="2 groups are incomplete"):
            _next(source, 0)
        add("b2", "b", 1.0)
        add("a1", "a", 1.0)
        taken = [_next(source, 0) for _ in range(2)]
        assert [_names(t) for t in taken] == [["b0", "b2"], ["a0", "a1"]]
        assert taken[0] is not None
        assert taken[0].cut == store.head()
        with pytest.raises(TrainError, match="0 groups are incomplete"):
            _next(source, 0)


def test_a_step_takes_as_many_groups_as_wanted(store: Store) -> None:
    """`groups` units make a step; what is left over stays for the next one."""
    for i in range(6):
        fabric.append(store, fabric.records(f"t{i}", group=f"g{i // 2}", reward=float(i)))
    source = _queue(store, algorithm={"name": "grpo", "groups": 2, "group_size": 2})
    assert _names(_next(source, 0)) == ["t0", "t1", "t2", "t3"]
    with pytest.raises(TrainError, match=r"no complete batch for 0\.05 s"):
        _next(source, 1)


def test_supervised_samples_come_one_by_one(store: Store) -> None:
    """With SFT on the tail every sample is a unit of its own, each used once."""
    turns = [fabric.T(), fabric.T()]
    for name in "ab":
        fabric.append(store, fabric.records(name, turns))
    source = _queue(store, algorithm={"name": "sft", "batch_size": 3})
    taken = _next(source, 0)
    assert taken is not None
    assert [s.leaf_turn_id for s in taken.samples] == ["a.0", "a.1", "b.0"]
    with pytest.raises(TrainError):
        _next(source, 0)


def test_evaluation_and_other_runs_never_come_out(store: Store) -> None:
    """Neither the eval split, nor a split that is not named, nor another run's trajectories."""
    for i, split in enumerate(("eval", "eval", "teacher", "teacher")):
        fabric.append(store, fabric.records(f"x{i}", group="g", split=split, reward=float(i)))
    for i in range(2):
        fabric.append(store, fabric.records(f"y{i}", group="g", reward=float(i)), run="other")
    with pytest.raises(TrainError):
        _next(_queue(store), 0)
    with pytest.raises(TrainError):
        _next(_queue(store, algorithm={"name": "sft", "batch_size": 1}), 0)


def test_stale_samples_are_dropped_with_their_rule(store: Store) -> None:
    """A stale group gives its place back at once: it is told, and the step is filled with the next one."""
    for group, version in (("old", 1), ("new", 5)):
        for i in range(2):
            records = fabric.records(f"{group}{i}", [fabric.T(version=version)], group=group, reward=float(i))
            fabric.append(store, records)
    evicted: list[Drop] = []
    taken = _next(_queue(store, recipe={"max_staleness": 2}), 5, evicted)
    assert taken is not None
    assert _names(taken) == ["new0", "new1"]
    assert taken.drops == []
    assert [(d.sample.name, d.rule, d.detail) for d in evicted] == [
        (f"old{i}", "staleness", {"staleness": 4, "max_staleness": 2, "oldest_version": 1}) for i in (0, 1)
    ]


def test_unusable_trajectories_are_dropped_with_their_rule(store: Store) -> None:
    """GRPO needs rewards and logprobs: what has none is dropped by name, its group goes on without it."""
    fabric.append(store, fabric.records("a", group="g", reward=1.0))
    fabric.append(store, fabric.records("b", group="g"))
    fabric.append(store, fabric.records("c", [fabric.T(logprobs=None)], group="g", reward=0.0))
    fabric.append(store, fabric.records("d", group="g", reward=0.0))
    group = {"name": "grpo", "groups": 1, "group_size": 4}
    taken = _next(_queue(store, algorithm=group, admission={"wait_s": 0.0}), 0)
    assert taken is not None
    assert _names(taken) == ["a", "d"]
    assert [(d.sample.name, d.rule) for d in taken.drops] == [("b", "no_reward"), ("c", "no_logprobs")]


def test_a_flat_group_has_had_its_turn(store: Store) -> None:
    """Of two groups wanted, a flat one counts but gives nothing; a step of flat groups only waits on."""
    for group, rewards in (("flat", (1.0, 1.0)), ("steep", (0.0, 1.0)), ("flat2", (2.0, 2.0))):
        for i, reward in enumerate(rewards):
            fabric.append(store, fabric.records(f"{group}{i}", group=group, reward=reward))
    source = _queue(store, algorithm={"name": "grpo", "groups": 2, "group_size": 2})
    taken = _next(source, 0)
    assert taken is not None
    assert _names(taken) == ["steep0", "steep1"]
    assert {(d.sample.name, d.rule) for d in taken.drops} == {(f"flat{i}", "zero_variance") for i in (0, 1)}
    with pytest.raises(TrainError):
        _next(source, 0)


def test_history_is_not_repeated(store: Store) -> None:
    """After a restart, groups that a committed step consumed or dropped do not come out again."""
    for i in range(6):
        fabric.append(store, fabric.records(f"t{i}", group=f"g{i // 2}", reward=float(i)))
    done = [fabric.planned(0, 0, turns=["t0.0", "t1.0"]), fabric.committed(0, 1)]
    history = fold_history(fabric.events(done), fabric.RUN, "actor")
    history.dropped |= {"t2.0", "t3.0"}
    assert _names(_next(_queue(store, history), 0)) == ["t4", "t5"]


def test_a_group_read_in_another_order_is_not_mixed(store: Store) -> None:
    """Lanes may be read in another order after a restart: used trajectories do not count for a group."""
    for i in range(4):
        fabric.append(store, fabric.records(f"t{i}", group="g", reward=float(i)))
    done = [fabric.planned(0, 0, turns=["t0.0", "t2.0"]), fabric.committed(0, 1)]
    history = fold_history(fabric.events(done), fabric.RUN, "actor")
    assert _names(_next(_queue(store, history), 1)) == ["t1", "t3"]
    source = _queue(store, history, algorithm={"name": "sft", "batch_size": 1})
    assert [_names(_next(source, 1)) for _ in range(2)] == [["t1"], ["t3"]]


@pytest.mark.parametrize("source", ["cut", "tail"])
def test_what_comes_after_the_finish_counts(store: Store, source: str) -> None:
    """A reward or delivery behind the finish, but inside the step's cut, is in the step's samples.

    A replay materializes them at that cut: anything else would be another batch.
    """
    undelivered = fabric.T([5], [6, 7], 0, delivered=False)
    fabric.append(store, fabric.records("a", [fabric.T(), undelivered], group="g", reward=0.0))
    late = [RewardAssigned("a", None, 0.75), TurnDelivered("a", "a.1", "echoed")]
    fabric.append(store, late + fabric.records("b", group="g", reward=1.0))
    config = fabric.config(
        fabric.GRPO, algorithm={"name": "grpo", "groups": 1, "group_size": 2}, idle_timeout_s=0.05
    )
    reader = make_source(config, store, History(fabric.RUN, "actor"), source, store.head(), "family", 0)
    taken = _next(reader, 0)
    assert taken is not None
    at_cut = {s.leaf_turn_id: s for s in all_samples(store.trajectories(taken.cut).values())}
    for sample in taken.samples:
        again = at_cut[sample.leaf_turn_id]
        assert (sample.reward, sample.digest()) == (again.reward, again.digest())
    assert taken.samples[0].reward == 0.75
    assert int(taken.samples[0].loss_mask.sum()) == 4


def test_a_reward_that_comes_while_waiting_counts(store: Store) -> None:
    """Units taken early in a step's wait are materialized again at the cut the step is planned at."""
    source = _queue(store, algorithm={"name": "grpo", "groups": 2, "group_size": 2})
    rewards = {"a": 0.0, "b": 1.0}
    for name, reward in rewards.items():
        fabric.append(store, fabric.records(name, group="g", reward=reward))
    with pytest.raises(TrainError):
        _next(source, 0)
    fabric.append(store, [RewardAssigned("a", None, 0.5)])
    for name, reward in {"c": 0.0, "d": 1.0}.items():
        fabric.append(store, fabric.records(name, group="h", reward=reward))
    taken = _next(source, 0)
    assert taken is not None
    assert [s.reward for s in taken.samples] == [0.5, 1.0, 0.0, 1.0]
    assert taken.cut == store.head()


def test_a_cut_ends_when_no_batch_is_left(store: Store) -> None:
    """At a cut, groups end without an error when no complete batch is left."""
    for i in range(5):
        fabric.append(store, fabric.records(f"t{i}", group=f"g{i // 2}", reward=float(i)))
    config = fabric.config(fabric.GRPO, algorithm={"name": "grpo", "groups": 1, "group_size": 2})
    source = make_source(config, store, History(fabric.RUN, "actor"), "cut", store.head(), "family", 0)
    taken = [_next(source, 0) for _ in range(3)]
    assert [_names(t) for t in taken[:2]] == [["t0", "t1"], ["t2", "t3"]]
    assert taken[2] is None


@given(st.data())
@settings(max_examples=25)
def test_each_sample_comes_out_once(data: st.DataObject) -> None:
    """However trajectories of groups interleave and split into polls, each is used at most once."""
    names = data.draw(
        st.permutations([f"{g}{i}" for g in "abc" for i in range(data.draw(st.integers(1, 5)))])
    )
    batches = [fabric.events(fabric.records(n, group=n[0], reward=float(i))) for i, n in enumerate(names)]
    polls = iter([[e for part in batches[i : i + 2] for e in part] for i in range(0, len(batches), 2)])
    config = fabric.config(fabric.GRPO, algorithm={"name": "grpo", "groups": 1, "group_size": 2})
    source = QueueSource(config, History(fabric.RUN, "actor"), lambda: next(polls, None), dict, live=False)
    taken: list[list[str]] = []
    while (selection := _next(source, 0)) is not None:
        taken.append(_names(selection))
    counts = Counter(name for unit in taken for name in unit)
    assert set(counts.values()) <= {1}
    assert all(len({n[0] for n in unit}) == 1 and len(unit) == 2 for unit in taken)
    sizes = Counter(n[0] for n in names)
    assert len(counts) == sum(size - size % 2 for size in sizes.values())


def test_supervised_samples_at_a_cut_may_be_stale(store: Store) -> None:
    """Staleness is held against the version that training starts from, and the drops are told once."""
    fabric.append(store, [r for i in range(4) for r in fabric.records(f"t{i}", [fabric.T(version=i)])])
    changes: Any = {"recipe": {"max_staleness": 1}, "algorithm": {"name": "sft", "batch_size": 2}}
    first = _next(_source(store, 3, **changes), 3)
    assert first is not None
    assert {s.name for s in first.samples} == {"t2", "t3"}
    assert [(d.sample.trajectory_id, d.rule, d.detail["staleness"]) for d in first.drops] == [
        ("t0", "staleness", 3),
        ("t1", "staleness", 2),
    ]
    later = _next(_source(store, 3, 1, **changes), 4)
    assert later is not None
    assert later.drops == []


def test_drops_of_a_step_that_never_fills_are_told(store: Store) -> None:
    """When the cut ends before a step is full, what the recipe dropped on the way was told."""
    for i in range(2):
        fabric.append(store, fabric.records(f"t{i}", [fabric.T(version=0)], group="g", reward=float(i)))
    config = fabric.config(
        fabric.GRPO, recipe={"max_staleness": 1}, algorithm={"name": "grpo", "groups": 1, "group_size": 2}
    )
    source = make_source(config, store, History(fabric.RUN, "actor"), "cut", store.head(), "family", 4)
    evicted: list[Drop] = []
    assert _next(source, 4, evicted) is None
    assert source.unfilled(4) == []
    assert [(d.sample.name, d.rule) for d in evicted] == [("t0", "staleness"), ("t1", "staleness")]


def test_the_order_of_arrival_does_not_decide_epochs(tmp_path: Path) -> None:
    """The same trajectories recorded in another order give the same batches."""
    names = [f"t{i}" for i in range(7)]
    rows = []
    for order in (names, names[::-1]):
        log = rb.open(tmp_path / order[0], create=True)
        fabric.append(log, [r for name in order for r in fabric.records(name)])
        changes: Any = {"recipe": {}, "algorithm": {"name": "sft", "batch_size": 3}}
        rows.append(_take(_source(log, **changes), 5))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("adopter", ["adopter", "zz"])
def test_the_tail_gives_adopted_trajectories(store: Store, adopter: str) -> None:
    """A trajectory that another lane finished is one unit, whole, whichever lane is read first."""
    records = list(fabric.records("t0"))
    trajectory_id = records[0].trajectory_id
    events = fabric.events(records)
    half = len(events) // 2
    adopted = TrajectoryAdopted(trajectory_id, "serve", events[half - 1].event_id)
    source = _queue(store, algorithm={"name": "sft", "batch_size": 1}, recipe={})
    for lane, part in (("serve", events[:half]), (adopter, [*fabric.events([adopted]), *events[half:]])):
        with store.writer(lane) as writer:
            writer.append(part).result(30)
    taken = _next(source, 0)
    assert _names(taken) == ["t0"]
    assert taken is not None
    [expected] = all_samples(fold(events).values())
    assert taken.samples[0].tokens.tolist() == expected.tokens.tolist()
    assert taken.cut == store.head()
