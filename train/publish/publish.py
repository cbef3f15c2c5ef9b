"""Publishes a policy's versions: as checkpoints in the store, and to the engines that serve the policy.

Writes a policy's versions to the store as checkpoints, at once or while training goes on, and removes
those that are not to be kept (`[checkpoint] keep_last`, `keep_every`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollbook.engines.hub import model_folder
from rollbook.engines.model_files import is_sharded, origin_of, require_folder, weight_files
from rollbook.engines.weights.digests import Tensors, digest_like, read_unchanged, stream_files
from rollbook.engines.weights.identify import binding
from rollbook.engines.weights.log import WeightLog
from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import note_checkpoint
from rollbook.store.cut import Cut
from rollbook.store.digest import is_tree
from rollbook.store.errors import EngineError, EngineLostError, TrainError, VersionError
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
from rollbook.store.fold.versions import VersionDigests
from rollbook.store.log.writer import LaneWriter
from rollbook.store.redaction import Scrubber, scrub_record
from rollbook.store.safe_paths import place_inside
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.upkeep.checkpoints import (
    StepTaken,
    erased_trajectories,
    is_checkpoint_of,
    remove_checkpoint,
    step_taken,
    steps_taken,
    why_kept,
)
from rollbook.store.whose import WANTED, ProxyIdentity
from rollbook.train.checkpoints.checkpoint import Adapter, write_checkpoint
from rollbook.train.checkpoints.shards import Trained, begin_sharded, check_shared
from rollbook.train.config.config import DTYPES, TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.model.score_head import SCORE, with_head
from rollbook.train.model.shape import read_shape, shape_to_train
from rollbook.train.model.weight_names import checked, weight_shapes
from rollbook.train.ranks.policy import Policy
from rollbook.train.step.reference import reference_line
from rollbook.train.stopping import Stopped
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.presence import await_one
from rollbook.train.sync.session import DRAIN, Release, Syncer, SyncOptions
from rollbook.train.sync.transports import FromDisk, Transport, Weights, transport_for


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """A version as training has it in hand.

    Attributes:
        policy: its weights, and the state of its optimizer.
        like: a model directory whose other files are copied into a checkpoint.
        critic: its state goes into a checkpoint that training can resume from.
    """

    policy: Policy
    number: int
    like: Path
    phase: str
    critic: Policy | None = None


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
        log = WeightLog(self._log, config.run, config.policy)
        also: Any = {"like": model, "phase": None, "scores": scores, "tree": log.trees}
        record = write_checkpoint(*self._named(0), weights, None, **also)
        with binding(log):
            log.refresh()
            try:
                log.check(0, record.weights_digest, f"{model} in {config.dtype}")
            except VersionError:
                shutil.rmtree(place_inside(self._log.path, record.path))
                raise
            self._noted(record)

    def write(self, trained: TrainedVersion, *, meanwhile: bool) -> CheckpointWritten | None:
        """Write a checkpoint that training can resume from.

        Args:
            meanwhile: while training goes on; then None is returned.

        Raises:
            ShortageError: the disk is full; or it was at the checkpoint before.
            RankError: a rank could not write its part, now or at the checkpoint before.
        """
        self.settle()
        begin = self._shards if self._config.checkpoint.sharded else self._whole
        finish = begin(trained, meanwhile=meanwhile)
        if not meanwhile:
            return self._noted(finish())
        self._under_way = self._writer.submit(lambda: self._noted(finish()))
        return None

    def write_weights(self, trained: TrainedVersion) -> CheckpointWritten:
        """Write the weights alone, for engines."""
        self.settle()
        policy = trained.policy
        named, adapter = self._named(trained.number), self._adapter(policy, dict)
        also: Any = {"like": trained.like, "phase": trained.phase, "adapter": adapter, "tree": self.trees}
        return self._noted(write_checkpoint(*named, policy.stream_weights(), None, **also))

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

    @property
    def trees(self) -> bool:
        """Whether the run's weights are digested by blocks, as those of its first version are."""
        return is_tree(self._history.checkpoints[0].weights_digest)

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

    def _whole(self, trained: TrainedVersion, *, meanwhile: bool) -> Callable[[], CheckpointWritten]:
        """A function that writes a checkpoint of whole tensors."""
        policy, critic = trained.policy, trained.critic
        copy = _copied if meanwhile else dict
        optimizer = copy(policy.optimizer_state().items())
        of_critic = None
        if critic is not None:
            of_critic = copy(critic.stream_weights()), copy(critic.optimizer_state().items())
        adapter = self._adapter(policy, copy)
        weights = policy.stream_weights()
        tensors = _copied(weights) if meanwhile else weights

        also: Any = {"like": trained.like, "phase": trained.phase, "critic": of_critic, "adapter": adapter}
        also |= {"tree": self.trees}
        return lambda: write_checkpoint(*self._named(trained.number), tensors, optimizer, **also)

    def _shards(self, trained: TrainedVersion, *, meanwhile: bool) -> Callable[[], CheckpointWritten]:
        """A function that writes a checkpoint of each rank's own pieces."""
        parts = Trained(trained.policy, self.lora, trained.critic, self.trees)
        also: Any = {"dtype": getattr(torch, self._config.dtype), "meanwhile": meanwhile}
        also |= {"like": trained.like, "phase": trained.phase}
        return begin_sharded(*self._named(trained.number), parts, **also)

    def _named(self, version: int) -> tuple[Path, str, str, int]:
        """The arguments that name the checkpoint of a version."""
        return self._log.path, self._config.run, self._config.policy, version

    def _adapter(self, policy: Policy, copy: Callable[[Any], Tensors]) -> Adapter | None:
        return None if self.lora is None else Adapter(copy(policy.adapter().items()), self.lora)

    def _noted(self, record: CheckpointWritten) -> CheckpointWritten:
        """Write the record of a durable checkpoint to the log, once all hosts can have it; returns it."""
        self._log.share(record.path)
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
        present = [c for c in checkpoints if is_checkpoint_of(c, run) and self._log.may_have(c.path)]
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


ADMIN_KEY_VARIABLE = "ROLLBOOK_ENGINE_ADMIN_KEY"


def check_model(config: TrainConfig, versions: VersionDigests) -> None:
    """Check that CONFIG's model is the one that the run started with, or a version of its own, if
    its weights can be compared.

    Raises:
        VersionError: the run's version 0 has other weights; the message has the remedy.
        ModelError: it cannot be read, or was changed after it was written.
    """
    model, key = config.model, (config.run, config.policy)
    if versions.of(*key, 0) is None:
        require_folder(model_folder(model), "the CONFIG's `model`")
        return
    if not weight_files(model):
        return
    version = versions.own(*key, origin_of(model)) or 0
    bound = versions.of(*key, version)
    assert bound is not None
    digest = _digest_of_model(config, bound.digest)
    versions.check(*key, version, digest, f"CONFIG's model {model}")


def _digest_of_model(config: TrainConfig, wanted: str) -> str:
    """The digest of the model's weights: the wanted one if they have it in any type that can be
    trained, since the run may have begun in another type than it goes on in."""
    digests: dict[str, str] = {}
    for dtype in DTYPES:
        digests[dtype] = digest_like(_own_weights(config, dtype), wanted)
        if digests[dtype] == wanted:
            return wanted
    return digests[config.dtype]


def check_head(config: TrainConfig, log: Store, history: History) -> None:
    """Check that the policy, where it has versions, is of the kind that the algorithm trains.

    Raises:
        TrainError: it is a reward model and the algorithm trains a policy, or the other way round.
    """
    folders = [place_inside(log.path, record.path) for record in history.checkpoints]
    held = next((read_shape(folder).scores for folder in reversed(folders) if folder.exists()), None)
    if held in (None, config.algorithm.head_width):
        return
    what = f"a reward model with a head of {held}" if held else "a policy, which predicts tokens"
    raise TrainError(
        f"policy {config.policy!r} of run {config.run!r} is {what}: algorithm "
        f"{config.algorithm.algorithm_name} cannot go on with it; give what it trains another name, such as "
        'policy = "reward"'
    )


def _own_weights(config: TrainConfig, dtype: str) -> Tensors:
    """The weights of CONFIG's model in a type, under the names used in files; fused tensors are
    split. A reward model's head that is missing in the model gives 0."""
    model, scores, type_ = config.model, config.algorithm.head_width, getattr(torch, dtype)
    shape, tensors = shape_to_train(model, scores), read_unchanged(model)
    if scores and SCORE not in tensors:
        tensors = with_head(tensors, shape)
    own = checked(tensors, shape)
    return {name: own[name].to(type_) for name in weight_shapes(shape)}


class Publisher:
    """Writes the versions of one policy of a run to the store, and syncs engines to them.

    Args:
        stopped: whether a signal has come: then engines that cannot be reached are not waited
            for.
    """

    def __init__(
        self,
        config: TrainConfig,
        log: Store,
        writer: LaneWriter,
        history: History,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._log, self._writer, self._history = config, log, writer, history
        self._scrub = Scrubber(store_secret(log.path, SECRETS))
        self._engines: list[EngineControl] = []
        self._syncer: Syncer | None = None
        self._transport: Transport | None = None
        self.checkpoints = Checkpointer(config, log, history, self.write)
        """Writes the checkpoints."""
        self._keeping = Keeping(config, log, history, self.write)
        self._given: int | None = None
        """The version that engines were given last, or are being given."""
        self._sender = ThreadPoolExecutor(1, "rollbook-sync")
        self._travels: Future[None] | None = None
        """The sync that is under way while training goes on."""
        self._checkpointed: int | None = None
        """The newest version with a checkpoint that training can resume from."""
        self.on_written: Callable[..., None] = lambda *records: None
        """Called with records once they are durable."""
        self._stopped = stopped

    def write(self, *records: Record) -> None:
        """Append records together and wait until they are durable."""
        clean = (scrub_record(record, self._scrub.text, self._scrub.value) for record in records)
        events = [Event(record, self._config.run) for record in clean]
        self._writer.append(events).result()
        for event in events:
            self._keeping.saw(event.record)
        self.on_written(*(event.record for event in events))

    def adopt_model(self) -> None:
        """Write version 0 of a new run as a checkpoint in the store.

        Raises:
            VersionError: the run's version 0 has other weights, with which a proxy has recorded.
        """
        config = self._config
        own = _own_weights(config, config.dtype)
        self.checkpoints.adopt(config.model, own, config.algorithm.head_width)

    def has_checkpoint(self, version: int) -> bool:
        """Whether this version has a checkpoint that training can resume from."""
        return self._checkpointed == version

    def restored(self, version: int) -> None:
        """Note that training resumes from this version's checkpoint."""
        self._checkpointed = version

    def publish(
        self,
        trained: TrainedVersion,
        *,
        checkpoint: bool,
        sync: bool,
        before_cache: Callable[[], None] = lambda: None,
        last: bool = False,
    ) -> None:
        """Write a version's checkpoint if requested, and sync the engines to it; then remove
        checkpoints that are not to be kept.

        Either may still be under way when this returns, if the configuration says so; those of
        the version before are waited for.

        Args:
            checkpoint: write one with the optimizer's state, so that training can resume from
                it.
            sync: send it to the engines, if there are any.
            before_cache: as of `Syncer.sync`.
            last: wait for all of it.

        Raises:
            EngineError: this sync, or one that was under way, gave no engine its version.
            ShortageError: the disk is full, or was for a checkpoint that was under way.
        """
        self.settle()
        if last:
            self.checkpoints.settle()
        self.checkpoints.look()
        config, record = self._config, None
        sync = sync and config.sync is not None
        loads = sync and self._syncs_from_disk()  # weights, from a directory of whole ones
        if checkpoint and self._checkpointed != trained.number:
            meanwhile = config.checkpoint.overlap and not last and not loads
            record = self.checkpoints.write(trained, meanwhile=meanwhile)
            self._checkpointed = trained.number
        if loads and (record is None or config.checkpoint.sharded):
            record = self.checkpoints.write_weights(trained)
        if sync:
            assert config.sync is not None
            overlap = config.sync.overlap and not last
            self._sync(trained, record, before_cache=before_cache, overlap=overlap)
        self._keeping.remove(self._given, trained.like)

    @property
    def under_way(self) -> bool:
        """Whether a sync is under way."""
        return self._travels is not None and not self._travels.done()

    def settle(self) -> None:
        """Wait for the sync that is under way.

        Raises:
            EngineError: it gave no engine its version.
        """
        if (travels := self._travels) is not None:
            self._travels = None
            travels.result()

    def rest(self, version: int) -> None:
        """Have the engines release their memory, until the sync of this version.

        Raises:
            EngineLostError: none of them can be reached for `wait_s`.
            EngineError: one of them does not.
            Stopped: a signal came while they were waited for.
        """
        self._connected()
        assert self._config.sync is not None
        self._await_one(self._config.sync.wait_s)
        self._connected().rest(self._config.policy, version)

    def lost(self) -> list[str]:
        """Engines that were restarted since their last sync."""
        return [] if self._syncer is None or self.under_way else self._syncer.lost()

    def keep_served(self, trained: TrainedVersion, lost: Sequence[str]) -> None:
        """Sync the current version to engines that were restarted since their last sync."""
        self.settle()
        with contextlib.suppress(EngineError):  # it became unreachable again, which the log records
            self.sync_current(trained, lost)

    def sync_current(
        self,
        trained: TrainedVersion,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
    ) -> None:
        """Sync the engines, or some of them, to the version that training resumes from."""
        if self._config.sync is None:
            return
        held = [c for c in self._history.checkpoints if c.policy_version == trained.number]
        if self._syncs_from_disk():
            folders = {c.path: self._log.folder(c.path) for c in held}
            held = [c for c in held if folders[c.path].is_dir() and not is_sharded(folders[c.path])]
        record = held[-1] if held else None
        if record is None and self._syncs_from_disk():
            record = self.checkpoints.write_weights(trained)
        self._sync(trained, record, only, before_cache)

    # Engines ----------------------------------------------------------------------------------

    def _sync(
        self,
        trained: TrainedVersion,
        record: CheckpointWritten | None,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
        overlap: bool = False,
    ) -> None:
        policy, path = trained.policy, "" if record is None else record.path
        trees = self.checkpoints.trees
        digest = policy.weights_digest(tree=trees).digest if record is None else record.weights_digest
        names = tuple(weight_shapes(policy.shape))
        own = (policy.shape.head_dim, self._config.run, names, policy.shape, self._config.dtype)
        release = Release(self._config.policy, trained.number, digest, path, *own)
        self._given = trained.number
        self._connected()
        if isinstance(self._transport, FromDisk):
            self._transport.path = self._log.folder(path)
        if not overlap:
            self._send(release, policy.stream_weights, only, before_cache)
            return
        if isinstance(self._transport, FromDisk):
            weights: Weights = functools.partial(stream_files, self._transport.path)
        else:  # the next step changes those that are in place
            held = [(name, tensor.detach().cpu().clone()) for name, tensor in policy.stream_weights()]
            weights = functools.partial(iter, held)
        self._travels = self._sender.submit(self._send, release, weights)

    def _send(
        self,
        release: Release,
        weights: Weights,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
    ) -> None:
        sync = self._config.sync
        assert sync is not None
        begun = time.monotonic()
        while True:
            try:
                self._connected().sync(release, weights, only, before_cache)
                return
            except EngineLostError:
                left = begun + sync.wait_s - time.monotonic()
                if only or left <= 0:
                    raise
                # A restarted engine needs a whole sync, or is not reachable yet.
                self._await_one(left)

    def _await_one(self, seconds: float) -> None:
        """Wait until an engine can be reached: see `sync.presence`.

        Raises:
            Stopped: a signal came first. The next start gives the engines their version.
        """
        try:
            await_one(self._engines, seconds, self._stopped)
        except EngineLostError as error:
            if self._stopped():
                raise Stopped from error
            raise

    def _syncs_from_disk(self) -> bool:
        self._connected()
        return isinstance(self._transport, FromDisk)

    def _connected(self) -> Syncer:
        if self._syncer is None:
            sync = self._config.sync
            assert sync is not None
            key, admin_key = sync.key(os.environ), os.environ.get(ADMIN_KEY_VARIABLE)
            whose = ProxyIdentity(self._log.store_id, self._config.run, os.environ.get(WANTED, ""))
            self._engines = [
                EngineControl(address.url, sync.timeout_s, key, address.login, admin_key, whose)
                for address in sync.engines
            ]
            self._transport = transport_for(sync, self._engines)
            options = SyncOptions(sync.pause if sync.partial_rollout else DRAIN, sync.drain_s)
            self._syncer = Syncer(self._engines, self._transport, self.write, options)
        return self._syncer

    def close(self) -> None:
        """Close connections, once what is under way has ended."""
        self.checkpoints.close()
        self._sender.shutdown()
        if self._syncer is not None:
            self._syncer.close()
