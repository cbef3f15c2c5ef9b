"""Several proxies of one run: on one host, each at a port of its own, as they would be on several."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import openai

from rollbook import store
from rollbook.store.fold.trajectory import fold
from rollbook.testing.asgi import free_port

PATIENCE_S = 30.0


class Cluster:
    """Proxies of one run."""

    def __init__(self, serve: Any, folder: Path, words: list[str], count: int = 3) -> None:
        self.path, self.serve, self._words = folder / "store", serve, words
        self.ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.served: list[Any] = [None] * count
        self.headers: dict[str, str] = {}
        """By which details of their health are asked for."""

    def start(self, number: int) -> Any:
        """Start one of them, or start it again."""
        if self.served[number] is None:
            words = [word for url in self.urls for word in ("--proxies", url)]
            words += ["--proxy", str(number)]
            port = self.ports[number]
            self.served[number] = self.serve(*self._words, *words, folder=self.path, port=port)
        else:
            self.served[number].start()
        return self.served[number]

    def agent(self, number: int, name: str) -> openai.OpenAI:
        """An agent in a trajectory, which asks that proxy."""
        return openai.OpenAI(base_url=f"{self.urls[number]}/t/{name}/v1", api_key="none", max_retries=0)

    def holds(self, number: int) -> list[list[int]]:
        """Which seats each proxy holds, as that one sees it."""
        proxies = httpx.get(f"{self.urls[number]}/healthz", headers=self.headers).json()["proxies"]
        return [proxy["holds"] for proxy in proxies]

    def until_holds(self, number: int, *wanted: list[int]) -> None:
        """Wait until one sees it so."""
        until = time.monotonic() + PATIENCE_S
        while (seats := self.holds(number)) != list(wanted):
            assert time.monotonic() < until, seats
            time.sleep(0.1)

    def lanes(self) -> dict[str, set[str]]:
        """Trajectory -> the lanes that hold events of it."""
        log, lanes = store.open(self.path), dict[str, set[str]]()
        name = {t.opened.trajectory_id: t.opened.name for t in fold(log.events()).values()}
        for event in log.events():
            if (trajectory_id := getattr(event.record, "trajectory_id", None)) in name:
                lanes.setdefault(name[trajectory_id], set()).add(event.lane)
        return lanes


def say(client: openai.OpenAI, *texts: str, **more: Any) -> str:
    """The reply to messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return str(
        client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content
    )
