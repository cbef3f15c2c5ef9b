"""`recover.*`: which acknowledged events survive `kill -9`, and how fast a lane is recovered.

A process appends to a lane of tiny segments while it seals them, merges sealed units, derives
tables and notes everything in the catalog (`bench.crash`). It is killed at a random moment:
alternately of its life, or of one of its sealer's phases, since some of these last only
milliseconds. Then the lane is recovered, and every event whose acknowledgement got out is looked
up and compared, including those of earlier lives. `kill -9` leaves the operating system's page
cache alone: it tests what the code does, not whether the disk flushes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from rollbook import store
from rollbook.bench.crash import ID_BYTES, LANE, PHASES, PRINT_BYTES, SETTINGS, fingerprint, in_phase, work
from rollbook.bench.figure import Figure, Outcome, Spread, spread
from rollbook.bench.rounds import Laps, Limit, always, interleave, times_faster, walls
from rollbook.bench.sinks import LogSink
from rollbook.bench.turns import make_turns
from rollbook.store import Store
from rollbook.store.errors import CorruptionError
from rollbook.store.log.recovery import recover_lane
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path

START_TIMEOUT_S = 60.0
GIB = 1 << 30
RECOVER, READ = "recover", "read"
CHUNK = 4 << 20
IN_PHASE_S, GLANCE_S = 0.02, 0.001
"""A kill in a phase comes within this time of its beginning, which is looked for this often."""
LONGEST_LIVES = 3
"""Lives after which a kill in a phase comes anyway."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: kills at random within `life_s` of the first append, `of_a_store` to a store."""

    kills: int = 100
    of_a_store: int = 20
    life_s: float = 0.5
    kill_limit_s: float = 120.0
    """No further kill after that many seconds."""
    limit: Limit = field(default_factory=lambda: Limit(10, 10.0))
    commits: int = 480
    """Commits of 40 events of 14 KB in the lane whose recovery is timed: 256 MiB."""

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.kills + self.limit.rounds


@dataclass(slots=True)
class Killed:
    """The outcome of the kills; `phases` counts what the sealer was doing at each."""

    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    changed: int = 0
    torn: int = 0
    """Kills that left an unfinished frame, which recovery cut off."""
    in_roll: int = 0
    """Kills between the making of a segment and its first watermark."""
    phases: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Measured:
    """The kills, and the laps of recovering a lane of `lane_bytes` and of reading its bytes."""

    killed: Killed
    laps: Laps
    lane_bytes: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Kill processes that write into `folder`, then time recovery; calls `on_round` after each of either.

    Raises:
        CorruptionError: a sealer found damage.
        RuntimeError: a process ended before it was killed.
    """
    killed = Killed()
    rng = random.Random(0)
    deadline = time.monotonic() + plan.kill_limit_s
    while killed.kills < plan.kills and (not killed.kills or time.monotonic() < deadline):
        count = min(plan.of_a_store, plan.kills - killed.kills)
        with contextlib.closing(_Victims(folder / f"store-{killed.kills}", killed, rng)) as victims:
            for _ in range(count):
                if time.monotonic() < deadline or not killed.kills:
                    victims.kill_one(plan.life_s)
                    on_round()
    laps, lane_bytes = _time_recovery(folder, plan, on_round)
    return Measured(killed, laps, lane_bytes)


class _Victims:
    """One store, and the processes that write it until they are killed."""

    def __init__(self, path: Path, killed: Killed, rng: random.Random) -> None:
        self._log = store.open(path, create=True)
        (path / "store.toml").write_text(SETTINGS)
        self._note = path.with_suffix(".phase")
        self._note.write_bytes(bytes(1))
        self._killed, self._rng = killed, rng
        self._acknowledged: dict[str, bytes] = {}
        # Each victim is a fork of one process that has imported everything and started no thread.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rollbook.bench.crash"])

    def kill_one(self, life_s: float) -> None:
        """Let a process live for a moment, kill it, recover the lane, and compare."""
        head = self._log.head()
        # Every second kill comes at any moment, the others soon after the sealer began something.
        number = self._killed.kills
        phase = PHASES[number // 2 % len(PHASES)] if number % 2 else None
        acks = self._live(life_s, phase)
        self._killed.kills += 1
        self._killed.phases[in_phase(self._note)] += 1
        self._note.write_bytes(bytes(1))
        lane = lane_folder(self._log.path, LANE)
        self._killed.in_roll += max(segment_numbers(lane)) > read_watermark(lane).segment
        with self._log.writer(LANE) as writer:
            self._killed.torn += writer.recovered.truncated_bytes > 0
        new = _parse(acks)
        self._killed.acknowledged += len(new)
        self._compare(new, head)
        self._acknowledged |= new

    def close(self) -> None:
        """Compare everything ever acknowledged once more: it may have been sealed and merged since."""
        self._compare(self._acknowledged, {})

    def _live(self, life_s: float, phase: str | None = None) -> list[bytes]:
        """A process's messages before it was killed: within `life_s`, or when its sealer was in the
        phase."""
        mine, theirs = self._context.Pipe(duplex=False)
        args = (self._log.path, self._rng.getrandbits(32), theirs, self._note)
        process = self._context.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        acks: list[bytes] = []
        try:
            if not mine.poll(START_TIMEOUT_S):
                raise TimeoutError(f"the process that is to be killed did not begin in {START_TIMEOUT_S} s")
            acks.append(mine.recv_bytes())
            if phase is not None:
                acks += self._until(phase, mine, LONGEST_LIVES * life_s)
            moment = self._rng.uniform(0.0, IN_PHASE_S if phase else life_s)
            acks += self._until(None, mine, moment)
        finally:
            process.kill()
            process.join()
            acks += _rest(mine)
        if process.exitcode != -signal.SIGKILL:
            _parse(acks)  # says what is damaged, if that is why
            raise RuntimeError(f"the process that was to be killed ended by itself, with {process.exitcode}")
        return acks

    def _until(self, phase: str | None, acks: Connection, seconds: float) -> list[bytes]:
        """Messages until the sealer is in the phase; without a phase, and at the latest, for `seconds`."""
        messages: list[bytes] = []
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if phase is not None and in_phase(self._note) == phase:
                break
            if acks.poll(min(left, GLANCE_S)):
                messages.append(acks.recv_bytes())
        return messages

    def _compare(self, acknowledged: dict[str, bytes], start: dict[str, int]) -> None:
        logged: dict[str, list[bytes]] = {}
        for event in self._log.events(start=start):
            logged.setdefault(event.event_id, []).append(fingerprint(event))
        self._killed.lost += sum(event_id not in logged for event_id in acknowledged)
        self._killed.changed += sum(
            event_id in logged and logged[event_id] != [expected]
            for event_id, expected in acknowledged.items()
        )


def _rest(acks: Connection) -> list[bytes]:
    """Messages that were still in the pipe when their writer was killed."""
    messages: list[bytes] = []
    with contextlib.suppress(EOFError), contextlib.closing(acks):
        while True:
            messages.append(acks.recv_bytes())
    return messages


def _parse(messages: list[bytes]) -> dict[str, bytes]:
    """Event id -> fingerprint.

    Raises:
        CorruptionError: the killed process had found damage.
    """
    fingerprints: dict[str, bytes] = {}
    for message in messages:
        if message.startswith(b"!"):
            raise CorruptionError(f"sealing found damage after a kill: {message[1:].decode()}")
        for at in range(0, len(message), ID_BYTES + PRINT_BYTES):
            event_id, print_ = message[at : at + ID_BYTES], message[at + ID_BYTES :][:PRINT_BYTES]
            fingerprints[event_id.decode()] = print_
    return fingerprints


def _time_recovery(folder: Path, plan: Plan, on_round: Callable[[], None]) -> tuple[Laps, int]:
    log = _full_lane(folder / "whole", plan)
    paths = [
        segment_path(lane_folder(log.path, LANE), n) for n in segment_numbers(lane_folder(log.path, LANE))
    ]
    buffer = bytearray(CHUNK)

    def read() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    sides = {RECOVER: always(lambda: recover_lane(log.path, LANE)), READ: always(read)}
    return interleave(sides, plan.limit, on_round), sum(path.stat().st_size for path in paths)


def _full_lane(path: Path, plan: Plan) -> Store:
    log = store.open(path, create=True)
    turns = make_turns(40)
    with log.writer(LANE) as writer:
        sink = LogSink(writer, 3)
        for _ in range(plan.commits):
            sink.write(sink.prepare([turns]))
    return log


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    killed, per_gib = measured.killed, GIB / measured.lane_bytes
    ours, theirs = ([s * per_gib for s in walls(measured.laps[side])] for side in (RECOVER, READ))
    against = f"{killed.acknowledged} acknowledged events, {killed.kills} kills"
    when = [("left an unfinished frame", killed.torn), ("in a segment's making", killed.in_roll)]
    when += [(phase, killed.phases[phase]) for phase in PHASES]
    figures = (
        Figure("recover.lost", float(killed.lost), "events", against, None, killed.kills),
        Figure("recover.changed", float(killed.changed), "events", against, None, killed.kills),
        Figure(
            *("recover.s_per_gib", median(ours), "s/GiB"),
            *(f"reading the same bytes, cached: {median(theirs):.3f} s/GiB", None, len(ours)),
        ),
    )
    spreads = (
        *(Spread(f"kills: {what}", "kills", n, n, n) for what, n in when),
        spread("recovery", "s/GiB", ours),
        spread("reading the same bytes, cached", "s/GiB", theirs),
        spread(
            "recovery over reading",
            "",
            [1 / times_faster([a], [b]) for a, b in zip(ours, theirs, strict=True)],
        ),
    )
    return Outcome(figures, spreads)
