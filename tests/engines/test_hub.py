"""Models by their names at the hub: from a cache that a test makes, and from a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.settings import proxy_parts

from rollbook import store as rb
from rollbook.engines.hub import cache_folder, model_folder, name_at_hub
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.serve.serve import prepared
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import ModelError
from rollbook.store.events import RunOpened

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = Path("tiny-org/tiny")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's home on this machine, empty; and no hub that answers."""
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def cached(home: Path, tiny_model: Path) -> Callable[..., Path]:
    """Puts the tiny model into the cache, as the hub's own tools do, or only its files of these names."""

    def make(*names: str) -> Path:
        kept = home / "hub" / f"models--{str(NAME).replace('/', '--')}"
        folder = kept / "snapshots" / COMMIT
        for place in (folder, kept / "blobs", kept / "refs"):
            place.mkdir(parents=True)
        (kept / "refs" / "main").write_text(COMMIT)
        for file in tiny_model.iterdir():
            if not names or file.name in names:
                blob = kept / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
                blob.write_bytes(file.read_bytes())
                (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
        return folder

    return make


@pytest.mark.parametrize("name", ["tiny-org/tiny", "tiny-org/tiny@main", f"tiny-org/tiny@{COMMIT}"])
def test_a_model_in_the_cache(cached: Callable[..., Path], name: str) -> None:
    """The snapshot of its commit, whose files can be read though they are links; no network is asked."""
    folder = cached()
    assert model_folder(Path(name)) == folder
    assert load_chat_tokenizer(folder).stop_ids
    assert name_at_hub(folder) == f"tiny-org/tiny@{COMMIT}"
    assert name_at_hub(folder.parent) is None


def test_a_folder_comes_first(cached: Callable[..., Path], tiny_model: Path) -> None:
    """One that is there is meant, and one that is missing beside others is no model of the hub."""
    cached()
    assert model_folder(tiny_model) == tiny_model
    for missing in (Path("/nowhere/tiny"), Path("mine"), Path("./a/b/c")):
        assert model_folder(missing) == missing
    NAME.parent.mkdir()
    assert model_folder(NAME) == NAME


def test_a_tokenizer_needs_no_weights(cached: Callable[..., Path]) -> None:
    """A snapshot without weights serves who needs none; who needs them is told what to do."""
    folder = cached("config.json", "tokenizer.json", "tokenizer_config.json")
    assert model_folder(NAME, weights=False) == folder
    with pytest.raises(
        ModelError, match=rf"no revision {COMMIT} of it with its weights, .* `hf download tiny-"
    ):
        model_folder(NAME)


def test_nothing_is_cached_and_no_hub_answers(home: Path) -> None:
    """The name, the cache and the remedies are said."""
    assert model_folder(NAME, fetch=False) == NAME
    with pytest.raises(ModelError) as raised:
        model_folder(NAME)
    for part in (f"{NAME}: there is no such folder", f"{home}/hub", "Name a model directory", "HF_HOME"):
        assert part in str(raised.value)


def test_where_the_cache_is() -> None:
    """As the hub's own tools have it."""
    assert cache_folder({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert cache_folder({"HF_HOME": "/b"}) == Path("/b/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert cache_folder({}) == Path.home() / ".cache/huggingface/hub"


def test_a_run_says_which_commit_it_is_of(cached: Callable[..., Path], tmp_path: Path) -> None:
    """A proxy's `run.opened`: the folder, the name and the commit."""
    folder, script = cached(), tmp_path / "script.py"
    script.write_text("def answer(messages, tools):\n    return 'yes'\n")
    parts = proxy_parts(store=tmp_path / "store", model=NAME, engine="scripted", script=f"{script}:answer")
    log = rb.open(tmp_path / "store", create=True)
    recorder = Recorder(log, "serve", "run")
    prepared(*parts).looked_at(recorder)
    recorder.close()
    [opened] = [event.record for event in log.events_of({RunOpened.KIND})]
    assert isinstance(opened, RunOpened)
    assert (opened.model, opened.config["model"]) == (str(folder), str(NAME))
    assert opened.config["model_at_hub"] == f"tiny-org/tiny@{COMMIT}"


class Hub(ThreadingHTTPServer):
    """A hub with one model, which says what it was asked for."""

    def __init__(self, model: Path) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _handler(model, self.asked))


def _handler(model: Path, requested: list[str]) -> type[BaseHTTPRequestHandler]:
    files = {file.name: file.read_bytes() for file in model.iterdir()} | {"onnx/model.safetensors": b"x"}

    class Handler(BaseHTTPRequestHandler):
        """Answers as the hub does."""

        def do_HEAD(self) -> None:
            """A file's size and hash."""
            self.answer(b"", head=True)

        def do_GET(self) -> None:
            """What the model is made of, or a file."""
            self.answer(b"", head=False)

        def answer(self, body: bytes, *, head: bool) -> None:
            """Write the reply."""
            path = self.path.partition("?")[0]
            requested.append(path)
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                body = json.dumps(
                    [
                        {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                        for n, b in files.items()
                    ]
                ).encode()
            elif path.startswith(f"/api/models/{NAME}"):
                about = {"id": str(NAME), "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
                body = json.dumps(about).encode()
            elif name in files:
                body = files[name]
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("etag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.end_headers()
            if not head:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    return Handler


@pytest.fixture
def hub(home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that answers."""
    with Hub(tiny_model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


def test_a_model_is_fetched_once(hub: Hub, tiny_model: Path) -> None:
    """First what a tokenizer needs, then the weights, of one commit; then nothing is asked for."""
    folder = model_folder(NAME, weights=False)
    assert name_at_hub(folder) == f"{NAME}@{COMMIT}"
    assert not any(path.endswith(".safetensors") for path in hub.asked)
    assert model_folder(NAME) == folder
    assert {file.name for file in folder.iterdir()} == {file.name for file in tiny_model.iterdir()}
    hub.asked.clear()
    assert model_folder(NAME) == folder
    assert hub.asked == []
