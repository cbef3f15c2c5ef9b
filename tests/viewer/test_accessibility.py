"""Pages for everybody: what axe-core finds, what keys alone reach, and what recorded attacks do in Chromium.

Pictures of all pages, dark and light, on wide and narrow screens, are left where ROLLBOOK_SCREENSHOTS says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.fakes.stories import fabric, hard
from tests.viewer.conftest import SHOTS, Viewer

from rollbook import store as rb
from rollbook.store import Store
from rollbook.viewer.rendering import part

SCRIPT = part(hard.SCRIPT)
TRAINED = {
    "runs": "/runs",
    "run": "/runs/demo",
    "step": "/runs/demo/steps/actor/11",
    "sample": "/trajectories/g4.0/samples/g4.0.1?run=demo&step=11",
    "trajectory": "/trajectories/g4.0",
    "raw": "/trajectories/g4.0/turns/g4.0.1",
    "trajectories": "/trajectories",
    "pair": "/compare/trajectories?left=g4.0&right=g4.1",
    "versions": "/compare/tasks?left=demo&right=demo",
    "two-steps": "/compare/steps?left=demo/actor/10&right=demo/actor/11",
    "what-if": "/runs/demo/steps/actor/11/what-if",
    "live": "/live",
    "sql": "/sql?q=select+*+from+turns+limit+5",
}
EMPTY = {"runs": "/runs", "trajectories": "/trajectories", "words": "/trajectories?q=a", "live": "/live"}
HARD = {
    "runs": "/runs",
    "run": f"/runs/{SCRIPT}",
    "step": f"/runs/{SCRIPT}/steps/{SCRIPT}/0",
    "numbers": "/runs/hard/steps/actor/0",
    "attacks": "/trajectories/attacks",
    "raw": "/trajectories/attacks/turns/attacks.0",
    "images": "/trajectories/images",
    "erased": "/trajectories/erased",
    "forks": "/trajectories/forks?from=501",
    "chain": "/trajectories/chain?from=101",
    "words": "/trajectories?q=script",
    "pair": "/compare/trajectories?left=attacks&right=images",
    "live": "/live",
}


@pytest.fixture(scope="module")
def addresses(served: Callable[[Store], str], hard_view: Viewer, tmp_path_factory: Any) -> dict[str, str]:
    """Where the viewers of a trained, an empty and a hard store are."""
    folder = tmp_path_factory.mktemp("seen")
    trained = rb.open(shutil.copytree(fabric.trained_path(), folder / "trained"))
    empty = rb.open(folder / "empty", create=True)
    return {"trained": served(trained), "empty": served(empty), "hard": served(hard_view.log)}


def _open(page: Page, address: str) -> None:
    page.goto(address)
    if address.endswith("/live"):  # its lines never end
        expect(page.locator("#live-state")).to_have_text("live")
        expect(page.locator("section[aria-label='Open trajectories'] > *")).to_have_count(1)
    else:
        page.wait_for_load_state("networkidle")


@pytest.mark.more_but("trained")
@pytest.mark.parametrize("kind", ["trained", "empty", "hard"])
def test_axe_finds_nothing(page: Page, addresses: dict[str, str], kind: str) -> None:
    """Nothing of any weight: contrast, names, landmarks, headings, labels; in the dark and in the light."""
    pages = {"trained": TRAINED, "empty": EMPTY, "hard": HARD}[kind]
    found = []
    for name, path in pages.items():
        page.emulate_media(color_scheme="light")
        _open(page, addresses[kind] + path)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            # In the dark nothing but the colours is another.
            rules = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
            for violation in (
                Axe().run(page, options=rules | {"resultTypes": ["violations"]}).response["violations"]
            ):
                nodes = [node["target"] for node in violation["nodes"][:3]]
                found.append((name, scheme, violation["impact"], violation["id"], nodes))
            for width in (360, 1200) if SHOTS or scheme == "dark" else ():
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
                if SHOTS:
                    page.screenshot(path=Path(SHOTS) / f"{kind}-{name}-{scheme}-{width}.png")
    assert found == []


def test_tokens_by_keys_alone(page: Page, addresses: dict[str, str]) -> None:
    """Tab reaches the tokens, arrows go among them and their parts, Enter tells what is known of one."""
    _open(page, addresses["trained"] + TRAINED["sample"])
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.tokens i')"):
            break
    chosen = page.locator(".tokens i:focus")
    everything = page.locator(".tokens i")
    assert chosen.evaluate("e => [...document.querySelectorAll('.tokens i')].indexOf(e)") == 0
    for key, place in (
        ("ArrowRight", 1),
        ("ArrowDown", 3),
        ("ArrowLeft", 2),
        ("ArrowUp", 2),
        ("ArrowDown", 3),
    ):
        page.keyboard.press(key)
        at = chosen.evaluate("e => [...document.querySelectorAll('.tokens i')].indexOf(e)")
        assert at == place, key
    assert chosen.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#card[aria-live=polite]")).to_contain_text("advantage")
    expect(page.locator("#card")).to_contain_text("place 3")
    expect(everything.nth(3)).to_have_attribute("role", "button")
    assert page.locator(".tokens [tabindex]").count() == 1


def test_recorded_attacks_do_nothing(page: Page, addresses: dict[str, str]) -> None:
    """No dialog, no request to anywhere else, no element, and nothing that the policy had to refuse."""
    address, asked = addresses["hard"], []
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error(e.blockedURI));"
        "addEventListener('popstate', () => console.error('moved'));"
    )
    for path in (
        *("/runs", f"/runs/{SCRIPT}", f"/runs/{SCRIPT}/steps/{SCRIPT}/0", "/trajectories/attacks"),
        *(
            "/trajectories/images",
            "/trajectories?q=onerror",
            "/trajectories/attacks/turns/attacks.0",
            "/live",
        ),
        "/sql?q=SELECT+extra+FROM+events+WHERE+trajectory_id='attacks'",
    ):
        _open(page, address + path)
        page.evaluate("document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
        made = page.locator(
            "main :is(img, iframe, script, base, link, meta, object), svg a, a[href^='javascript']"
        ).count()
        assert (made, page.locator("#theme").count()) == (0, 1), path
        assert page.url.startswith(address), path
    assert [url for url in asked if not url.startswith(address)] == []
