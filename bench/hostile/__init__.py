"""`hostile.*`: honest clients beside every attack in turn, kills, and planted secrets.

The proxies are real `rollbook serve` processes, one that makes the ids and one that only
records. The honest clients are a process that keeps every acknowledgement. The attacks are
functions, each of which states what must hold. Each attack is preceded by a quiet lap. At the
end everything acknowledged is looked up in the logs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollbook.bench.figure import Outcome
from rollbook.bench.hostile.attack import RECORD, TOKENS
from rollbook.bench.hostile.attacks import attacks_on
from rollbook.bench.hostile.checks import hold, read_acks
from rollbook.bench.hostile.kills import kill_often
from rollbook.bench.hostile.laps import Round, fight, lap
from rollbook.bench.hostile.outcome import Measured, figures, spreads
from rollbook.bench.hostile.secret_runs import search
from rollbook.bench.hostile.stage import HONEST, Stage, acks_of

KILLS, ROUNDS = 100, 3
WARM_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: how often every attack is carried out.
        attack_s, quiet_s: how long an attack lasts, and the quiet lap before it.
    """

    rounds: int = ROUNDS
    kills: int = KILLS
    attack_s: float = 1.2
    quiet_s: float = 0.4
    seed: int = 0

    @property
    def steps(self) -> int:
        """Attacks, kills, and the search for secrets."""
        each = sum(len(attacks_on(kind)) for kind in (TOKENS, RECORD))
        return self.rounds * each + self.kills + 1


def sized(scale: float) -> Plan:
    """A plan of `scale` times 100 kills and three rounds, one round at least."""
    return Plan(rounds=max(round(ROUNDS * scale), 1), kills=max(round(KILLS * scale), 1))


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Attack, kill, plant, and check the logs.

    Raises:
        BenchError: a proxy ended by itself, or did not come up.
    """
    measured = Measured()
    with Stage(folder) as stage:
        for kind in (TOKENS, RECORD):
            _attack_all(stage, kind, plan, measured, on_round)
        measured.killed = kill_often(stage, TOKENS, plan.kills, plan.seed, on_round)
        measured.searched = search(stage, plan.seed)
        on_round()
    return measured


def _attack_all(
    stage: Stage, kind: str, plan: Plan, measured: Measured, on_round: Callable[[], None]
) -> None:
    """Carry out every attack on a kind of proxy, once per round, beside honest agents."""
    proxy = stage.standard(kind, kind)
    agents = stage.agents(proxy)
    rng = random.Random(plan.seed)
    time.sleep(WARM_S)
    for _ in range(plan.rounds):
        quiet = proxy.memory("VmRSS") if not measured.quiet.get(kind) else measured.quiet[kind]
        measured.quiet[kind] = quiet
        measured_round = Round(kind)
        for attack in attacks_on(kind):
            measured_round.quiet.append(lap(agents, lambda: time.sleep(plan.quiet_s)))
            measured_round.fought.append(fight(attack, proxy, agents, plan.attack_s, rng))
            on_round()
        measured.rounds.append(measured_round)
    measured.wrong += agents.ask(do="stop")["wrong"]
    proxy.end()
    measured.held[kind] = hold(proxy.store, read_acks(acks_of(proxy)), HONEST)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    return Outcome(tuple(figures(measured)), tuple(spreads(measured)))
