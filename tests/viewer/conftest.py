"""Viewers of stores, asked without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.viewer.app import PREFIX, build_view_app
from rollbook.viewer.snapshots import Snapshots


class Viewer:
    """A viewer of one store."""

    def __init__(self, log: Store) -> None:
        self.log, self.snapshots = log, Snapshots(log)
        self._client = TestClient(build_view_app(self.snapshots), raise_server_exceptions=False)
        self.close = self.snapshots.close

    def get(self, path: str, **query: Any) -> Any:
        """The reply at an address behind `/view`."""
        return self._client.get(PREFIX + path, params=query)

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
def view() -> Iterator[Callable[[Store], Viewer]]:
    """Makes viewers, which are closed in the end."""
    with ExitStack() as stack:

        def make(log: Store) -> Viewer:
            viewer = Viewer(log)
            stack.callback(viewer.close)
            return viewer

        yield make


@pytest.fixture(scope="session")
def trained_view(view: Callable[[Store], Viewer]) -> Viewer:
    """The viewer of a store on which a model was trained. Never write to it."""
    return view(rb.open(fabric.trained_path()))
