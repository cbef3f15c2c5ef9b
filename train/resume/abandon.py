"""Abandons the steps after a checkpoint, so that training resumes from it.

The versions of abandoned steps keep their numbers, since engines may hold them and tokens name them. So the
checkpoint to resume from is written again, under a number above all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import note_checkpoint
from rollbook.store.digest import is_tree
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, PolicyPublished, Record, StepAbandoned, StepCommitted
from rollbook.store.fold.history import KINDS, History, fold_history
from rollbook.store.fold.versions import VersionDigests
from rollbook.store.log.writer import LaneWriter
from rollbook.train.checkpoints.checkpoint import checkpoint_named, write_checkpoint
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.phase import family_in


def go_back(
    config: TrainConfig,
    source: str,
    version: int,
    log: Store,
    writer: LaneWriter,
    history: History,
    versions: VersionDigests,
    note: Callable[[str], None],
) -> History:
    """Abandon the steps after a version; returns the history without them.

    Repeating the call, for example in a restarted batch job, abandons nothing more.

    Args:
        versions: of the whole log.
        note: called with a line that says what was done.

    Raises:
        TrainError: there is no checkpoint of the version from which this configuration can go on.
        ModelError: the checkpoint is damaged.
    """
    now = _current_number(history, version)
    if now != version:
        note(
            f"the steps after version {version} were abandoned before, and training goes on from it as "
            f"version {now}: nothing is abandoned now (what came since would be by --abandon-after {now})"
        )
        return history
    base = _checkpoint(config, source, history, version)
    steps = [s.committed for _, s in sorted(history.steps.items()) if s.committed.policy_version > version]
    if not steps:
        note(f"no step was committed after version {version}: nothing is abandoned")
        return history
    highest = max(versions.newest(config.run, config.policy), history.version)
    written = _write_again(config, log, base, highest + 1)
    log.share(written.path)
    records: list[Record] = [
        StepAbandoned(s.step, s.attempt, config.policy, s.policy_version, version, written.policy_version)
        for s in steps
    ]
    records += [written, _published(written, version)]
    writer.append([Event(record, config.run) for record in records]).result()
    note_checkpoint(log.path, config.run, written)
    note(_summary(steps, version, written.policy_version))
    return fold_history(log.events_of(KINDS), config.run, config.policy)


def _summary(steps: list[StepCommitted], version: int, now: int) -> str:
    versions = f"versions {steps[0].policy_version} to {steps[-1].policy_version}"
    return (
        f"abandoned {len(steps)} steps ({steps[0].step} to {steps[-1].step}), which made {versions}: "
        f"training goes on from version {version}, as version {now}; what they consumed may be used again"
    )


def _current_number(history: History, version: int) -> int:
    """The number under which training went on from a version, if it went back to it before; else
    the version."""
    held = {*history.held_versions, *(removed.policy_version for removed in history.removed)}
    names = {r.back_to: r.goes_on_as for r in history.abandoned.values() if r.goes_on_as in held}
    while version in names:
        version = names[version]
    return version


def _checkpoint(config: TrainConfig, source: str, history: History, version: int) -> CheckpointWritten:
    fit = [c for c in history.checkpoints if _fits(config, source, history, c)]
    matches = [c for c in fit if c.policy_version == version]
    if not matches:
        there = ", ".join(str(v) for v in sorted({c.policy_version for c in fit})) or "none"
        raise TrainError(
            f"--abandon-after {version}: run {config.run!r} has no checkpoint of version {version} of policy "
            f"{config.policy!r} that this CONFIG can go on from; it can from: {there}"
            f"{history.why_gone(version)}"
        )
    return matches[-1]


def _fits(config: TrainConfig, source: str, history: History, checkpoint: CheckpointWritten) -> bool:
    """Whether training can resume from the checkpoint: it has the optimizer's state, or a new phase starts
    there."""
    steps = {
        n: s for n, s in history.steps.items() if s.committed.policy_version <= checkpoint.policy_version
    }
    left = replace(history, steps=steps)
    phase = left.phase_to_train(family_in(left, config, source))
    whole = checkpoint.phase == phase and checkpoint.optimizer_digest is not None
    return whole or not left.of_phase(phase)


def _write_again(config: TrainConfig, log: Store, base: CheckpointWritten, version: int) -> CheckpointWritten:
    """A version's checkpoint under another number, in files of its own."""
    path = log.folder(base.path)
    held = checkpoint_named(path, base.weights_digest)
    return write_checkpoint(
        log.path,
        config.run,
        config.policy,
        version,
        held.weights,
        held.optimizer,
        like=path,
        phase=base.phase,
        critic=None if held.critic is None else (held.critic, held.critic_optimizer or {}),
        adapter=held.adapter,
        tree=is_tree(base.weights_digest),
    )


def _published(written: CheckpointWritten, parent: int) -> PolicyPublished:
    named = (written.policy, written.policy_version)
    return PolicyPublished(*named, parent, written.path, written.weights_digest)
