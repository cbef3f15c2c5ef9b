"""Pages in a real Chromium: what its script does, and that nothing is refused or fails on the way.

It needs Chromium (Debian's package `chromium`). Where there is none the tests are skipped and say so, unless
ROLLBOOK_BROWSER=required, which `.ci/run` sets where it could install one.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Page, expect, sync_playwright
from tests.fakes.stories import fabric
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.testing.asgi import listen
from rollbook.viewer.app import build_view_app
from rollbook.viewer.snapshots import Snapshots

SHOTS = os.environ.get("ROLLBOOK_SCREENSHOTS")
"""Folder in which each test leaves a picture of the page that it ended with."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store on which a model was trained, and which grows."""
    return rb.open(shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("seen") / "store"))


@pytest.fixture(scope="module")
def address(log: Store) -> Iterator[str]:
    """Where its viewer is."""
    snapshots = Snapshots(log)
    with listen() as listener:
        config = uvicorn.Config(build_view_app(snapshots), log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/view"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
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


def test_a_run_is_drawn(page: Page, address: str) -> None:
    """Its parts come by themselves: signs, curves, ledger, steps; a curve leads to a step, keys to rows."""
    page.goto(f"{address}/runs")
    expect(page.locator("td", has_text="No sign of failure")).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/view/runs/demo$"))
    expect(page.locator(".curve canvas").first).to_be_visible()
    assert page.locator(".curve h3", has_text="loss").count() == 1
    expect(page.locator(".ledger")).to_contain_text("trained")
    expect(page.locator(".ok", has_text="It balances")).to_be_visible()
    page.locator("main a", has_text=re.compile("^11$")).click()
    expect(page.locator(".ok", has_text="their digest is the step's")).to_be_visible()
    page.get_by_role("button", name="advantage").click()
    expect(page.get_by_role("button", name="advantage")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("u")
    expect(page).to_have_url(re.compile("/view/runs/demo$"))


def test_tokens_change_their_colours(page: Page, address: str) -> None:
    """By what is asked for; and one that is clicked tells what is known of it."""
    page.goto(f"{address}/runs/demo/steps/actor/11")
    page.locator("#samples a").first.click()
    trained = page.locator(".sampled p i")
    expect(trained.first).to_have_class(re.compile("^c[0-9a-f]$"))
    page.get_by_role("button", name="mask").click()
    expect(page.locator("#legend")).to_contain_text("trained")
    expect(trained.first).to_have_class("c0")
    expect(page.locator(".prompt p i").first).to_have_class("")
    trained.first.click()
    expect(page.locator("#card")).to_contain_text("step")
    expect(page.locator("#card")).to_contain_text("advantage")
    assert trained.first.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_live_lines_come(page: Page, address: str, log: Store) -> None:
    """Soon after they are durable, and what is open with them."""
    page.goto(f"{address}/live")
    expect(page.locator("#live-state")).to_have_text("live")
    with log.writer("another") as writer:
        records = [kinds.TrajectoryOpened("fresh", "fresh <i>"), turn_requested("fresh", "f1")]
        writer.append([Event(record, "demo") for record in records]).result(30)
        expect(page.locator("#lines")).to_contain_text("fresh <i>", timeout=3000)
        expect(page.locator("caption")).to_contain_text("1 trajectory is open")
        records = [turn_completed("fresh", "f1", reply={"content": "<img src=x onerror=alert(1)>"})]
        writer.append([Event(record, "demo") for record in records]).result(30)
    expect(page.locator("#lines")).to_contain_text("<img src=x onerror=alert(1)>", timeout=3000)
    assert page.locator("#lines img, #lines i").count() == 0


def test_dark_and_light(page: Page, address: str) -> None:
    """As a reader says, also on the next page; the list of keys opens by its key."""
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}/trajectories")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Dark or light").click()
    page.goto(f"{address}/live")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


@pytest.mark.parametrize("path", ["/runs", "/runs/demo", "/trajectories", "/sql", "/live"])
def test_a_narrow_screen_is_enough(page: Page, address: str, path: str) -> None:
    """At 360 px nothing but tables within their own frames is wider than the screen."""
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(address + path)
    page.wait_for_load_state("networkidle" if path != "/live" else "load")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
