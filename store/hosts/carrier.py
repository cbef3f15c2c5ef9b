"""One process's part in carrying a store between hosts: its lease, its lanes out, and other hosts' lanes in.

Of the processes of a host one follows, whichever was first; another takes that up when it ends. The same one
ships what is left in lanes whose process has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from rollbook.store.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    LaneLockedError,
    MediumError,
    StoreError,
)
from rollbook.store.hosts.claims import held_claim
from rollbook.store.hosts.follower import Follower
from rollbook.store.hosts.host import host_name
from rollbook.store.hosts.lifetime import forget_erased, forget_old
from rollbook.store.hosts.orphans import LANE as ORPHANS
from rollbook.store.hosts.orphans import move_orphans
from rollbook.store.hosts.replica import boot_id, session_of
from rollbook.store.hosts.session import Session, Witness, seconds
from rollbook.store.hosts.shipper import SETTLED, LaneShipper, Sender, is_ended, put_empty, put_fence
from rollbook.store.hosts.units import Telling, take_units
from rollbook.store.ids import now_us
from rollbook.store.log.recovery import recovered_lane
from rollbook.store.log.store import CHECKPOINTS
from rollbook.store.log.writer import LaneWriter
from rollbook.store.marker import MARKER
from rollbook.store.medium.folders import SharedFolders
from rollbook.store.medium.medium import (
    AGREED,
    LANES,
    SESSIONS,
    STORE,
    Medium,
    lane_of,
    lane_sequence,
    newest_chunk,
    units_sequence,
)
from rollbook.store.medium.open import opened_folders, opened_medium
from rollbook.store.permissions import make_empty, make_folder, open_file, replace_small
from rollbook.store.safe_paths import place_inside, read_small
from rollbook.store.settings import MediumSettings, read_settings
from rollbook.store.wal.files import (
    FENCED,
    folders_of_lanes,
    is_replica,
    lane_folder,
    read_shipped,
    read_watermark,
    try_lock,
)

SHARED = "SHARED"
"""In the store's folder: names of folders that other hosts can have."""
FOLLOWING, LOOK, AS_OF = "following.lock", "LOOK", "AS_OF"
"""In the folder of claims: held by the process that follows; touched by one that waits for it; and how far
that is."""
TAKE_UP_S = 0.5
"""Between two tries to take up following."""
LEFTOVERS_S = 5.0
"""Between two looks for what is left in lanes without a process."""
RETRY_S, LONGEST_RETRY_S = 0.2, 3.0
LONGEST_WAIT_S = 0.1
"""Between two looks whether another process of this host waits for the newest."""
PATIENCE_S = 60.0
"""So long a command waits for what was in the medium when it began."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the process of a host is that follows.

    Attributes:
        as_of: all is here that was in the medium then (`session.seconds`).
        failure: why nothing, or nothing of a lane, was taken in the newest step.
        failed_at: when that step began.
    """

    as_of: float = 0.0
    failure: Exception | None = None
    failed_at: float = 0.0


class Carrier:
    """What a process does for its store between hosts. Made once for a folder; threads may share it.

    Raises:
        ConfigError: the medium's address cannot be used.
    """

    def __init__(self, store: Path, store_id: str, settings: MediumSettings) -> None:
        self.settings = settings
        self._store, self._store_id = store, store_id
        self.host = host_name(store)
        self.medium: Medium = opened_medium(settings, store_id)
        self._telling = Telling(self.medium, store, self.host)
        self._session: Session | None = None
        self._witness: Witness | None = None
        self._gate = threading.RLock()
        self._follower: Follower | None = None
        self._as_of = threading.Condition()
        self._stopping = threading.Event()
        self._own_progress = Progress()
        self._closed = False
        self._hurried, self._woken = threading.Event(), threading.Event()
        make_folder(store / "claims")
        self._lock = open_file(store / "claims" / FOLLOWING, os.O_RDWR | os.O_CREAT)
        self.medium.listen(self._heard)
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)
        self._thread.start()

    def _heard(self, sequence: str) -> None:
        follower = self._follower
        own = (f"{LANES}/{self.host}/", units_sequence(self.host))
        if follower is not None and not sequence.startswith(own):
            follower.heard(sequence)
            self._woken.set()

    # Lanes out ----------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """This process's lease, begun when it is first needed.

        Raises:
            MediumError: the medium does not answer.
        """
        with self._gate:
            if self._session is None or self._session.fenced is not None:
                if not self.medium.read(STORE, 0):
                    self.medium.put(STORE, 0, read_small(self._store / MARKER))
                self._session = Session(self.medium, self.host, self.settings.lease_s, self._store / "claims")
                self._witness = self._new_witness()
            return self._session

    def lane_for(self, lane: str) -> str:
        """The lane that this host writes where one host alone would write `lane`.

        It has the host's name in it, but for one that was there before there were several; and a number, once
        an earlier one was ended by another host.
        """
        with self._gate:
            before = lane_folder(self._store, lane).exists() and not is_replica(self._store, lane)
            own = lane if lane.endswith(f".{self.host}") else f"{lane}.{self.host}"
            names = itertools.chain([lane] if before else [], _numbered(own))
            name = next(name for name in names if not self._is_ended(name))
            self._move_orphans()
            return name

    def _is_ended(self, lane: str) -> bool:
        """Whether a lane of this host was ended, which is noted in its folder."""
        folder = lane_folder(self._store, lane)
        if folder.exists() and not (folder / FENCED).exists() and is_ended(self.medium, self.host, lane):
            make_empty(folder / FENCED)
        return (folder / FENCED).exists()

    def _move_orphans(self) -> None:
        """Move away what this host's lanes hold behind their ends, if their processes ended."""
        for lane in folders_of_lanes(self._store):
            folder = lane_folder(self._store, lane)
            if is_replica(self._store, lane) or not (folder / FENCED).exists():
                continue
            if read_small(folder / FENCED) != SETTLED or _is_behind(folder):
                with contextlib.suppress(LaneLockedError):
                    move_orphans(self._sender(), lane, self._orphan_writer)

    def _orphan_writer(self) -> LaneWriter:
        # That lane may have been ended as well, with the lease of whoever wrote it.
        lanes = _numbered(f"{ORPHANS}.{self.host}")
        name = next(name for name in lanes if not self._is_ended(name))
        return LaneWriter(self._store, self._store_id, name, ship=self.ship)

    def ship(self, lane: str, on_fenced: Callable[[FencedError], None]) -> LaneShipper:
        """Ship a lane whose lock this process holds, until the shipper is closed.

        Raises:
            FencedError: another host has ended the lane.
            MediumError: the medium does not answer.
        """
        return LaneShipper(self._sender(), lane, on_fenced)

    def _sender(self) -> Sender:
        gated = self.settings.ack == "medium"
        return Sender(self.medium, self.session, self._store, self._store_id, self.host, gated)

    def _ship_leftovers(self) -> None:
        """Ship what processes that have ended left in this host's lanes."""
        for lane in folders_of_lanes(self._store):
            folder = lane_folder(self._store, lane)
            if is_replica(self._store, lane) or (folder / FENCED).exists() or not _is_behind(folder):
                continue
            try:
                with recovered_lane(self._store, lane):
                    shipper = self.ship(lane, lambda error: logger.warning("%s", error))
                    try:
                        shipper.acknowledge(read_watermark(folder), [])
                    finally:
                        shipper.close()
            except LaneLockedError:
                continue  # it has a process
            except (StoreError, OSError) as error:
                logger.warning("what is left in lane %s is not shipped: %s", lane, error)

    def tell_units(self) -> None:
        """Tell other hosts which units of this host's lanes are in object storage. The caller alone changes
        sealed units.

        Raises:
            MediumError: the medium does not answer.
        """
        self._telling.tell()

    def forget_old(self, lane: str, segment: int) -> None:
        """Remove a lane's chunks up to a segment that is in object storage, once they are old enough.

        Raises:
            MediumError: the medium does not answer.
        """
        before_us = now_us() - int(self.settings.keep_s * 1e6)
        forget_old(self.medium, lane_sequence(self.host, lane), segment, before_us)

    def forget_erased(self, lane: str, segment: int, sealed: int) -> bool:
        """Remove a lane's chunks with anything of a segment or those before it, if all that they hold is in
        object storage; whether none of them is left.

        Args:
            sealed: the last segment that is in object storage.

        Raises:
            LaneLockedError: the lane has a writer, and its newest chunk is one: it goes with the next.
            MediumError: the medium does not answer.
        """
        sequence = lane_sequence(self.host, lane)
        if forget_erased(self.medium, sequence, segment, sealed):
            return True
        newest = newest_chunk(self.medium, sequence)
        if newest is None or newest.end is None or newest.end[0] > sealed:
            return False
        with recovered_lane(self._store, lane):  # nobody writes it: it goes once there is one behind it
            put_empty(self._sender(), lane)
        return forget_erased(self.medium, sequence, segment, sealed)

    # Folders ------------------------------------------------------------------------------------

    def share(self, named: str) -> None:
        """Copy a folder of the store to where other hosts fetch it.

        Raises:
            ConfigError: there is no object storage.
            MediumError: it does not answer, or refuses.
        """
        self._folders().share(place_inside(self._store, named), named)
        self._note_shared(named)

    def _note_shared(self, named: str) -> None:
        with self._gate:
            replace_small(self._store / SHARED, orjson.dumps(sorted({*self._shared_before(), named})))

    def _shared_before(self) -> set[str]:
        """The folders of this host that were shared, or that come from others."""
        try:
            return set(orjson.loads(read_small(self._store / SHARED, 1 << 26)))
        except (FileNotFoundError, ValueError):
            return set()

    def _share_missing(self) -> None:
        """Share checkpoints that were written before there were several hosts."""
        there = {
            path.relative_to(self._store).as_posix() for path in self._store.glob(f"{CHECKPOINTS}/*/*/v*")
        }
        for named in sorted(there - self._shared_before()):
            with contextlib.suppress(ConfigError):  # there is nowhere to
                self.share(named)

    def fetch(self, named: str) -> None:
        """Have a folder here that another host has shared, if one has.

        Raises:
            ConfigError: there is no object storage.
            MediumError: it does not answer, or refuses.
            CorruptionError: it is not what was shared.
        """
        if self._folders().fetch(named, place_inside(self._store, named)):
            self._note_shared(named)

    def unshare(self, named: str) -> None:
        """Remove a folder from where other hosts fetch it.

        Raises:
            ConfigError: there is no object storage.
            MediumError: it does not answer, or refuses.
        """
        self._folders().remove(named)

    def _folders(self) -> SharedFolders:
        settings = read_settings(self._store).model_copy(update={"medium": self.settings})
        return opened_folders(settings, self._store_id)

    # Claims -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(
        self, what: str, remedy: str, patience_s: float, *, shared: bool, at_once: bool
    ) -> Iterator[None]:
        """Hold a claim among hosts; see `held_claim`."""
        session = self.session
        # One is kept, so that who asks again and again without waiting sees how long a session is silent.
        witness = self._witness if at_once else self._new_witness()
        assert witness is not None
        parts = (self.medium, session, witness, what, remedy, patience_s)
        with held_claim(*parts, shared=shared, at_once=at_once, on_gone=self.end_lanes):
            yield

    def _new_witness(self) -> Witness:
        assert self._session is not None
        return Witness(self.medium, self._session.name, self.host, self._store / "claims")

    def state_of(self, session: str) -> str:
        """Whether a process, by its session, runs or has ended, for people.

        Raises:
            MediumError: the medium does not answer.
        """
        return "ended in order" if Witness(self.medium, "").has_ended(session) else "runs, or is silent"

    def agree(self, what: str, value: str) -> bool:
        """Whether all hosts have this value of something, which the first one that asks says.

        Raises:
            MediumError: the medium does not answer.
        """
        said = self.medium.read(f"{AGREED}/{what}", 0)
        return said == [value.encode()] if said else self.medium.put(f"{AGREED}/{what}", 0, value.encode())

    def end_lanes(self, session: str) -> None:
        """End all lanes of a session that has ended, and have what is in them here.

        Raises:
            MediumError: the medium does not answer.
            StoreError: what is in them did not come in time.
        """
        for sequence in self._new_witness().lanes(session):
            host, lane = lane_of(sequence)
            if host == self.host:
                continue
            self._await_lane(lane, put_fence(self._sender(), sequence).next_seq)

    def end_others(self) -> None:
        """End the lanes of all other processes, which must have ended.

        Raises:
            LaneLockedError: one runs.
            MediumError: the medium does not answer.
        """
        own, witness = self.session, self._new_witness()
        for sequence in self.medium.sequences(SESSIONS):
            session = sequence.removeprefix(f"{SESSIONS}/")
            if session == own.name:
                continue
            if not witness.gone(session):
                raise LaneLockedError(
                    f"{witness.described(session)}, writes this store too: end it first "
                    "(`rollbook store hosts`)"
                )
            self.end_lanes(session)

    def take_over(self, lane: str) -> bool:
        """End another host's lane if its process has ended, or was silent for its lease; whether it has
        ended.

        Raises:
            MediumError: the medium does not answer.
            StoreError: what is in it did not come in time.
        """
        if (lane_folder(self._store, lane) / FENCED).exists():
            return True
        name, own = session_of(self._store, lane), self.session
        if name is None or self._witness is None or not own.valid or not self._witness.gone(name):
            return False
        self.end_lanes(name)
        return (lane_folder(self._store, lane) / FENCED).exists()

    def _await_lane(self, lane: str, end: int) -> None:
        until = seconds() + PATIENCE_S
        while seconds() < until:
            self.catch_up()
            follower = self._follower
            if follower is None:
                return  # another process of this host follows, and is as far
            replica = follower.replica(lane)
            if replica is not None and replica.fenced and replica.visible >= end:
                return
            time.sleep(0.02)
        raise StoreError(
            f"lane {lane!r} was ended at event {end}, and is not here up to that after {PATIENCE_S:.0f} s"
        )

    # Lanes in -----------------------------------------------------------------------------------

    def catch_up(self, patience_s: float = PATIENCE_S) -> None:
        """Return once all is here that was in the medium when this was called.

        Raises:
            MediumError: the medium does not answer.
            StoreError: what it holds of another host is damaged, or did not come in time.
        """
        asked = seconds()
        until = asked + patience_s
        while True:
            self._hurried.set()
            self._woken.set()
            (self._store / "claims" / LOOK).touch()
            with self._as_of:
                self._as_of.wait(0.05)
            seen = self._progress()
            if seen.failure is not None and seen.failed_at >= asked:
                raise seen.failure
            if seen.as_of >= asked:
                return
            if seconds() > until:
                raise MediumError(
                    f"{self.medium.address}: what is there did not come within {patience_s:.0f} s"
                )

    def _progress(self) -> Progress:
        """How far the process of this host is that follows: this one, or another one, by what it wrote
        down."""
        if self._follower is not None:
            return self._own_progress
        try:
            values = orjson.loads(read_small(self._store / "claims" / AS_OF))
        except (FileNotFoundError, ValueError):
            return Progress()
        if values["boot"] != boot_id():
            return Progress()
        failure = None if values["failure"] is None else StoreError(values["failure"])
        return Progress(values["as_of"], failure, values["failed_at"])

    def _run(self) -> None:
        """Follow, as soon as no other process of this host does."""
        while not self._stopping.is_set():
            if try_lock(self._lock, fcntl.LOCK_EX):
                try:
                    self._follow()
                finally:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
            else:
                self._stopping.wait(TAKE_UP_S)

    def _follow(self) -> None:
        follower = Follower(
            self.medium,
            self._store,
            self._store_id,
            self.host,
            self.settings.follow,
            partial(take_units, self._store),
        )
        self._follower = follower
        try:
            self._step_on(follower)
        finally:
            self._follower = None
            follower.close()

    def _step_on(self, follower: Follower) -> None:
        retry, leftovers = RETRY_S, seconds()
        while not self._stopping.is_set():
            pause, begun, others = 0.0, seconds(), False
            try:
                others = self._others_wait()
                if others or self._hurried.is_set():
                    self._hurried.clear()
                    follower.hurry()
                pause = follower.step()
                retry = RETRY_S
                failure: Exception | None = follower.failure
                if seconds() >= leftovers:
                    self._ship_leftovers()
                    self._share_missing()
                    leftovers = seconds() + LEFTOVERS_S
            except (StoreError, OSError) as error:
                if self._own_progress.failure is None:
                    logger.warning("other hosts' lanes are not followed, and tried again: %s", error)
                failure, pause = error, retry
                retry = min(2 * retry, LONGEST_RETRY_S)
            self._own_progress = Progress(follower.as_of, failure, begun)
            if others:
                self._write_progress()
            with self._as_of:
                self._as_of.notify_all()
            if pause:
                self._woken.wait(min(pause, LONGEST_WAIT_S))
                self._woken.clear()

    def _others_wait(self) -> bool:
        """Whether another process of this host waits for the newest: it says so again until it has that."""
        try:
            (self._store / "claims" / LOOK).unlink()
        except FileNotFoundError:
            return False
        return True

    def _write_progress(self) -> None:
        """Write down how far this process is, for the others of this host."""
        now = self._own_progress
        values = {"boot": boot_id(), "as_of": now.as_of, "failed_at": now.failed_at}
        values["failure"] = None if now.failure is None else str(now.failure)
        with contextlib.suppress(OSError):  # a full disk: the others wait
            replace_small(self._store / "claims" / AS_OF, orjson.dumps(values))

    def close(self) -> None:
        """Stop following, and end the session. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        self._woken.set()
        self._thread.join()
        if self._session is not None:
            self._session.close()
        self.medium.close()
        os.close(self._lock)


def _numbered(lane: str) -> Iterator[str]:
    """A lane's name, and those of the lanes that follow it once it was ended."""
    yield lane
    for number in itertools.count(2):
        yield f"{lane}.{number}"


def _is_behind(folder: Path) -> bool:
    """Whether a lane has more than the medium."""
    try:
        mark = read_watermark(folder)
    except CorruptionError:
        return False
    shipped = read_shipped(folder)
    return mark.next_seq > (0 if shipped is None else shipped.next_seq)
