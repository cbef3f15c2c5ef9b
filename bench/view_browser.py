"""The viewer in a real Chromium: when a sample's tokens are painted, and when a turn is to be seen live.

A sample is one of 131,072 tokens in 16 turns. Of `text` they are real text, the standard library's
source as a byte-level BPE of 32,000 tokens has it, so that few tokens are frequent and most are rare; of
`random` each is as likely as any other, which no model says and no page compresses well.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollbook.bench.corpus import Corpus
from rollbook.bench.view_live import LivePages
from rollbook.bench.view_pages import Viewer, text_of
from rollbook.bench.view_turns import Turn, Written, trajectory
from rollbook.store.log.writer import LaneWriter
from rollbook.viewer.app import PREFIX

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
RANDOM, TEXT = "random", "text"
TURNS_OF_A_SAMPLE = 16
STATIC = re.compile(rf'(?:src|href)="({PREFIX}/static/[^"]+)"')
PAUSE_S = (0.01, 0.12)
"""Shortest and longest between two turns of the live page."""
PATIENCE_S = 30.0
_PAINTED = """() => new Promise((done) => {
  const told = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    const page = performance.getEntriesByType("navigation")[0];
    if (!paint || !page.loadEventEnd) return setTimeout(told, 20);
    const tokens = document.querySelectorAll(".tokens p i").length;
    done({ painted: paint.startTime, loaded: page.loadEventEnd, tokens });
  };
  told();
})"""
_SCROLLED = """() => new Promise((done) => {
  const begun = performance.now();
  scrollTo(0, document.body.scrollHeight / 2);
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
})"""
_WATCH = r"""() => {
  window.seenAt = {};
  new MutationObserver((changes) => {
    const marks = changes.flatMap(({ addedNodes }) => [...addedNodes])
      .map((line) => /It is (mark-\d+)/.exec(line.textContent)?.[1]).filter(Boolean);
    // A frame's callbacks run before it is painted: when the next frame's run, it has been.
    requestAnimationFrame(() => requestAnimationFrame(() => {
      for (const mark of marks) window.seenAt[mark] ??= (performance.timeOrigin + performance.now()) / 1000;
    }));
  }).observe(document.querySelector("#lines"), { childList: true });
}"""


@contextmanager
def chromium() -> Iterator[Browser | None]:
    """Context: Chromium; None, said once, where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("the browser's figures are left out: pip install playwright", file=sys.stderr)
        yield None
        return
    if path is None:
        print("the browser's figures are left out: apt-get install chromium", file=sys.stderr)
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


# Tokens ---------------------------------------------------------------------------------------------------


def write_samples(writer: LaneWriter, model: Path, length: int) -> dict[str, Written]:
    """Append a sample of each kind, of so many tokens, and write their tokenizer to a model's folder."""
    corpus = Corpus.of(max(8 * length, 1 << 16), min(32_000, max(length // 4, 512)))
    model.mkdir()
    corpus.tokenizer.save(str(model / "tokenizer.json"))
    rng = np.random.default_rng(0)
    text = corpus.ids[:length]
    assert len(text) == length, f"the text has {len(corpus.ids)} tokens, and not {length}"
    drawn = rng.integers(0, corpus.tokenizer.get_vocab_size(), length).astype(np.int32)
    samples = {}
    for kind, ids in ((RANDOM, drawn), (TEXT, text)):
        parts = np.array_split(ids, 2 * TURNS_OF_A_SAMPLE)
        words = corpus.tokenizer.decode_batch([part.tolist() for part in parts])
        pairs = zip(words[::2], words[1::2], parts[::2], parts[1::2], strict=True)
        samples[kind] = trajectory(f"{length} tokens, {kind}", [Turn(*pair) for pair in pairs])
        writer.append(samples[kind].events).result()
    return samples


def sample_address(sample: Written) -> str:
    """The address of a sample's page."""
    return f"{PREFIX}/trajectories/{sample.trajectory_id}/samples/{sample.leaf}"


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes of a sample's page, compressed, and of the files that a first visit loads besides."""

    page: int
    files: int


def wire(viewer: Viewer, sample: Written) -> Wire:
    """What a browser would be sent that shows a sample, and has never shown a page before."""
    reply = viewer.ask(sample_address(sample))
    files = sorted(set(STATIC.findall(text_of(reply))))
    assert files, "the page of a sample loads no file"
    return Wire(len(reply.body), sum(len(viewer.ask(file).body) for file in files))


@dataclass(frozen=True, slots=True)
class Painted:
    """One visit of a sample's page: seconds from navigation until its first contentful paint and until all
    is there; and of a jump to its middle, until that is painted."""

    painted_s: float
    loaded_s: float
    scrolled_s: float


def visit(browser: Browser, url: str, tokens: int) -> Painted:
    """Visit a page of so many tokens as a browser that has never been there.

    Raises:
        AssertionError: it shows another number of tokens.
    """
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    try:
        page.goto(url)
        told: dict[str, Any] = page.evaluate(_PAINTED)
        assert told["tokens"] == tokens, f"the page shows {told['tokens']} tokens of {tokens}"
        return Painted(told["painted"] / 1e3, told["loaded"] / 1e3, page.evaluate(_SCROLLED) / 1e3)
    finally:
        page.close()


# Live -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Live:
    """Milliseconds from each turn's acknowledgement until its line came over a stream, and until it was
    painted on a page of Chromium; none where there is no Chromium.

    The tail may see a turn a moment before its writer hears that it is durable.
    """

    heard_ms: Sequence[float]
    seen_ms: Sequence[float]


def watch_live(viewer: Viewer, browser: Browser | None, writer: LaneWriter, turns: int) -> Live:
    """Append so many turns, one after the other, while live pages are open.

    Raises:
        AssertionError: a turn's line does not come.
    """
    page = None if browser is None else _live_page(browser, viewer.url)
    try:
        with LivePages(viewer.url, 1) as pages:
            pages.wait(1)
            durable = _append_turns(writer, turns)
            heard = _until(durable, lambda: _marks(pages))
            seen = {} if page is None else _until(durable, lambda: _seen(page))
    finally:
        if page is not None:
            page.close()
    heard_ms = [1e3 * (heard[mark] - at) for mark, at in durable.items()]
    return Live(heard_ms, [1e3 * (seen[mark] - at) for mark, at in durable.items() if seen])


def _live_page(browser: Browser, url: str) -> Page:
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(f"{url}{PREFIX}/live")
    page.locator("#lines > *").first.wait_for()
    page.evaluate(_WATCH)
    return page


def _append_turns(writer: LaneWriter, turns: int) -> dict[str, float]:
    """Mark of a turn -> when it was acknowledged as durable, by the clock."""
    rng, durable = np.random.default_rng(0), dict[str, float]()
    for number in range(turns):
        mark = f"mark-{number:06}"
        opened, asked, *answered = trajectory(mark, [Turn("What is new?", f"It is {mark}.")]).events
        writer.append([opened, asked]).result()
        time.sleep(rng.uniform(*PAUSE_S))
        done = writer.append(answered)
        done.add_done_callback(lambda _, mark=mark: durable.setdefault(mark, time.time()))  # type: ignore[misc]
        done.result()
        time.sleep(rng.uniform(*PAUSE_S))
    return durable


def _marks(pages: LivePages) -> dict[str, float]:
    found: dict[str, float] = {}
    for time_s, line in list(pages.pages[0].heard):
        for mark in re.findall(r"It is (mark-\d+)", line):
            found.setdefault(mark, time_s)
    return found


def _seen(page: Page) -> dict[str, float]:
    seen: dict[str, float] = page.evaluate("window.seenAt")
    return seen


def _until(durable: Mapping[str, float], found: Any) -> dict[str, float]:
    """What was found, once all marks are in it."""
    deadline = time.monotonic() + PATIENCE_S
    while missing := durable.keys() - (seen := found()).keys():
        assert time.monotonic() < deadline, f"{len(missing)} of {len(durable)} turns did not come live"
        time.sleep(0.1)
    result: dict[str, float] = seen
    return result
