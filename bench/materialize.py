"""`materialize.*`: advantages and recipes over a million samples, and a recorded store under another recipe.

- `materialize.rloo_s` and its like: `Algorithm.advantages` of a million samples in 125,000 groups of 8 whose
  members lie far apart, from numbered groups, as the log's columns give them; against a loop over the groups
  in numpy, of the same formula (`materialize_loops`), which begins with the numbers too.
  `reinforce_plus_plus_baseline` is by tokens, of which each sample has four; the others are by samples.
- `materialize.sort_out_s`: the recipe's rules over the columns of as many samples: a tenth is too old, and in
  each 16th group all rewards are equal; against a loop over the groups with these two rules. Both find which
  samples each rule drops; `materialize.drops_s` is what it takes then to read the drops one by one, with the
  numbers that the rules compared, as events and JSON have them.
- `materialize.number_s`: groups and trajectories of as many samples numbered from lists of names, which comes
  first for who has names only.
- `materialize.samples_s`: `rollbook samples --recipe FILE --as-of CUT --json`, as a process, of a store of
  10,000 trajectories (`scale_store`), about half of which `max_staleness` drops; against `rollbook --help`.

With `--folder` the store stays there, and is not made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from rollbook import store
from rollbook.bench import scale_commands as commands
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.materialize_loops import (
    LOOPS,
    Batch,
    advantages_of,
    numbers_of,
    sort_out_by_groups,
    sorted_out,
)
from rollbook.bench.rounds import Laps, Limit, Side, always, interleave, order, times_faster, walls
from rollbook.bench.scale_commands import Use
from rollbook.bench.scale_store import Made, store_in
from rollbook.bench.scale_turns import GROUP, TURNS
from rollbook.store import format_cut

SORT_OUT, LOOP = "sort_out", "loop"
NUMBER, DROPS = "number", "drops"
SAMPLES, HELP = "samples", "help"
_ALONE = {
    NUMBER: "nothing: for who has names instead of the log's columns",
    DROPS: "nothing: reading what sort_out drops, with details",
}
"""Ours without a loop, and what is said of it."""
KEEPS_STORES = True
"""With `--folder`, what is made stays in it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        groups, group_size: of the batch that is in memory.
        trajectories: of the store.
        limit: of the batch's rounds; commands: rounds of the two commands.
    """

    groups: int = 125_000
    group_size: int = 8
    trajectories: int = 10_000
    limit: Limit = field(default_factory=lambda: Limit(3, 240.0))
    commands: int = 5

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds + 1 + self.commands


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        laps: of ours by name, and of the loops with the same name after `LOOP`; `NUMBER` and `DROPS` have
            no loop.
        samples: in the batch; uses: of the two commands; kept, dropped: what the first one printed.
    """

    laps: Laps
    samples: int
    uses: Mapping[str, Sequence[Use]]
    kept: int
    dropped: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Time both ways over a batch in memory; then make the store in `folder`, if it is missing, and
    time the commands.

    Raises:
        OSError: the disk refuses, for instance because it is full.
        BenchError: a command failed.
        AssertionError: a loop gives other values, or the command prints other samples than the
            store has.
    """
    batch = Batch.of(plan.groups, plan.group_size)
    _check(batch)
    laps = interleave(_sides(batch), plan.limit, on_round)
    target = store_in(folder, plan.trajectories * TURNS)
    on_round()
    with tempfile.TemporaryDirectory(prefix=".rollbook-bench-", dir=folder) as scratch:
        uses, kept, dropped = _ask(target, Path(scratch), plan.commands, on_round)
    return Measured(laps, len(batch.rewards), uses, kept, dropped)


def _sides(batch: Batch) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for name, loop in LOOPS.items():
        sides[name] = always(lambda name=name: advantages_of(name, batch))  # type: ignore[misc]
        sides[LOOP + name] = always(lambda loop=loop: loop(batch))  # type: ignore[misc]
    sides[SORT_OUT] = always(lambda: sorted_out(batch))
    sides[LOOP + SORT_OUT] = always(lambda: sort_out_by_groups(batch))
    sides[NUMBER] = always(lambda: numbers_of(batch))
    drops = sorted_out(batch)[1]
    sides[DROPS] = always(lambda: list(drops))
    return sides


def _check(batch: Batch) -> None:
    """Check that both ways give the same, up to the rounding of sums in another order."""
    for name, loop in LOOPS.items():
        assert np.allclose(advantages_of(name, batch), loop(batch), rtol=1e-6, atol=1e-9), name
    (kept, drops), (kept_by_loop, drops_by_loop) = sorted_out(batch), sort_out_by_groups(batch)
    assert np.array_equal(kept, kept_by_loop)
    by_rule = {dropped.rule: dropped.at.tolist() for dropped in (*drops.alone, *drops.compared)}
    assert by_rule == {rule: at.tolist() for rule, at in drops_by_loop.items()}


def _ask(
    target: Made, scratch: Path, rounds: int, on_round: Callable[[], None]
) -> tuple[dict[str, list[Use]], int, int]:
    """Both commands once a round, after a warm-up; the numbers of samples kept and dropped."""
    log = store.open(target.path)
    recipe = scratch / "recipe.toml"
    recipe.write_text(f"max_staleness = {target.steps // 2}\n")
    samples_words = [
        "samples",
        "--recipe",
        recipe,
        "--as-of",
        format_cut(log.head()),
        "--json",
        "--store",
        target.path,
    ]
    words: dict[str, list[object]] = {SAMPLES: [*samples_words], HELP: ["--help"]}
    _, output = commands.run(samples_words, scratch)
    printed = orjson.loads(output)
    kept, dropped = len(printed["kept"]), len(printed["dropped"])
    finished = target.turns // TURNS - GROUP
    assert kept + dropped == finished, f"{kept} kept and {dropped} dropped of {finished} trajectories"
    assert {drop["rule"] for drop in printed["dropped"]} == {"staleness"}
    uses: dict[str, list[Use]] = {name: [] for name in words}
    for number in range(rounds):
        for name in order(list(words), number):
            uses[name].append(commands.run(words[name], scratch)[0])
        on_round()
    return uses, kept, dropped


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    names = [*LOOPS, SORT_OUT]
    ours, theirs = (
        {name: [use.wall_s for use in measured.uses[name]] for name in (SAMPLES, HELP)},
        {name: walls(measured.laps[LOOP + name]) for name in names},
    )
    figures = [_against_loop(name, measured, theirs[name]) for name in names]
    for name, against in _ALONE.items():
        alone = walls(measured.laps[name])
        figures.append(Figure(f"materialize.{name}_s", median(alone), "s", against, None, len(alone)))
    ratio = median(a / b for a, b in zip(ours[SAMPLES], ours[HELP], strict=True))
    against = (
        f"rollbook --help: {median(ours[HELP]):.2f} s; {measured.kept} kept, {measured.dropped} dropped; "
    )
    figures.append(
        Figure(
            *("materialize.samples_s", median(ours[SAMPLES]), "s", f"{against}goal <= 2 s"),
            *(ratio, len(ours[SAMPLES])),
        )
    )
    spreads = [spread(name, "s", walls(measured.laps[name])) for name in (*names, *_ALONE)]
    spreads += [spread(f"{name}, loop", "s", theirs[name]) for name in names]
    spreads += [spread(f"rollbook {name}", "s", values) for name, values in ours.items()]
    return Outcome(tuple(figures), tuple(spreads))


def _against_loop(name: str, measured: Measured, loop: Sequence[float]) -> Figure:
    mine = walls(measured.laps[name])
    against = f"a loop over groups: {median(loop):.2f} s; goals <= 1 s and, for the ratio, >= 50"
    return Figure(f"materialize.{name}_s", median(mine), "s", against, times_faster(mine, loop), len(mine))
