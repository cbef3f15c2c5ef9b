"""Pages of other origins neither read the viewer, nor frame it, nor act through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient
from tests.viewer.conftest import Viewer, listening

from rollbook.edge.keys import Key, Keys, Role, digest_of
from rollbook.edge.web_pages import AllowedHosts
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.viewer.serve import guarded_viewer

PATHS = (
    "/view/runs",
    "/view/runs.json",
    "/view/sql/rows.csv?q=select+1",
    "/view/live/lines",
    "/view/static/viewer.js",
)
SECRET = "what-nobody-else-may-read"
CROSS = {"sec-fetch-site": "cross-site"}


@pytest.fixture
def secret(store: Store) -> Store:
    """A store with a run."""
    with store.writer("serve") as writer:
        writer.append([Event(kinds.TrajectoryOpened("t", "t"), SECRET)]).result(30)
    return store


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.test"}, 421),
        ({"host": "evil.test:80", "origin": "http://evil.test"}, 421),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "null"}, 403),
        (CROSS | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        (CROSS | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        (CROSS | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 403),
    ],
    ids=str,
)
def test_a_request_of_another_origin(
    secret: Store, view: Callable[..., Viewer], path: str, headers: dict[str, str], status: int
) -> None:
    """Reaches no page, by whatever it is caused, and is given nothing that a browser would share."""
    viewer = view(secret)
    client = TestClient(guarded_viewer(viewer.snapshots, Keys(), AllowedHosts()), "http://127.0.0.1")
    reply = client.get(path, headers=headers)
    assert reply.status_code == status
    assert SECRET not in reply.text
    assert "access-control-allow-origin" not in reply.headers


def test_a_link_may_lead_here(secret: Store, view: Callable[..., Viewer]) -> None:
    """From any site; the page may be framed by none, shares its window with none, and is kept nowhere."""
    client = TestClient(guarded_viewer(view(secret).snapshots, Keys(), AllowedHosts()), "http://127.0.0.1")
    link = CROSS | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    reply = client.get("/view/runs", headers=link)
    assert (reply.status_code, SECRET in reply.text) == (200, True)
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["cross-origin-opener-policy"] == "same-origin"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-content-type-options"] == "nosniff"


ATTACK = """<!doctype html>
<iframe src="VIEW/runs"></iframe><script src="VIEW/runs.json"></script>
<script>
const told = {};
const tell = async (name, work) => {
  try { told[name] = String(await work()); } catch (error) { told[name] = "refused"; }
};
const give = (mode, type) => fetch("VIEW/trajectories/t/rewards", {
  method: "POST", mode, headers: { "content-type": type }, body: '{"reward": 1}',
});
(async () => {
  await tell("fetch", async () => (await fetch("VIEW/runs.json")).text());
  const opaque = { mode: "no-cors" };
  await tell("opaque", async () => (await (await fetch("VIEW/runs.json", opaque)).text()).length);
  await tell("post", async () => (await give("cors", "application/json")).status);
  await tell("form", async () => (await give("no-cors", "text/plain")).type);
  await tell("stream", () => new Promise((done) => {
    const source = new EventSource("VIEW/live/lines");
    source.onmessage = ({ data }) => done(data);
    source.onerror = () => done("refused");
  }));
  await tell("frame", () => document.querySelector("iframe").contentDocument?.body.innerText ?? "none");
  window.told = told;
})();
</script>"""


def test_an_attacking_page_in_chromium(browser: Any, secret: Store, served: Callable[[Store], str]) -> None:
    """It is told nothing, its frame is empty, and it gave no reward."""
    with listening(HTMLResponse(ATTACK.replace("VIEW", served(secret)))) as elsewhere:
        page = browser.new_page()
        page.goto(elsewhere)
        told = page.wait_for_function("window.told", timeout=30_000).json_value()
        frames = [frame.content() for frame in page.frames[1:]]
        page.close()
    assert told == {
        **dict.fromkeys(("fetch", "post", "stream"), "refused"),
        **{"opaque": "0", "form": "opaque", "frame": "none"},
    }
    assert not any(SECRET in text for text in frames)
    assert [event.kind for event in secret.events()] == ["trajectory.opened"]


def test_its_health_is_for_probes(secret: Store, view: Callable[..., Viewer]) -> None:
    """Which have no key, and ask by an address; of the log it says nothing."""
    keys = Keys([Key("reader-1", Role.reader, digest_of("the-readers"))])
    own = AllowedHosts(addresses=True)
    client = TestClient(guarded_viewer(view(secret).snapshots, keys, own), "http://10.0.0.7:8080")
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/view/runs").status_code == 401
