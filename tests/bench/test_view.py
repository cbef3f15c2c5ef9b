"""bench view, in small: every page is asked for, what is found is there, and each measure can fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from tests.bench.conftest import TURNS_HERE

from rollbook import store as rb
from rollbook.bench import view, view_pages
from rollbook.bench.figure import Figure
from rollbook.bench.processes import BenchError
from rollbook.bench.rounds import Limit
from rollbook.bench.scale_store import borrowed
from rollbook.bench.scripted.asgi import Message, Receive, Send, reply, until_gone
from rollbook.bench.view import COMMON, RARE, Plan
from rollbook.bench.view_browser import (
    RANDOM,
    TEXT,
    Live,
    Painted,
    Wire,
    chromium,
    write_samples,
)
from rollbook.bench.view_live import LINES, LivePages
from rollbook.bench.view_outcome import Measured
from rollbook.bench.view_pages import Asked, Cold, Named, Viewer, script_lines, shipped_bytes, things, visits
from rollbook.bench.view_recording import ALONE, WATCHED, Lap, Load
from rollbook.bench.view_turns import Turn, trajectory
from rollbook.store import Store
from rollbook.store.fold.trajectory import fold
from rollbook.testing.asgi import serving
from rollbook.train.select.samples import samples_of
from rollbook.viewer.app import build_viewer
from rollbook.viewer.pages import Page
from rollbook.viewer.snapshots import Snapshots

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


SMALL = Plan(
    turns=TURNS_HERE,
    asks=2,
    starts=1,
    searches=1,
    tokens=1024,
    visits=1,
    live_turns=5,
    load=Load(Limit(1, 60.0), pages=2, concurrency=2, trajectories=2, turns=2),
)


@pytest.fixture(scope="module")
def rounds() -> list[None]:
    """An entry for each time that a measurement told of its progress."""
    return []


@pytest.fixture(scope="module")
def measured(folder: Path, rounds: list[None]) -> Measured:
    """All that there is to measure, of the smallest store there is; pages are not waited for to grow old."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view_pages, "FRESH_S", -view_pages.MARGIN_S)
        return view.measure(folder, SMALL, lambda: rounds.append(None))


@pytest.fixture(scope="module")
def log(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A copy of that store, to which the rare word is added."""
    with borrowed(folder / f"turns-{TURNS_HERE}/store", tmp_path_factory.mktemp("view")) as copy:
        log = rb.open(copy)
        with log.writer(view.LANE) as writer:
            writer.append(trajectory("added", [Turn("What?", RARE)]).events).result()
        yield log


@pytest.fixture(scope="module")
def viewer(log: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """A process that shows it."""
    with Viewer(log.path, tmp_path_factory.mktemp("process")) as viewer:
        yield viewer


def test_all_of_it_is_measured(measured: Measured, rounds: list[None], folder: Path) -> None:
    """As often as it says; nothing is left; every figure has a value."""
    assert len(rounds) == SMALL.steps - (0 if measured.painted else SMALL.visits)
    assert not list(folder.glob(".rollbook-bench-*"))
    figures = _figures(measured)
    assert figures.keys() == _figures(_measured() if measured.painted else _without_chromium()).keys()
    assert all(figure.value > 0 for figure in figures.values())
    assert [len(measured.colds), *map(len, measured.searches.values())] == [1, 1, 1]


def test_every_page_is_asked_for(measured: Measured, log: Store) -> None:
    """And each once more when the log has grown; the live page's part tells of what is open."""
    routes = [str(getattr(route, "path", "")) for route in build_viewer(Snapshots(log)).routes]
    twins = {path.removesuffix(".json") for path in routes if path.endswith(".json")}
    assert {path for path, _ in visits()} == twins
    pages = {page.page: page for page in measured.pages}
    assert len(pages) == len(visits())
    assert {len(page.warm_s) for page in pages.values()} == {SMALL.asks}
    assert all(0 < page.warm_s[0] < 60 and page.first_s > 0 for page in pages.values())
    assert set(measured.grown_s) == {page.partition("?")[0] for page in pages}
    assert pages[view_pages.OPEN_PAGE].bytes > 300


def test_samples_and_live_turns_are_seen(measured: Measured) -> None:
    """In Chromium, where there is one; bytes and lines are counted without."""
    required = os.environ.get("ROLLBOOK_BROWSER") == "required"
    assert measured.painted or not required, "no Chromium: apt-get install chromium"
    for visited in measured.painted.values():
        assert [0 < each.painted_s < 60 and 0 < each.scrolled_s < 60 for each in visited] == [True]
    assert measured.wires[RANDOM].page > measured.wires[TEXT].page > SMALL.tokens
    assert measured.wires[TEXT].files > 10_000
    assert len(measured.live.heard_ms) == SMALL.live_turns
    assert len(measured.live.seen_ms) == (SMALL.live_turns if measured.painted else 0)
    assert all(-1_000 < ms < 30_000 for ms in measured.live.heard_ms)  # the tail may be the first to know
    assert all(0 < ms < 30_000 for ms in measured.live.seen_ms)


def test_both_sides_of_a_recording_have_laps(measured: Measured) -> None:
    """One a round; without live pages there is no viewer."""
    [watched], [alone] = measured.laps[WATCHED], measured.laps[ALONE]
    assert min(watched.turns_per_s, alone.turns_per_s) > 0
    assert alone.viewer_ms == 0


def test_a_page_that_is_not_answered_is_no_measure(
    log: Store, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the server said; a part of a path of which nothing is known is named."""
    absent = [Named(0, 0, "none", "none", "none")]
    monkeypatch.setattr(view_pages, "PAGES", [Page("/trajectories/{trajectory_id}", "x", lambda *_: None)])
    with pytest.raises(BenchError, match="/view/trajectories/none with 404"):
        view_pages.ask_pages(viewer, absent, 1, 1.0, lambda: None)
    with pytest.raises(BenchError, match=r"/things/\{colour\} has a part 'colour'"):
        absent[0].address("/things/{colour}", "")


def test_a_search_finds_its_word(viewer: Viewer) -> None:
    """In the one turn that was added; one that does not stand where it should is no measure."""
    assert view_pages.search(viewer, RARE, 1) > 0
    with pytest.raises(AssertionError, match="shows 1 hits, and there are 2"):
        view_pages.search(viewer, RARE, 2)


def test_things_are_spread_over_the_run(log: Store) -> None:
    """Each is a sample of another step, with a trajectory to compare it with."""
    named = things(log, 3)
    assert named
    assert len({each.turn_id for each in named}) == len({each.step for each in named}) == len(named)
    assert all(each.other_id != each.trajectory_id for each in named)
    assert named[0].address("/x/{step}", "other={other_id}").endswith(f"/x/0?other={named[0].other_id}")


def test_what_is_shipped(tmp_path: Path) -> None:
    """A package's files as a wheel packs them, without caches; lines of scripts that are not others'."""
    package = tmp_path / "viewer"
    for name, text in {
        "app.py": "a = 1\n" * 500,
        "__pycache__/app.pyc": "x" * 9000,
        "static/own.js": "let a;\nlet b;\n",
        "static/vendor/other.js": "let c;\n" * 50,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert script_lines(package) == 2
    few = shipped_bytes(package)
    assert 300 < few < 1500
    (package / "more.bin").write_bytes(np.random.default_rng(0).bytes(5000))
    assert 5000 < shipped_bytes(package) - few < 5500


def test_a_trajectory_is_as_the_proxy_records_one() -> None:
    """Its turns follow each other, and make one sample of exactly these tokens."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(8, 256, 2 * size).astype(np.int32) for size in (5, 7, 9)]
    turns = [
        Turn(f"m{i}", f"r{i}", half[: len(half) // 2], half[len(half) // 2 :]) for i, half in enumerate(ids)
    ]
    written = trajectory("long", turns, version=3)
    [folded] = fold([*written.events]).values()
    [sample] = samples_of(folded)
    assert sample.leaf_turn_id == written.leaf
    assert np.array_equal(sample.tokens, np.concatenate(ids))
    assert sample.trained == 21
    assert sorted(set(sample.versions[sample.loss_mask].tolist())) == [3, 4, 5]


def test_samples_have_as_many_tokens_as_they_say(log: Store, tmp_path: Path) -> None:
    """Of each kind."""
    with log.writer(view.LANE) as writer:
        samples = write_samples(writer, tmp_path / "model", 640)
    found = log.trajectories(ids=[sample.trajectory_id for sample in samples.values()])
    for sample in samples.values():
        [tokens] = samples_of(found[sample.trajectory_id])
        assert (tokens.leaf_turn_id, len(tokens)) == (sample.leaf, 640)


def test_where_there_is_no_chromium(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is said; what it was needed for has no figure, and the rest has."""
    monkeypatch.setenv("PATH", "")
    with chromium() as browser:
        assert browser is None
    assert "left out: apt-get install chromium" in capsys.readouterr().err
    without = _without_chromium()
    names = {"view.tokens_paint_s", "view.live_p95_ms"}
    assert _figures(_measured()).keys() - _figures(without).keys() == names
    assert view.outcome(without).spreads


def test_a_page_that_hears_too_little_is_seen() -> None:
    """A stream without the lines that it should have, and one that is refused, are no measure."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] != LINES:
            return await reply(send, 503, {})
        lines = orjson.dumps({"lines": ["<a>It is mark-000001.</a>"], "missed": 2})
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"id: 3\nda", b"ta: " + lines + b"\n", b"\n: still here\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await until_gone(receive)

    with serving(app) as url, LivePages(url, 2) as pages:
        with pytest.raises(AssertionError, match=r"a live page got no answer: .*503"):
            pages.wait(4, 0.3)
        assert pages.counts == [3, 3]
        assert {page.status for page in pages.pages} == {200}
        [(came, line)] = pages.pages[0].heard
        assert (line, abs(came - time.time()) < 30) == ("<a>It is mark-000001.</a>", True)
        pages.failures.clear()
        with pytest.raises(AssertionError, match="had 3 lines of 4"):
            pages.wait(4, 0.1)


def _measured() -> Measured:
    pages = [
        Asked("/fast", 9.0, [0.01] * 20, 0.01, 900),
        Asked("/slow", 0.1, [0.1] * 18 + [0.3, 0.9], 0.1, 9_000),
        Asked("/middle", 0.1, [0.15] * 20, 0.125, 9_000),
    ]
    return Measured(
        1_000_000,
        pages,
        {"/fast": 0.5, "/slow": 2.0, "/middle": 0.75},
        [Cold(1.0, 1.25, 1.0), Cold(1.0, 2.0, 1.1), Cold(1.5, 1.75, 1.2)],
        {RARE: [1.0, 3.0, 2.0], COMMON: [0.1, 0.2, 0.3]},
        {RANDOM: Wire(600_000, 40_000), TEXT: Wire(250_000, 40_000)},
        {RANDOM: _visits(0.5, 2.0, 0.75), TEXT: _visits(0.5, 0.25)},
        Live([1.0] * 19 + [9.0], [30.0] * 18 + [50.0, 90.0]),
        {
            ALONE: [Lap(400.0, 2.0, 0.0), Lap(100.0, 2.0, 0.0), Lap(200.0, 2.5, 0.0)],
            WATCHED: [Lap(300.0, 2.0, 0.5), Lap(99.0, 2.0, 0.5), Lap(180.0, 2.5, 0.75)],
        },
        250_000,
        200,
    )


def _without_chromium() -> Measured:
    return replace(_measured(), painted={}, live=Live([1.0], []))


def _visits(*painted_s: float) -> list[Painted]:
    return [Painted(seconds, 3.0, 0.01) for seconds in painted_s]


def _figures(measured: Measured) -> dict[str, Figure]:
    return {f.figure: f for f in view.outcome(measured).figures}


def test_the_values_of_the_figures() -> None:
    """The slowest page by its 95th percentile, without its first reply; the others are medians."""
    figures = _figures(_measured())
    assert {name: f.value for name, f in figures.items()} == {
        "view.page_p95_ms": 300.0,
        "view.page_cpu_ms": 125.0,
        "view.grown_ms": 2000.0,
        "view.cold_s": 1.75,
        "view.tokens_paint_s": 0.75,
        "view.tokens_mb": 0.6,
        "view.live_p95_ms": 50.0,
        "view.search_rare_s": 2.0,
        "view.search_common_s": 0.2,
        "view.wheel_mb": 0.25,
        "view.js_lines": 200,
        "view.recording_ratio": 0.9,
    }
    assert str(figures["view.tokens_mb"].against).startswith("random tokens 0.60 MB, text tokens 0.25 MB; ")
    assert str(figures["view.recording_ratio"].against).startswith(
        "180 beside ten live pages, 200 turns/s without"
    )
    assert figures["view.page_p95_ms"].runs == 20
    assert str(figures["view.page_p95_ms"].against) == (
        "/slow; then /middle 150, /fast 10 ms; 1 of 3 pages beyond the goal <= 200"
    )
    slower = replace(_measured(), pages=[Asked("/fast", 0.1, [1.0] * 20, 0.1, 9), *_measured().pages[1:]])
    assert str(_figures(slower)["view.page_p95_ms"].against).startswith("/fast; then /slow 300")


def test_the_scale_sets_the_turns() -> None:
    """`--scale 1` is a million."""
    assert Plan().turns == view.sized(1).turns == 1_000_000
    assert view.sized(0.01).turns == 10_000
    assert view.sized(1e-9).turns == 1_000
