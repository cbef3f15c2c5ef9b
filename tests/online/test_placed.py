"""Engines that Ray places, in a real cluster of this host: where they are, that they end, what is missing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.processes.ray_nodes import ray_nodes

from rollbook.online import parts
from rollbook.online import placed as placing
from rollbook.online.config import PlacedConfig, WholeConfig, at_addresses, load_whole
from rollbook.online.parts import Supervisor, specs_of
from rollbook.online.placed import placed
from rollbook.store.errors import ConfigError, RolloutError
from rollbook.store.patience import Patience

pytestmark = pytest.mark.ranks
ENGINE = """
import http.server, json, os, sys

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        told = {"pid": os.getpid(), "words": words, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
        self.wfile.write(json.dumps(told | {"own": os.environ.get("OWN")}).encode())

    def log_message(self, *words):
        pass


print("begins", flush=True)
http.server.ThreadingHTTPServer((words["--host"], int(words["--port"])), Answers).serve_forever()
"""
CONFIG = """
store = "runs"
model = "my-model"

[engines]
command = [{python}, "-S", "engine.py"]
options = ["--dtype", "float32"]
environment = {{ OWN = "yes" }}

[engines.placed]
count = 2
resources = {{ GPU = 1, engines = 1 }}

[train]
steps = 1
[train.algorithm]
name = "grpo"
"""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """A head, and a node with what engines take."""
    with ray_nodes({"num_gpus": 2, "resources": {"engines": 2}}):  # Ray believes it
        yield


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WholeConfig:
    """A run with two engines that Ray places."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "PAUSE_S", 0.1)
    Path("engine.py").write_text(ENGINE)
    Path("online.toml").write_text(CONFIG.format(python=json.dumps(sys.executable)))
    return load_whole(Path("online.toml"))


def asked(address: str) -> Any:
    """What an engine tells of itself."""
    return httpx.get(f"http://{address}/health", timeout=10).json()


def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    by = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < by
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether nothing runs under this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_engines_on_nodes(config: WholeConfig) -> None:
    """The parts are told where they are; each has its GPU; one that dies is started again; none is left."""
    assert config.engines is not None
    assert config.engines.placed is not None
    seen: dict[str, Any] = {}

    async def all_of_it() -> None:
        assert config.engines is not None
        assert config.engines.placed is not None
        with placed(config.engines.placed, print) as (group, addresses):
            there = at_addresses(config, group, addresses)
            supervisor = Supervisor(specs_of(there, ["engines"]), lambda text: None)
            running = asyncio.create_task(supervisor.run())
            await asyncio.wait_for(asyncio.gather(*(p.ready.wait() for p in supervisor.parts)), 60)
            seen["addresses"], seen["config"] = addresses, load_whole(there.path)
            seen["told"] = [await asyncio.to_thread(asked, address) for address in addresses]
            first = seen["told"][0]["pid"]
            os.kill(first, signal.SIGKILL)
            log = supervisor.parts[0].spec.log
            await asyncio.to_thread(until, lambda: log.read_text().count("begins") == 2)
            supervisor.stop()
            await asyncio.wait_for(running, 60)

    asyncio.run(all_of_it())
    written = seen["config"]
    assert written.engines.addresses == tuple(seen["addresses"])
    assert written.engines.placed is None
    assert [url.url for url in written.serve.engine_url] == [f"http://{place}" for place in seen["addresses"]]
    assert [url.url for url in written.train.sync.engines] == [
        f"http://{place}" for place in seen["addresses"]
    ]
    assert sorted(engine["gpus"] for engine in seen["told"]) == ["0", "1"]
    assert {engine["own"] for engine in seen["told"]} == {"yes"}
    assert [engine["words"]["--dtype"] for engine in seen["told"]] == ["float32", "float32"]
    pids = [engine["pid"] for engine in seen["told"]]
    until(lambda: all(map(gone, pids)))
    with pytest.raises(httpx.ConnectError):
        asked(seen["addresses"][0])
    import ray
    from ray.util.placement_group import placement_group_table

    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    until(lambda: ray.available_resources().get("GPU") == 2)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what was asked for, and what there is; and before that what is waited for, and until when."""
    wanted, messages = PlacedConfig(count=3, resources={"engines": 1.0}, within_s=0.5), list[str]()
    monkeypatch.setattr(placing, "LOOK_S", 0.05)
    monkeypatch.setattr(placing, "Patience", partial(Patience, after_s=0.2))
    with (
        pytest.raises(RolloutError, match=r"room for 3 engines within 0.5 s.*1 engines each.*has 2, 2 free"),
        placed(wanted, messages.append),
    ):
        pass
    what = "room in the Ray cluster for 3 engines, by PACK: 1 engines each"
    [once] = messages
    assert re.fullmatch(rf"waiting for {what} \(for 0 s, until \S+Z at most\)", once)


def test_addresses_and_places_at_once(config: WholeConfig) -> None:
    """Only one of them says where engines are."""
    text = Path("online.toml").read_text().replace("[engines]\n", '[engines]\naddresses = ["127.0.0.1:3"]\n')
    Path("online.toml").write_text(text)
    with pytest.raises(ConfigError, match="leave addresses and gpus out"):
        load_whole(Path("online.toml"))
