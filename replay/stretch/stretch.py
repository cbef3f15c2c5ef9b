"""Proves a stretch of a training: every step of it, from checkpoint to checkpoint, in several processes, or
by workers of Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial

from rollbook.replay.claims.backed import Unbacked, find_unbacked
from rollbook.replay.step.manifest import checked
from rollbook.replay.step.replayer import Replayer, device_like
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start, has_state
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.digest import is_tree
from rollbook.store.errors import ModelError, ReplayError, TrainError
from rollbook.store.fold.history import KINDS, History, fold_histories, fold_history
from rollbook.store.workers import HERE, StoreThere, Workers, spread, store_there
from rollbook.train.ranks.ray_ranks import sent_environment
from rollbook.train.step.reference import policy_of


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step of a stretch: its replay, or why there is none."""

    step: int
    replay: StepReplay | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Break:
    """A step that, by the log alone, does not start with what the step before it ended with.

    Attributes:
        stage: the input of which another result was recorded.
    """

    step: int
    stage: str
    ended_with: str
    starts_with: str


@dataclass(frozen=True, slots=True)
class StepRange:
    """The result of a stretch.

    Attributes:
        broken: where the chain of recorded digests does not hold.
        steps: in order.
        unbacked: digests of published and served weights that nothing else in the log backs.
    """

    run: str
    policy: str
    broken: list[Break]
    steps: list[VerifiedStep]
    unbacked: list[Unbacked] = field(default_factory=list)

    @property
    def first_difference(self) -> StepReplay | None:
        """The first step that differs."""
        return next((step.replay for step in self.steps if step.replay and not step.replay.equal), None)

    @property
    def unproven(self) -> list[VerifiedStep]:
        """Steps that could not be replayed."""
        return [step for step in self.steps if step.replay is None]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.broken and not self.unbacked and self.first_difference is None


def history_of(log: Store, run: str | None, policy: str, cut: Cut | None = None) -> History:
    """The history of a policy's training at a cut (default: head).

    Args:
        run: None: the only one that committed steps of it.

    Raises:
        ReplayError: there is none, or there are several.
    """
    if run is not None:
        history = fold_history(checked(log.events_of(KINDS, cut)), run, policy)
        if not history.steps:
            raise ReplayError(f"run {run!r} has no committed step of policy {policy!r}")
        return history
    histories = {
        key: h
        for key, h in fold_histories(checked(log.events_of(KINDS, cut))).items()
        if h.steps and key[1] == policy
    }
    if not histories:
        raise ReplayError(f"this store has no committed step of policy {policy!r}")
    if len(histories) > 1:
        runs = ", ".join(sorted(key[0] for key in histories))
        raise ReplayError(f"runs {runs} each trained policy {policy!r}: name one with --run")
    return next(iter(histories.values()))


def chain(history: History, steps: Sequence[int]) -> list[Break]:
    """Where, by what they recorded, a step does not start with the weights (within a training also the
    optimizer) that the last one ended with. Pure."""
    by_version = {step.committed.policy_version: step for step in history.steps.values()}
    breaks: list[Break] = []
    for number in steps:
        step = history.steps[number]
        before = by_version.get(step.planned.policy_version)
        if before is None:
            continue
        pairs = [("input_weights", "weights"), ("critic_input_weights", "critic_weights")]
        if before.planned.phase == step.planned.phase:
            pairs += [("input_optimizer", "optimizer"), ("critic_input_optimizer", "critic_optimizer")]
        for stage, last in pairs:
            starts, ended = step.planned.input_digests.get(stage), before.committed.digests.get(last)
            # A training in another type rounds the weights that it begins with.
            retyped = before.planned.environment.get("dtype") != step.planned.environment.get("dtype")
            if starts is None or ended is None:
                continue
            if stage.endswith("optimizer") and is_tree(starts) != is_tree(ended):
                continue  # an earlier release went before: digests of two kinds tell nothing of each other
            if starts != ended and not retyped:
                breaks.append(Break(number, stage, str(ended), str(starts)))
    return breaks


def segments(history: History, first: int, last: int) -> list[list[int]]:
    """The steps from `first` to `last`, divided before each where a checkpoint has the whole state. Pure."""
    parts: list[list[int]] = []
    for number in (n for n in sorted(history.steps) if first <= n <= last):
        if not parts or has_state(history, history.steps[number]):
            parts.append([])
        parts[-1].append(number)
    return parts


def prove_stretch(
    log: Store,
    history: History,
    first: int,
    last: int,
    *,
    jobs: int = 1,
    workers: Workers = HERE,
    cut: Cut | None = None,
    trust_parts: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> StepRange:
    """Replay all steps of a run from one to another.

    A segment ends at its first difference, for what follows starts from it; the next one starts at a
    checkpoint of its own.

    Args:
        jobs: processes, each with segments of its own.
        workers: of Ray, instead of processes.
        cut: of the history (default: head).
        done: called with the number of steps that were finished.

    Raises:
        ReplayError: the run has no step there.
    """
    parts = segments(history, first, last)
    if not parts:
        raise ReplayError(f"run {history.run!r} has no committed step from {first} to {last}")
    broken, run_log = chain(history, [n for part in parts for n in part]), RunLog(log, history)
    which = (history.run, history.policy)
    odd = [odd for odd in find_unbacked(log, history.run) if policy_of(odd.policy) == history.policy]
    verified: list[VerifiedStep] = []
    if workers.count == 0 and (jobs == 1 or len(parts) == 1):
        for part in parts:
            for proven in prove_segment(run_log, part, trust_parts=trust_parts):
                verified.append(proven)
                done(1)
        return StepRange(*which, broken, verified, odd)
    there = store_there(log, log.head() if cut is None else cut, workers)
    prover = partial(_prover, there, *which, trust_parts)
    if workers.count:
        proving = _by_ray(prover, parts, _like_here(workers, history))
    else:
        proving = _by_processes(prover, parts, jobs)
    with contextlib.closing(proving):
        for proven_steps in proving:
            verified += proven_steps
            done(len(proven_steps))
    return StepRange(*which, broken, sorted(verified, key=lambda proven: proven.step), odd)


Prover = Callable[[list[int]], list[VerifiedStep]]
"""Proves a segment."""


def _by_processes(
    prover: Callable[[], Prover], parts: list[list[int]], jobs: int
) -> Generator[list[VerifiedStep]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(parts)), mp_context=spawn) as pool:
        for task in as_completed([pool.submit(_proven, prover, part) for part in parts]):
            yield task.result()


def _by_ray(
    prover: Callable[[], Prover], parts: list[list[int]], workers: Workers
) -> Generator[list[VerifiedStep]]:
    with spread(prover, workers) as results:
        yield from results(parts)


def _like_here(workers: Workers, history: History) -> Workers:
    """The workers, computing as this process does: with its variables and threads, and a GPU each where this
    process would replay the history's steps on one."""
    on_gpu = any(device_like(step.planned).type == "cuda" for step in history.steps.values())
    return replace(workers, gpu=on_gpu, environment=sent_environment(), ahead=1)


def prove_segment(
    run_log: RunLog, steps: Sequence[int], *, trust_parts: bool = False
) -> Iterator[VerifiedStep]:
    """Replay consecutive steps, from the nearest start of the first that has one.

    Steps that must be run between a start and these are run too, but are not part of the result.
    """
    left, history = list(steps), run_log.history
    while left:
        target = history.steps[left[0]]
        try:
            start = find_start(run_log, target)
        except ReplayError as error:
            yield VerifiedStep(left.pop(0), None, str(error))
            continue
        with Replayer(run_log, start, trust_parts=trust_parts) as replayer:
            reran: list[int] = []
            for step in (*start.between, *(history.steps[n] for n in left)):
                number = step.planned.step
                try:
                    replayed = replayer.run(step, claims=number in left)
                except (ReplayError, TrainError, ModelError) as error:
                    yield VerifiedStep(left.pop(0), None, f"step {number}: {error}")
                    break
                reran.append(number)
                differs = None if replayed.equal else number
                if differs is not None and number not in left:
                    behind = f"it is reached by step {number}, which differs in {replayed.differs_in}"
                    yield VerifiedStep(left.pop(0), None, behind)
                    break
                if number in left:
                    left.remove(number)
                    yield VerifiedStep(number, replace(replayed, reran=list(reran), differs_at_step=differs))
                if differs is not None:
                    for behind_it in left:
                        why = f"its segment differs from step {number} on"
                        yield VerifiedStep(behind_it, None, why)
                    return
                if start.weights_only:
                    break


def _prover(there: StoreThere, run: str, policy: str, trust_parts: bool) -> Prover:
    """`prove_segment` in another process, over the history at the cut."""
    log, cut = there.open()
    run_log = RunLog(log, fold_history(log.events_of(KINDS, cut), run, policy))
    return lambda steps: list(prove_segment(run_log, steps, trust_parts=trust_parts))


def _proven(prover: Callable[[], Prover], steps: list[int]) -> list[VerifiedStep]:
    return prover()(steps)
