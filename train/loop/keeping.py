"""Removes a training's checkpoints that it is not to keep (`[checkpoint] keep_last`, `keep_every`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Record, StepCommitted, StepPlanned, StepRetired, TrajectoryErased
from rollbook.store.fold.history import KINDS, History, fold_history
from rollbook.store.fold.in_service import KINDS as SERVICE_KINDS
from rollbook.store.fold.in_service import InService
from rollbook.store.inside import place_inside
from rollbook.store.upkeep.checkpoint_rule import StepTaken, step_taken, steps_taken, why_kept
from rollbook.store.upkeep.checkpoints import erased_trajectories, folder_of, remove_checkpoint
from rollbook.train.config.config import TrainConfig

_ENDS_REPLAYS = frozenset({StepRetired.KIND, TrajectoryErased.KIND})


class Keeping:
    """Which checkpoints of a policy in training may go, and their removal.

    What steps need is known from the history and from `saw`; what engines and proxies serve, and what was
    retired and erased meanwhile, is read off the log.

    Args:
        history: of the policy; a checkpoint that is removed here is taken out of it.
        write: appends records together and waits until they are durable.
    """

    def __init__(self, config: TrainConfig, log: Store, history: History, write: Callable[..., None]) -> None:
        self._config, self._log, self._history, self._write = config, log, history, write
        self._steps = _by_number(steps_taken(history, ()))
        self._service = InService()
        self._read_to: Cut = {}
        self._looked = 0
        """How many checkpoints there were when it last looked."""

    def saw(self, record: Record) -> None:
        """Take a record of the training that is durable."""
        match record:
            case StepPlanned():
                self._steps[record.step] = step_taken(record, None)
            case StepCommitted():
                self._steps[record.step] = replace(self._steps[record.step], made=record.policy_version)

    def remove(self, given: int | None, like: Path) -> None:
        """Remove the checkpoints that may go now, if one was written since this was last asked.

        Args:
            given: the version that engines were given last, or are being given.
            like: the folder whose files later checkpoints copy.
        """
        keep, checkpoints = self._config.checkpoint.keep, list(self._history.checkpoints)
        if keep is None or len(checkpoints) == self._looked:
            return
        self._read_on()
        run = self._config.run
        present = [c for c in checkpoints if folder_of(self._log, c, run) is not None]
        why_each = why_kept(
            present, self._steps.values(), keep, self._named(given), lambda path: self._user_of(path, like)
        )
        for record, why in zip(present, why_each, strict=True):
            if not why and remove_checkpoint(self._log, run, record, f"[checkpoint] {keep}", self._write):
                self._history.checkpoints.remove(record)
        self._looked = len(self._history.checkpoints)

    def _user_of(self, path: str, like: Path) -> str | None:
        """Who uses a checkpoint's folder."""
        copied = like == place_inside(self._log.path, path)
        return "later checkpoints copy its files" if copied else self._service.user_of(path)

    def _named(self, given: int | None) -> dict[int, str]:
        """Versions that something beside the steps so far needs."""
        named = self._service.given(self._config.run, self._config.policy)
        if given is not None:
            named[given] = "engines are given it"
        reference = self._config.algorithm.reference
        return named if reference is None else named | {reference: "the reference that CONFIG names"}

    def _read_on(self) -> None:
        """Take what the log says since it was last asked."""
        head, ends_replays = self._log.head(), False
        for event in self._log.events_of(SERVICE_KINDS | _ENDS_REPLAYS, head, self._read_to):
            self._service.take(event)
            ends_replays |= event.kind in _ENDS_REPLAYS
        self._read_to = head
        if ends_replays:
            history = fold_history(self._log.events_of(KINDS), self._config.run, self._config.policy)
            self._steps = _by_number(steps_taken(history, erased_trajectories(self._log)))


def _by_number(steps: list[StepTaken]) -> dict[int, StepTaken]:
    return {step.step: step for step in steps}
