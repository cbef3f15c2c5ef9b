"""docs/rollout-functions.md: each class on the page rolls out, against a proxy that is served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.rollouts.config import load_rollouts, parse_rollouts
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task

THEIRS = '''
class Agent:
    """As AReaL has it: it knows an address and a key, and gives rewards by response id."""

    def __init__(self, worth):
        self.worth = worth

    async def run(self, data, base_url, api_key, **_):
        import openai
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        said = await client.chat.completions.create(messages=data["messages"], model="default")
        return {said.id: self.worth}


class Shop:
    """As TRL has it."""

    def reset(self, prompt, label, **_):
        self.calls = []
        return label

    def calc(self, a: int, b: str) -> str:
        """Adds.

        Args:
            a: one
            b: another
        """
        self.calls.append((a, b))
        return f"{a}{b}"

    def get_reward(self):
        return float(len(self.calls))
'''


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script, which says what its last message asks for."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer")


@pytest.fixture(scope="module")
def files(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page shows as `my_agents.py`, and with theirs."""
    folder = tmp_path_factory.mktemp("page")
    page = (root / "docs" / "rollout-functions.md").read_text()
    blocks = re.findall(r"^```python\n# ours\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    (folder / "my_agents.py").write_text("\n\n".join(blocks))
    (folder / "theirs.py").write_text(THEIRS)
    toml = page.partition("```toml\n")[2].partition("```")[0]
    (folder / "page.toml").write_text(toml)
    assert load_rollouts(folder / "page.toml").agent.rollout == "my_agents.py:TRLEnvironment"
    return folder


@pytest.mark.parametrize(
    ("name", "options", "values", "reward", "by_turn"),
    [
        ("ToolLoop", {}, {"prompt": [{"role": "user", "content": "hello"}]}, 1.0, [None, None]),
        ("ToolLoop", {"most_turns": 1}, {"prompt": [{"role": "user", "content": "hello"}]}, 0.0, [None]),
        ("AReaLAgent", {"worth": 3.0}, {"messages": [{"role": "user", "content": "hello"}]}, None, [3.0]),
        ("Search", {}, {"prompt": "hello", "label": "the answer"}, 1.0, [None, None]),
        (
            "TRLEnvironment",
            {},
            {"prompt": [{"role": "user", "content": "call "}], "label": "two"},
            2.0,
            [None, None],
        ),
    ],
    ids=["verl", "cut short", "areal", "slime", "trl"],
)
def test_each_rolls_out(
    name: str,
    options: dict[str, Any],
    values: dict[str, Any],
    reward: float | None,
    by_turn: list[float | None],
    server: Served,
    files: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Its reward, or those of its turns, are in the log."""
    theirs = {"AReaLAgent": ("agent", "Agent"), "TRLEnvironment": ("environment", "Shop")}
    if name in theirs:
        key, kind = theirs[name]
        options = options | {key: f"{files}/theirs.py:{kind}"}
    agent = {"launcher": "python", "rollout": f"{files}/my_agents.py:{name}", "options": options}
    rollout = re.sub(r"\W", "-", request.node.name)
    settings = {"name": rollout, "proxy": server.url, "tasks": "-", "folder": str(tmp_path), "agent": agent}
    config = parse_rollouts(settings, "test")

    async def run() -> None:
        async with Proxy(config.proxy) as proxy:
            launcher = launcher_of(config)
            agents = agents_of(config, proxy, launcher)
            await Rollouts(config, [Task("t", values)], proxy, agents, launcher, "test").run()

    asyncio.run(run())
    with rb.connect(server.path) as connection:
        query = """
            SELECT l.status, l.why, t.reward, list(u.reward ORDER BY u.seq)
            FROM launches l JOIN trajectories t USING (trajectory_id) JOIN turns u USING (trajectory_id)
            WHERE l.rollout = $1 GROUP BY ALL"""
        rows = connection.execute(query, [rollout]).fetchall()
    status = "truncated" if options == {"most_turns": 1} else "done"
    assert rows == [(status, None, reward, by_turn)]
