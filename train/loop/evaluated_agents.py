"""Waits for agents to be evaluated at the trainer's version. Who runs them hears of it from the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rollbook.store import Store, format_cut
from rollbook.store.events import EvalSampled, EvalStarted
from rollbook.store.fold.evaluated_agents import CAME_TO_AN_END, KINDS, EvaluatedAgents
from rollbook.store.log.tail import Filter
from rollbook.store.patience import Patience, waits
from rollbook.store.sql.query import connect_at
from rollbook.train.config.config import TrainConfig
from rollbook.train.loop.stopping import Stopping
from rollbook.train.loop.trainer import Trainer

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Awaited:
    """What came of waiting.

    Attributes:
        expected: trajectories that there were to be; None: nobody said.
        whole: whether all of them came to an end, or who ran them says so and launched none by itself.
    """

    expected: int | None
    whole: bool


def await_agents(
    config: TrainConfig, log: Store, trainer: Trainer, stopping: Stopping, say: Callable[[str], None]
) -> Awaited:
    """Return once the log says that agents were evaluated, or `evaluation.wait_s` passed, which is said.

    What is waited for is said after 10 s, and each minute.

    Raises:
        Stopped: a signal came.
        EngineError: no engine can be given the version.
    """
    assert config.evaluation is not None
    version, wait_s, agents = trainer.version, config.evaluation.wait_s, EvaluatedAgents()
    with log.tail(log.head(), Filter(KINDS | {EvalSampled.KIND}, run=config.run)) as tail:
        trainer.have_served()
        trainer.write(EvalStarted(config.policy, version, trainer.phase))
        began = time.monotonic()
        deadline, keep_served = began + wait_s, stopping.in_hand(trainer.keep_served)
        patience = Patience(began)
        with stopping.waiting():
            while (left := deadline - time.monotonic()) > 0:
                for event in tail.poll():
                    record = event.record
                    agents.take(record)
                    if isinstance(record, EvalSampled) and (record.policy, record.policy_version) == (
                        config.policy,
                        version,
                    ):
                        return _sampled(log, config.run, record)
                keep_served()
                if patience.due(time.monotonic()):
                    what = f"agents to be evaluated at version {version}: {agents.said}"
                    say(waits(what, time.monotonic() - began, left, time.time()))
                tail.wait(min(left, POLL_S))
    ended, expected = _ended(log, config.run, agents.rollout)
    say(
        f"version {version}: agents were not evaluated within {wait_s:g} s (evaluation.wait_s), "
        f"{agents.said}: those that finish later count to the next evaluation. Does "
        "`rollbook rollout --follow` run, with [evaluation]?"
    )
    return Awaited(expected, expected is not None and ended >= expected)


def _sampled(log: Store, run: str, told: EvalSampled) -> Awaited:
    """What the log has of agents of which somebody says that they were evaluated."""
    ended, known = _ended(log, run, told.rollout)
    return Awaited(told.trajectories, known is None or ended >= told.trajectories)


def _ended(log: Store, run: str, rollout: str | None) -> tuple[int, int | None]:
    """(places of rollouts whose agent came to an end, places in all; None: no launch says it)."""
    given = {"run": run, "rollout": rollout, "ends": list(CAME_TO_AN_END)}
    with connect_at(log, format_cut(log.head())) as connection:
        [(ended, places)] = connection.execute(_PLACES, given).fetchall()
    return ended, places


_PLACES = """
    SELECT count(DISTINCT (epoch, task, sample)) FILTER (list_contains($ends, status)), max(places)
    FROM launches WHERE run = $run AND rollout = $rollout"""
