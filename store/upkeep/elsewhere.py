"""What a host does for others' sake when it seals: erasures and removals that another one ordered, and the
lifetime of chunks.

`trajectory.erased` in any host's lane is an order to all: each rewrites its own lanes' units, in its sealer's
next pass. What is erased leaves the medium at once, other chunks when they are old. After
`checkpoint.removed` each host removes what it fetched of that checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import orjson

from rollbook.store.errors import LaneLockedError, UpkeepError
from rollbook.store.events import CheckpointRemoved, CheckpointWritten, Event, TrajectoryErased
from rollbook.store.fold.checkpoints import held_and_removed
from rollbook.store.ids import now_us
from rollbook.store.log.store import Carrier, Store
from rollbook.store.permissions import replace_small
from rollbook.store.safe_paths import read_small
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.checkpoints import discard_removed, folder_of
from rollbook.store.upkeep.claim import training_claim
from rollbook.store.upkeep.erase import erase_own
from rollbook.store.upkeep.find import find_trajectory
from rollbook.store.wal.files import CARRIED_OUT

ORDERS = (TrajectoryErased.KIND, CheckpointRemoved.KIND)
NOTED_EVENTS = 10_000
"""So many events are read again by the next sealer, at most."""
LOOK_US = 60_000_000
"""Between two looks for chunks that are old."""

logger = logging.getLogger(__name__)


class Orders:
    """Carries out, in one host's lanes, what was ordered in others'."""

    def __init__(self, log: Store, carrier: Carrier) -> None:
        self._log, self._carrier = log, carrier
        self._noted = self._cut = _noted(log.path)
        self._waiting: list[Event] = []
        self._looked_us = 0
        self._forgotten: dict[str, int] = {}
        """Lane -> the segment up to which nothing of what was erased is in the medium any more."""

    def carry_out(self) -> list[str]:
        """Erase and remove what was ordered since the last call; the units that were rewritten. The caller
        alone changes sealed units.

        Raises:
            CorruptionError: a file that must be read is damaged.
        """
        head = self._log.head()
        # A lane of this host that was ended has fewer events than it had.
        start = {lane: min(count, head.get(lane, 0)) for lane, count in self._cut.items()}
        self._waiting += list(self._log.events_of(ORDERS, head, start))  # all of them, or none
        self._cut, orders, rewritten = head, list(self._waiting), list[str]()
        for order in orders:
            try:
                rewritten += self._carry_out(order)
            except LaneLockedError:
                continue  # a segment is still written, or a folder is read: the next pass
            except UpkeepError as error:
                logger.debug("nothing of it is here: %s", error)
            self._waiting.remove(order)  # not where something else failed: it is tried again
        if not self._waiting and (orders or sum(head.values()) > sum(self._noted.values()) + NOTED_EVENTS):
            replace_small(self._log.path / CARRIED_OUT, orjson.dumps(head))
            self._noted = head
        return rewritten

    def _carry_out(self, order: Event) -> tuple[str, ...]:
        """Carry one order out; the units that were rewritten.

        Raises:
            LaneLockedError: not all of it can be done yet.
            UpkeepError: there is no such trajectory here.
        """
        if isinstance(order.record, CheckpointRemoved):
            self._remove(order.record, order.run)
        elif isinstance(order.record, TrajectoryErased):
            target = find_trajectory(self._log, order.record.trajectory_id)
            return erase_own(self._log, target, keep_tokens=order.record.tokens_kept).units
        return ()

    def _remove(self, record: CheckpointRemoved, run: str) -> None:
        """Remove what is here of a checkpoint that was removed, unless it was written again.

        Raises:
            LaneLockedError: somebody reads it, or trains the policy on this host: whoever writes it again
                does.
        """
        log = self._log
        if folder_of(log, record, run) is None:
            return
        with log.claim(training_claim(run, record.policy), "try again at once", of_host=True):
            kinds = (CheckpointWritten.KIND, CheckpointRemoved.KIND)
            held, _ = held_and_removed(event for event in log.events_of(kinds) if event.run == run)
            again = any(written.path == record.path for written in held)
            if not again and not discard_removed(log, record, run):
                raise LaneLockedError(f"{record.path} is being read: try again when that has ended")

    def trim(self) -> None:
        """Tell other hosts which units are in object storage, and remove chunks that they replace: those that
        are old, and all of what was erased.

        Raises:
            MediumError: the medium does not answer.
        """
        self._carrier.tell_units()
        now = now_us()
        old = now - self._looked_us > LOOK_US
        self._looked_us = now if old else self._looked_us
        for lane in self._log.own_lanes():
            units = [unit for unit in current_units(self._log.path, lane) if unit.remote is not None]
            erased = [unit.last for unit in units if unit.erased]
            if old and units:
                self._carrier.forget_old(lane, units[-1].last)
            newest = max(erased, default=0)
            if newest > self._forgotten.get(lane, 0):
                with contextlib.suppress(LaneLockedError):
                    if self._carrier.forget_erased(lane, newest, units[-1].last):
                        self._forgotten[lane] = newest


def _noted(store: Path) -> dict[str, int]:
    """Up to where a sealer before this one carried orders out."""
    try:
        cut: dict[str, int] = orjson.loads(read_small(store / CARRIED_OUT, 1 << 24))
    except (FileNotFoundError, ValueError):
        return {}
    return cut
