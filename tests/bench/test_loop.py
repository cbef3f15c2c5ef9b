"""The loop's benchmark: what its checks find in logs that are wrong, its figures, and a short run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook.bench import loop
from rollbook.bench.loop_agents import Habits
from rollbook.bench.loop_checks import Witness, violations
from rollbook.bench.loop_kills import Killed, KillPlan, setting_of
from rollbook.bench.loop_lap import Lap, lap_of
from rollbook.bench.loop_outcome import ASYNC, NO_ADMISSION, ON_POLICY, Measured
from rollbook.bench.rounds import Limit
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.files import load_config

URL = "http://engine"
WITNESS = Witness([("a", "ua", "0a"), ("b", "ub", "0b")], ["a", "b"], [URL], 2)


def _trajectory(name: str, version: int = 0) -> list[Any]:
    """One turn of two tokens that begin with the mark of the first engine."""
    turn, prompt, ids = f"u{name}", np.array([1], np.int32), np.array([5, 6], np.int32)
    ask = turn_requested(
        f"t{name}", turn, request_id=turn, root_reason="first", requested_model="m", context_key="k"
    )
    done = turn_completed(
        f"t{name}",
        turn,
        policy_version=version,
        prompt_ids=prompt,
        completion_ids=ids,
        logprobs=np.zeros(2, np.float32),
        version_spans=(kinds.VersionSpan("actor", version, 0, 2),),
        prompt_length=1,
        prompt_sha256=prompt_sha256(prompt),
        reply={"role": "assistant", "content": f"0{name}"},
    )
    delivered = kinds.TurnDelivered(f"t{name}", turn, "sent")
    reward = kinds.RewardAssigned(f"t{name}", None, 0.5)
    opened = kinds.TrajectoryOpened(f"t{name}", name, "g")
    return [opened, ask, done, delivered, reward, kinds.TrajectoryFinished(f"t{name}")]


def _step(number: int, turns: list[str], begins: str, ends: str, cut: str = "serve=24") -> list[Any]:
    """A committed step, with its plan."""
    refs = [{"turn_id": turn, "trajectory_id": f"t{turn[1:]}"} for turn in turns]
    plan = step_planned(
        number,
        policy_version=number,
        phase="phase",
        cut=cut,
        recipe_digest="recipe",
        samples=refs,
        input_digests={"input_weights": begins},
    )
    return [plan, kinds.StepCommitted(number, 1, "actor", number + 1, {"weights": ends}, {})]


def _log(*train: Any, serve: list[Any] | None = None) -> list[Event]:
    """The engine is known to hold version 0; then the proxy's events, and a second later the trainer's."""
    records = _trajectory("a") + _trajectory("b") if serve is None else serve
    lanes = (
        ("begin", [kinds.PolicyPublished("actor", 0, 0, "p", "w0"), _activated(0, "w0")], 0),
        ("serve", records, 1_000_000),
        ("train", list(train), 2_000_000),
    )
    return [
        Event(record, "loop", f"{lane}-{seq}", at + seq, lane, seq)
        for lane, written, at in lanes
        for seq, record in enumerate(written)
    ]


def _activated(version: int, digest: str) -> Any:
    return kinds.PolicyActivated("actor", version, URL, digest, "")


GOOD = _step(0, ["ua", "ub"], "w0", "w1")
DROP = kinds.SampleDropped("tb", "ub", "staleness", "recipe", 0, {})


def test_a_sound_log_has_no_lost_or_doubled_sample() -> None:
    """Trained once each, or dropped once; told twice of the same drop is no second one."""
    assert violations(_log(*GOOD, _activated(1, "w1")), WITNESS) == []
    assert violations(_log(DROP, DROP, *_step(0, ["ua"], "w0", "w1")), WITNESS) == []


@pytest.mark.parametrize(
    ("events", "witness", "violation"),
    [
        (_log(*GOOD, *_step(1, ["ua"], "w1", "w2")), WITNESS, "sample ua of a went 2 ways"),
        (_log(*_step(0, ["ua"], "w0", "w1")), WITNESS, "sample ub of b went 0 ways"),
        (_log(DROP, *GOOD), WITNESS, "sample ub of b went 2 ways"),
        (_log(*_step(0, ["ua"], "w0", "w1")), WITNESS, "2 tokens of 1 turns by version 0 are waiting"),
        (_log(*GOOD, serve=_trajectory("a")), WITNESS, "ub went {'trained by step 0': 1}, but is no sample"),
        (_log(*GOOD), replace(WITNESS, answered=[("a", "ua", "0x")]), "a was answered '0x' by turn ua"),
        (_log(*GOOD), replace(WITNESS, answered=[("a", "uz", "0a")]), "the log has None"),
        (
            _log(*GOOD),
            replace(WITNESS, finished=["c"]),
            "c, which its client finished, has 0 ends",
        ),
        (_log(*GOOD, *_step(2, [], "w1", "w3")), WITNESS, "where 1 to 2 was due"),
        (_log(*GOOD, *_step(1, [], "wx", "w2")), WITNESS, "step 1 began with other weights"),
        (_log(*GOOD, _activated(1, "wx")), WITNESS, f"{URL} was given weights as version 1 that nobody made"),
        (
            _log(*GOOD, kinds.PolicyPublished("actor", 1, 0, "p", "wx")),
            WITNESS,
            "version 1 has 2 weights: ['w1', 'wx']",
        ),
        (
            _log(*GOOD, _activated(1, "w1"), serve=_trajectory("a", 1) + _trajectory("b")),
            WITNESS,
            f"turn ua has tokens of version 1, not yet given to {URL}",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_found(events: list[Event], witness: Witness, violation: str) -> None:
    """Each check finds what it is there for."""
    assert violation in "\n".join(violations(events, witness))


def test_open_ends_are_found() -> None:
    """A trajectory that never finished, and spans that leave a token out."""
    open_ended = _log(*GOOD, serve=_trajectory("a") + _trajectory("b") + _trajectory("c")[:4])
    assert "2 tokens of 1 turns by version 0 are in flight" in violations(open_ended, WITNESS)
    serve = _trajectory("a") + _trajectory("b")
    serve[2] = replace(serve[2], version_spans=(kinds.VersionSpan("actor", 0, 0, 1),))
    faults = violations(_log(*GOOD, serve=serve), WITNESS)
    assert "turn ua: its version spans do not cover its tokens once each" in faults


def test_a_lap_is_measured_from_its_log(store: Store) -> None:
    """Rate, parts, staleness and what was dropped, of a log whose numbers are known."""
    serve = [record for name in "abcd" for record in _trajectory(name)]
    drop = replace(DROP, trajectory_id="td", turn_id="ud", step=2)
    finished = kinds.SyncFinished("actor", 1, "s", URL, 1, 0.1)
    train = [*_step(0, ["ua"], "", ""), *_step(1, ["ub"], "", ""), finished, drop, *_step(2, ["uc"], "", "")]
    seconds = [1, 2, 4, 6, 7, 7, 10, 14]
    with store.writer("serve") as writer:
        writer.append([Event(record, "loop") for record in serve]).result(20)
    cut = {"serve": 3}
    for record in train:
        with store.writer("train") as writer:
            writer.append([Event(record, "loop", time_us=seconds.pop(0) * 1_000_000)]).result(20)
    lap = lap_of(store, [cut], 1, 1)
    assert (lap.generated, lap.dropped, lap.dropped_share) == (8, 2, 0.25)
    assert (lap.staleness, lap.stale) == ([0, 1, 2], 1)
    assert lap.turns_per_s == 2 / 12
    assert (lap.wait_s, lap.step_s, lap.sync_s) == ([2.0, 3.0], [2.0, 4.0], [1.0])
    assert (lap.unaccounted, lap.cuts) == (0, 2)


def _lap(rate: float, dropped: int = 0, stale: int = 0) -> Lap:
    return Lap(rate, [1.0], [1.0], [1.0], [0, 1], stale, 100, dropped, 3, 2)


def test_figures_are_ratios_of_a_round_and_shares_of_tokens() -> None:
    """Ratios are of each round; shares are of tokens; what is wrong is counted."""
    laps = {
        ON_POLICY: [_lap(10), _lap(20)],
        ASYNC: [_lap(30, 2), _lap(40, 0, 1)],
        NO_ADMISSION: [_lap(9, 30)],
    }
    killed = [Killed(0, Counter({("proxy", "any moment"): 3}), samples=7, wrong=["seed 0: x"]), Killed(1)]
    figures = {f.figure: f for f in loop.outcome(Measured(laps, killed)).figures}
    assert list(figures) == [
        *("loop.async_vs_onpolicy", "loop.dropped_share", "loop.stale", "loop.unaccounted"),
        "loop.lost_or_doubled",
    ]
    assert (figures["loop.async_vs_onpolicy"].value, figures["loop.async_vs_onpolicy"].ratio) == (35, 2.5)
    assert figures["loop.dropped_share"].value == 0.01
    assert figures["loop.dropped_share"].against == "without admission, oldest first: 0.300"
    assert (figures["loop.stale"].value, figures["loop.unaccounted"].value) == (1, 15)
    lost = figures["loop.lost_or_doubled"]
    assert (lost.value, lost.runs, lost.against) == (1, 3, "7 samples, 3 kills")


def test_each_setting_becomes_its_training_config(tmp_path: Path) -> None:
    """Each is a CONFIG that says what the setting says; those of kills treat running requests differently."""

    def read(setting: Any) -> TrainConfig:
        (tmp_path / "c.toml").write_text(setting.config(tmp_path, ["http://e"]))
        return load_config(tmp_path / "c.toml", [])

    configs = {name: read(setting) for name, setting in loop.SETTINGS.items()}
    assert {name: c.recipe.max_staleness for name, c in configs.items()} == {
        **{"on-policy": 0, "streaming": 1},
        **{"staleness budget": 4, "partial rollout": 4, "no admission": 4},
    }
    syncs = {name: (c.sync.sync_every, c.sync.partial_rollout) for name, c in configs.items() if c.sync}
    assert syncs[ON_POLICY] == (1, False)
    assert syncs["streaming"] == (2, False)
    assert syncs[ASYNC] == (1, True)
    assert not configs[NO_ADMISSION].admission.hold
    assert configs[NO_ADMISSION].admission.order == "age"
    assert len({(c.algorithm.model_dump_json(), c.steps) for c in configs.values()}) == 1
    kills = [read(setting_of(seed)).sync for seed in range(4)]
    manners = {(sync.pause, sync.partial_rollout) for sync in kills if sync is not None}
    assert manners == {("retract", True), ("abort", True), ("in_place", True), ("retract", False)}


def test_pauses_have_a_long_tail() -> None:
    """The mean is well above the median, and none is longer than the bound."""
    habits, rng = Habits(""), Random(0)
    pauses = sorted(habits.pause(rng) for _ in range(2000))
    assert 0.09 < pauses[1000] < 0.11
    assert sum(pauses) / 2000 > 1.5 * pauses[1000]
    assert pauses[-1] == habits.longest_s


def test_the_scale_multiplies_the_kills() -> None:
    """The default is 200 kills; a scale is so many times as many."""
    assert (loop.Plan().kills, loop.sized(0.25).kills) == (200, 50)


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_short_run_with_kills_finds_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of one setting and three kills, with real processes, report no fault."""
    rounds: list[None] = []
    killing = KillPlan(gap_s=0.5, wait_s=1.0, agents=8)
    plan = loop.Plan(
        Limit(1, 60.0), 8, steps_each=4, warm_up=1, settings=(ASYNC,), kills=3, of_a_store=3, killing=killing
    )
    note: Callable[[], None] = lambda: rounds.append(None)  # noqa: E731
    measured = loop.measure(tmp_path, plan, note)
    [lap] = measured.laps[ASYNC]
    assert lap.turns_per_s > 0
    assert (lap.stale, lap.unaccounted) == (0, 0)
    assert len(lap.staleness) == 4 * 16
    assert lap.cuts > 1
    assert [killed.kills for killed in measured.killed] == [3]
    assert len(rounds) == plan.steps == 4
    assert capsys.readouterr().err == ""
    assert {f.figure: f.value for f in loop.outcome(measured).figures}["loop.lost_or_doubled"] == 0
