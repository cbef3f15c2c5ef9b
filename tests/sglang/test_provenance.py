"""Whose tokens they are: servers of other weights than one thinks, started anew, cut off, of other shape."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.proxies.served import Served
from tests.sglang import model
from tests.sglang.conftest import TOLERANCE, Reference, Weights
from tests.sglang.server import SglangServer

from rollbook import store
from rollbook.demo.processes import rollbook_command
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated, Record
from rollbook.store.fold.trajectory import Trajectory
from rollbook.testing.asgi import free_port
from rollbook.train.algorithms.policy_gradient import Grpo
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.samples import all_samples
from rollbook.train.select.sorting import select

KEYS = ("--api-key", "some-key", "--admin-api-key", "admin-key")
ENVIRONMENT = {"ROLLBOOK_ENGINE_KEY": "some-key", "ROLLBOOK_ENGINE_ADMIN_KEY": "admin-key"}


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Starts `rollbook serve` in front of a server, with the server's keys."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    proxies: list[Served] = []

    def start(path: Path, server: SglangServer, *options: str) -> Served:
        words = ["--model", str(path), "--engine", "sglang", "--engine-url", server.url, *options]
        proxies.append(Served(tmp_path / "store", words))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.stop()


def ask(proxy: Served, name: str) -> None:
    """A trajectory of one turn, finished and rewarded."""
    with httpx.Client(base_url=proxy.url, timeout=100) as http:
        body = {"messages": [{"role": "user", "content": "What is 37 + 58?"}], "max_tokens": 8}
        reply = http.post(f"/t/{name}/group/g/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert http.post(f"/v1/trajectories/{name}/finish", json={"reward": 1.0}).status_code == 200


def engine_of(proxy: Served) -> Any:
    """What /healthz says of the engine, once it is usable."""
    for _ in range(600):
        (engine,) = httpx.get(f"{proxy.url}/healthz").json()["engines"]
        if engine["state"] == "usable":
            return engine
        time.sleep(0.1)
    raise AssertionError(engine)


def recorded(proxy: Served) -> dict[str, Trajectory]:
    """The log's trajectories, by name."""
    return {t.opened.name: t for t in store.open(proxy.path).trajectories().values()}


def versions(trajectory: Trajectory) -> list[int]:
    """Which versions made its tokens; the whole of a turn, or nothing of it."""
    (turn,) = trajectory.turns.values()
    assert turn.completed is not None
    spans = turn.completed.version_spans
    assert sum(span.end - span.start for span in spans) in (0, len(turn.completed.completion_ids))
    return [span.version for span in spans]


@pytest.mark.timeout(900)
def test_a_server_that_is_not_what_one_thinks(
    models: dict[str, Path], tmp_path: Path, serve: Callable[..., Served], reference: Reference
) -> None:
    """Other weights of the same shape have no version and train nothing, also behind an idle proxy.

    The server is started with the proxy's model, then anew from another checkpoint, then from its own again.
    """
    port = free_port()
    with ExitStack() as stack:

        def started(path: Path) -> SglangServer:
            server = SglangServer(path, tmp_path / f"server-{path.name}", *KEYS)
            server.port, server.url = port, f"http://127.0.0.1:{port}"
            stack.callback(server.stop)
            server.start()
            server.ready()
            return server

        first = started(models["dense"])
        proxy = serve(models["dense"], first)
        assert engine_of(proxy)["policy_version"] == 0
        ask(proxy, "right")
        first.stop()
        other = started(models["dense-next"])
        ask(proxy, "behind its back")
        engine = engine_of(proxy)
        assert engine["policy_version"] is None
        assert "holds no version that is known here" in engine["unverified"]
        assert "let the trainer sync it" in engine["unverified"]
        ask(proxy, "known by now")
        proxy.stop()
        proxy = serve(models["dense"], other)
        assert "has no policy version and is never trained" in proxy.log.read_text()
        ask(proxy, "a new proxy")
        other.stop()
        started(models["dense"])
        ask(proxy, "back, and not yet compared")
        assert engine_of(proxy)["policy_version"] == 0
        ask(proxy, "back")
        proxy.stop()
    trajectories = recorded(proxy)
    assert {name: versions(trajectory) for name, trajectory in trajectories.items()} == {
        "right": [0],
        "behind its back": [],
        "known by now": [],
        "a new proxy": [],
        "back, and not yet compared": [],
        "back": [0],
    }
    for name, path in (("right", "dense"), ("back", "dense"), ("behind its back", "dense-next")):
        _check(trajectories[name], models[path], reference)
    kept, drops = select(all_samples(trajectories.values()), RecipeConfig(drop_zero_variance=False), GRPO, 0)
    assert {sample.name for sample in kept} == {"right", "back"}
    assert {drop.rule for drop in drops} == {"no_version"}
    command = rollbook_command("tail", "--no-follow", "--store", proxy.path)
    tail = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert tail.stdout.count("no version") == 4, tail.stdout


GRPO = Grpo(name="grpo", groups=1, group_size=2)


def _check(trajectory: Trajectory, path: Path, reference: Reference) -> None:
    """The tokens are those of a model's weights."""
    (turn,) = trajectory.turns.values()
    done = turn.completed
    assert done is not None
    assert done.logprobs is not None
    wanted = reference.logprobs(path, trajectory.prompt_ids(turn), done.completion_ids.tolist(), 1.0)
    assert abs(done.logprobs - wanted).max() <= TOLERANCE


def test_another_model_in_the_same_run(
    dense: SglangServer,
    weights: Callable[..., Weights],
    models: dict[str, Path],
    serve: Callable[..., Served],
) -> None:
    """Its version 0 would have two digests: refused with the remedy, in one sentence, before it records."""
    changing = weights(dense)
    proxy = serve(models["dense"], dense)
    ask(proxy, "first")
    proxy.stop()
    changing.load(models["dense-next"])
    with pytest.raises(RuntimeError, match="is not version 0") as caught:
        serve(models["dense-next"], dense)
    parts = str(caught.value).partition("is not version 0")
    assert "Use another --run, or the weights that version 0 is" in parts[2]
    assert "Traceback" not in str(caught.value)
    assert str(caught.value).count("recording run") == 1, "that of the first"
    ask(serve(models["dense-next"], dense, "--run", "another"), "second")
    log = store.open(proxy.path)
    bound = {e.run: e.record for e in log.events() if isinstance(e.record, PolicyActivated)}
    digests = {run: record.weights_digest for run, record in bound.items()}
    assert digests == {
        "default": digest_tensors(read_weights(models["dense"]), tree=True),
        "another": digest_tensors(read_weights(models["dense-next"]), tree=True),
    }


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_sync_to_a_server_of_another_shape(
    dense: SglangServer,
    weights: Callable[..., Weights],
    models: dict[str, Path],
    tmp_path: Path,
    transport: str,
) -> None:
    """Nothing is sent that would end its scheduler: it answers as before, and the error says what differs."""
    from rollbook.train.model.shape import read_shape
    from rollbook.train.model.weight_names import weight_shapes
    from rollbook.train.sync.control import EngineControl
    from rollbook.train.sync.session import Release, Syncer, SyncOptions
    from rollbook.train.sync.transports import ByBroadcast, FromDisk, FromTensors, Transport

    weights(dense)
    wide = model.make(tmp_path / "wide", "dense", 9, tied=True, like=models["dense"], hidden=2 * model.HIDDEN)
    transports: dict[str, Callable[[], Transport]] = {
        "tensor": lambda: FromTensors(1 << 16),
        "distributed": lambda: ByBroadcast(1 << 16, "127.0.0.1", 30.0),
        "disk": lambda: FromDisk(wide),
    }
    records: list[Record] = []
    syncer = Syncer(
        [EngineControl(dense.url)], transports[transport](), lambda *r: records.extend(r), SyncOptions()
    )
    shape = read_shape(wide)
    release = Release("actor", 1, "w", "", shape.head_dim, "run", tuple(weight_shapes(shape)), shape)
    before = dense.get("/model_info")["weight_version"]
    try:
        with pytest.raises(EngineError, match=r"serves a model of another shape .*hidden 64, not 128"):
            syncer.sync(release, lambda: iter(read_weights(wide).items()))
    finally:
        syncer.close()
    assert [record.KIND for record in records] == ["sync.started", "sync.failed"]
    reply = dense.post("/generate", {"input_ids": [20, 21], "sampling_params": {"max_new_tokens": 4}})
    assert reply["meta_info"]["weight_version"] == before


class Relay:
    """Passes connections on to a server, and ends one that is used again, before the server hears of it."""

    def __init__(self, server: SglangServer) -> None:
        self._server, self.cuts = server, 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(60)
        self.url = f"http://127.0.0.1:{self._port}"

    def _run(self) -> None:
        async def listen() -> Any:
            listening = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self._port = listening.sockets[0].getsockname()[1]
            self._ready.set()
            return listening

        self._listening = self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._server.port)
        answered = False

        async def answers() -> None:
            nonlocal answered
            while data := await there.read(1 << 16):
                answered = True
                writer.write(data)
            writer.close()

        passing = asyncio.create_task(answers())
        while data := await reader.read(1 << 16):
            if answered and data.startswith(b"POST /generate"):
                self.cuts += 1
                break
            back.write(data)
        passing.cancel()
        writer.close()
        back.close()

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def test_a_kept_connection_that_is_cut(
    dense: SglangServer,
    weights: Callable[..., Weights],
    serve: Callable[..., Served],
    models: dict[str, Path],
) -> None:
    """A healthy server is not put out for it: the request is asked again on a new one, and no turn fails."""
    weights(dense)
    relay = Relay(dense)
    try:
        server = SglangServer(models["dense"], dense.folder)
        server.url = relay.url
        proxy = serve(models["dense"], server)
        for number in range(4):
            ask(proxy, f"t{number}")
        assert engine_of(proxy)["policy_version"] == 0
        proxy.stop()
    finally:
        relay.close()
    assert relay.cuts >= 2, "a few of the four met a connection that the server had kept"
    turns = [turn for trajectory in recorded(proxy).values() for turn in trajectory.turns.values()]
    assert [turn.failed for turn in turns] == [None] * 4
    assert [versions(trajectory) for trajectory in recorded(proxy).values()] == [[0]] * 4
