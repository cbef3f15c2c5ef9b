"""The staleness policy: which trajectories to admit, which to train on next, which are too old. Pure.

The proxy asks it what to admit, the trainer what to select and what to evict as `stale`: one object decides
all three, so that they cannot contradict each other. Staleness of a unit is the trainer's version minus that
of its oldest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["windowed", "fifo", "age"]


@dataclass(frozen=True, slots=True)
class Unit:
    """What a step uses together: a group, or a trajectory that is in none.

    Attributes:
        name: which one.
        oldest: version of its oldest token, or of what was served when it began; None: unknown.
        complete: whether all of it is finished.
    """

    name: str
    oldest: int | None
    complete: bool


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """How old what is trained on may be, and in which order it is used.

    Attributes:
        batch: units a step uses.
        max_staleness: oldest that a unit may be when it is used; None: any age.
        order: `windowed` uses units as they complete, those first that could not be used in time otherwise,
            and waits for running ones of that kind; `fifo` uses them as they began, and waits for each; `age`
            uses the oldest complete ones and waits for none, so that slow ones may be lost.
    """

    batch: int
    max_staleness: int | None = None
    order: Order = "windowed"

    def capacity(self, outstanding: int, version: int, served: int) -> int | None:
        """How many more units may begin now; None: any number.

        A unit that begins now is `version - served` versions old already, and is used after what is
        outstanding (admitted, and neither used nor dropped), so there is room for (max_staleness - (version -
        served) + 1) * batch - outstanding. Where the engine always serves the trainer's version this is
        equation 3 of AReaL (arXiv:2505.24298).

        Args:
            version: the trainer's.
            served: the engines'.
        """
        if self.max_staleness is None:
            return None
        return (self.max_staleness - max(version - served, 0) + 1) * self.batch - outstanding

    def stale(self, unit: Unit, version: int) -> bool:
        """Whether a unit is too old for a step that starts from `version`."""
        limit = self.max_staleness
        return limit is not None and unit.oldest is not None and version - unit.oldest > limit

    def select(self, units: Sequence[Unit], version: int) -> list[Unit] | None:
        """The units of the next step, or None: wait.

        Args:
            units: complete ones in the order in which they completed (`fifo`: all, as they began), and those
                that still run, without those that are too old already.
        """
        count = self.batch
        usable = [unit for unit in units if not self.stale(unit, version)]
        ready = [unit for unit in usable if unit.complete]
        match self.order:
            case "fifo":
                chosen = [] if any(not unit.complete for unit in usable[:count]) else ready
            case "age":
                chosen = sorted(ready, key=lambda unit: -1 if unit.oldest is None else unit.oldest)
            case "windowed":
                due = self._due(usable, version)
                first = {unit.name for unit in due or ()}
                chosen = [] if due is None else due + [unit for unit in ready if unit.name not in first]
        return chosen[:count] if len(chosen) >= count else None

    def _due(self, usable: Sequence[Unit], version: int) -> list[Unit] | None:
        """The complete units that this step must use so that later ones can still use all others in time.

        Of the units that will be too old in `ahead + 1` steps, the `ahead` steps that follow can use `batch`
        each: what is more than that is due now. None: a running one is due, so wait for one.
        """
        due: list[Unit] = []
        taken: set[str] = set()
        ahead = 0
        while ahead * self.batch < len(usable) and ahead <= (self.max_staleness or 0):
            aging = [unit for unit in usable if self.stale(unit, version + ahead + 1)]
            missing = min(len(aging) - ahead * self.batch, self.batch) - len(due)
            if missing > 0:
                more = [unit for unit in aging if unit.complete and unit.name not in taken][:missing]
                if len(more) < missing:
                    return None
                due += more
                taken |= {unit.name for unit in more}
            ahead += 1
        return due
