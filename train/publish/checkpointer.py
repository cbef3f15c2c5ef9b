"""Writes a policy's versions to the store as checkpoints, at once or while training goes on, and removes
those that are not to be kept (`[checkpoint] keep_last`, `keep_every`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.engines.weights.identify import binding
from rollbook.engines.weights.log import WeightLog
from rollbook.store import Store
from rollbook.store.catalog.catalog import note_checkpoint
from rollbook.store.cut import Cut
from rollbook.store.errors import VersionError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyPublished,
    Record,
    StepCommitted,
    StepPlanned,
    StepRetired,
    TrajectoryErased,
)
from rollbook.store.fold.checkpoints import KINDS as SERVICE_KINDS
from rollbook.store.fold.checkpoints import InService
from rollbook.store.fold.history import KINDS, History, fold_history
from rollbook.store.safe_paths import place_inside
from rollbook.store.upkeep.checkpoints import (
    StepTaken,
    erased_trajectories,
    folder_of,
    remove_checkpoint,
    step_taken,
    steps_taken,
    why_kept,
)
from rollbook.train.checkpoints.checkpoint import Adapter, write_checkpoint
from rollbook.train.checkpoints.shards import Trained, begin_sharded, check_shared
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.ranks.policy import Policy
from rollbook.train.step.reference import reference_line


class Checkpointer:
    """Writes checkpoints of one policy of a run, and records each once all of it is durable.

    Args:
        write: appends records together and waits until they are durable.
    """

    def __init__(self, config: TrainConfig, log: Store, history: History, write: Callable[..., None]) -> None:
        self._config, self._log, self._history, self._record = config, log, history, write
        self.lora: LoraTraining | None = None
        """The training of low-rank factors, where it is one."""
        self._writer = ThreadPoolExecutor(1, "rollbook-checkpoint")
        self._under_way: Future[CheckpointWritten] | None = None

    def adopt(self, model: Path, weights: Tensors, scores: int) -> None:
        """Write version 0 of a new run, so that the run depends on no outside files.

        Args:
            model: whose other files are copied.
            scores: width of a reward model's head; 0: it is a policy.

        Raises:
            VersionError: the run's version 0 has other weights, with which a proxy has recorded.
        """
        config = self._config
        record = write_checkpoint(*self._named(0), weights, None, like=model, phase=None, scores=scores)
        log = WeightLog(self._log, config.run, config.policy)
        with binding(log):
            log.refresh()
            try:
                log.check(0, record.weights_digest, f"{model} in {config.dtype}")
            except VersionError:
                shutil.rmtree(place_inside(self._log.path, record.path))
                raise
            self._noted(record)

    def write(
        self,
        policy: Policy,
        version: int,
        like: Path,
        phase: str,
        *,
        critic: Policy | None,
        meanwhile: bool,
    ) -> CheckpointWritten | None:
        """Write a checkpoint that training can resume from.

        Args:
            like: a model directory whose other files are copied.
            critic: its state goes along.
            meanwhile: while training goes on; then None is returned.

        Raises:
            ShortageError: the disk is full; or it was at the checkpoint before.
            RankError: a rank could not write its part, now or at the checkpoint before.
        """
        self.settle()
        begin = self._shards if self._config.checkpoint.sharded else self._whole
        finish = begin(policy, version, like, phase, critic, meanwhile=meanwhile)
        if not meanwhile:
            return self._noted(finish())
        self._under_way = self._writer.submit(lambda: self._noted(finish()))
        return None

    def write_weights(self, policy: Policy, version: int, like: Path, phase: str) -> CheckpointWritten:
        """Write the weights alone, for engines. Arguments as of `write`."""
        self.settle()
        also: Any = {"like": like, "phase": phase, "adapter": self._adapter(policy, dict)}
        return self._noted(write_checkpoint(*self._named(version), policy.stream_weights(), None, **also))

    def renew_reference(self, version: int, before: int | None) -> None:
        """Record that a version whose checkpoint is written, or being written, is the policy's
        reference from here on.

        Args:
            before: the version that was.

        Raises:
            ShortageError, RankError: as `settle`.
        """
        self.settle()
        record = [c for c in self._history.checkpoints if c.policy_version == version][-1]
        line = reference_line(self._config.policy)
        self._record(PolicyPublished(line, version, before, record.path, record.weights_digest))

    def check(self, policy: Policy) -> None:
        """Check that every rank that is to write sees the store's folder.

        Raises:
            ConfigError: one does not.
        """
        if self._config.checkpoint.sharded:
            check_shared(self._log.path, self._config.run, self._config.policy, policy)

    def settle(self) -> None:
        """Wait for the checkpoint that is under way.

        Raises:
            ShortageError: the disk is full. Nothing of the checkpoint is left.
            RankError: a rank could not write its part; likewise.
        """
        if (under_way := self._under_way) is not None:
            self._under_way = None
            under_way.result()

    def look(self) -> None:
        """Raise the error that ended the checkpoint under way, if there was one; like `settle`,
        without waiting."""
        if self._under_way is not None and self._under_way.done():
            self.settle()

    def close(self) -> None:
        """Let what is under way end."""
        self._writer.shutdown()

    def _whole(
        self,
        policy: Policy,
        version: int,
        like: Path,
        phase: str,
        critic: Policy | None,
        *,
        meanwhile: bool,
    ) -> Callable[[], CheckpointWritten]:
        """A function that writes a checkpoint of whole tensors."""
        copy = _copied if meanwhile else dict
        optimizer = copy(policy.optimizer_state().items())
        of_critic = None
        if critic is not None:
            of_critic = copy(critic.stream_weights()), copy(critic.optimizer_state().items())
        adapter = self._adapter(policy, copy)
        weights = policy.stream_weights()
        tensors = _copied(weights) if meanwhile else weights

        also: Any = {"like": like, "phase": phase, "critic": of_critic, "adapter": adapter}
        return lambda: write_checkpoint(*self._named(version), tensors, optimizer, **also)

    def _shards(
        self,
        policy: Policy,
        version: int,
        like: Path,
        phase: str,
        critic: Policy | None,
        *,
        meanwhile: bool,
    ) -> Callable[[], CheckpointWritten]:
        """A function that writes a checkpoint of each rank's own pieces."""
        trained, dtype = Trained(policy, self.lora, critic), getattr(torch, self._config.dtype)
        also: Any = {"like": like, "phase": phase, "dtype": dtype, "meanwhile": meanwhile}
        return begin_sharded(*self._named(version), trained, **also)

    def _named(self, version: int) -> tuple[Path, str, str, int]:
        """The arguments that name the checkpoint of a version."""
        return self._log.path, self._config.run, self._config.policy, version

    def _adapter(self, policy: Policy, copy: Callable[[Any], Tensors]) -> Adapter | None:
        return None if self.lora is None else Adapter(copy(policy.adapter().items()), self.lora)

    def _noted(self, record: CheckpointWritten) -> CheckpointWritten:
        """Write the record of a durable checkpoint to the log; returns it."""
        earlier = [c.policy_version for c in list(self._history.checkpoints)]  # of which others go meanwhile
        parent = max((v for v in earlier if v < record.policy_version), default=None)
        published = PolicyPublished(
            record.policy, record.policy_version, parent, record.path, record.weights_digest
        )
        self._record(record, published)
        self._history.checkpoints.append(record)
        note_checkpoint(self._log.path, self._config.run, record)
        return record


def _copied(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Copies in the host's memory, which the next step does not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


_ENDS_REPLAYS = frozenset({StepRetired.KIND, TrajectoryErased.KIND})


class Keeping:
    """Which checkpoints of a policy in training may go, and their removal.

    What steps need is known from the history and from `saw`; what engines and proxies serve, and
    what was retired and erased since, is read from the log.

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
        """Take a durable record of the training."""
        match record:
            case StepPlanned():
                self._steps[record.step] = step_taken(record, None)
            case StepCommitted():
                self._steps[record.step] = replace(self._steps[record.step], made=record.policy_version)

    def remove(self, served: int | None, like: Path) -> None:
        """Remove the checkpoints that may go now, if one was written since the last call.

        Args:
            served: the version that engines were given last, or are being given.
            like: the folder whose files later checkpoints copy.
        """
        keep, checkpoints = self._config.checkpoint.keep, list(self._history.checkpoints)
        if keep is None or len(checkpoints) == self._looked:
            return
        self._read_on()
        run = self._config.run
        present = [c for c in checkpoints if folder_of(self._log, c, run) is not None]
        why_each = why_kept(
            present, self._steps.values(), keep, self._named(served), lambda path: self._user_of(path, like)
        )
        for record, why in zip(present, why_each, strict=True):
            if not why and remove_checkpoint(self._log, run, record, f"[checkpoint] {keep}", self._write):
                self._history.checkpoints.remove(record)
        self._looked = len(self._history.checkpoints)

    def _user_of(self, path: str, like: Path) -> str | None:
        """What uses a checkpoint's folder."""
        copied = like == place_inside(self._log.path, path)
        return "later checkpoints copy its files" if copied else self._service.user_of(path)

    def _named(self, served: int | None) -> dict[int, str]:
        """Versions that are needed by something other than the steps so far, and by what."""
        named = self._service.given(self._config.run, self._config.policy)
        if served is not None:
            named[served] = "engines are given it"
        reference = self._config.algorithm.reference
        return named if reference is None else named | {reference: "the reference that CONFIG names"}

    def _read_on(self) -> None:
        """Read what was added to the log since the last call."""
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
