"""At the address of a run's proxy somebody else may listen: nothing is given to another's."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook import store
from rollbook.online import address, parts
from rollbook.online.address import Proof, check_is_ours, placed_at
from rollbook.online.config import WholeConfig, load_whole
from rollbook.online.parts import Part, Spec
from rollbook.rollouts.proxy import Proxy
from rollbook.store.config import PORT
from rollbook.store.errors import ConfigError, RolloutError
from rollbook.store.whose import ASKS, PROVES, ProxyIdentity, proof

THEIRS = {"status": "ok", "run": "theirs", "store": "store-2"}


class Answers(http.server.BaseHTTPRequestHandler):
    """A proxy that says whose it is."""

    said: dict[str, Any] = THEIRS
    proves: Callable[[str], str] = staticmethod(lambda word: "no proof")

    def do_GET(self) -> None:
        """Say it."""
        self.send_response(200)
        if word := self.headers.get(ASKS):
            self.send_header(PROVES, type(self).proves(word))
        self.end_headers()
        self.wfile.write(json.dumps(self.said).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def theirs() -> Iterator[int]:
    """The port at which another one's proxy answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WholeConfig]:
    """Makes a CONFIG of a run `mine`, with these tables."""
    monkeypatch.chdir(tmp_path)
    store.open(tmp_path / "runs", create=True)

    def make(*tables: str) -> WholeConfig:
        text = "\n".join(('run = "mine"', 'store = "runs"', 'model = "m"', *tables))
        Path("online.toml").write_text(text)
        return load_whole(Path("online.toml"))

    return make


def test_the_default_port_is_taken(
    config: Callable[..., WholeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is, and it is said; every part reads it."""
    monkeypatch.setattr(address, "ANSWER_S", 0.3)
    messages: list[str] = []
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # it is somebody's anyhow
            other.bind(("127.0.0.1", PORT))
            other.listen()
        placed = placed_at(config("[serve]"), messages.append)
    assert placed.serve.port > PORT
    assert placed.proxy == f"http://127.0.0.1:{placed.serve.port}"
    assert load_whole(placed.path).proxy == placed.proxy
    assert messages[0].startswith(f"127.0.0.1:{PORT} is taken by ")
    assert messages[0].endswith(f": the proxy of this run listens at {placed.proxy}")


def test_the_port_that_was_chosen_is_taken(
    config: Callable[..., WholeConfig], theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is refused, with both names; a port that is free is taken as it is."""
    with pytest.raises(ConfigError) as caught:
        placed_at(config("[serve]", f"port = {theirs}"), print)
    for words in ("run 'theirs' of store store-2", "run 'mine' of store", "--set serve.port="):
        assert words in str(caught.value)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        free = config("[serve]", f"port = {mute.getsockname()[1]}")
        mute.listen()
        monkeypatch.setattr(address, "ANSWER_S", 0.3)
        with pytest.raises(ConfigError, match="something that is no proxy"):
            placed_at(free, print)
    assert placed_at(free, print) is free


def test_a_proxy_that_is_started_elsewhere(config: Callable[..., WholeConfig], theirs: int) -> None:
    """Another's is refused; one that does not answer yet may be the run's."""
    with pytest.raises(ConfigError, match=r"is of run 'theirs' of store store-2, and not of run 'mine'"):
        check_is_ours(config(f'proxy = "http://127.0.0.1:{theirs}"', "[serve]"))
    check_is_ours(config('proxy = "http://127.0.0.1:9"', "[serve]"))


def test_rollouts_go_to_no_other_run(theirs: int) -> None:
    """They begin nothing."""

    async def asked(wanted: ProxyIdentity) -> str:
        async with Proxy(f"http://127.0.0.1:{theirs}", wanted=wanted) as proxy:
            return await proxy.run_name()

    assert (
        asyncio.run(asked(ProxyIdentity()))
        == asyncio.run(asked(ProxyIdentity("store-2", "theirs")))
        == "theirs"
    )
    with pytest.raises(RolloutError, match="is of run 'theirs' of store store-2, and not of run 'mine'"):
        asyncio.run(asked(ProxyIdentity(run="mine")))


def test_a_part_is_ready_once_it_answers_itself(
    theirs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers at its address in its place is none."""
    monkeypatch.setattr(parts, "LOOK_S", 0.1)
    own = Proof(b"secret", ProxyIdentity("store-1", "mine", "start"))
    health = f"http://127.0.0.1:{theirs}/healthz"
    spec = Spec("proxy", ("sleep", "600"), tmp_path / "log", health=health, proof=own)

    async def scenario() -> None:
        part = Part(spec, print)
        running = asyncio.create_task(part.run())
        await asyncio.sleep(0.5)
        assert not part.ready.is_set()
        monkeypatch.setattr(Answers, "proves", staticmethod(lambda word: proof(b"secret", word, own.whose)))
        await asyncio.wait_for(part.ready.wait(), 20)
        await part.stop()
        await running

    asyncio.run(scenario())
