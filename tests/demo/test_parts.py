"""The demo's model, agent, configurations and report; the whole demo runs in CI by itself."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from rollbook import store
from rollbook.demo import agent, run, typed
from rollbook.demo.processes import Agent, DemoError, Process, Server, rollbook_command
from rollbook.demo.report import plot, reward_by_version
from rollbook.demo.task import TOOLS, conversation, parse
from rollbook.ingest.tokens.bridge import self_test
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import ConfigError
from rollbook.store.events import Event, RewardAssigned, TrajectoryFinished, TrajectoryOpened
from rollbook.train.config.config import parse_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model."""
    from rollbook.demo.model import make_model

    folder = tmp_path_factory.mktemp("demo") / "model"
    make_model(folder, 0)
    return folder


def test_the_agent_knows_nothing_of_rollbook() -> None:
    """The agent's file imports the standard library and openai, and nothing else."""
    tree = ast.parse(Path(agent.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - sys.stdlib_module_names == {"openai"}


def test_turns_split_where_lines_do(model: Path) -> None:
    """Rendering a conversation whole, or turn by turn, gives the same ids: bridges are exact."""
    tokenizer = load_chat_tokenizer(model)
    assert self_test(tokenizer) is None
    messages = conversation(parse("What is 37 plus 58?"))
    whole = tokenizer.encode(tokenizer.render(messages, TOOLS, generate=False)).tolist()
    prompt = tokenizer.encode(tokenizer.render(messages[:3], TOOLS, generate=True)).tolist()
    assert whole[: len(prompt)] == prompt
    assert len(whole) < 60


def test_the_demos_configurations_load(tmp_path: Path) -> None:
    """Both CONFIGs are valid, and name the run and model they are for."""
    values = {"run": "demo", "model": tmp_path, "seed": 0}
    sft = run.SFT_CONFIG.format(**values, offline_steps=run.OFFLINE_STEPS, decay_steps=90)
    grpo = run.GRPO_CONFIG.format(
        **values, online_steps=run.ONLINE_STEPS, groups=16, group_size=8, engine="http://127.0.0.1:1/engine"
    )
    assert parse_config(tomllib.loads(sft), "sft").recipe.splits == ("teacher",)
    parsed = parse_config(tomllib.loads(grpo), "grpo")
    assert (parsed.recipe.splits, parsed.recipe.max_staleness) == (("train",), 0)


def test_the_report_reads_the_log(tmp_path: Path) -> None:
    """Rewards by version come from SQL, and the plot is a PNG."""
    log = store.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        for name, reward in (("a", 1.0), ("b", 0.0)):
            opened = TrajectoryOpened(name, name, split="eval")
            events = [opened, RewardAssigned(name, None, reward), TrajectoryFinished(name)]
            writer.append([Event(e, "demo") for e in events]).result()
    (row,) = reward_by_version(log.path)
    assert (row.split, row.rollouts, row.reward) == ("eval", 2, 0.5)
    plot([row], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.more
def test_the_agent_works_through_a_teacher(model: Path, tmp_path: Path) -> None:
    """Agent, proxy and script as real processes: the rewards it earned are the recorded ones."""
    path = tmp_path / "store"
    options = ("--store", path, "--model", model, "--engine", "scripted")
    script = "rollbook.demo.task:teacher"
    jobs = [
        {"id": f"j{a}", "group": "g", "task": "t", "split": "teacher", "seed": a}
        | {"question": f"What is {a} plus 58?", "answer": str(a + 58)}
        for a in range(10, 40)
    ]
    with Server("server", tmp_path, *options, "--script", script) as server:
        server.await_ready()
        with Agent(tmp_path, server.url) as worker:
            rewards = worker.work(jobs)
    query = "select reward from trajectories where split = 'teacher' order by trajectory"
    assert [row[0] for row in store.connect(path).execute(query).fetchall()] == rewards
    assert 0 < sum(rewards) < len(rewards)


def test_a_failing_process_shows_its_last_lines(tmp_path: Path) -> None:
    """The error says which process failed, and what it said."""
    command = rollbook_command("sql", "select 1", "--store", tmp_path / "nothing")
    with Process("query", command, tmp_path) as process:
        assert process.wait() == 2
        with pytest.raises(DemoError, match=r"query failed \(2\):\n(.|\n)*is not a Rollbook store"):
            process.check()


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    """The demo removes only an earlier demo's store, and only when told to."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear to me")
    for replace in (False, True):
        with pytest.raises(ConfigError, match="choose another --store"):
            run.run_demo(tmp_path / "mine", 0, replace)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear to me"


def test_commands_work_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `rollbook` is not on PATH they name its script, and what makes it so; else they do not."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typed.sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert (typed.typed_rollbook(), typed.activated_by()) == (".venv/bin/python -m rollbook", None)
    for name in ("rollbook", "activate"):
        (folder / name).touch(0o755)
    assert typed.typed_rollbook() == ".venv/bin/rollbook"
    assert typed.activated_by() == "`source .venv/bin/activate`"
    monkeypatch.setenv("PATH", str(folder))
    assert (typed.typed_rollbook(), typed.activated_by()) == ("rollbook", None)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/nowhere")
    assert typed.typed_rollbook() == "./rollbook"
