"""Waits for agents to be evaluated at the trainer's version. Who runs them hears of it from the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollbook.store import Store
from rollbook.store.events import EvalSampled, EvalStarted
from rollbook.store.log.tail import Filter
from rollbook.train.config.config import TrainConfig
from rollbook.train.loop.stopping import Stopping
from rollbook.train.loop.trainer import Trainer

POLL_S = 0.2


def await_agents(
    config: TrainConfig, log: Store, trainer: Trainer, stopping: Stopping, say: Callable[[str], None]
) -> None:
    """Return once the log says that agents were evaluated, or `evaluation.wait_s` passed, which is said.

    Raises:
        Stopped: a signal came.
        EngineError: no engine can be given the version.
    """
    assert config.evaluation is not None
    version, wait_s = trainer.version, config.evaluation.wait_s
    with log.tail(log.head(), Filter(frozenset({EvalSampled.KIND}), run=config.run)) as tail:
        trainer.have_served()
        trainer.write(EvalStarted(config.policy, version, trainer.phase))
        deadline, keep_served = time.monotonic() + wait_s, stopping.in_hand(trainer.keep_served)
        with stopping.waiting():
            while (left := deadline - time.monotonic()) > 0:
                for event in tail.poll():
                    record = event.record
                    assert isinstance(record, EvalSampled)
                    if (record.policy, record.policy_version) == (config.policy, version):
                        return
                keep_served()
                tail.wait(min(left, POLL_S))
    say(
        f"version {version}: agents were not evaluated within {wait_s:g} s (evaluation.wait_s): those that "
        "finish later count to the next evaluation. Does `rollbook rollout --follow` run, with [evaluation]?"
    )
