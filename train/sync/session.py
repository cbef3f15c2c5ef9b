"""The sequence that gives engines a new version of a policy's weights.

    drain or pause -> flush -> disown -> begin, update in buckets and flush, end -> verify -> activate
    -> continue

SGLang refuses to flush, even paused, while a constrained request waits for its grammar, which is compiled
only while SGLang runs. So it is also flushed before any weight is sent, and resumed briefly until the flush
succeeds.

An engine is paused from start to end, so no token is sampled with unverified weights. During the update its
weights have no version's name; it gets one only after its own checksums equal those of the tensors sent. An
engine that fails in between stays paused, since its weights are unknown, and the failure is recorded: only a
complete sync makes it usable again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.engines.sglang.protocol import release_of
from rollbook.engines.weights.compare import Expected, Holding, check_layout, describe_holding
from rollbook.engines.weights.name import read_name, weight_name
from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest
from rollbook.engines.weights.tensor_checksums import checksum_kind
from rollbook.store.errors import EngineError, EngineLostError, ModelError
from rollbook.store.events import Json, PolicyActivated, Record, SyncFailed, SyncFinished, SyncStarted
from rollbook.store.ids import new_id
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.sync.control import (
    ASLEEP,
    CACHE,
    EMBEDDED,
    SESSIONS_SINCE,
    UNVERIFIED,
    WAKING,
    WEIGHTS,
    EngineControl,
    EngineInfo,
)
from rollbook.train.sync.presence import looking_at
from rollbook.train.sync.transports import FromDisk, Receiver, Transport, Weights

DRAIN = "drain"
POLL_S = 0.01
MOMENT_S, LONGEST_MOMENT_S = 0.05, 1.0
"""Seconds for which an engine that refused to flush is resumed; doubled each time."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version of a policy's weights to be served.

    Attributes:
        weights_digest: over all tensors, by Hugging Face names.
        path: its directory, relative to the store; empty where it was not written.
        head_dim: of the model's attention.
        run: whose policy it is.
        names: of all tensors.
        shape: of the model.
        dtype: of the tensors.
    """

    policy: str
    version: int
    weights_digest: str
    path: str
    head_dim: int
    run: str
    names: tuple[str, ...] = ()
    shape: ModelShape | None = None
    dtype: str = "float32"

    def name(self) -> str:
        """The name that an engine is to give it: it is used once, so that it proves this very sync."""
        return weight_name(self.run, self.policy, self.version)


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How a sync treats running requests.

    Attributes:
        pause: `drain` lets them finish first, while proxies hold new ones; for other modes see
            `EngineControl.pause`.
        drain_s: longest wait for them to finish; after it they are retracted.
    """

    pause: str = "retract"
    drain_s: float = 600.0


@dataclass(slots=True, eq=False)
class SyncAttempt:
    """A sync of one engine in progress.

    Attributes:
        name: that the engine is to give the weights.
        holding: how the engine holds them.
        own: whether the engine is embedded in a proxy, which tracks its weights itself.
        flush_first: whether to flush before any weight is sent, because the engine may refuse.
        checksums: digest of what it holds, once that is verified.
        held: how it holds that, as far as it is known.
        recorded: whether the end of the sync is recorded.
    """

    receiver: Receiver
    sync_id: str
    begun: float
    name: str
    holding: Holding
    own: bool
    flush_first: bool
    checksums: str = ""
    held: Json | None = None
    recorded: bool = False


class Syncer:
    """Syncs engines to a policy's versions.

    Args:
        engines: all that serve the policy.
        transport: how the weights get there.
        write: appends records to the log and returns once they are durable.
        options: how requests that run are treated.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        transport: Transport,
        write: Callable[..., None],
        options: SyncOptions,
    ) -> None:
        self._engines, self._transport, self._write, self._options = list(engines), transport, write, options
        self._held: dict[str, list[RankChecksums]] = {}
        """What engines said that they hold when last verified: they need not hash it again to be asked."""
        self._looked_at = {look.url: look for look in looking_at(engines)}
        self._memory = EngineOffload()
        self._standing: set[str] = set()
        """Engines that failed during a sync and have been paused since."""
        self._begun: dict[str, tuple[int, str]] = {}
        """Engines that gave their memory away: (version that they wait for, id of its sync)."""
        self._given: dict[str, str] = {}
        """Engine -> the name of its weights given by the last sync of it that went well."""

    def rest(self, policy: str, version: int) -> None:
        """Have every engine release its memory, until the sync of this version, which begins here:
        no request runs from now on.

        Raises:
            EngineError: one does not, and is as it was or stays paused; the message gives the
                reason.
        """
        ids, name = {engine.url: new_id() for engine in self._engines}, self._transport.name
        self._write(*(SyncStarted(policy, version, sync_id, url, name) for url, sync_id in ids.items()))
        with ThreadPoolExecutor(len(ids)) as pool:
            tasks = {engine.url: pool.submit(self._rest, engine) for engine in self._engines}
        failed = {url: task.exception() for url, task in tasks.items() if task.exception() is not None}
        if failed:
            self._write(*(SyncFailed(policy, version, ids[url], url, str(e)) for url, e in failed.items()))
        self._begun |= {url: (version, sync_id) for url, sync_id in ids.items() if url not in failed}
        if left := [error for error in failed.values() if not isinstance(error, EngineLostError)]:
            raise EngineError(f"an engine keeps the memory that training needs: {left[0]}") from left[0]

    def sync(
        self,
        release: Release,
        weights: Weights,
        only: Sequence[str] = (),
        before_cache: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Sync the release to every engine; returns the addresses of those that serve it now.

        Args:
            only: addresses of the engines to sync, if not all.
            before_cache: called once weights are sent, before engines that released their memory
                allocate that of their caches again.

        Raises:
            EngineLostError: none of them can be reached.
            EngineError: no engine serves it; the message gives each engine's reason.
        """
        engines = [engine for engine in self._engines if engine.url in only or not only]
        with ThreadPoolExecutor(len(engines)) as pool:
            attempts = self._opened(pool, release, engines)
            self._each(pool, attempts, self._halt)
            sent = self._send(release, weights, attempts)
            self._each(pool, attempts, lambda attempt: self._verify(attempt, release.names))
            before_cache()
            self._each(pool, attempts, lambda attempt: self._memory.take_cache(attempt.receiver.control))
            self._each(pool, attempts, lambda attempt: attempt.receiver.control.activate(attempt.name))
            self._note_activated(release, _present(attempts))
            self._each(pool, attempts, self._resume)
        self._note_ends(release, attempts, sent)
        serving = {c.receiver.control.url: c.name for c in attempts if c.receiver.error is None}
        if not serving:
            lost = all(isinstance(c.receiver.error, EngineLostError) for c in attempts)
            reasons = "; ".join(str(c.receiver.error) for c in attempts)
            text = f"version {release.version} of {release.policy} is served nowhere: {reasons}"
            raise EngineLostError(text) if lost else EngineError(text)
        self._given |= serving
        return list(serving)

    def lost(self) -> list[str]:
        """Engines that can be reached but serve other weights than their last sync gave: they were
        restarted."""
        urls = []
        for url, expected in self._given.items():
            with contextlib.suppress(EngineError):
                # One that a sync of this process has left standing waits for the next.
                if self._looked_at[url].weight_version() not in (expected, UNVERIFIED, ASLEEP, WAKING):
                    urls.append(url)
        return urls

    def close(self) -> None:
        """Close the connections to engines, and the transport."""
        self._transport.close()
        for engine in [*self._engines, *self._looked_at.values()]:
            engine.close()

    # The steps --------------------------------------------------------------------------------

    def _opened(
        self, pool: ThreadPoolExecutor, release: Release, engines: Sequence[EngineControl]
    ) -> list[SyncAttempt]:
        """Record the start of each engine's sync; an engine that does not report its weights fails at
        once."""
        shared: dict[Any, Expected] = {}
        attempts = []
        for engine, future in [(engine, pool.submit(self._ask, engine, release)) for engine in engines]:
            error = future.exception()
            info, ranks = (None, []) if error is not None else future.result()
            own = info is not None and info.kind == EMBEDDED
            how = holding(info or EngineInfo("", "", "cpu"), release.head_dim, release.dtype)
            held = ((rank.tp_rank, rank.tp_size, frozenset(rank.tensors)) for rank in ranks)
            expected = shared.setdefault((how, *held), Expected(ranks, how))
            # With in_place, the cache is kept on purpose, and a flush would be refused.
            receiver = Receiver(engine, len(ranks), expected, flush=self._options.pause != "in_place")
            if isinstance(error, Exception):
                receiver.failed(error)
            begun, flush_first = time.perf_counter(), receiver.flush and not own
            flush_first = flush_first and engine.url not in self._memory.woken
            attempts.append(SyncAttempt(receiver, new_id(), begun, release.name(), how, own, flush_first))
        self._note_starts(release, attempts)
        self._note_ends(release, [c for c in attempts if c.receiver.error], 0)
        return attempts

    def _ask(self, engine: EngineControl, release: Release) -> tuple[EngineInfo, list[RankChecksums]]:
        """Check, before anything is sent, that the engine can take the release, and read its description and
        ranks."""
        info, held = engine.info(), self._held.pop(engine.url, None)
        if held is None or engine.url in self._begun:  # also of one that another trainer left
            self._memory.take_weights(engine, info)
        if self._options.pause == "in_place" and info.overlap:
            # The step running at the pause uses the old weights, but SGLang attributes its token to the new
            # ones.
            text = (
                f"engine {engine.url}: in_place would give one token of each running request a wrong version"
            )
            raise EngineError(f"{text}; start it with --disable-overlap-schedule, or pause by retract")
        check_transport(engine.url, info, self._transport.name)
        ranks = engine.checksums() if held is None else held
        check_fits(engine.url, info, ranks, release.names, release.shape, release.dtype)
        return info, ranks

    def _halt(self, attempt: SyncAttempt) -> None:
        """Pause the engine, after its requests are drained if the options say so."""
        control = attempt.receiver.control
        self._stop(control, self._options.pause, flush=attempt.flush_first)
        if not attempt.own and control.url not in self._memory.woken:
            control.disown()  # should this process die now, and somebody have the engine go on

    def _rest(self, control: EngineControl) -> None:
        pause = DRAIN if self._options.pause == DRAIN else "retract"
        self._memory.give(control, lambda *, flush: self._stop(control, pause, flush=flush))
        self._standing.add(control.url)

    def _stop(self, control: EngineControl, pause: str, *, flush: bool) -> None:
        if pause == DRAIN:
            deadline = time.monotonic() + self._options.drain_s
            # Requests of an engine that is paused already do not finish.
            while control.url not in self._standing and control.requests() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            pause = "retract"  # also requests that arrived since
        known = control.url in self._given and control.url not in self._standing
        self._standing.add(control.url)
        control.pause(pause)
        if flush:
            self._flush(control, pause, known)

    def _flush(self, control: EngineControl, pause: str, known: bool) -> None:
        """Flush the prefix cache of a paused engine.

        Args:
            known: whether its weights are verified; unverified ones may be a partial update.
        """
        deadline, moment = time.monotonic() + control.timeout_s, MOMENT_S
        while (refused := control.flush()) is not None and time.monotonic() < deadline:
            if not known:
                control.disown()
            control.resume()
            time.sleep(moment)
            moment = min(2 * moment, LONGEST_MOMENT_S)
            control.pause(pause)
        if refused is None:
            return
        if known:  # no weight was sent yet
            control.resume()
            self._standing.discard(control.url)
        text = f"{refused} (for {control.timeout_s:g} s). Constrained requests (response_format) that are"
        text += " being compiled hold its cache: send fewer or smaller schemas, or raise the sync's timeout_s"
        raise EngineError(text)

    def _send(self, release: Release, weights: Weights, attempts: list[SyncAttempt]) -> int:
        present = _present(attempts)
        try:
            return self._transport.send(weights, [c.receiver for c in present]) if present else 0
        # An error of the policy itself: the engines' weights are unknown all the same.
        except Exception as error:
            for attempt in present:
                attempt.receiver.failed(error)
            self._note_ends(release, attempts, 0)
            raise

    def _verify(self, attempt: SyncAttempt, names: Sequence[str]) -> None:
        control = attempt.receiver.control
        held = control.checksums()
        attempt.receiver.expected.check(control.url, held)
        self._held[control.url] = held
        attempt.checksums, attempt.held = ranks_digest(held), describe_holding(held, names, attempt.holding)

    def _resume(self, attempt: SyncAttempt) -> None:
        attempt.receiver.control.resume()
        self._standing.discard(attempt.receiver.control.url)

    def _note_starts(self, release: Release, attempts: Sequence[SyncAttempt]) -> None:
        """Record which syncs begin. For an engine that released its memory for this version, the
        sync has begun already; one that waits for another version waits in vain."""
        records: list[Record] = []
        for attempt in attempts:
            url = attempt.receiver.control.url
            version, sync_id = self._begun.pop(url, (None, ""))
            if version == release.version:
                attempt.sync_id = sync_id
                continue
            if version is not None:
                error = f"version {version} was not made: version {release.version} is sent"
                records.append(SyncFailed(release.policy, version, sync_id, url, error))
            named = (release.policy, release.version, attempt.sync_id, url)
            records.append(SyncStarted(*named, self._transport.name))
        if records:
            self._write(*records)

    def _note_activated(self, release: Release, attempts: list[SyncAttempt]) -> None:
        """Record which engines hold the verified weights, before they sample a token with them."""
        version, files = (release.policy, release.version), (release.weights_digest, release.path)
        records = [
            PolicyActivated(*version, c.receiver.control.url, *files, c.name, c.checksums, c.held)
            for c in attempts
        ]
        if records:
            self._write(*records)

    def _note_ends(self, release: Release, attempts: list[SyncAttempt], sent: int) -> None:
        """Record the end of each engine's sync, unless it is recorded already."""
        records: list[Record] = []
        for attempt in attempts:
            error, url = attempt.receiver.error, attempt.receiver.control.url
            named = (release.policy, release.version, attempt.sync_id, url)
            if error is not None and not attempt.recorded:
                records.append(SyncFailed(*named, str(error)))
            elif error is None and not attempt.recorded:
                records.append(SyncFinished(*named, sent, time.perf_counter() - attempt.begun))
            attempt.recorded = True
        if records:
            self._write(*records)

    def _each(
        self, pool: ThreadPoolExecutor, attempts: Sequence[SyncAttempt], step: Callable[[SyncAttempt], None]
    ) -> None:
        """Run a step of the sync on all engines that have not failed, in parallel."""
        running = [(attempt, pool.submit(step, attempt)) for attempt in _present(attempts)]
        for attempt, task in running:
            error = task.exception()
            if isinstance(error, Exception):
                attempt.receiver.failed(error)


def _present(attempts: Sequence[SyncAttempt]) -> list[SyncAttempt]:
    return [attempt for attempt in attempts if attempt.receiver.error is None]


# Whether an engine can load a policy's tensors, and how it holds them. This is checked before any tensor is
# sent: SGLang's scheduler dies of a tensor of another shape, in the middle of a version.

EXACT = "float32"
"""The type that holds whatever is trained; an engine's checksums are of the type that it holds."""
BUILDS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "experts")
"""Fields of a model's shape that determine the shapes of its tensors."""


def check_fits(
    url: str,
    info: EngineInfo,
    ranks: Sequence[RankChecksums],
    names: Sequence[str],
    shape: ModelShape | None,
    dtype: str,
) -> None:
    """Compare an engine with what it is to be sent: names, types and shapes.

    An engine reports the names and the type of its tensors, but not their shapes. Those follow from its
    model's configuration; if that cannot be read from here, shapes are not compared.

    Args:
        dtype: of what it is sent.

    Raises:
        EngineError: it is of another model, or of another type; the first difference is named.
    """
    if names:
        check_layout(url, ranks, names)
    if info.kind == EMBEDDED:
        return  # it refuses a tensor that does not fit without damage
    if info.dtype not in ("", "auto", EXACT, dtype):
        raise EngineError(
            f"engine {url} holds its weights in {info.dtype}, and those that are trained are {dtype}: they "
            f"would be rounded, and what it samples would be another policy. Start it with --dtype {dtype}"
        )
    held = _shape_of(info)
    if shape is None or held is None:
        return
    odd = [name for name in BUILDS if getattr(held, name) != getattr(shape, name)]
    if odd:
        shown = ", ".join(f"{name} {getattr(held, name)}, not {getattr(shape, name)}" for name in odd)
        raise EngineError(f"engine {url} serves a model of another shape ({info.model_path}): {shown}")


def _shape_of(info: EngineInfo) -> ModelShape | None:
    """The shape of its model, None where its directory is not on this host, or of no kind that is trained."""
    path = Path(info.model_path)
    if not path.is_absolute() or not (path / "config.json").is_file():
        return None
    try:
        return read_shape(path)
    except ModelError:
        return None  # the names have been compared


def holding(info: EngineInfo, head_dim: int, dtype: str) -> Holding:
    """How an engine will hold the tensors that it is sent.

    Args:
        head_dim: of the model's attention.
        dtype: of what it is sent.
    """
    # The embedded engine hashes as on a CPU, whatever its device, and pads nothing.
    own = info.kind == EMBEDDED
    # It widens what it is sent, and SGLang what is narrower than its own type.
    wide = own or info.dtype == EXACT
    kind = checksum_kind("cpu" if own else info.device)
    return Holding(kind, EXACT if wide else dtype, head_dim, padded=not own)


def check_transport(url: str, info: EngineInfo, transport: str) -> None:
    """Check that an engine supports the transport.

    Raises:
        EngineError: it is too old.
    """
    release = release_of(info.version)
    too_old = info.kind != EMBEDDED and release is not None and release < (release_of(SESSIONS_SINCE) or ())
    if transport != FromDisk.name and too_old:
        raise EngineError(
            f"engine {url}: SGLang {info.version} takes no weights by {transport}: use {SESSIONS_SINCE} or "
            'newer, or transport = "disk"'
        )


# The memory of engines that share devices with a trainer: given away while it trains, and taken again.
#
# An engine's state stays with the engine, in what it calls its weights: whoever syncs it next knows what it
# must give back, also where the trainer that took it is gone.


class EngineOffload:
    """Which engines released their memory.

    Attributes:
        woken: those that have the memory of their weights again, but not that of their caches.
    """

    def __init__(self) -> None:
        self.woken: set[str] = set()
        self._given: set[str] = set()
        """Those that gave it to this trainer."""

    def give(self, control: EngineControl, stop: Callable[..., None]) -> None:
        """Stop an engine, and have it release its memory. An engine that an earlier trainer left so
        is so already.

        Args:
            stop: pauses it; `flush` also flushes its cache.
        """
        own = control.info().kind == EMBEDDED
        name = "" if own else control.weight_version()
        self._given.add(control.url)
        if name == ASLEEP:
            return
        stop(flush=not own and name != WAKING)
        control.release_memory(*((WEIGHTS,) if name == WAKING else (CACHE, WEIGHTS)))
        if not own:
            control.activate(ASLEEP)

    def take_weights(self, control: EngineControl, info: EngineInfo) -> None:
        """Have an engine allocate its weights' memory again, if it released it."""
        if info.kind == EMBEDDED:  # which keeps it
            self.woken |= {control.url} if info.asleep else set()
            return
        name, offloaded = control.weight_version(), control.url in self._given
        self._given.discard(control.url)
        # A proxy that was just comparing weights may have named it since; one that was started anew has
        # another name, and all of its memory.
        asleep = name == ASLEEP or (offloaded and read_name(name) is not None)
        if asleep:
            control.resume_memory(WEIGHTS)
            control.activate(WAKING)
        self.woken |= {control.url} if asleep or name == WAKING else set()

    def take_cache(self, control: EngineControl) -> None:
        """Have it allocate the memory of its cache again, too."""
        if control.url in self.woken:
            control.resume_memory(CACHE)
            self.woken.discard(control.url)
