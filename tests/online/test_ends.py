"""`rollbook run` and its parts are ended at random moments, with agents deaf to SIGTERM: nothing is left.

ROLLBOOK_ENDS=40 ends that often, and ROLLBOOK_SEED makes a failed run again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.fakes.processes.online_run import HERE, Run

from rollbook.testing.ledger import fold_ledger

pytestmark = [pytest.mark.torch, pytest.mark.crashes]
ENDS = int(os.environ.get("ROLLBOOK_ENDS", "4"))
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
WHOLE = {"SIGKILL": -9, "SIGHUP": 143, "SIGTERM": 143}
"""Signals to `rollbook run` itself, and the exit code."""
PARTS = {
    "proxy": b"serve",
    "trainer": b"train",
    "rollouts": b"rollout",
    "sealer": b"seal",
    "reference": b"rollbook.train.step.reference",
    "keeper": b"keeper.py",
    "agent": b"deaf.py",
    "guard": b"guard.py",
}
"""Parts that are ended by SIGKILL, and a word of their command lines."""
WITHIN_S = 15.0
"""So long after the end of `rollbook run` something of it may be there."""
SILENT_S, SAID_S = 20.0, 75.0
"""So long the console may be silent: twice what is meant, on a machine with much to do; and after it has said
what it waits for."""
WAITS = "waiting for "
DEAF = """
import runpy, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
runpy.run_path({agent!r}, run_name="__main__")
time.sleep(0.3)
"""


@dataclass
class Silence:
    """The longest times without a new line on the console of `rollbook run`, while that runs.

    Attributes:
        longest: how long, and after which line; said: the same, after a line that says what is waited for.
    """

    run: Run
    longest: tuple[float, str] = (0.0, "")
    said: tuple[float, str] = (0.0, "")
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Watch it until `end`."""
        heard, since, at_start = (0, 0), time.monotonic(), 0
        while not self._over.wait(0.1):
            now, child, size = time.monotonic(), self.run.child, self.run.log_file.stat().st_size
            if child.poll() is not None:
                continue  # nobody is there to speak
            if child.pid != heard[0]:
                at_start = size
            if (child.pid, size) != heard:
                heard, since = (child.pid, size), now
                continue
            after = "its start" if size == at_start else self.run.said().splitlines()[-1]
            if WAITS in after:
                self.said = max(self.said, (now - since, after))
            else:
                self.longest = max(self.longest, (now - since, after))

    def told(self) -> str:
        """The same in a line."""
        (longest_s, after), (said_s, wait) = self.longest, self.said
        return f"longest silence: {longest_s:.1f} s, after {after!r}; {said_s:.1f} s, after {wait!r}"

    def end(self) -> None:
        """Watch no more."""
        self._over.set()


@dataclass
class Ended:
    """What became of a run that was ended so often.

    Attributes:
        silence: of its console.
        left: processes that were there long after `rollbook run` had ended, with how it was ended.
        took_s: how long after it the last process was gone, by signal.
        ends: how often each was ended.
    """

    run: Run
    silence: Silence
    left: list[tuple[str, list[bytes]]] = field(default_factory=list)
    took_s: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """The same in a line."""
        took = {name: round(seconds, 1) for name, seconds in self.took_s.items()}
        return f"processes left: {len(self.left)}, all gone after {took} s at most"

    def whole(self, child: subprocess.Popen[bytes], name: str) -> subprocess.Popen[bytes]:
        """End all of it, and start it again."""
        began = time.monotonic()
        child.send_signal(getattr(signal, name))
        assert child.wait(60) == WHOLE[name], f"seed {SEED}"
        while (there := self.run.processes()) and time.monotonic() < began + WITHIN_S:
            time.sleep(0.2)
        took = time.monotonic() - began
        self.left += [(name, words) for words in there.values()]
        self.took_s[name] = max(self.took_s.get(name, 0.0), took)
        return self.run.start()

    def part(self, name: str) -> None:
        """End the processes of a part, if there are any now."""
        for pid, words in self.run.processes().items():
            if any(word == PARTS[name] or word.endswith(b"/" + PARTS[name]) for word in words):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.ends[name] += 1
                if name in ("keeper", "agent"):
                    return


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A run that was ended so often, and then ran to its end."""
    folder, dice = tmp_path_factory.mktemp("ends"), random.Random(SEED)
    run = Run(
        folder,
        agent="deaf.py",
        train="reference_apart = true",
        algorithm="kl = 0.1",
        rollout="[rollout.clocks]\ngrace_s = 1.0",
    )
    (folder / "deaf.py").write_text(DEAF.format(agent=str(HERE / "examples/arithmetic/agent.py")))
    config = (folder / "online.toml").read_text().replace('"deaf.py"', f'"{folder / "deaf.py"}"')
    (folder / "online.toml").write_text(config)
    tally = Ended(run, silence := Silence(run))
    # Each once, in any order, and then again.
    kinds: list[str] = []
    while len(kinds) < ENDS:
        more = [*WHOLE, *PARTS]
        dice.shuffle(more)
        kinds += more
    child = run.start()
    threading.Thread(target=silence.watch, daemon=True).start()
    try:
        child = run.await_steps(1, child)
        for number, name in enumerate(kinds[:ENDS]):
            print(f"{number}: {name}; {tally.told()}; {silence.told()}", flush=True)
            time.sleep(dice.uniform(0.0, 3.0))
            if name in WHOLE:
                tally.ends[name] += 1
                child = tally.whole(child, name)
            else:
                tally.part(name)
            child = run.await_steps(1, child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 143
        child = run.start("--set", f"train.steps={run.done() + 2}")
        assert child.wait(300) == 0, run.log_file.read_text()[-3000:]
        silence.end()
        print(f"seed {SEED}: ended {dict(tally.ends)}; {tally.told()}; {silence.told()}")
        yield tally
    finally:
        silence.end()
        if child.poll() is None:
            child.kill()
            child.wait()


@pytest.mark.timeout(3600)
def test_nothing_is_left(ended: Ended) -> None:
    """However it was ended: no part, no agent that is deaf, no guard."""
    assert ended.left == [], f"seed {SEED}"
    by = time.monotonic() + WITHIN_S
    while there := ended.run.processes():
        assert time.monotonic() < by, (there, f"seed {SEED}")
        time.sleep(0.2)


def test_nothing_waits_in_silence(ended: Ended) -> None:
    """Whatever the console waits for, it says so soon, and again."""
    assert ended.silence.longest[0] < SILENT_S, (ended.silence.told(), f"seed {SEED}")
    assert ended.silence.said[0] < SAID_S, (ended.silence.told(), f"seed {SEED}")


def test_no_turn_is_trained_twice(ended: Ended) -> None:
    """Each sampled turn is of one committed step, or of none."""
    used = ended.run.sql("SELECT turn_id FROM samples WHERE status = 'committed'")
    assert used, f"seed {SEED}"
    assert len(used) == len(set(used)), f"seed {SEED}"


def test_the_ledger_is_exact(ended: Ended) -> None:
    """Every token is accounted for, and no launch and no trajectory is without its end."""
    assert not any(fold_ledger(ended.run.log().events()).unaccounted().values()), f"seed {SEED}"
    assert ended.run.sql("SELECT count(*) FROM launches WHERE ended IS NULL") == [(0,)], f"seed {SEED}"
    assert ended.run.sql("SELECT count(*) FROM trajectories WHERE finished IS NULL") == [(0,)], f"seed {SEED}"
