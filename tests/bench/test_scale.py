"""bench scale, in small: the store is one, every command is asked of it, and each measure can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.bench.conftest import TURNS_HERE

from rollbook import store as rb
from rollbook.bench import scale, scale_commands, scale_feed, scale_store
from rollbook.bench.figure import Figure
from rollbook.bench.processes import BenchError
from rollbook.bench.rounds import Lap
from rollbook.bench.scale import EMPTY, FULL, JSON, LIVE, ORJSON, SEALED, SMALL, TENTH, Measured, Plan
from rollbook.bench.scale_commands import Pass, Use
from rollbook.bench.scale_store import Made, Shape, borrowed, make_turns, store_in
from rollbook.bench.scale_turns import EVENTS, GROUP, LANE, TURNS, Agents, events_of, is_flat
from rollbook.store.events import TurnCompleted
from rollbook.store.events.batches import encode
from rollbook.store.fold.trajectory import fold
from rollbook.store.sealed.parquet import same_bits
from rollbook.store.sealed.unit import current_units
from rollbook.train.select.samples import all_samples

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def made(folder: Path) -> Made:
    """The smallest store there is."""
    return store_in(folder, TURNS_HERE)


def test_the_turns_are_as_the_proxy_records_them() -> None:
    """Tables made at once hold what the codec would make of the records; prompts fold to their hashes."""
    agents = Agents(lambda number: number // GROUP)
    waves = [agents.wave(10), agents.wave(10)]
    for wave, first in zip(waves, (0, 10 * EVENTS), strict=True):
        events = events_of(wave.table)
        table = wave.table.drop_columns("lane")
        assert same_bits(table, type(table).from_batches([encode(events, first)])) is None
        samples = all_samples(fold(events).values())
        assert [s.trajectory_id for s in samples] == wave.trajectory_ids
        assert [s.leaf_turn_id for s in samples] == wave.leaf_ids
        assert {len(s.turn_ids) for s in samples} == {TURNS}
        assert all(
            (s.versions[s.loss_mask] == (first // EVENTS + i) // GROUP).all() for i, s in enumerate(samples)
        )
        assert {s.group for s in samples} == {f"group-{first // EVENTS // GROUP + i}" for i in (0, 1)}
    assert not set(waves[0].trajectory_ids) & set(waves[1].trajectory_ids)


def test_new_tokens_of_a_turn() -> None:
    """About 500, and rewards differ within a group unless it is one to be dropped."""
    events = events_of(Agents(lambda number: 0).wave(200).table)
    turns = [e.record for e in events if isinstance(e.record, TurnCompleted)]
    assert 490 < np.mean([len(t.prompt_ids) + len(t.completion_ids) for t in turns]) < 510
    groups: dict[str | None, set[float | None]] = {}
    for sample in all_samples(fold(events).values()):
        groups.setdefault(sample.group, set()).add(sample.reward)
    assert {int(str(name)[6:]) for name, rewards in groups.items() if len(rewards) == 1} == set(
        filter(is_flat, range(40))
    )


def test_the_scale_sets_turns_and_steps() -> None:
    """`--scale 1` is a million turns and a thousand steps; the smallest store still has all its parts."""
    whole = Shape(scale.sized(1).turns)
    assert (whole.turns, whole.trajectories, whole.live) == (1_000_000, 125_000, 1_250)
    assert (whole.steps, whole.groups_a_step) == (1_000, 24)
    plan = scale.sized(0.1)
    assert (plan.turns, plan.tenth, plan.small, plan.tail_turns) == (100_000, 10_000, 1_000, 10_000)
    assert scale.sized(1e-9).turns == 1_000
    assert Shape(TURNS_HERE).groups_a_step > 0


def test_the_made_store_is_sealed_and_balances(made: Made) -> None:
    """It is sealed but for its newest turns; its steps are committed, and its ledger balances."""
    log = rb.open(made.path)
    events = [e for e in log.events() if e.lane == LANE]
    assert [e.seq for e in events] == list(range(made.events))
    shape = Shape(TURNS_HERE)
    [unit] = current_units(log.path, LANE)
    assert unit.next_seq == (shape.trajectories - shape.live) * EVENTS < made.events
    trajectories = log.trajectories()
    assert len(trajectories) * TURNS == made.turns == TURNS_HERE
    assert sum(t.finished is None for t in trajectories.values()) == GROUP
    connection = rb.connect(made.path)
    steps = connection.execute("SELECT step, status FROM steps ORDER BY step").fetchall()
    assert steps == [(step, "committed") for step in range(made.steps)]
    assert made.last_step == made.steps - 1 == 3
    used = connection.execute("SELECT count(*), count(DISTINCT trajectory_id) FROM samples").fetchall()
    assert used == [(shape.groups_a_step * GROUP + 2 * 3,) * 2]
    scale_commands.run(["store", "verify", "--store", made.path], made.path.parent)


def test_what_is_there_is_not_made_again(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is whole is kept; one whose making was cut short is made anew."""
    paths: list[Path] = []

    def make(path: Path, *_: object) -> tuple[int, int, int, str]:
        paths.append(path)
        return 1, 2, 3, "name"

    monkeypatch.setattr(scale_store, "_make", make)
    assert store_in(folder, TURNS_HERE) == made
    (folder / "turns-1").mkdir()
    (folder / "turns-1/left").touch()
    stored = store_in(folder, 1)
    assert (paths, stored.turns, stored.shown) == ([folder / "turns-1/store"], 1, "name")
    assert not (folder / "turns-1/left").exists()


def test_a_borrowed_store_is_not_the_kept_one(made: Made, tmp_path: Path) -> None:
    """What is written to the copy is not in the store, and sealed files take no room."""
    before = rb.open(made.path).head()
    with borrowed(made.path, tmp_path) as copy:
        [unit] = made.path.glob(f"sealed/{LANE}/*/turns.parquet")
        assert (copy / unit.relative_to(made.path)).stat().st_ino == unit.stat().st_ino
        with rb.open(copy).writer(LANE) as writer:
            writer.append(events_of(Agents(lambda number: 0).wave(5).table)).result()
        assert rb.open(copy).head()[LANE] == before[LANE] + 5 * EVENTS
    assert rb.open(made.path).head() == before
    assert not copy.exists()


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A command is run once and then repeats its answer, as all stores here are one; what was run."""
    ran: list[object] = []
    done: dict[object, Any] = {}

    def once(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            about = (name, *(args[0] if name == "run" else ()))
            if about not in done:
                ran.append(args[0][0] if name == "run" else name)
                done[about] = real(*args)
            return done[about]

        return run

    for name in ("run", "serve_ready", "train_ready", "feed_pass"):
        monkeypatch.setattr(scale_commands, name, once(name, getattr(scale_commands, name)))
    return ran


def test_every_command_has_a_figure(made: Made, folder: Path, asked_once: list[object]) -> None:
    """Every command is asked, answers, and has a figure; progress is told of each step."""
    plan = Plan(*(TURNS_HERE,) * 3, tail_turns=80, rounds=1, samples=40, passes=2)
    steps: list[None] = []
    measured = scale.measure(folder, plan, lambda: steps.append(None))
    assert len(steps) == plan.steps
    assert asked_once == [
        *("serve_ready", "train_ready", "show", "samples", "replay", "ledger", "sql", "tail", "feed_pass")
    ]
    assert 60 < measured.tail_turns < 90
    assert measured.made == dict.fromkeys((SMALL, TENTH, FULL), made)
    finished = (TURNS_HERE // TURNS - GROUP) * TURNS
    assert all(0.9 < result.tokens / finished / 500 < 1.1 for result in measured.passes.values())
    assert {side: len(laps) for side, laps in measured.laps.items()} == dict.fromkeys(
        (SEALED, LIVE, JSON, ORJSON), 2
    )
    figures = {f.figure: f for f in scale.outcome(measured).figures}
    ready = [
        f"scale.{name}_s" for name in ("serve_ready", "train_ready", "show", "samples", "replay", "find")
    ]
    plain = [f"scale.{name}_s" for name in ("ledger", "sql_ready", "tail")]
    assert list(figures)[:11] == [*ready, *plain, "scale.growth", "scale.train_peak_gib"]
    assert all(figures[name].value > 0.1 for name in (*ready, *plain))
    assert {figures[name].ratio for name in ready} == {1}
    assert figures["scale.train_peak_gib"].value == 0
    assert not list(folder.glob(".rollbook-bench-*"))


def _uses(*cpu_s: float) -> list[Use]:
    return [Use(value, 2 * value) for value in cpu_s]


def _measured(tmp_path: Path) -> Measured:
    """Two rounds in which all goals are met."""
    base = Made(tmp_path, 1_000, 0, 4, "task-1", 2**20, 1.0)
    sizes = {SMALL: base, TENTH: replace(base, turns=100_000), FULL: replace(base, turns=1_000_000)}
    grows = {
        name: {SMALL: _uses(1, 2), TENTH: _uses(1, 2), FULL: _uses(1.2, 2.4)} for name in ("show", "samples")
    }
    return Measured(
        sizes,
        {
            "serve_ready": {EMPTY: _uses(2, 4), TENTH: _uses(2, 4), FULL: _uses(2.5, 5)},
            "train_ready": {SMALL: _uses(3, 3), TENTH: _uses(3, 3), FULL: _uses(4.5, 4.5)},
            **grows,
            "replay": {SMALL: _uses(6, 6), TENTH: _uses(6, 6), FULL: _uses(6.6, 6.6)},
            "ledger": {TENTH: _uses(1, 1), FULL: _uses(1.25, 1.25)},
            "sql_ready": {FULL: _uses(0.5, 0.7)},
            "tail": {FULL: _uses(1.0, 1.5)},
        },
        10_000,
        {SMALL: Pass(10**6, 2**30, 1.0), FULL: Pass(10**9, 2 * 2**30, 40.0)},
        {
            side: [Lap(9.0, s), Lap(9.0, s)]
            for side, s in ((SEALED, 0.1), (LIVE, 0.05), (JSON, 5.0), (ORJSON, 1.0))
        },
        3_000_000,
    )


def _figures(measured: Measured) -> dict[str, Figure]:
    return {f.figure: f for f in scale.outcome(measured).figures}


def test_the_values_of_the_figures(tmp_path: Path) -> None:
    """CPU seconds are medians, ratios are of each round, and what stands for several is the worst of them."""
    figures = _figures(_measured(tmp_path))
    values = {name: (f.value, f.ratio) for name, f in figures.items()}
    assert values["scale.serve_ready_s"] == (3.75, 1.25)
    assert values["scale.train_ready_s"] == (4.5, 1.5)
    assert values["scale.find_s"] == values["scale.show_s"] == (pytest.approx(1.8), pytest.approx(1.2))
    assert values["scale.replay_s"] == (6.6, pytest.approx(1.1))
    assert values["scale.ledger_s"] == (1.25, None)
    assert values["scale.sql_ready_s"] == (0.6, None)
    assert values["scale.tail_s"] == (1.25, None)
    assert values["scale.growth"] == (1.5, 1.5)
    assert str(figures["scale.growth"].against).startswith("train_ready: 4.50 s, with 100,000 turns 3.00 s")
    assert values["scale.train_peak_gib"] == (1.0, None)
    assert values["materialize.mtokens_per_s"] == (pytest.approx(30), None)
    assert values["materialize.live_mtokens_per_s"] == (pytest.approx(60), None)
    assert values["materialize.vs_jsonl"] == (pytest.approx(30), pytest.approx(50))
    assert values["materialize.vs_orjson"] == (pytest.approx(30), pytest.approx(10))


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        ("serve_ready", "scale.serve_ready_s"),
        ("train_ready", "scale.train_ready_s"),
        ("show", "scale.find_s"),
        ("samples", "scale.find_s"),
        ("replay", "scale.find_s"),
        ("ledger", "scale.growth"),
    ],
)
def test_what_reads_the_whole_log_is_seen(tmp_path: Path, command: str, figure: str) -> None:
    """A command that takes ten times as long on ten times the log is beyond its goal, and named."""
    measured = _measured(tmp_path)
    rounds = dict(measured.uses[command])
    rounds[FULL] = [Use(10 * use.cpu_s, use.wall_s) for use in rounds[TENTH]]
    figures = _figures(replace(measured, uses={**measured.uses, command: rounds}))
    assert figures[figure].ratio == pytest.approx(10)
    assert (figures["scale.growth"].value, str(figures["scale.growth"].against).split(":")[0]) == (
        pytest.approx(10),
        command,
    )


def test_memory_and_rates_are_seen(tmp_path: Path) -> None:
    """A pass that keeps the log in memory, and one way of reading that is slow, each miss their goals."""
    measured = _measured(tmp_path)
    large = {**measured.passes, FULL: Pass(10**9, 12 * 2**30, 1.0)}
    assert _figures(replace(measured, passes=large))["scale.train_peak_gib"].value == 11
    slow = _figures(replace(measured, laps={**measured.laps, LIVE: [Lap(1.0, 1.0)] * 2}))
    assert slow["materialize.mtokens_per_s"].value == pytest.approx(3)
    assert slow["materialize.vs_jsonl"].ratio == pytest.approx(5)
    assert "live" in str(slow["materialize.mtokens_per_s"].against)


def test_a_command_that_fails_is_no_measure(made: Made, folder: Path, tmp_path: Path) -> None:
    """Its exit code and what it said are the error; so is a count that is not the store's."""
    with pytest.raises(BenchError, match=r"(?s)replay step 999 .* ended with 2.*no committed step 999"):
        scale_commands.run(["replay", "step", 999, "--store", made.path], tmp_path)
    bare = make_turns(tmp_path / "bare", 0, 10)
    with pytest.raises(BenchError, match="train planned no step"):
        scale_commands.train_ready(bare.path, tmp_path / "no-model", tmp_path)
    more = replace(made, turns=made.turns + 1)
    asking = scale._Asking({FULL: more}, folder / "model", tmp_path, 80)
    with pytest.raises(AssertionError, match=f"and not {more.turns}"):
        asking._count(more)
    with pytest.raises(AssertionError, match="does not say 'another'"):
        asking._says(made, "another", "show", made.shown)


def test_other_samples_are_seen(tmp_path: Path) -> None:
    """One logprob of the file that differs from the log's is found before anything is timed."""
    log = make_turns(tmp_path / "store", 0, 10)
    file = tmp_path / "rows.jsonl"
    tokens = scale_feed.write_rows(file, scale_feed.trained_batches(log))
    assert tokens == sum(len(s) for s in all_samples(log.trajectories().values()))
    scale._check(file, log)
    rows: Sequence[dict[str, list[float]]] = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert len(rows) == 10
    rows[7]["logprobs"][-1] -= 0.25
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    with pytest.raises(AssertionError, match="are not the file's"):
        scale._check(file, log)
