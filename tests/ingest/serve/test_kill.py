"""kill -9 of the server in mid-traffic: nothing a client was told is lost, and open work goes on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.proxies.served import Served

from rollbook import store

pytestmark = pytest.mark.crashes

CLIENTS, ROUNDS = 4, 3


class Agent(threading.Thread):
    """Talks in one trajectory until its server goes away; keeps each reply it received."""

    def __init__(self, url: str, name: str, messages: list[Any]) -> None:
        super().__init__()
        self.url, self.name_, self.messages = f"{url}/t/{name}/v1", name, messages
        self.received: list[tuple[str, str]] = []

    def run(self) -> None:
        """Ask until the connection breaks."""
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=20)
        try:
            while True:
                reply = client.chat.completions.create(model="m", messages=self.messages)
                message = reply.choices[0].message
                self.received.append((reply.id.removeprefix("chatcmpl-"), message.content or ""))
                answer = {"role": "assistant", "content": message.content}
                question = {"role": "user", "content": f"{self.name_} {len(self.received)}"}
                self.messages = [*self.messages, answer, question]
        except openai.APIConnectionError:
            return


def _turns(served: Any) -> dict[str, Any]:
    rows = store.connect(served.path).execute(
        "select turn_id, trajectory, status, content, parent_turn_id, root_reason from turns"
    )
    return {row[0]: row[1:] for row in rows.fetchall()}


def test_no_reply_is_lost_and_open_trajectories_go_on(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """Over several kills: each received reply is in `turns` as received, and the next turn extends it."""
    arguments = ["--engine", "scripted", "--script", f"{script}:answer"]
    served = serve("--model", str(text_model("chatml")), *arguments)
    received: dict[str, tuple[str, str]] = {}
    open_: dict[str, tuple[list[Any], str]] = {}
    for round_ in range(ROUNDS):
        agents = []
        for number in range(CLIENTS):
            # Half of the agents go on in a trajectory that the last kill left open.
            name = f"a{number}" if number % 2 else f"r{round_}-{number}"
            messages = open_[name][0] if name in open_ else [{"role": "user", "content": f"{name} start"}]
            agents.append(Agent(served.url, name, messages))
        for agent in agents:
            agent.start()
        deadline = time.monotonic() + 60
        while min(len(agent.received) for agent in agents) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05 * round_)  # the moment of the kill differs from round to round
        served.kill()
        for agent in agents:
            agent.join(30)
            assert not agent.is_alive()
            assert len(agent.received) > 2
            received |= {turn_id: (agent.name_, text) for turn_id, text in agent.received}
            open_[agent.name_] = (agent.messages, agent.received[-1][0])
        turns = _turns(served)
        for turn_id, (name, text) in received.items():
            assert turns[turn_id][:3] == (name, "completed", text)
        served.start()
    turns = _turns(served)
    firsts = [t for t in turns.values() if t[4] is not None]
    assert sorted(t[0] for t in firsts if t[4] == "first_turn") == sorted(open_)
    assert {t[4] for t in firsts} == {"first_turn"}  # no turn after any restart had to begin anew

    for name, (messages, last) in open_.items():
        client = openai.OpenAI(base_url=f"{served.url}/t/{name}/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(model="m", messages=messages)
        turn = _turns(served)[reply.id.removeprefix("chatcmpl-")]
        assert turn[3] == last  # its parent is the last reply the client has
        client.post(f"{served.url}/v1/trajectories/{name}/finish", body={"reward": 1.0}, cast_to=object)
    rows = store.connect(served.path).execute("select status, reward from trajectories").fetchall()
    assert rows == [("completed", 1.0)] * len(open_)
    served.stop()


def test_a_termination_ends_it_orderly(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """SIGTERM, as service managers send it: what was noted is in the log, and the sealer has ended too."""
    arguments = ["--engine", "scripted", "--script", f"{script}:answer"]
    served = serve("--model", str(text_model("chatml")), *arguments, "--seal")
    client = openai.OpenAI(base_url=f"{served.url}/t/a/v1", api_key="none", max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 128 + signal.SIGTERM
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
    assert len(children) == 1
    [turn] = store.open(served.path).trajectories().popitem()[1].turns.values()
    assert turn.delivered == "sent"
