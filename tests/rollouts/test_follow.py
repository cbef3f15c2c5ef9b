"""Rollouts beside an online training: what the log says of it, and that they go by that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.rollouts.config import RolloutConfig, parse_rollouts
from rollbook.rollouts.launchers.agents import agents_of
from rollbook.rollouts.manager import Following, Training
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task
from rollbook.store.events import (
    EvalFinished,
    EvalSampled,
    EvalStarted,
    Event,
    Record,
    RunOpened,
    StepCommitted,
    StopFired,
)

OWN = """
from rollbook.rollouts.agents.agentic import AgenticRollout


class Says(AgenticRollout):
    async def run(self, task, llm):
        said = await llm.chat([{"role": "user", "content": task.values["do"]}])
        return float(len(said["content"]))
"""


def begins(steps: int, done: int = 0, wait_s: float = 0.0, **more: Any) -> RunOpened:
    """A training begins."""
    config = {"policy": "actor", "source": "tail", "steps": steps, "steps_done": done}
    return RunOpened("train", config | {"evaluation": {"every": 2, "wait_s": wait_s}} | more)


def step(version: int) -> StepCommitted:
    """A step commits."""
    return StepCommitted(version - 1, 1, "actor", version, {}, {})


def evaluated(version: int) -> EvalFinished:
    """An evaluation is over."""
    return EvalFinished("actor", version, "p", "", "", 0, 0, 0, None, None, {})


@pytest.mark.parametrize(
    ("records", "over", "asked"),
    [
        ([], False, None),
        ([begins(2)], False, None),
        ([begins(2), step(1)], False, None),
        ([begins(2), step(1), step(2)], True, None),
        ([begins(4), step(1), StopFired("actor", 1, "p", {}, [])], True, None),
        # Another policy's steps, and a training on a cut, are none of its.
        ([begins(1), StepCommitted(0, 1, "critic", 1, {}, {})], False, None),
        ([begins(1), step(1), begins(4, source="cut")], True, None),
        # A longer one begins after it.
        ([begins(1), step(1), begins(3, 1)], False, None),
        # It waits for agents to be evaluated, also at its end.
        ([begins(1, wait_s=9), EvalStarted("actor", 0, "p")], False, 0),
        ([begins(1, wait_s=9), EvalStarted("actor", 0, "p"), EvalSampled("actor", 0, "e", 1)], False, None),
        ([begins(1, wait_s=9), EvalStarted("actor", 0, "p"), evaluated(0), step(1)], False, None),
        ([begins(1, wait_s=9), step(1), EvalStarted("actor", 1, "p")], False, 1),
        ([begins(1, wait_s=9), step(1), EvalStarted("actor", 1, "p"), evaluated(1)], True, None),
        # It died while it waited.
        ([begins(1, wait_s=9), EvalStarted("actor", 0, "p"), begins(1, wait_s=9)], False, None),
    ],
)
def test_what_the_log_says_of_a_training(records: list[Record], over: bool, asked: int | None) -> None:
    """Whether it is over, and what it waits for."""
    training = Training()
    training.take([Event(record, "run") for record in records])
    assert (training.over, training.asked) == (over, asked)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script, in a run of its own."""
    model = str(text_model("chatml"))
    return serve(
        "--model",
        model,
        "--engine",
        "scripted",
        "--script",
        f"{script}:answer",
        "--no-seal",
        "--run",
        "follow",
    )


@pytest.fixture
def config(server: Served, tmp_path: Path, request: pytest.FixtureRequest) -> RolloutConfig:
    """Classes of two tasks, evaluated on another."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "held_out.jsonl").write_text('{"id": "held", "do": "hello"}\n')
    values = {
        **{"name": request.node.name[:40], "proxy": server.url, "tasks": "none", "samples": 2},
        **{"concurrency": 2, "folder": str(tmp_path / "launches")},
        "agent": {"launcher": "python", "rollout": f"{tmp_path}/own.py:Says"},
        "evaluation": {"tasks": str(tmp_path / "held_out.jsonl"), "samples": 3},
    }
    return parse_rollouts(values, "test")


def follow(config: RolloutConfig, beside: Callable[[Following], Any]) -> tuple[Progress, list[str]]:
    """Follow the training while something is done beside; how far they came, and what was said."""
    messages: list[str] = []

    async def all_of_it() -> Progress:
        async with Proxy(config.proxy) as proxy:
            agents = agents_of(config, proxy, None)  # type: ignore[arg-type]  # they are classes

            async def made(settings: RolloutConfig) -> Rollouts:
                what = [Task("held", {"do": "hello"})] if settings is not config else []
                what = what or [Task(name, {"do": "hello"}) for name in ("one", "two")]
                return Rollouts(
                    settings, what, proxy, agents, None, "test", messages.append, endless=settings is config
                )

            following = Following(config, proxy, made, messages.append)
            acting = asyncio.create_task(asyncio.to_thread(beside, following))
            progress = await asyncio.wait_for(following.run(), 60)
            await acting
            return progress

    return asyncio.run(all_of_it()), messages


def rows(server: Any, query: str) -> list[tuple[Any, ...]]:
    """What SQL says."""
    with rb.connect(server.path) as connection:
        return connection.execute(query).fetchall()


def test_until_the_training_ends(server: Served, config: RolloutConfig) -> None:
    """Over the tasks again and again; evaluated at the version it asks for, and told so each time it asks."""
    log = rb.open(server.path)

    def training(_: Following) -> None:
        with log.writer("train") as writer:

            def write(record: Record) -> None:
                writer.append([Event(record, "follow")]).result()

            def await_told(count: int) -> None:
                by = time.monotonic() + 30
                while len(list(log.events_of({EvalSampled.KIND}))) < count:
                    assert time.monotonic() < by
                    time.sleep(0.02)

            time.sleep(0.3)
            write(begins(2, wait_s=9))
            write(EvalStarted("actor", 0, "p"))
            await_told(1)
            write(begins(2, wait_s=9))  # it died, and asks again
            write(EvalStarted("actor", 0, "p"))
            await_told(2)
            for record in (evaluated(0), step(1), step(2), EvalStarted("actor", 2, "p")):
                write(record)
            await_told(3)
            write(evaluated(2))

    progress, messages = follow(config, training)
    messages = [text for text in messages if "was blocked" not in text]  # by a busy machine
    assert messages == ["waiting for an online training of run 'follow' (rollbook train --source tail)"]
    assert progress.total is None
    name = config.name
    held = rows(
        server,
        f"""SELECT rollout, t.split, t."group", count(*), count(t.reward), min(l.status)
            FROM launches l JOIN trajectories t USING (trajectory_id)
            WHERE rollout LIKE '{name}.eval.%' GROUP BY ALL ORDER BY ALL""",
    )
    assert held == [
        (f"{name}.eval.{version}", "eval", f"{name}.eval.{version}.0.held", 3, 3, "done")
        for version in (0, 2)
    ]
    evaluations = [event.record for event in log.events_of({EvalSampled.KIND})]
    assert [
        (evaluation.policy_version, evaluation.rollout, evaluation.trajectories) for evaluation in evaluations
    ] == [(version, f"{name}.eval.{version}", 3) for version in (0, 0, 2)]
    epochs = rows(
        server,
        f"""SELECT count(DISTINCT epoch), count(DISTINCT t."group"), max(n)
            FROM (SELECT *, count(*) OVER (PARTITION BY task, epoch, sample, attempt) AS n FROM launches) l
            JOIN trajectories t USING (trajectory_id) WHERE rollout = '{name}'""",
    )
    [(many, groups, most)] = epochs
    assert many >= 2
    assert groups >= 2 * many - 1
    assert most == 1
    assert sum(progress.by_status.values()) > 4 * (many - 1), (
        "an epoch begins once all of the last have begun"
    )


def test_somebody_stops_it(server: Served, config: RolloutConfig) -> None:
    """While no training goes on, too."""

    messages: list[str] = []

    async def all_of_it() -> Progress:
        async with Proxy(config.proxy) as proxy:

            async def made(settings: RolloutConfig) -> Rollouts:
                raise AssertionError("nothing is to be run")

            def said(text: str) -> None:
                messages.append(text)
                asyncio.get_running_loop().call_later(0.05, following.stop)

            following = Following(config, proxy, made, said)
            return await asyncio.wait_for(following.run(), 30)

    assert asyncio.run(all_of_it()) == Progress(None)
    assert "waiting for an online training" in messages[0]
