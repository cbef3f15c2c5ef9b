"""Several proxies of one run: on one host, each at a port of its own, as they would be on several."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from rollbook import store
from rollbook.store.fold.trajectory import fold
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.join import join
from rollbook.store.secret import SECRET, store_secret
from rollbook.store.settings import OwnMediumSettings
from rollbook.store.wal.files import FENCED, is_replica, read_watermark
from rollbook.testing.asgi import free_port

PATIENCE_S = 30.0
LEASE_S = 2.0


class Cluster:
    """Proxies of one run."""

    def __init__(
        self, serve: Any, folder: Path, words: list[str], count: int = 3, *, hosts: bool = False
    ) -> None:
        self.path, self.serve, self._words = folder / "store", serve, words
        self.folders: dict[int, Path] = {}
        if hosts and count:
            self._make_hosts(folder, count)
        self.ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.served: list[Any] = [None] * count
        self.headers: dict[str, str] = {}
        """By which details of their health are asked for."""

    def _make_hosts(self, folder: Path, count: int) -> None:
        """Give each proxy a folder of its own, with a folder between them in the place of object storage."""
        self.folders = {number: folder / f"host-{number}" for number in range(1, count)}
        log = store.open(self.path, create=True)
        settings = OwnMediumSettings(url=f"file://{folder}/medium", lease_s=LEASE_S, ack="medium")
        lines = f'[medium]\nurl = "{settings.url}"\nlease_s = {LEASE_S}\nack = "medium"\n'
        (self.path / "store.toml").write_text(lines)
        store_secret(self.path, "peers")
        first = Carrier(self.path, log.store_id, settings)
        first.session.close()
        for other in self.folders.values():
            join(other, f"{settings.url}/{log.store_id}", settings)
            shutil.copy(self.path / SECRET, other / SECRET)
        first.close()

    def start(self, number: int) -> Any:
        """Start one of them, or start it again."""
        if self.served[number] is None:
            words = [word for url in self.urls for word in ("--proxies", url)]
            words += ["--proxy", str(number)]
            port = self.ports[number]
            self.served[number] = self.serve(
                *self._words, *words, folder=self.folders.get(number, self.path), port=port
            )
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

    def log(self) -> store.Store:
        """The log, with what every proxy has written by now."""
        folders = [self.path, *self.folders.values()]
        written = {lane: count for folder in folders for lane, count in own_head(folder).items()}
        until = time.monotonic() + PATIENCE_S
        while True:
            log = store.open(self.path)
            head = log.head()
            if all(head.get(lane, 0) >= count for lane, count in written.items()):
                return log
            assert time.monotonic() < until, (head, written)
            time.sleep(0.05)

    def connect(self) -> Any:
        """The log as SQL."""
        return store.connect(self.log().path)

    def lanes(self) -> dict[str, set[str]]:
        """Trajectory -> the lanes that hold events of it."""
        log, lanes = self.log(), dict[str, set[str]]()
        name = {t.opened.trajectory_id: t.opened.name for t in fold(log.events()).values()}
        for event in log.events():
            if (trajectory_id := getattr(event.record, "trajectory_id", None)) in name:
                # Of hosts, each lane has its host's name behind a dot.
                lanes.setdefault(name[trajectory_id], set()).add(event.lane.partition(".")[0])
        return lanes


def own_head(folder: Path) -> dict[str, int]:
    """Lane -> durable events, of those that a host writes, and that nobody has ended."""
    lanes = [path for path in (folder / "lanes").iterdir() if not is_replica(folder, path.name)]
    return {lane.name: read_watermark(lane).next_seq for lane in lanes if not (lane / FENCED).exists()}


def say(client: openai.OpenAI, *texts: str, **more: Any) -> str:
    """The reply to messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return str(
        client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content
    )
