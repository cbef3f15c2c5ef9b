"""`bench scale`: what commands cost on a store of a million turns, against the same on a small one.

The store holds trajectories of 8 turns of about 500 new tokens, rewarded and in groups, sealed but for the
last hundredth, and a run of a step per thousand turns with its manifests, syncs and checkpoints
(`scale_store`). Each command is a process as users start it. What is compared is CPU time, of the process and
its children: the machine's other work does not change it. Imports are part of it.

- `scale.serve_ready_s`: `rollbook serve` until it answers, without its sealer; against an empty store.
- `scale.train_ready_s`: `rollbook train --source tail`, which goes on with the run, until its next step is
  planned, so all that it has to know of the log is read; against the small store, since on an empty one no
  step is planned.
- `scale.show_s`, `.samples_s`, `.replay_s`: `rollbook show NAME` and `rollbook samples --trajectory NAME` of
  a trajectory in the middle, and `rollbook replay step` of the last step: all of it, with a second of the
  tiny model's work on two samples; against the small store. `scale.find_s` is the one that grows most.
- `scale.ledger_s`, `.sql_ready_s`, `.tail_s`: `rollbook ledger`; `rollbook sql "select count(*) from turns"`;
  `rollbook tail --no-follow`, which prints the newest 10,000 turns.
- `scale.growth`: the greatest of the ratios of the full store to one of a tenth.
- `scale.train_peak_gib`: the most memory of a pass over all samples in the trainer's way, from the log to
  batches, less that of the small store. No model takes part: it would take hours, and as much in both.
- `materialize.*`: tokens of such a pass per CPU second, from a store that is all sealed and from one that is
  not sealed at all; against the same samples in JSON lines, read by a loop with `json`, and with `orjson`.

With `--folder` the stores stay there, and are not made again. Commands that write work on a copy whose sealed
files are links.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from rollbook import store
from rollbook.bench import scale_commands as commands
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.rounds import Lap, Laps, Limit, always, interleave, order
from rollbook.bench.scale_commands import Pass, Use
from rollbook.bench.scale_feed import Arrays, read_rows, rows_of, trained_batches, write_rows
from rollbook.bench.scale_store import Made, borrowed, make_turns, model_in, store_in
from rollbook.bench.scale_turns import EVENTS, LANE, TURNS
from rollbook.store import Store, format_cut
from rollbook.store.events import TurnCompleted

FULL, TENTH, SMALL, EMPTY = "full", "tenth", "small", "empty"
SEALED, LIVE, JSON, ORJSON = "sealed", "live", "json", "orjson"
COUNT = "select count(*) as turns from turns"
KEEPS_STORES = True
"""With `--folder`, what is made stays in it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        turns, tenth, small: of the stores.
        tail_turns: that `rollbook tail` prints.
        rounds, seconds: of each command, whichever ends first.
        samples, passes: of `materialize`.
    """

    turns: int = 1_000_000
    tenth: int = 100_000
    small: int = 1_000
    tail_turns: int = 10_000
    rounds: int = 3
    seconds: float = 300.0
    samples: int = 2048
    passes: int = 5

    @property
    def steps(self) -> int:
        """How often `on_round` is called, unless time runs out: stores, rounds of commands, passes."""
        return 3 + 8 * self.rounds + 2 + self.passes


def sized(scale: float) -> Plan:
    """A plan of `scale` times a million turns."""
    plan = Plan()
    turns = max(round(plan.turns * scale), plan.small)
    tenth = max(turns // 10, plan.small)
    return replace(plan, turns=turns, tenth=tenth, tail_turns=min(plan.tail_turns, turns))


Rounds = Mapping[str, Sequence[Use]]
"""Store -> what a command took there, round by round."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        made: store -> what it holds.
        uses: command -> its rounds.
        tail_turns: that `tail` printed.
        passes: store -> a pass over its samples.
        laps, tokens: of `materialize`.
    """

    made: Mapping[str, Made]
    uses: Mapping[str, Rounds]
    tail_turns: int
    passes: Mapping[str, Pass]
    laps: Laps
    tokens: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Make the stores in `folder` that are not there, and measure.

    Raises:
        OSError: the disk refuses, for instance because it is full.
        BenchError: a command failed; a step did not replay; a ledger does not balance.
        AssertionError: a command printed what the store does not hold, or batches differ from the file's.
    """
    stores: dict[str, Made] = {}
    for name, turns in ((SMALL, plan.small), (TENTH, plan.tenth), (FULL, plan.turns)):
        stores[name] = store_in(folder, turns)
        on_round()
    with tempfile.TemporaryDirectory(prefix=".rollbook-bench-", dir=folder) as inside:
        scratch = Path(inside)
        asking = _Asking(stores, model_in(folder), scratch, plan.tail_turns)
        uses = {name: _take_turns(sides, plan, on_round) for name, sides in asking.commands().items()}
        passes = {}
        for name in (SMALL, FULL):
            passes[name] = commands.feed_pass(stores[name].path, scratch)
            on_round()
        laps, tokens = materialize(scratch, plan, on_round)
    return Measured(stores, uses, asking.printed_turns, passes, laps, tokens)


def _take_turns(sides: Mapping[str, Callable[[], Use]], plan: Plan, on_round: Callable[[], None]) -> Rounds:
    """Each side once a round. The first round warms up the common imports."""
    names = list(sides)
    sides[names[0]]()
    uses: dict[str, list[Use]] = {name: [] for name in names}
    deadline = time.monotonic() + plan.seconds
    for number in range(plan.rounds):
        for name in order(names, number):
            uses[name].append(sides[name]())
        on_round()
        if time.monotonic() >= deadline:
            break
    return uses


class _Asking:
    """The commands, each with the stores that it runs on; the cheapest store comes first."""

    def __init__(self, stores: Mapping[str, Made], model: Path, scratch: Path, tail_turns: int) -> None:
        self._made, self._model, self._scratch = stores, model, scratch
        newest = stores[FULL]
        head = store.open(newest.path).head()
        behind = head | {LANE: max(head[LANE] - tail_turns * EVENTS // TURNS, 0)}
        self._tail_from = format_cut(behind)
        batches = store.open(newest.path).batches(head, behind)
        self.printed_turns = sum(
            kind == TurnCompleted.KIND for _, batch in batches for kind in batch.column("kind").to_pylist()
        )

    def commands(self) -> dict[str, dict[str, Callable[[], Use]]]:
        """Command -> store -> function that runs it once."""

        def of(measure_once: Callable[[Made], Use], *names: str) -> dict[str, Callable[[], Use]]:
            return {name: partial(measure_once, self._made[name]) for name in names}

        return {
            "serve_ready": {EMPTY: self._serve_empty} | of(self._serve, TENTH, FULL),
            "train_ready": of(self._train, SMALL, TENTH, FULL),
            "show": of(
                lambda target: self._says(target, target.shown, "show", target.shown), SMALL, TENTH, FULL
            ),
            "samples": of(self._samples, SMALL, TENTH, FULL),
            "replay": of(self._replay, SMALL, TENTH, FULL),
            "ledger": of(lambda target: self._says(target, "balances", "ledger"), TENTH, FULL),
            "sql_ready": of(self._count, FULL),
            "tail": of(self._tail, FULL),
        }

    def _says(self, target: Made, text: str, *words: object) -> Use:
        used, output = commands.run([*words, "--store", target.path], self._scratch)
        assert text in output.decode(), f"rollbook {words[0]} does not say {text!r}"
        return used

    def _serve_empty(self) -> Use:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            return commands.serve_ready(Path(folder) / "store", self._model, self._scratch)

    def _serve(self, target: Made) -> Use:
        with borrowed(target.path, self._scratch) as log:
            return commands.serve_ready(log, self._model, self._scratch)

    def _train(self, target: Made) -> Use:
        with borrowed(target.path, self._scratch) as log:
            return commands.train_ready(log, self._model, self._scratch)

    def _samples(self, target: Made) -> Use:
        return self._says(target, target.shown, "samples", "--trajectory", target.shown)

    def _replay(self, target: Made) -> Use:
        """A replay whose only difference is the selection of samples, since the trainer was told
        its samples."""
        words = ("replay", "step", target.last_step, "--json", "--store", target.path)
        used, output = commands.run(words, self._scratch, 1)
        verdicts = {name: stage["verdict"] for name, stage in orjson.loads(output)["stages"].items()}
        assert {name for name, verdict in verdicts.items() if verdict != "equal"} == {"selection"}, verdicts
        return used

    def _count(self, target: Made) -> Use:
        used, output = commands.run(["sql", COUNT, "--format", "json", "--store", target.path], self._scratch)
        assert orjson.loads(output)[0]["turns"] == target.turns, f"{output.decode()} and not {target.turns}"
        return used

    def _tail(self, target: Made) -> Use:
        words = ("tail", "--no-follow", "--from", self._tail_from, "--store", target.path)
        used, output = commands.run(words, self._scratch)
        lines = output.count(b"\n")
        assert lines >= self.printed_turns, f"{lines} lines of {self.printed_turns} turns"
        return used


def materialize(scratch: Path, plan: Plan, on_round: Callable[[], None]) -> tuple[Laps, int]:
    """Laps of a pass over the same samples, sealed, not sealed and as JSON lines; and their tokens.

    Raises:
        AssertionError: the batches are not the same.
    """
    sealed = make_turns(scratch / SEALED, plan.samples, 0)
    live = make_turns(scratch / LIVE, 0, plan.samples)
    file = scratch / "samples.jsonl"
    tokens = write_rows(file, trained_batches(sealed))
    _check(file, live)
    sides = {
        SEALED: always(lambda: _exhaust(trained_batches(sealed))),
        LIVE: always(lambda: _exhaust(trained_batches(live))),
        JSON: always(lambda: _exhaust(read_rows(file, json.loads))),
        ORJSON: always(lambda: _exhaust(read_rows(file, orjson.loads))),
    }
    return interleave(sides, Limit(plan.passes, plan.seconds), on_round), tokens


def _check(file: Path, log: Store) -> None:
    """Check that the store's batches equal those made of the file's rows."""
    ours, theirs = trained_batches(log), read_rows(file, orjson.loads)
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a), "the log's samples are not the file's"


def _exhaust(batches: Any) -> None:
    batch: Arrays
    for batch in batches:
        assert batch.lengths


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    uses = measured.uses
    ratios = {name: _against_least(uses[name]) for name in ("show", "samples", "replay")}
    worst = max(ratios, key=lambda name: ratios[name])
    figures = (
        _ready("serve_ready", uses, "an empty store", "<= 1.5"),
        _ready("train_ready", uses, "the small store", "<= 3"),
        *(_ready(name, uses, "the small store", "<= 1.5") for name in ratios),
        _ready(worst, uses, f"{worst}, on the small store", "<= 1.5", called="find"),
        _plain("ledger", uses, f"{measured.made[FULL].turns:,} turns; goal <= 6 s"),
        _plain("sql_ready", uses, f"{_wall(uses['sql_ready']):.2f} s by the clock; goal < 1 s"),
        _plain("tail", uses, f"{measured.tail_turns:,} turns; goal < 2 s"),
        _growth(measured),
        _peak(measured),
        *_materialized(measured),
    )
    return Outcome(figures, _spreads(measured))


def _cpu(uses: Sequence[Use]) -> list[float]:
    return [use.cpu_s for use in uses]


def _wall(rounds: Rounds) -> float:
    return median(use.wall_s for use in rounds[FULL])


def _times(ours: Sequence[Use], theirs: Sequence[Use]) -> float:
    """The median over the rounds of our CPU seconds over theirs."""
    return median(a / b for a, b in zip(_cpu(ours), _cpu(theirs), strict=True))


def _against_least(rounds: Rounds) -> float:
    """The full store's CPU time as a multiple of that of the cheapest store, which comes first."""
    return _times(rounds[FULL], next(iter(rounds.values())))


def _ready(name: str, uses: Mapping[str, Rounds], other: str, goal: str, called: str | None = None) -> Figure:
    rounds = uses[name]
    least = median(_cpu(next(iter(rounds.values()))))
    against = f"{other}: {least:.2f} s; goal for the ratio {goal}"
    value = median(_cpu(rounds[FULL]))
    return Figure(f"scale.{called or name}_s", value, "s", against, _against_least(rounds), len(rounds[FULL]))


def _plain(name: str, uses: Mapping[str, Rounds], against: str) -> Figure:
    rounds = uses[name][FULL]
    return Figure(f"scale.{name}_s", median(_cpu(rounds)), "s", against, None, len(rounds))


def _growth(measured: Measured) -> Figure:
    """The greatest ratio of the full store to the tenth, among the commands that ran on both."""
    compared = {name: rounds for name, rounds in measured.uses.items() if TENTH in rounds}
    ratios = {name: _times(rounds[FULL], rounds[TENTH]) for name, rounds in compared.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    least, most = (median(_cpu(compared[worst][size])) for size in (TENTH, FULL))
    tenth = measured.made[TENTH].turns
    against = f"{worst}: {most:.2f} s, with {tenth:,} turns {least:.2f} s; goal <= 2"
    return Figure("scale.growth", ratios[worst], "", against, ratios[worst], len(compared[worst][FULL]))


def _peak(measured: Measured) -> Figure:
    full, small = (measured.passes[name] for name in (FULL, SMALL))
    value = (full.peak_bytes - small.peak_bytes) / 2**30
    against = f"{full.tokens / 1e6:.1f} million tokens; the small store: {small.peak_bytes / 2**30:.2f} GiB; "
    return Figure("scale.train_peak_gib", value, "GiB", f"{against}goal <= 1.5", None, 1)


def _materialized(measured: Measured) -> tuple[Figure, ...]:
    """Millions of tokens per CPU second, and as a multiple of those from JSON lines."""
    rates = {side: _rates(laps, measured.tokens) for side, laps in measured.laps.items()}
    slower = min((SEALED, LIVE), key=lambda side: median(rates[side]))
    value, runs = median(rates[slower]), len(rates[slower])

    def against(side: str, what: str, goal: str) -> Figure:
        ratio = median(a / b for a, b in zip(rates[slower], rates[side], strict=True))
        text = f"{what}: {median(rates[side]):.2f} Mtokens/s{goal}"
        return Figure(f"materialize.vs_{what}", value, "Mtokens/s", text, ratio, runs)

    unit = "Mtokens/s"
    return (
        Figure("materialize.mtokens_per_s", value, unit, f"{slower}; goal >= 20", None, runs),
        Figure("materialize.sealed_mtokens_per_s", median(rates[SEALED]), unit, None, None, runs),
        Figure("materialize.live_mtokens_per_s", median(rates[LIVE]), unit, None, None, runs),
        against(JSON, "jsonl", "; goal for the ratio >= 40"),
        against(ORJSON, "orjson", ""),
    )


def _rates(laps: Sequence[Lap], tokens: int) -> list[float]:
    return [tokens / 1e6 / lap.cpu_s for lap in laps]


def _spreads(measured: Measured) -> tuple[Spread, ...]:
    sizes = {name: f"{target.turns:,} turns" for name, target in measured.made.items()} | {EMPTY: EMPTY}
    command_spreads = [
        spread(f"{name}, {sizes[size]}", "CPU s", _cpu(uses))
        for name, rounds in measured.uses.items()
        for size, uses in rounds.items()
    ]
    stores = [
        spread(f"making {sizes[name]}, {target.bytes / 2**20:.0f} MiB", "s", [target.seconds])
        for name, target in measured.made.items()
    ]
    passes = [
        spread(f"a pass, {sizes[name]}", "GiB", [feed.peak_bytes / 2**30])
        for name, feed in measured.passes.items()
    ]
    rates = [
        spread(f"materialize {side}", "Mtokens/s", _rates(laps, measured.tokens))
        for side, laps in measured.laps.items()
    ]
    return (*stores, *command_spreads, *passes, *rates)
