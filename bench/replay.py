"""`bench replay`: what it costs to record steps so that they can be replayed, and to replay them.

- `replay.capture_share`: part of a step that recording it takes: manifest, digests of its stages, hashes of
  samples and tensors, metrics. Of steps of 128 rollouts and 8,192 trained tokens by the model of tests, by
  the metrics of a real `rollbook train`; beside it that of 32 rollouts by a model of a million parameters.
  `replay.capture_share_100m`: of a step of 105 million parameters (`train_sides`).
- `replay.step_bytes`: what a step keeps beside the log that it reads and its checkpoints, for 128 samples
  and for 1,024: its two events in the WAL, less the names of its samples.
- `replay.data_stages_s`: `rollbook replay step N --no-model --to losses` of a step of a million trained
  tokens whose logprobs are recorded, in a warm process: the stages themselves, with reading their samples
  and vectors. Whether the recipe chooses these samples (selection) is not part of it, and is told apart.
- `replay.find_s`: what finding the newest step reads of a log of a million turns and a thousand steps (the
  store of `bench scale`), less the same of a thousand turns, in a warm process.
- `replay.first_bad_steps`: a training of a thousand steps that goes wrong from one step on, the last before a
  checkpoint, so the most are to be run: steps that `rollbook replay bisect` runs, and how long it takes.

With `--folder` the stores stay there, those of `bench scale` among them, and are not made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rollbook.bench import scale_commands as commands
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.processes import BenchError, Process, module, some_cores
from rollbook.bench.replay_rollouts import MIDDLE, TINIEST, TINY, Steps
from rollbook.bench.replay_steps import Kept, capture_shares, in_store, kept, step_time, take
from rollbook.bench.scale_commands import Use
from rollbook.bench.scale_store import Made, store_in
from rollbook.bench.train_sides import BIG, LARGE, make_model
from rollbook.store import Store

KEEPS_STORES = True
"""With `--folder`, what is made stays in it."""
BAD, FEW, MANY, LONG = "bad", "few", "many", "long"
"""Runs: one that goes wrong; steps of 128 and of 1,024 samples; and one of a million tokens."""
FULL, SMALL = "full", "small"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        turns, small: of the two logs in which a step is found.
        bad_steps, every: of the training that goes wrong, and between its checkpoints.
        tokens: trained of each of the 1,024 samples of the long step.
        rounds: of each question; large_rounds: steps of the large model.
    """

    turns: int = 1_000_000
    small: int = 1_000
    bad_steps: int = 1_000
    every: int = 50
    tokens: int = 1_000
    rounds: int = 5
    large_rounds: int = 5

    @property
    def steps(self) -> int:
        """How often `on_round` is called: stores, rounds of questions, the search, and the large steps."""
        return 5 + self.rounds + 1 + self.large_rounds


def sized(scale: float) -> Plan:
    """A plan of `scale` times as many turns, steps, and tokens."""
    plan = Plan()
    return replace(
        plan,
        turns=max(round(plan.turns * scale), plan.small),
        bad_steps=max(round(plan.bad_steps * scale), 2 * plan.every),
        tokens=max(round(plan.tokens * scale), 4),
    )


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the first bad step.

    Attributes:
        ran: steps that it ran, of `steps`.
        wall_s: of a warm process; command: the whole command.
        step_s: seconds from step to step of the training.
    """

    ran: int
    steps: int
    wall_s: float
    command: Use
    step_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        shares: of recording, of steps of 128 samples; small: of a model of a million
            parameters; large: of the large model's.
        kept: of a step of 128 samples, and of one of 1,024.
        stages: part -> CPU seconds, round by round; command: the whole command; tokens: trained of the step.
        finds: store -> part -> CPU seconds, round by round; made: store -> what it holds.
    """

    shares: Sequence[float]
    small: Sequence[float]
    large: Sequence[float]
    kept: Sequence[Kept]
    stages: Sequence[Mapping[str, float]]
    command: Use
    tokens: int
    finds: Mapping[str, Sequence[Mapping[str, float]]]
    made: Mapping[str, Made]
    search: Search


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Make the stores in `folder` that are not there, and measure.

    Raises:
        OSError: the disk refuses, for instance because it is full.
        BenchError: a training or command failed, a step does not replay, or another step is found to be bad.
    """
    stores = {}
    for name, turns in ((SMALL, plan.small), (FULL, plan.turns)):
        stores[name] = store_in(folder, turns)
        on_round()
    with tempfile.TemporaryDirectory(prefix=".rollbook-bench-", dir=folder) as inside:
        scratch = Path(inside)
        few = in_store(folder, "few", lambda log: _take_few(log, scratch))
        on_round()
        steps = in_store(folder, f"steps-{plan.tokens}", lambda log: _take_steps(log, plan, scratch))
        on_round()
        bad = in_store(folder, f"bad-{plan.bad_steps}", lambda log: _take_bad(log, plan, scratch))
        on_round()
        with _side("replay", module("rollbook.bench.replay_side"), scratch) as side:
            stages, finds = _ask(side, steps, stores, plan, on_round)
            search = _search(side, bad, plan, scratch)
        on_round()
        words = ["replay", "step", 0, "--run", LONG, "--no-model", "--to", "losses", "--store", steps.path]
        command, _ = commands.run(words, scratch)
        large = _large(scratch, plan, on_round)
    shares = capture_shares(few, FEW), capture_shares(bad, BAD), large
    bytes_ = [kept(few, FEW), kept(steps, MANY)]
    return Measured(*shares, bytes_, stages, command, 1024 * plan.tokens, finds, stores, search)


def _take_steps(log: Store, plan: Plan, scratch: Path) -> None:
    """A step of many samples, and a long one."""
    make_model(scratch / "tiny", TINY)
    make_model(scratch / "tiniest", TINIEST)
    take(log, Steps(MANY, 1, 128, 8, 8), scratch / "tiny", scratch)
    vectors = ("logprobs", "losses")
    take(log, Steps(LONG, 1, 128, 8, plan.tokens, vectors=vectors), scratch / "tiniest", scratch)


def _take_few(log: Store, scratch: Path) -> None:
    make_model(scratch / "few", TINY)
    take(log, Steps(FEW, 12, 16, 8, 64), scratch / "few", scratch)


def _take_bad(log: Store, plan: Plan, scratch: Path) -> None:
    make_model(scratch / "bad", MIDDLE)
    steps = Steps(BAD, plan.bad_steps, 4, 8, 64, plan.every)
    take(log, steps, scratch / "bad", scratch, fault=_first_bad(plan))


def _first_bad(plan: Plan) -> int:
    """The first step that goes wrong: the last before a checkpoint, in the middle of the training."""
    return plan.bad_steps // plan.every // 2 * plan.every - 1


def _side(name: str, words: Sequence[str], scratch: Path) -> Process:
    return Process(name, words, scratch, some_cores(2))


def _ask(
    side: Process, steps: Store, stores: Mapping[str, Made], plan: Plan, on_round: Callable[[], None]
) -> tuple[list[Any], dict[str, list[Any]]]:
    """Seconds of the stages, and of finding a step in each store, after a round that warms up."""
    stages: list[Any] = []
    finds: dict[str, list[Any]] = {name: [] for name in stores}
    for number in range(plan.rounds + 1):
        stages.append(side.ask(what="stages", log=str(steps.path), run=LONG, step=0))
        for name, stored in stores.items():
            finds[name].append(side.ask(what="find", log=str(stored.path), step=stored.last_step))
        if number:
            on_round()
    return stages[1:], {name: lap[1:] for name, lap in finds.items()}


def _search(side: Process, log: Store, plan: Plan, scratch: Path) -> Search:
    """Search for the first bad step, in a warm process and as a command.

    Raises:
        BenchError: it finds another one.
    """
    side.ask(what="bisect", log=str(log.path), last=1)
    answer = side.ask(what="bisect", log=str(log.path), last=plan.bad_steps - 1)
    if answer["first"] != _first_bad(plan):
        raise BenchError(f"the first bad step is {_first_bad(plan)}, and {answer['first']} was found")
    used, _ = commands.run(["replay", "bisect", "--store", log.path, "--json"], scratch, code=1)
    return Search(answer["ran"], plan.bad_steps, answer["wall_s"], used, step_time(log, BAD))


def _large(scratch: Path, plan: Plan, on_round: Callable[[], None]) -> list[float]:
    """The share of the large model's steps that recording takes."""
    make_model(scratch / "large", BIG)
    shares = []
    with _side("large", module("rollbook.bench.train_sides", LARGE, scratch / "large"), scratch) as side:
        side.ask()
        for _ in range(plan.large_rounds):
            answer = side.ask()
            shares.append(answer["manifest"] / answer["seconds"])
            on_round()
    return shares


STAGES = ("recorded_vectors", "recorded_batch", "part_stages")
"""Parts of replaying the stages themselves."""


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    most = max(measured.kept, key=lambda entry: entry.ratio)
    search = measured.search
    own = [sum(lap[part] for part in STAGES) for lap in measured.stages]
    selection = median(lap["selection"] for lap in measured.stages)
    full, small = ([sum(lap.values()) for lap in measured.finds[name]] for name in (FULL, SMALL))
    more = [a - b for a, b in zip(full, small, strict=True)]
    of_1m = median(measured.small)
    share, rounds = "share of a step", len(measured.stages)
    turns = f"{measured.made[FULL].turns:,} turns: {median(full):.2f} s"
    return Outcome(
        (
            _goal(
                "capture_share",
                measured.shares,
                share,
                f"1M parameters: {of_1m:.2f}; goal <= 0.05",
            ),
            _goal("capture_share_100m", measured.large, share, f"{LARGE}; goal <= 0.015"),
            Figure(
                *("replay.step_bytes", most.stored, "bytes"),
                f"16 KB, and 48 a sample and 64 a tensor: {most.samples} samples, {most.tensors} tensors; "
                "goal for the ratio <= 1",
                *(most.ratio, len(measured.kept)),
            ),
            _goal(
                "data_stages_s",
                own,
                "s",
                f"{measured.tokens:,} tokens; selection {selection:.2f} s, the whole command "
                f"{measured.command.cpu_s:.2f} s; goal <= 1",
            ),
            _goal("find_s", more, "s", f"{turns}, with a small log {median(small):.2f} s; goal <= 1.5 more"),
            Figure(
                *("replay.first_bad_steps", search.ran, "steps"),
                f"{search.steps} steps; {search.wall_s / search.step_s:.0f} step-times of "
                f"{search.step_s:.2f} s, the command {search.command.wall_s:.1f} s; goal <= 60",
                *(None, 1),
            ),
        ),
        (*_spreads(measured), spread("stages", "s", own), *_of_each("finding", measured.finds[FULL], rounds)),
    )


def _goal(name: str, values: Sequence[float], unit: str, against: str) -> Figure:
    return Figure(f"replay.{name}", median(values), unit, against, None, len(values))


def _spreads(measured: Measured) -> list[Spread]:
    parts = _of_each("stages", measured.stages, len(measured.stages))
    shares = [spread("recording, 128 samples", "share", measured.shares)]
    shares.append(spread("recording, 1M parameters", "share", measured.small))
    shares.append(spread("recording, 105M parameters", "share", measured.large))
    return [*shares, *parts]


def _of_each(what: str, laps: Sequence[Mapping[str, float]], rounds: int) -> list[Spread]:
    assert len(laps) == rounds
    return [spread(f"{what}: {part}", "s of CPU", [lap[part] for lap in laps]) for part in laps[0]]
