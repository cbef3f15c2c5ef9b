"""What the console of a run says, as the run goes, where it is no terminal."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rollbook.cli.online import run as running
from rollbook.cli.online.run import Lines, Screen
from rollbook.cli.train.training import line_of
from rollbook.online.config import load_whole
from rollbook.online.parts import Spec, Supervisor
from rollbook.store.events import Event


class KeptConsole(Console):
    """A console whose lines are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def tell(self, *texts: str | tuple[str, str]) -> None:
        """Keep a line."""
        self.lines.append("".join(text if isinstance(text, str) else text[0] for text in texts))


@pytest.fixture
def console() -> KeptConsole:
    """One whose lines are kept."""
    return KeptConsole()


@pytest.fixture
def screen(console: KeptConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Of a run whose proxy has been starting for 11 s."""
    monkeypatch.setattr(running, "LOOK_S", 0.01)
    (tmp_path / "online.toml").write_text('run = "sums"\nstore = "runs"\nmodel = "m"\n[serve]\nport = 9\n')
    supervisor = Supervisor([[Spec("proxy", ("true",), tmp_path / "proxy.log")]], lambda text: None)
    [proxy] = supervisor.parts
    proxy.state, proxy.since = "starting", time.time() - 11
    return Screen(load_whole(tmp_path / "online.toml"), supervisor, Lines(console), line_of)


def test_it_speaks_while_the_log_is_read(
    screen: Screen, console: KeptConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes."""
    read = threading.Event()

    def events() -> list[Event]:
        read.wait(60)
        return []

    monkeypatch.setattr(screen, "_events", events)

    def said() -> bool:
        return (
            any("waiting for proxy, which is starting" in line for line in console.lines) and not read.set()
        )

    asyncio.run(_until(said, screen))
    assert len(console.lines) == 2, console.lines


def test_a_fault_of_it_is_said(screen: Screen, console: KeptConsole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console that shows nothing more says so: silence would look well."""

    def fault() -> None:
        raise ZeroDivisionError("of the screen")

    monkeypatch.setattr(screen, "_events", fault)
    asyncio.run(_until(lambda: any("ZeroDivisionError" in line for line in console.lines), screen))
    assert console.lines[-1].startswith("from here on nothing is shown of this run, which goes on: ")


async def _until(holds: Callable[[], bool], screen: Screen) -> None:
    """Show it until something holds, as `rollbook run` does."""
    shown, by = screen.begin(), time.monotonic() + 5
    while not holds():
        assert time.monotonic() < by
        await asyncio.sleep(0.01)
    screen.over = True
    await asyncio.wait([shown])
