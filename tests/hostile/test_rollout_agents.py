"""64 agents at once, most of them hostile, and a manager that is killed in between: the honest are
undisturbed, nothing is left of the others, and each launch is accounted for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.processes.rollout_runs import launches

from rollbook import store as rb
from rollbook.bench.hostile.attack import TOKENS
from rollbook.bench.hostile.script import reply_to
from rollbook.bench.hostile.stage import OPERATOR, Proxy, Stage
from rollbook.rollouts.launchers import isolation
from rollbook.rollouts.rollouts import DIED
from rollbook.testing.ledger import fold_ledger
from rollbook.train.config.config import parse_config
from rollbook.train.sources.source import EpochUnits

pytestmark = pytest.mark.timeout(240)
AGENT = Path(__file__).parents[1] / "fakes" / "agents" / "hostile.py"
NAME, RUN = "r64", "default"
HONEST = 16
OTHERS = dict.fromkeys(("crash", "hang", "deaf", "daemons", "disk", "late", "thief", "spy", "prowl"), 5)
OTHERS |= {"mute": 2, "gigabyte": 1}
SECRET = "planted-7c2f9e11d0"
SCORE = f"""
def correct(task, attempt):
    return float((attempt.folder / "answer.txt").read_text() == {reply_to("question 2")!r})
"""
NO_BWRAP = isolation.missing("bwrap")


@dataclass(frozen=True, slots=True)
class Ran:
    """What there is when all of it has ended."""

    proxy: Proxy
    folder: Path
    rows: list[dict[str, Any]]
    left: list[str]
    seconds: float

    @property
    def path(self) -> Path:
        """Of the store."""
        return self.proxy.store

    def last(self, deed: str) -> list[dict[str, Any]]:
        """The last launch of each place of agents that do something."""
        by_task = {row["task"]: row for row in self.rows if row["task"].rpartition("-")[0] == deed}
        return list(by_task.values())

    def whole(self, deed: str) -> list[dict[str, Any]]:
        """Those of `last` that ended before the process that ran them."""
        return [row for row in self.last(deed) if row["why"] != DIED]

    def but_for_the_kill(self, seen: dict[str, set[Any]]) -> dict[str, set[Any]]:
        """What is seen of each deed's launches: nothing, where the killed process had finished all of their
        trajectories, and the next one told of the launches. Few places of a deed may all be so."""
        assert all(self.whole(deed) for deed in seen if OTHERS[deed] > 2)
        return {deed: values if self.whole(deed) else set() for deed, values in seen.items()}

    def saw(self, deed: str) -> list[Any]:
        """What such agents noted."""
        whole = self.whole(deed)
        # Who finished its trajectory by itself is not tried again, wherever the kill found it.
        assert whole or all(row["finished"] == "completed" for row in self.last(deed))
        folders = [next(self.folder.glob(f"{row['trajectory']}-*")) for row in whole]
        return [orjson.loads((folder / "seen.json").read_bytes()) for folder in folders]


@dataclass(frozen=True, slots=True)
class _Server:
    path: Path


@pytest.fixture(scope="module")
def ran(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All agents, by two processes: the first one is killed once some have ended."""
    folder = tmp_path_factory.mktemp("agents")
    proxy = stage.standard(TOKENS, "rollouts")
    word = f"3{uuid.uuid4().int % 10**9:09d}"
    config = _written(folder, proxy, word)
    began = time.monotonic()
    first = _begin(config)
    _await(lambda: sum(row["status"] == "done" for row in launches(_Server(proxy.store), NAME)) >= 8)
    first.kill()
    first.wait()
    second = _begin(config)
    assert second.wait(150) == 0
    took = time.monotonic() - began
    rows = launches(_Server(proxy.store), NAME)
    return Ran(proxy, folder / "launches", rows, _running(word, folder), took)


def _written(folder: Path, proxy: Proxy, word: str) -> Path:
    """The CONFIG, with its tasks and its scorer."""
    deeds = [f"honest-{i}" for i in range(HONEST)]
    deeds += [f"{deed}-{i}" for deed, count in OTHERS.items() for i in range(count)]
    deeds = [deeds[i * 37 % len(deeds)] for i in range(len(deeds))]  # the honest are among the others
    victim = f"{NAME}.0.honest-0.0"
    tasks = [{"id": name, "do": name.rpartition("-")[0], "word": word, "victim": victim} for name in deeds]
    (folder / "tasks.jsonl").write_bytes(b"".join(orjson.dumps(task) + b"\n" for task in tasks))
    (folder / "scores.py").write_text(SCORE)
    lines = [
        f'name = "{NAME}"',
        f'proxy = "{proxy.url}"',
        f'tasks = "{folder}/tasks.jsonl"',
        "concurrency = 64",
    ]
    lines += [f'folder = "{folder}/launches"', "clocks = { idle_s = 20.0, grace_s = 0.3 }"]
    lines += ["[agent]", f"command = {orjson.dumps([sys.executable, '-S', str(AGENT)]).decode()}"]
    lines += ["limits = { file_mb = 4, output_mb = 0.25 }"]
    lines += ["[[score]]", 'name = "correct"', f'function = "{folder}/scores.py:correct"']
    config = folder / "hostile.toml"
    config.write_text("\n".join(lines) + "\n")
    return config


def _begin(config: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "rollbook", "rollout", str(config), "--json"]
    environment = os.environ | {"ROLLBOOK_KEY": OPERATOR, "SOMEBODYS_TOKEN": SECRET}
    with (config.parent / "out.log").open("ab") as log:
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


def _await(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def _running(word: str, folder: Path) -> list[str]:
    """Processes of these agents, whatever became of their environment."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            inside = str(folder) in os.readlink(path.with_name("cwd"))
            if word in command or AGENT.name in command or inside:
                commands.append(command)
    return commands


def test_nothing_is_left_running(ran: Ran) -> None:
    """Neither of the killed process's agents nor of the others, daemons without a mark included."""
    assert ran.left == []


def test_each_launch_is_accounted_for(ran: Ran) -> None:
    """It has an end; only what the killed process ran has another attempt; and each ended as it should."""
    assert len({row["task"] for row in ran.rows}) == HONEST + sum(OTHERS.values()) == 64
    assert all(row["status"] is not None for row in ran.rows)
    again = [row for row in ran.rows if row["attempt"] > 1]
    given_up = [row for row in ran.rows if row["status"] == "infra_error"]
    assert len(again) == len(given_up) > 0
    assert {row["why"] for row in given_up} == {DIED}
    assert {(row["split"], row["finished"], row["reward"]) for row in given_up} == {("void", "void", None)}
    ended = {deed: Counter((row["status"], row["finished"]) for row in ran.last(deed)) for deed in OTHERS}
    failed, done = ("agent_error", "failed"), ("done", "completed")
    expected = dict.fromkeys(OTHERS, done) | dict.fromkeys(("crash", "disk", "mute"), failed)
    expected |= dict.fromkeys(("hang", "deaf"), ("timeout", "failed"))
    assert ended == {deed: Counter({expected[deed]: OTHERS[deed]}) for deed in OTHERS}
    whys = {
        "crash": {"signal 6 ended it"},
        "hang": {"its idle clock ran out"},
        "deaf": {"its idle clock ran out"},
        "disk": {"it exited with 1"},
        "mute": {"it ended without a request"},
    }
    assert {deed: {row["why"] for row in ran.whole(deed)} for deed in whys} == ran.but_for_the_kill(whys)


def test_what_is_left_behind_is_told(ran: Ran) -> None:
    """Processes of each launch that did not end with it."""
    left = {"daemons": {3}, "mute": {3}, "crash": {1}, "deaf": {1}}
    assert {deed: {row["leaked"] for row in ran.whole(deed)} for deed in left} == ran.but_for_the_kill(left)
    assert {row["leaked"] for row in ran.last("honest")} == {0}


def test_the_honest_are_undisturbed(ran: Ran) -> None:
    """All done, with the reward that they deserve."""
    rows = ran.last("honest")
    assert [(r["status"], r["reward"], r["turns"]) for r in rows] == [("done", 1.0, 3)] * HONEST
    assert ran.seconds < 200


def test_what_is_printed_and_written_is_bounded(ran: Ran) -> None:
    """A gigabyte leaves a quarter of a megabyte, and no file is larger than it may be."""
    for row in ran.whole("gigabyte"):
        printed = orjson.loads(row["output"])["stdout"]
        assert (printed["bytes"], printed["kept"]) == (1 << 30, 1 << 18)
    written = [path.stat().st_size for path in ran.folder.glob("*/large")]
    assert len(written) >= OTHERS["disk"]
    assert max(written) == 4 << 20


def test_an_end_is_an_end(ran: Ran) -> None:
    """What finished its trajectory is refused all else, and keeps the reward that it had then."""
    assert all(seen == [200, 409, 409, 403] for seen in ran.saw("late"))
    assert {(row["reward"], row["turns"]) for row in ran.last("late")} == {(0.25, 1)}


def test_a_key_opens_its_own_trajectory_alone(ran: Ran) -> None:
    """Nothing of another's is asked (the request names two: 400), ended or rewarded by it."""
    assert all(seen == [400, 403, 403] for seen in ran.saw("thief"))
    with rb.connect(ran.path) as connection:
        query = "SELECT DISTINCT reward FROM rewards WHERE trajectory LIKE 'r64.0.honest-%'"
        assert connection.execute(query).fetchall() == [(1.0,)]


@pytest.mark.skipif(NO_BWRAP is not None, reason=str(NO_BWRAP))
def test_no_secret_is_in_its_reach(ran: Ran) -> None:
    """Neither in its own variables nor in those of any process that it sees."""
    for seen in ran.saw("spy"):
        assert any(entry.startswith("OPENAI_API_KEY=") for entry in seen)
        text = "\n".join(seen)
        assert SECRET not in text
        assert OPERATOR not in text
        assert len({entry for entry in seen if entry.startswith("OPENAI_API_KEY=")}) == 1


@pytest.mark.skipif(NO_BWRAP is not None, reason=str(NO_BWRAP))
def test_the_folders_of_others_are_not_there(ran: Ran) -> None:
    """It sees none, and writes nothing beside its own."""
    assert all(seen == [] for seen in ran.saw("prowl"))
    assert list(ran.folder.rglob("was-here")) == []


def test_a_training_takes_the_honest_alone(ran: Ran) -> None:
    """At the cut of the end, of what completed with a reward; and the ledger accounts for every token."""
    log = rb.open(ran.path)
    recipe = {"splits": ["train"], "statuses": ["completed"], "min_reward": 1.0}
    values = {"run": RUN, "model": "none", "steps": 1, "recipe": recipe}
    config = parse_config(values | {"algorithm": {"name": "sft", "batch_size": 3 * HONEST}}, "test")
    units = EpochUnits(log, log.head(), RUN, config.recipe, config.algorithm, 0, 0)
    assert sorted({sample.name for sample in units.samples(0)}) == sorted(
        row["trajectory"] for row in ran.last("honest")
    )
    assert len(units) == 3 * HONEST  # each question of theirs is a conversation of its own
    assert not any(fold_ledger(log.events()).unaccounted().values())
