"""Pages in a real Chromium: what its script does, and that nothing is refused or fails on the way.

It needs Chromium: see `conftest`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.fakes.stories import fabric
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.viewer.export import Export
from rollbook.viewer.snapshots import Snapshots


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store on which a model was trained, and which grows."""
    return rb.open(shutil.copytree(fabric.trained_path(), tmp_path_factory.mktemp("seen") / "store"))


@pytest.fixture(scope="module")
def address(log: Store, served: Callable[[Store], str]) -> str:
    """Where its viewer is."""
    return served(log)


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


def test_a_person_judges(page: Page, address: str, log: Store) -> None:
    """A reward, a label and a preference by the page's own forms, which show what they have written."""
    with rb.connect(log.path) as connection:
        query = (
            "SELECT trajectory_id, trajectory FROM trajectories WHERE reward IS NOT NULL ORDER BY 1 LIMIT 2"
        )
        (left, name), (right, _) = connection.execute(query).fetchall()
    page.goto(f"{address}/trajectories/{left}")
    rewards = page.get_by_role("form", name="Give a reward")
    rewards.get_by_label("reward").fill("0.25")
    rewards.get_by_role("button").click()
    expect(page.locator("[aria-label=Remarks] td", has_text="human")).to_be_visible()
    labels = page.get_by_role("form", name="Add a label")
    labels.get_by_label("label").fill("garbled")
    labels.get_by_label("value").fill("true")
    labels.get_by_role("button").click()
    expect(page.locator("[aria-label=Remarks] th", has_text="garbled")).to_be_visible()
    page.get_by_role("link", name="Compare it").click()
    expect(page.locator("h1")).to_contain_text(f"Compare {name} with")
    page.goto(f"{address}/compare/trajectories?left={left}&right={right}")
    expect(page.locator("[aria-label='Where they part']")).to_contain_text(re.compile("At turn|the same"))
    page.get_by_role("button", name="This one is better").first.click()
    expect(page.locator("output").first).to_have_text("written")
    with rb.connect(log.path) as connection:
        given = connection.execute("SELECT reward FROM rewards WHERE source = 'human'").fetchall()
        query = "SELECT extra->>'$.name', extra->>'$.value' FROM events WHERE kind = 'label.added'"
        labelled = connection.execute(query).fetchall()
        preferred = connection.execute(
            "SELECT trajectory_id, rejected_trajectory_id FROM preferences"
        ).fetchall()
    assert (given, labelled, preferred) == ([(0.25,)], [("garbled", "true")], [(left, right)])


def test_an_exported_file_asks_nothing(page: Page, log: Store, tmp_path: Path) -> None:
    """It is shown as the page is, from a file, and no request leaves it."""
    snapshots = Snapshots(log)
    with snapshots.reading() as snapshot:
        (tmp_path / "step.html").write_text(Export(snapshot).step("demo", "actor", 11))
    snapshots.close()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "step.html").as_uri())
    expect(page.locator(".ok", has_text="their digest is the step's")).to_be_visible()
    page.locator("main > details > summary").last.click()
    expect(page.locator("main > details").last.locator("article.turn").first).to_be_visible()
    assert asked == [(tmp_path / "step.html").as_uri()]
