"""Random runs of two proxies and a trainer, as admission hears of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from tests.fakes.stories.training import answered, asked, committed, dropped, opened, planned

from rollbook.store.events import Record, TrajectoryFinished


@dataclass
class Story:
    """A run of two proxies and a trainer, told in the order in which it happened: (lane, record)."""

    size: int
    records: list[tuple[str, Record]] = field(default_factory=list)
    units: list[list[str]] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    productive: set[str] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    steps: int = 0

    def tell(self, lane: str, *records: Record) -> None:
        """Something happens."""
        self.records += [(lane, record) for record in records]

    def go(self, draw: Any) -> None:
        """Something happens, mostly to what has begun."""
        what = draw(st.sampled_from(["begin", "go_on", "go_on", "go_on", "train"]))
        getattr(self, what)(draw)

    def begin(self, draw: Any) -> None:
        """A unit begins in one lane; a name of a group may be that of an earlier one of the lane."""
        lane = draw(st.sampled_from(["a-proxy", "z-proxy"]))
        group = f"{lane} {draw(st.integers(0, 3))}" if self.size > 1 else None
        number = len(self.units)
        self.units.append([f"{number}.{i} {lane}" for i in range(self.size)])
        self.running += self.units[-1]
        self.tell(lane, *(opened(name, group) for name in self.units[-1]))

    def go_on(self, draw: Any) -> None:
        """A trajectory gets a turn, or ends."""
        if not self.running:
            return
        name = draw(st.sampled_from(self.running))
        lane = name.split()[1]
        if draw(st.booleans()):
            self.productive.add(name)
            self.tell(lane, asked(name), *answered(name))
        else:
            self.running.remove(name)
            self.tell(lane, TrajectoryFinished(name))

    def train(self, draw: Any) -> None:
        """A step on a complete unit, or it is dropped."""
        free = [i for i in range(len(self.units)) if self._usable(i)]
        if not free:
            return
        number = draw(st.sampled_from(free))
        names = [name for name in self.units[number] if name in self.productive]
        self.closed.add(number)
        if draw(st.booleans()):
            self.tell("train", *(dropped(name) for name in names))
        else:
            self.tell("train", planned(self.steps, names), committed(self.steps))
            self.steps += 1

    def _usable(self, number: int) -> bool:
        names = self.units[number]
        over = not any(name in self.running for name in names)
        return over and number not in self.closed and any(name in self.productive for name in names)

    @property
    def outstanding(self) -> int:
        """Units that run or could be used, counted one by one."""
        return sum(
            any(name in self.running for name in names) or self._usable(number)
            for number, names in enumerate(self.units)
        )
