"""Giving an engine new weights: what is asked of it, and what it must answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.store import Store
from rollbook.store.errors import EngineError
from rollbook.store.events import CheckpointWritten, StepCommitted
from rollbook.train.config import SyncConfig
from rollbook.train.sync import sync_weights


class Engine:
    """An engine's control route that answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: Callable[[Any], tuple[int, Any]] = lambda body: (200, {"success": True, "digest": "d"})
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.asked.append((self.path, body))
                status, reply = engine.answer(body)
                data = orjson.dumps(reply)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/engine"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A fake engine that accepts everything with digest `d`."""
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_what_an_engine_is_asked(engine: Engine) -> None:
    """The checkpoint's path and the version, over SGLang's route; a slash at the URL's end is no matter."""
    sync_weights(SyncConfig(engine=engine.url + "/"), Path("/s/c"), 7, "d")
    assert engine.asked == [
        ("/engine/update_weights_from_disk", {"model_path": "/s/c", "weight_version": "7"})
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"success": False, "message": "another architecture"}), "refused version 7: .*architecture"),
        ((200, {"success": False, "message": "busy"}), "refused version 7: .*busy"),
        ((200, {"success": True, "digest": "e"}), "holds weights e as version 7, not d"),
        ((200, {"success": True}), "holds weights None"),
    ],
)
def test_an_engine_that_has_other_weights(engine: Engine, answer: Any, message: str) -> None:
    """A refusal, or weights that are not the checkpoint's, is an EngineError that says so."""
    engine.answer = lambda body: answer
    with pytest.raises(EngineError, match=message):
        sync_weights(SyncConfig(engine=engine.url), Path("/s/c"), 7, "d")


def test_an_engine_that_is_not_there(engine: Engine) -> None:
    """No connection is an EngineError with the remedy."""
    engine.server.shutdown()
    engine.server.server_close()
    with pytest.raises(EngineError, match="is `rollbook serve` running"):
        sync_weights(SyncConfig(engine=engine.url, timeout_s=2.0), Path("/s/c"), 7, "d")


def test_every_version_goes_to_the_engine(
    fabric: Any, recorded: Callable[..., Store], engine: Engine
) -> None:
    """Training with [sync] gives the engine the version it starts from, and each one it makes."""
    log = recorded()

    def answer(body: Any) -> tuple[int, Any]:
        manifest = orjson.loads((Path(body["model_path"]) / "rollbook.json").read_bytes())
        assert str(manifest["policy_version"]) == body["weight_version"]
        return 200, {"success": True, "digest": manifest["weights_digest"]}

    engine.answer = answer
    changes = {"checkpoint_every": 2, "optimizer": {"lr": 1e-2}, "sync": {"engine": engine.url}}
    settings = fabric.config(fabric.SFT, steps=3, **changes)
    fabric.train(log, settings)
    assert [body["weight_version"] for _, body in engine.asked] == ["0", "1", "2", "3"]
    records = [e.record for e in log.events() if e.lane == "train"]
    written = [r for r in records if isinstance(r, CheckpointWritten)]
    kinds = [(r.policy_version, r.optimizer_digest is not None) for r in written]
    assert kinds == [(0, False), (1, False), (2, True), (3, True)]
    fabric.train(log, settings.model_copy(update={"steps": 5}))
    assert [body["weight_version"] for _, body in engine.asked[4:]] == ["3", "4", "5"]
    alone = recorded("alone")
    fabric.train(alone, fabric.config(fabric.SFT, steps=5, optimizer={"lr": 1e-2}))
    ends = [
        [e.record.digests for e in one.events() if isinstance(e.record, StepCommitted)]
        for one in (log, alone)
    ]
    assert len(ends[0]) == 5
    assert ends[0] == ends[1], "giving weights away changes no bit of them"
