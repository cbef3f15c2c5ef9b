"""Viewers of stores, asked without a socket, or shown by a real Chromium.

Chromium is Debian's package `chromium`. Where there is none the tests that need it are skipped and say so,
unless ROLLBOOK_BROWSER=required, which `.ci/run` sets where it could install one.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Page, sync_playwright
from starlette.testclient import TestClient
from tests.fakes.stories import fabric, hard

from rollbook import store as rb
from rollbook.edge.keys import Keys
from rollbook.edge.web_pages import AllowedHosts
from rollbook.store import Store
from rollbook.testing.asgi import listen
from rollbook.viewer.app import PREFIX
from rollbook.viewer.serve import guarded_viewer
from rollbook.viewer.snapshots import Snapshots

SHOTS = os.environ.get("ROLLBOOK_SCREENSHOTS")
"""Folder in which pages leave pictures of themselves."""


class Viewer:
    """A viewer of one store."""

    def __init__(self, log: Store, keys: Keys | None = None, model: Path | None = None) -> None:
        self.log, self.snapshots = log, Snapshots(log, model)
        app = guarded_viewer(self.snapshots, keys or Keys(), AllowedHosts())
        self._client = TestClient(app, "http://127.0.0.1", raise_server_exceptions=False)
        self.close = self.snapshots.close

    def get(self, path: str, authorization: str = "", **query: Any) -> Any:
        """The reply at an address behind `/view`."""
        headers = {"authorization": authorization} if authorization else {}
        return self._client.get(PREFIX + path, params=query, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The reply to a body of JSON at an address behind `/view`."""
        return self._client.post(PREFIX + path, json=body, headers=headers)

    def html(self, path: str, **query: Any) -> str:
        """A page's text."""
        reply = self.get(path, **query)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8"), (
            reply.text
        )
        return str(reply.text)

    def json(self, path: str, **query: Any) -> Any:
        """What a page shows."""
        reply = self.get(f"{path}.json", **query)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="session")
def view() -> Iterator[Callable[..., Viewer]]:
    """Makes viewers, which are closed in the end."""
    with ExitStack() as stack:

        def make(log: Store, keys: Keys | None = None, model: Path | None = None) -> Viewer:
            viewer = Viewer(log, keys, model)
            stack.callback(viewer.close)
            return viewer

        yield make


@pytest.fixture(scope="session")
def trained_view(view: Callable[..., Viewer]) -> Viewer:
    """The viewer of a store on which a model was trained. Never write to it."""
    return view(rb.open(fabric.trained_path()))


@pytest.fixture(scope="session")
def hard_view(view: Callable[..., Viewer], tmp_path_factory: pytest.TempPathFactory) -> Viewer:
    """The viewer of a store with all that is hard. Never write to it."""
    path = tmp_path_factory.mktemp("hard") / "store"
    return view(hard.make(path, tokens=100_000, turns=350, depth=1_200))


# In Chromium ------------------------------------------------------------------------------------------


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Context: an application on a port of this host; where it is."""
    with listen() as listener:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@contextmanager
def serving(log: Store) -> Iterator[str]:
    """Context: a viewer of a store, as its command serves it; where its pages are."""
    with listening(guarded_viewer(Snapshots(log), Keys(), AllowedHosts())) as address:
        yield f"{address}{PREFIX}"


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[[Store], str]]:
    """Serves a viewer of a store, and says where."""
    with ExitStack() as stack:
        yield lambda log: stack.enter_context(serving(log))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; while it runs, this thread runs an event loop."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert os.environ.get("ROLLBOOK_BROWSER") != "required", "no Chromium: apt-get install chromium"
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page, which may say nothing on the console: neither errors, nor what its policy refused."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    yield opened
    if SHOTS:
        opened.screenshot(path=Path(SHOTS) / f"{request.node.name}.png")
    opened.close()
    assert said == []
