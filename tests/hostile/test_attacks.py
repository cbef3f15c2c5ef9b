"""Every attack beside honest agents: nobody else feels it, nothing is let in, nothing is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rollbook.bench.hostile.attack import RECORD, TOKENS
from rollbook.bench.hostile.attacks import attacks_on, named
from rollbook.bench.hostile.checks import hold, read_acks
from rollbook.bench.hostile.laps import fight, lap
from rollbook.bench.hostile.stage import HONEST, Proxy, Stage, acks_of
from rollbook.bench.processes import Process

pytestmark = pytest.mark.timeout(120)

ATTACK_S, LONGER_S = 0.8, 6.0
LONGEST_MS = 30_000
"""Of an honest request: one that hangs takes longer, one on a busy machine does not."""
QUIET_S, LEAST = 2.0, 0.2
"""So much of a quiet time's honest requests are answered under any attack."""
MEMORY = 512 << 20


@dataclass(slots=True)
class Field:
    """A proxy with agents at work, the memory that it has without attacks, and requests a second."""

    proxy: Proxy
    agents: Process
    quiet: int
    pace: float


@pytest.fixture(scope="module")
def field_of(stage: Stage) -> Callable[[str], Field]:
    """The proxy of a kind; it is started when it is first asked for."""
    cache: dict[str, Field] = {}

    def get(kind: str) -> Field:
        if kind not in cache:
            proxy = stage.standard(kind, kind)
            agents = stage.agents(proxy, agents=6)
            time.sleep(1.0)
            calm = lap(agents, lambda: time.sleep(QUIET_S))
            cache[kind] = Field(proxy, agents, proxy.memory("VmRSS"), len(calm.ms) / QUIET_S)
        return cache[kind]

    return get


CASES = [(kind, one.name) for kind in (TOKENS, RECORD) for one in attacks_on(kind)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_honest_clients_are_served_during_an_attack(
    field_of: Callable[[str], Field], kind: str, name: str
) -> None:
    """The attack has its documented outcome, and honest requests are answered meanwhile; where its beginning
    takes all of a short one, in a longer one."""
    field, attack = field_of(kind), named(name)
    for seconds in (ATTACK_S, LONGER_S):
        fought = fight(attack, field.proxy, field.agents, seconds, random.Random(name))
        assert fought.tally.wrong_200 == [], attack.says
        assert fought.tally.errors_500 == [], attack.says
        assert fought.tally.strange == [], attack.says
        assert fought.tracebacks == []
        assert fought.lap.errors_500 == 0, fought.lap.told
        assert fought.peak - fought.before < MEMORY
        if attack.refuses:
            return
        assert fought.lap.refused == 0, fought.lap.told
        assert max(fought.lap.ms, default=0) < LONGEST_MS
        if len(fought.lap.ms) > LEAST * field.pace * seconds:
            return
    pytest.fail(f"{len(fought.lap.ms)} answers in {seconds} s, where a quiet second has {field.pace:.0f}")


@pytest.mark.parametrize("kind", [TOKENS, RECORD])
def test_all_that_was_acknowledged_is_in_the_log(field_of: Callable[[str], Field], kind: str) -> None:
    """After all attacks: each turn, finish and reward whole and unchanged, and every lane verifies."""
    field = field_of(kind)
    assert field.agents.ask(do="stop") == {"wrong": []}
    assert field.proxy.memory("VmRSS") - field.quiet < MEMORY  # what an attack took is given back
    field.proxy.end()
    held = hold(field.proxy.store, read_acks(acks_of(field.proxy)), HONEST)
    assert held.acks > 50
    assert (held.lost, held.changed, held.damage) == ([], [], [])
