"""A real browser: a page of another origin neither records, nor controls the engine, nor reads the log.

It needs Chromium (Debian's package `chromium`). Where there is none the test is skipped and says so, unless
ROLLBOOK_BROWSER=required, which `.ci/run` sets where it could install one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbook import store
from rollbook.demo.processes import Server
from rollbook.store.events import CursorMoved, EngineControlled, TrajectoryOpened
from rollbook.testing.asgi import free_port

PAGE = (Path(__file__).parent / "pages" / "attack.html").read_text()
SECRET = "what-nobody-else-may-read"
PATIENCE_S = 60.0
REBOUND = "127.0.0.3"
"""Another address of this host: there the attacker's network is, which leads a name elsewhere later."""


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert os.environ.get("ROLLBOOK_BROWSER") != "required", "no Chromium: apt-get install chromium"
        pytest.skip("there is no Chromium: apt-get install chromium")
    return path


class Attacker:
    """A web server: gives the page, takes what it found out, and passes all else on to the proxy.

    For a page that was loaded from it under some name and port, that is what a change of the name's address
    to the proxy's is: the same origin, another server.
    """

    def __init__(self, address: str, port: int, target: str, onward: str | None = None) -> None:
        self.told: dict[str, str] = {}
        self._done = threading.Event()
        attacker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                if self.path == "/hold":  # the page is not loaded before it has told
                    attacker._done.wait(PATIENCE_S)
                    self._answer(b"")
                elif self.path == "/page":
                    self._answer(PAGE.replace("TARGET", target).encode())
                else:
                    self._pass()

            def do_POST(self) -> None:
                if self.path != "/result":
                    self._pass()
                    return
                attacker.told = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._answer(b"")
                attacker._done.set()

            do_PUT = do_OPTIONS = lambda self: self._pass()

            def _answer(self, body: bytes, status: int = 200, kind: str = "text/html") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _pass(self) -> None:
                if onward is None:
                    self._answer(b"", 404)
                    return
                length = int(self.headers.get("content-length", 0))
                headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
                url = f"{onward}{self.path}"
                reply = httpx.request(
                    self.command, url, headers=headers, content=self.rfile.read(length), timeout=5
                )
                self._answer(reply.content, reply.status_code, reply.headers.get("content-type", ""))

        self._server = ThreadingHTTPServer((address, port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._done.set()
        self._server.shutdown()
        self._server.server_close()


def _browse(chromium: str, folder: Path, url: str, rules: str) -> None:
    """Have the browser load a page, until the page has told what it found out."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={folder}", f"--host-resolver-rules={rules}", "--dump-dom", url]
    with (folder.with_suffix(".log")).open("wb") as log:
        browser = subprocess.Popen(
            [chromium, *words],
            env=os.environ | {"HOME": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            browser.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


@pytest.fixture(scope="module")
def own_port() -> int:
    """A port for the server of a page of one's own, whose origin the proxy is told of."""
    return free_port()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, own_port: int) -> Iterator[Any]:
    """A proxy without keys over an embedded engine, with something in its log."""
    from rollbook.demo.model import make_model

    folder = tmp_path_factory.mktemp("browser")
    make_model(folder / "model", seed=0)
    options = ("--store", folder / "store", "--model", folder / "model", "--threads", 1)
    with Server("proxy", folder, *options, "--allow-origin", f"http://localhost:{own_port}") as server:
        server.await_ready()
        _chat(server.url, SECRET)
        yield server


def _chat(url: str, name: str) -> None:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 2}
    httpx.post(f"{url}/t/{name}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def _log(proxy: Any) -> list[Any]:
    path = Path(proxy.child.args[proxy.child.args.index("--store") + 1])
    return [event.record for event in store.open(path).events()]


def _check_untouched(proxy: Any, answers: dict[str, str]) -> None:
    """The page ran to its end; nothing of it is in the log, the engine goes on, and it read nothing."""
    assert len(answers) == 19, answers
    assert not any(SECRET in answer for answer in answers.values()), answers
    assert not any("trajectory.opened" in answer for answer in answers.values())
    assert answers["socket"] == answers["events, streamed"] == "error"
    records = _log(proxy)
    opened = [r.name for r in records if isinstance(r, TrajectoryOpened)]
    assert [name for name in opened if name.startswith("page")] == []
    assert [r for r in records if isinstance(r, EngineControlled | CursorMoved)] == []
    assert httpx.get(f"{proxy.url}/engine/server_info").json()["paused"] is None
    _chat(proxy.url, f"after-{len(opened)}")


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1", "localhost"])
def test_a_page_of_another_origin_is_refused(chromium: str, proxy: Any, tmp_path: Path, host: str) -> None:
    """Pages of another host, and of another port of this host, change nothing and read nothing."""
    attacker = Attacker("127.0.0.1", 0, proxy.url)
    try:
        page = f"http://{host}:{attacker.port}/page"
        _browse(chromium, tmp_path / "profile", page, "MAP evil.test 127.0.0.1")
        _check_untouched(proxy, attacker.told)
        assert attacker.told["events"].startswith("refused by the browser")
        assert attacker.told["chat, text"].startswith("0 opaque")
    finally:
        attacker.close()


def test_a_rebound_dns_name_is_refused(chromium: str, proxy: Any, tmp_path: Path) -> None:
    """After DNS rebinding the browser takes the proxy for the page's own server: each request is a 421."""
    port = httpx.URL(proxy.url).port
    assert port is not None
    attacker = Attacker(REBOUND, port, f"http://evil.test:{port}", proxy.url)
    try:
        page = f"http://evil.test:{port}/page"
        _browse(chromium, tmp_path / "profile", page, f"MAP evil.test {REBOUND}")
        answers = attacker.told
        _check_untouched(proxy, answers)
        for name in ("models", "events", "health", "chat, json", "pause", "pause, json", "cursor"):
            assert answers[name].startswith("421 basic"), (name, answers[name])
            assert "foreign_host" in answers[name]
        assert "foreign_host" in answers["chat, form"]
    finally:
        attacker.close()


def test_a_page_of_an_allowed_origin_is_served(
    chromium: str, proxy: Any, tmp_path: Path, own_port: int
) -> None:
    """The same page from an allowed origin is served, so the refusals elsewhere are deliberate."""
    attacker = Attacker("127.0.0.1", own_port, proxy.url)
    try:
        _browse(
            chromium, tmp_path / "profile", f"http://localhost:{own_port}/page", "MAP evil.test 127.0.0.1"
        )
        answers = attacker.told
        assert answers["models"].startswith("200 cors")
        assert SECRET in answers["events"]
        assert answers["pause, json"].startswith("200 cors")
        records = _log(proxy)
        opened = [r.name for r in records if isinstance(r, TrajectoryOpened)]
        assert "page-json" in opened  # and waits, as the engine is paused
        # A body that any page could send is refused, whoever's page it is.
        assert {"page-text", "page-untyped", "page-form", "page-beacon", "page-opened"} & set(opened) == set()
        actions = [r.action for r in records if isinstance(r, EngineControlled)]
        assert "pause_generation" in actions
    finally:
        attacker.close()
        httpx.post(f"{proxy.url}/engine/continue_generation")
