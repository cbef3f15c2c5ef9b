"""Publishes a policy's versions: as checkpoints in the store, and to the engines that serve the policy."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rollbook.engines.hub import model_folder
from rollbook.engines.model_files import is_sharded, origin_of, require_folder, weight_files
from rollbook.engines.weights.digests import Tensors, digest_tensors, read_unchanged, stream_files
from rollbook.store import Event, Store
from rollbook.store.errors import EngineError, EngineLostError, TrainError
from rollbook.store.events import CheckpointWritten, Record
from rollbook.store.fold.history import History
from rollbook.store.fold.versions import VersionDigests
from rollbook.store.log.writer import LaneWriter
from rollbook.store.redaction import Scrubber, scrub_record
from rollbook.store.safe_paths import place_inside
from rollbook.store.secret import SECRETS, store_secret
from rollbook.store.whose import WANTED, ProxyIdentity
from rollbook.train.config.config import DTYPES, TrainConfig
from rollbook.train.model.score_head import SCORE, with_head
from rollbook.train.model.shape import read_shape, shape_to_train
from rollbook.train.model.weight_names import checked, weight_shapes
from rollbook.train.publish.checkpointer import Checkpointer, Keeping
from rollbook.train.ranks.policy import Policy
from rollbook.train.stopping import Stopped
from rollbook.train.sync.control import EngineControl
from rollbook.train.sync.presence import await_one
from rollbook.train.sync.session import DRAIN, Release, Syncer, SyncOptions
from rollbook.train.sync.transports import FromDisk, Transport, Weights, transport_for

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
        digests[dtype] = digest_tensors(_own_weights(config, dtype))
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
        policy: Policy,
        version: int,
        like: Path,
        phase: str,
        *,
        checkpoint: bool,
        sync: bool,
        critic: Policy | None = None,
        before_cache: Callable[[], None] = lambda: None,
        last: bool = False,
    ) -> None:
        """Write a version's checkpoint if requested, and sync the engines to it; then remove
        checkpoints that are not to be kept.

        Either may still be under way when this returns, if the configuration says so; those of
        the version before are waited for.

        Args:
            like: a model directory whose other files are copied into a checkpoint.
            checkpoint: write one with the optimizer's state, so that training can resume from
                it.
            sync: send it to the engines, if there are any.
            critic: its state goes into the checkpoint.
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
        if checkpoint and self._checkpointed != version:
            meanwhile = config.checkpoint.overlap and not last and not loads
            record = self.checkpoints.write(policy, version, like, phase, critic=critic, meanwhile=meanwhile)
            self._checkpointed = version
        if loads and (record is None or config.checkpoint.sharded):
            record = self.checkpoints.write_weights(policy, version, like, phase)
        if sync:
            assert config.sync is not None
            overlap = config.sync.overlap and not last
            self._sync(policy, version, record, before_cache=before_cache, overlap=overlap)
        self._keeping.remove(self._given, like)

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

    def keep_served(self, policy: Policy, version: int, like: Path, phase: str, lost: Sequence[str]) -> None:
        """Sync the current version to engines that were restarted since their last sync."""
        self.settle()
        with contextlib.suppress(EngineError):  # it became unreachable again, which the log records
            self.sync_current(policy, version, like, phase, lost)

    def sync_current(
        self,
        policy: Policy,
        version: int,
        like: Path,
        phase: str,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
    ) -> None:
        """Sync the engines, or some of them, to the version that training resumes from."""
        if self._config.sync is None:
            return
        held = [c for c in self._history.checkpoints if c.policy_version == version]
        if self._syncs_from_disk():
            held = [c for c in held if not is_sharded(place_inside(self._log.path, c.path))]
        record = held[-1] if held else None
        if record is None and self._syncs_from_disk():
            record = self.checkpoints.write_weights(policy, version, like, phase)
        self._sync(policy, version, record, only, before_cache)

    # Engines ----------------------------------------------------------------------------------

    def _sync(
        self,
        policy: Policy,
        version: int,
        record: CheckpointWritten | None,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
        overlap: bool = False,
    ) -> None:
        path = "" if record is None else record.path
        digest = policy.weights_digest().digest if record is None else record.weights_digest
        names = tuple(weight_shapes(policy.shape))
        own = (policy.shape.head_dim, self._config.run, names, policy.shape, self._config.dtype)
        release = Release(self._config.policy, version, digest, path, *own)
        self._given = version
        self._connected()
        if isinstance(self._transport, FromDisk):
            self._transport.path = place_inside(self._log.path, path)
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
