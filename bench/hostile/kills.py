"""`kill -9` of the proxy at any moment, with a hostile client beside honest ones."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollbook.bench.hostile.attack import Ground, Tally, carry_out
from rollbook.bench.hostile.attacks import named
from rollbook.bench.hostile.checks import Held, hold, read_acks
from rollbook.bench.hostile.laps import tracebacks
from rollbook.bench.hostile.stage import HONEST, OPERATOR, Stage, acks_of

HOSTILE = (
    "labels_nested_deep",
    "labels_nested_deep_first",
    "broken_unicode",
    "deep_json_anywhere",
    "races_to_the_finish",
    "storms_of_retries",
    "leaving_in_mid_stream",
    "connections_that_reset",
    "names_that_disagree",
    "opening_and_leaving",
)
"""What the hostile client does, one after the other; all of these are quick, so that kills fall into each."""
ATTACK_S, LONGEST_S = 0.4, 1.2


@dataclass(slots=True)
class Killed:
    """The outcome of the kills.

    Attributes:
        held: everything that was acknowledged, compared with the log at the end.
    """

    kills: int = 0
    seconds: float = 0.0
    held: Held = field(default_factory=Held)
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)


def kill_often(stage: Stage, kind: str, kills: int, seed: int, on_kill: Callable[[], None]) -> Killed:
    """Kill a proxy so often, start it again each time, and check its log at the end.

    Raises:
        BenchError: it does not come up again.
    """
    killed, rng, begun = Killed(), random.Random(seed), time.monotonic()
    proxy = stage.standard(kind, f"killed-{kind}")
    agents = stage.agents(proxy, seed, agents=8, pause_s=0.02)
    ground = Ground(proxy.url, OPERATOR, "", proxy, random.Random(seed + 1), kind, killed.tally)
    stop = threading.Event()
    attacker = threading.Thread(target=_attack, args=(ground, stop), daemon=True)
    attacker.start()
    for _ in range(kills):
        time.sleep(rng.uniform(0.1, LONGEST_S))
        proxy.victim.kill()
        killed.kills += 1
        proxy.await_ready()
        on_kill()
    time.sleep(LONGEST_S)
    stop.set()
    attacker.join(60.0)
    killed.wrong = agents.ask(do="stop")["wrong"]
    proxy.end()
    killed.held = hold(proxy.store, read_acks(acks_of(proxy)), HONEST)
    killed.tracebacks = tracebacks(proxy.log())
    killed.seconds = time.monotonic() - begun
    return killed


def _attack(ground: Ground, stop: threading.Event) -> None:
    """Run one attack after the other; if the proxy is away, go on with the next."""
    while not stop.is_set():
        chosen = named(ground.rng.choice(HOSTILE))
        if ground.kind in chosen.proxies:
            ground.over = asyncio.Event()
            with contextlib.suppress(OSError, ValueError, LookupError):
                asyncio.run(carry_out(chosen, ground, ATTACK_S))
