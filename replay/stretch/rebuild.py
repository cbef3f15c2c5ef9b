"""Rebuilds a policy version that no checkpoint has: weights are a fold of the log."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.replay.claims.written import STAGES_OF, digests_of
from rollbook.replay.step.replayer import Replayer
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import Start, find_start
from rollbook.replay.verdict import StepReplay, Verdict
from rollbook.store import Event, Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import CheckpointWritten
from rollbook.store.fold.history import CommittedStep, History
from rollbook.store.interchange.destination import destination
from rollbook.store.upkeep.claim import training_claim
from rollbook.train.checkpoints.checkpoint import Checkpoint, write_checkpoint
from rollbook.train.ranks.kept_digests import trees_of

LANE = "replay"
"""The lane that rebuilt checkpoints are recorded in."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A version that was rebuilt.

    Attributes:
        proof: of the step that made it; of earlier steps only the one that differs, if any.
        proven: whether the result is the version, by every digest that the step recorded of it.
        bits: whether all of each step on the way came out bit for bit.
        path: where it was written to; None where it was not.
    """

    run: str
    policy: str
    policy_version: int
    weights_digest: str
    proof: StepReplay
    proven: bool
    bits: bool
    path: str | None = None


def making(history: History, version: int) -> CommittedStep:
    """The step that made a version.

    Raises:
        ReplayError: none did.
    """
    for step in history.steps.values():
        if step.committed.policy_version == version:
            return step
    versions = sorted(step.committed.policy_version for step in history.steps.values())
    have = f"steps made versions {versions[0]} to {versions[-1]}" if versions else "no step made any"
    raise ReplayError(
        f"run {history.run!r} has no step that made version {version} of policy {history.policy!r}: {have}"
    )


def steps_to(log: Store, history: History, version: int) -> int:
    """How many steps are run to rebuild a version.

    Raises:
        ReplayError: no step made it, or there is nothing to start from.
    """
    return 1 + len(find_start(RunLog(log, history), making(history, version)).between)


def rebuild(
    log: Store,
    history: History,
    version: int,
    out: Path | None = None,
    *,
    restore: bool = False,
    trust_parts: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> Rebuilt:
    """Run the steps from the nearest checkpoint to a version, and prove the digest of each on the way.

    Args:
        out: a new folder, to write it to as a checkpoint.
        restore: write it into the store, as a checkpoint that training, exports and replays use.
        done: called with the number of steps that were finished.

    Raises:
        ReplayError: no step made the version, or there is nothing to start from.
        InterchangeError: `out` exists, or cannot be written.
    """
    target = making(history, version)
    run_log = RunLog(log, history)
    start = find_start(run_log, target)
    if start.weights_only:
        raise ReplayError(
            f"version {version} cannot be rebuilt: the only checkpoint before it, of version "
            f"{start.record.policy_version}, has no optimizer state; {'; '.join(start.passed_over)}"
        )
    proof, bits, held = _run_to(run_log, start, target, done, trust_parts=trust_parts)
    digest = target.committed.digests.get("weights", "")
    path = None if held is None else _written(log, history, start, target, held, out, restore=restore)
    return Rebuilt(history.run, history.policy, version, digest, proof, held is not None, bits, path)


def _run_to(
    run_log: RunLog,
    start: Start,
    target: CommittedStep,
    done: Callable[[int], None],
    *,
    trust_parts: bool,
) -> tuple[StepReplay, bool, Checkpoint | None]:
    """The proof of the step that made a version, whether all steps came out bit for bit, and the version
    itself; None where it is not proven."""
    with Replayer(run_log, start, trust_parts=trust_parts) as replayer:
        reran, bits = list[int](), True
        for step in (*start.between, target):
            replay = replayer.run(step, claims=False)
            reran.append(step.planned.step)
            done(1)
            bits = bits and replay.bit_for_bit
            if not replay.equal:
                break
        differs = None if replay.equal else replay.step
        proof = replace(replay, reran=reran, differs_at_step=differs)
        checkpoint = replayer.state() if _is_proven(proof) else None
        return proof, bits, checkpoint if checkpoint is not None and _is_made(checkpoint, target) else None


def _is_proven(proof: StepReplay) -> bool:
    """Whether nothing differs, and each stage that a checkpoint holds came out bit for bit."""
    held = [proof.stages[stage] for stage in STAGES_OF.values() if stage in proof.stages]
    return (
        proof.equal
        and "weights" in proof.stages
        and all(replayed.verdict == Verdict.equal for replayed in held)
    )


def _is_made(checkpoint: Checkpoint, target: CommittedStep) -> bool:
    """Whether what would be written has the digests that the step recorded."""
    due = {what: target.committed.digests.get(stage) for what, stage in STAGES_OF.items()}
    return all(digest == due[what] for what, digest in digests_of(checkpoint, due).items())


def _written(
    log: Store,
    history: History,
    start: Start,
    target: CommittedStep,
    held: Checkpoint,
    out: Path | None,
    *,
    restore: bool,
) -> str | None:
    """Write a version where it is wanted, and return the last of these places."""
    path = None
    if out is not None:
        with destination(out, folder=True) as building:
            record = _write(building, history, target, held, start.path)
            for file in (building / record.path).iterdir():
                file.rename(building / file.name)
            shutil.rmtree(building / record.path.partition("/")[0])
        path = str(out)
    if restore:
        # A training that starts now would take a folder that the log does not name yet for a leftover.
        what = training_claim(history.run, history.policy)
        with log.claim(what, "wait until it ends, or write the version elsewhere (--out)"):
            record = _write(log.path, history, target, held, start.path)
            with log.writer(LANE) as writer:
                writer.append([Event(record, history.run)]).result()
        path = str(log.path / record.path)
    return path


def _write(
    root: Path, history: History, target: CommittedStep, held: Checkpoint, like: Path
) -> CheckpointWritten:
    """Write the version that a step made, below a folder."""
    critic = None
    if held.critic is not None and held.critic_optimizer is not None:
        critic = held.critic, held.critic_optimizer
    return write_checkpoint(
        root,
        history.run,
        history.policy,
        target.committed.policy_version,
        held.weights,
        held.optimizer,
        like=like,
        phase=target.planned.phase,
        critic=critic,
        adapter=held.adapter,
        tree=trees_of(target.planned.input_digests).weights,
    )
