"""A pytest plugin: agents in tests are answered from recorded trajectories, in the test's own process.

It is installed with Rollbook; what it needs is imported when a test first asks for it. See docs/cassettes.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rollbook.cassettes.cassette import Cassette

MARKER = "rollbook_cassette"
ALL = "select trajectory_id from trajectories order by opened, trajectory_id"
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Set to `none` where the environment has none: the clients insist on one."""


class PlayedCassette:
    """A cassette that is served to one test.

    Attributes:
        url: its address, as Anthropic's clients take it.
        base_url: the same as OpenAI's clients take it.
    """

    def __init__(self, cassette: Cassette, url: str) -> None:
        self._cassette = cassette
        self.url, self.base_url = url, f"{url}/v1"

    @property
    def unused(self) -> list[str]:
        """The recorded requests that nothing asked for so far, such as `turn 2 of task-7`."""
        return [f"turn {request.number} of {request.name}" for request in self._cassette.unused]

    @property
    def misses(self) -> list[str]:
        """What differs from the nearest recorded request, for each request that was not recorded."""
        return [miss.near.text if miss.near else miss.asked.endpoint for miss in self._cassette.misses]

    def assert_all_used(self) -> None:
        """Fail unless every recorded request was asked for.

        Raises:
            AssertionError: naming those that were not.
        """
        assert not self.unused, f"not asked for: {', '.join(self.unused)}"

    def assert_no_misses(self) -> None:
        """Fail if a request was not recorded.

        Raises:
            AssertionError: with what differs.
        """
        assert not self.misses, "requests that were not recorded:\n" + "\n".join(self.misses)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    text = f"{MARKER}(source, trajectory=..., query=...): answer this test's agents from a recording"
    config.addinivalue_line("markers", text)


@pytest.fixture
def rollbook_cassette(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Serve a recording to this test: a function to call with its source, or, marked, what is served.

    With a marker of the same name the value is the `PlayedCassette` that its arguments make; else a function
    of the same arguments. `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL` lead to it until the test ends, which
    fails if a request was not recorded.

    Args:
        source: folder of a store, or a file that `rollbook export --format jsonl` wrote.
        trajectory: a client's name, an id or its end, or several; without it and a query: all.
        query: SQL over the views that gives trajectory ids.
        run, as_of: as for `rollbook replay serve`.
        ignore: names of request fields that need not be the same.
        timing: replies take as long as they were recorded to take.
        allow_misses: the test does not fail because of a request that was not recorded.
    """
    with contextlib.ExitStack() as served:
        strict: list[PlayedCassette] = []

        def play(source: str | os.PathLike[str], *, allow_misses: bool = False, **how: Any) -> PlayedCassette:
            played = served.enter_context(_playing(Path(source), tmp_path_factory, **how))
            monkeypatch.setenv("OPENAI_BASE_URL", played.base_url)
            monkeypatch.setenv("ANTHROPIC_BASE_URL", played.url)
            for name in KEYS:
                monkeypatch.setenv(name, os.environ.get(name) or "none")
            strict.extend([] if allow_misses else [played])
            return played

        marker = request.node.get_closest_marker(MARKER)
        yield play if marker is None else play(*marker.args, **marker.kwargs)
        for played in strict:
            if played.misses:
                pytest.fail("requests that were not recorded:\n" + "\n".join(played.misses), pytrace=False)


@pytest.fixture(autouse=True)
def _rollbook_cassette_of_marker(request: pytest.FixtureRequest) -> None:
    """Serve what a test is marked with, also where it asks for no fixture."""
    if request.node.get_closest_marker(MARKER) is not None:
        request.getfixturevalue(MARKER)


@contextlib.contextmanager
def _playing(
    source: Path,
    folders: pytest.TempPathFactory,
    *,
    trajectory: str | Sequence[str] = (),
    query: str | None = None,
    run: str | None = None,
    as_of: str = "head",
    ignore: Sequence[str] = (),
    timing: bool = False,
) -> Iterator[PlayedCassette]:
    """A cassette, served by a thread while the context lasts."""
    from rollbook.cassettes.app import CassetteOptions, build_cassette_app
    from rollbook.cli.replay.serve import read_cassette
    from rollbook.testing.asgi import serving

    names = [trajectory] if isinstance(trajectory, str) else list(trajectory)
    query = ALL if query is None and not names else query
    cassette = read_cassette(_store_of(source, folders), names, query, run, as_of, ignore)
    with serving(build_cassette_app(cassette, CassetteOptions(timing=timing))) as url:
        yield PlayedCassette(cassette, url)


def _store_of(source: Path, folders: pytest.TempPathFactory) -> Path:
    """The store, or one that is made of an exported file."""
    if not source.is_file():
        return source
    from rollbook.store.interchange.importing import import_chats

    store = folders.mktemp("rollbook-cassette") / "store"
    import_chats(source, store, "imported")
    return store
