"""Pages of stores that are hard to show: hostile names, texts and images, long and wide trajectories."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
import pytest
from markupsafe import escape
from tests.fakes.models.text import make_tokenizer, write_text_model
from tests.fakes.stories import hard
from tests.viewer.conftest import Viewer

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.train.select.samples import samples_of
from rollbook.transcript import reading
from rollbook.transcript.text import visible
from rollbook.viewer import snapshots
from rollbook.viewer.app import PAGES
from rollbook.viewer.pages import Page
from rollbook.viewer.rendering import link, name_of, part
from rollbook.viewer.samples import COLOURS
from rollbook.viewer.trajectories import SHOWN

NAMED = [name for name in hard.NAMES if len(name) < 1000]
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
"""What drives a terminal, or leads the eye."""
SCRIPT = part(hard.SCRIPT)
NUMBERS = "/runs/hard/steps/actor/0"
ADDRESSES: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "/runs": [("/runs", {}, "quo&#34;te&#39;s")],
    "/runs/{run}": [("/runs/hard", {}, "quarantine"), (f"/runs/{SCRIPT}", {}, "&lt;script&gt;")],
    "/runs/{run}/signs/{policy}": [("/runs/hard/signs/actor", {}, "")],
    "/runs/{run}/ledger": [("/runs/hard/ledger", {}, "It balances")],
    "/runs/{run}/steps/{policy}": [("/runs/hard/steps/actor", {}, "1.7e+308")],
    "/runs/{run}/curves/{policy}": [("/runs/hard/curves/actor", {}, "loss")],
    "/runs/{run}/steps/{policy}/{step}": [(NUMBERS, {}, "-1.7e+308")],
    "/runs/{run}/steps/{policy}/{step}/samples": [
        (f"{NUMBERS}/samples", {"by": by}, "number-2") for by in ("position", "advantage", "reward")
    ],
    "/runs/{run}/steps/{policy}/{step}/what-if": [(f"{NUMBERS}/what-if", {"set": hard.SCRIPT}, "")],
    "/compare/trajectories": [("/compare/trajectories", {"left": "attacks", "right": "images"}, "alert(1)")],
    "/compare/tasks": [("/compare/tasks", {"left": hard.SCRIPT, "right": "a/b"}, "")],
    "/compare/steps": [("/compare/steps", {"left": "hard/actor/0", "right": "hard/actor/0"}, "1.7e+308")],
    "/trajectories": [
        ("/trajectories", {"run": hard.SCRIPT}, "&lt;script&gt;"),
        ("/trajectories", {"q": "<img src=x"}, "<mark>&lt;img src=x</mark>"),
        ("/trajectories", {"split": "void"}, ">void</a>"),
        ("/trajectories", {"label": "\x1b=\u202e", "task": "'; --", "q": "{{7*7}}"}, "{{7*7}}"),
    ],
    "/live": [("/live", {"run": hard.SCRIPT}, "&lt;script&gt;")],
    "/sql": [("/sql", {"q": "SELECT run, chr(27) AS esc FROM runs -- </textarea>"}, "&lt;/textarea&gt;")],
    "/trajectories/{trajectory_id}": [
        ("/trajectories/attacks", {}, "gnp.exe"),
        ("/trajectories/images", {}, "2,250,000"),
        ("/trajectories/erased", {}, "&lt;b&gt;forget&lt;/b&gt;"),
        ("/trajectories/void", {}, "void"),
        ("/trajectories/stray", {}, "quarantine"),
        ("/trajectories/empty", {}, "0 turns"),
        ("/trajectories/orphan", {}, "at the bottom"),
        ("/trajectories/chain", {"from": 301}, "turns 301 to 350 of 350"),
        ("/trajectories/forks", {"from": 2301}, "turns 2,301 to 2,400 of 2,401"),
        ("/trajectories/forks", {"from": 9999}, "no turns there"),
    ],
    "/trajectories/{trajectory_id}/turns/{turn_id}": [
        ("/trajectories/attacks/turns/attacks.0", {}, "\\u202e"),
        ("/trajectories/images/turns/odd.0", {}, "950,000 characters more"),
        ("/trajectories/long/turns/long.0", {}, "99,000 more"),
        ("/trajectories/erased/turns/erased.1", {}, "erased"),
        ("/trajectories/orphan/turns/orphan.2", {}, "at the bottom"),
    ],
    "/trajectories/{trajectory_id}/lineage": [("/trajectories/number-1/lineage", {}, "as it had it")],
    "/trajectories/{trajectory_id}/remarks": [("/trajectories/named-5/remarks", {}, "&lt;script&gt;")],
    "/trajectories/{trajectory_id}/samples/{turn_id}": [
        ("/trajectories/erased/samples/erased.1", {}, "[-1]"),
        ("/trajectories/forks/samples/forks.1200", {}, "path 1,201 of 1,201"),
        ("/trajectories/number-0/samples/number-0.0", {"step": 0, "run": "hard"}, "as step 0 had it"),
    ],
    "/trajectories/{trajectory_id}/samples/{turn_id}/colours": [
        ("/trajectories/number-0/samples/number-0.0/colours", {"by": by, "step": 0}, by) for by in COLOURS
    ],
    "/trajectories/{trajectory_id}/samples/{turn_id}/tokens/{place}": [
        ("/trajectories/number-0/samples/number-0.0/tokens/2", {"step": 0}, "nan"),
        ("/trajectories/erased/samples/erased.1/tokens/5", {}, "token -1"),
        ("/trajectories/long/samples/long.0/tokens/100001", {}, "place 100001"),
    ],
}
"""Path of a page -> addresses of it, and what its HTML has there."""


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _check_tags(html: str) -> None:
    """Every element is one of a template's: none acts by itself, and all lead to the viewer."""
    tags = _Tags()
    tags.feed(html)
    for tag, attributes in tags.found:
        assert tag not in ("img", "iframe", "base", "object", "embed", "style", "b"), tag
        assert tag != "script" or re.fullmatch(r"/view/static/(vendor/)?[\w.]+\.js", attributes["src"] or "")
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            if name in ("href", "src", "action", "hx-get", "hx-post", "xlink:href"):
                assert re.match(r"/view/|\?|#", value or ""), (tag, value)


# Every page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_every_page_of_a_hard_store(hard_view: Viewer, page: Page) -> None:
    """Shows what is there, as text that does nothing; and as JSON."""
    for address, query, words in ADDRESSES[page.path]:
        html = hard_view.html(address, **query)
        assert words in html, address
        assert CONTROLS.search(html) is None, address
        _check_tags(html)
        assert len(html) < 2_000_000, address
        orjson.loads(hard_view.get(f"{address}.json", **query).content)


def test_hard_texts_are_shown_as_they_are(hard_view: Viewer) -> None:
    """Each attack word for word, what cannot be seen as its escape; in JSON as it was."""
    page = hard_view.html("/trajectories/attacks")
    [first] = [
        t for t in hard_view.json("/trajectories/attacks")["facts"]["turns"] if t["turn_id"] == "attacks.0"
    ]
    assert [message["parts"][0]["text"] for message in first["messages"]] == list(hard.ATTACKS)
    for attack in hard.ATTACKS:
        assert str(escape(visible(attack, lines=True))) in page


def test_images_are_told_not_shown(hard_view: Viewer) -> None:
    """Their type, size and digest, or their link as a text; their bytes are not in the page."""
    page = hard_view.html("/trajectories/images")
    assert "<img" not in page
    assert "image/png, 108 bytes, sha256" in page
    assert "image https://elsewhere.test/cat.png" in page
    assert "image javascript:alert(1)" in page
    assert hard.PIXEL[:40] not in page
    assert "AAAAAAAA" not in page
    assert "996,000 characters more: see the raw turn" in page


def test_what_is_erased_is_gone_from_every_page(hard_view: Viewer) -> None:
    """Of its messages, labels, task and tokens nothing is left; its name and its reason are there."""
    base = "/trajectories/erased"
    pages = ("", "/turns/erased.0", "/turns/erased.1", "/samples/erased.1", "/remarks", "/lineage")
    for page in [base + page for page in pages]:
        for text in (hard_view.html(page), hard_view.get(f"{page}.json").text):
            assert "secret task" not in text
            assert "a secret" not in text
            assert "secret 2" not in text
    assert hard_view.json("/trajectories", q="secret 2")["hits"] == []
    assert hard_view.json(f"{base}/samples/erased.1")["parts"][0]["ids"] == [-1, -1]
    masked = hard_view.json(f"{base}/samples/erased.1/colours", by="mask")["legend"]
    assert [words for _, words in masked] == ["erased", "prompt"]


def test_a_step_that_trained_what_is_erased(hard_view: Viewer) -> None:
    """Its sample has no advantage, and as the step had it is gone: both say why."""
    why = "were erased (asked to <b>forget</b>)"
    assert why in hard_view.json("/runs/hard/steps/forgetful/0/samples")["why"]
    query = {"run": "hard", "policy": "forgetful", "step": 0}
    reply = hard_view.get("/trajectories/erased/samples/erased.1.json", **query)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_in_log")
    assert why in reply.json()["error"]["message"]


def test_a_damaged_log_says_where(store: Store, view: Callable[..., Viewer]) -> None:
    """A page that needs the damaged part names the file."""
    with store.writer("serve") as writer:
        writer.append([Event(record, "r") for record in hard.hostile_trajectories()]).result(30)
    [file] = (store.path / "lanes" / "serve").glob("*.wal")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    viewer = view(rb.open(store.path))
    for path in ("/runs", "/trajectories", "/trajectories/attacks", "/trajectories/attacks/turns/attacks.0"):
        reply = viewer.get(f"{path}.json")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "log_damaged")
        assert str(file) in reply.json()["error"]["message"]
        assert str(file) in viewer.get(path).text


def test_what_counts_for_nothing_says_so(hard_view: Viewer) -> None:
    """Void, quarantined and judging trajectories have their split, and no step has them."""
    for name, split in (("void", "void"), ("stray", "quarantine"), ("judged", "judge")):
        [line] = hard_view.json("/trajectories", run="hard", split=split)["trajectories"]
        assert (line["trajectory_id"], line["split"]) == (name, split)
        assert hard_view.json(f"/trajectories/{name}/lineage")["uses"] == []


# Long and wide trajectories -----------------------------------------------------------------------------


def test_turns_are_paged_by_their_numbers(hard_view: Viewer) -> None:
    """Each is on one page, at whose address it stays; a page leads to those beside it."""
    seen, before, at = [], [], 1
    while at:
        page = hard_view.json("/trajectories/chain", **{"from": at})
        seen += [turn["number"] for turn in page["facts"]["turns"]]
        before.append(page["before"])
        assert [n for branch in page["branches"] for n in branch["numbers"]] == seen[at - 1 :]
        at = page["after"]
    assert seen == list(range(1, 351))
    assert before == [None, 1, 101, 201]
    assert (page["count"], page["leaves"]) == (350, ["chain.349"])
    html = hard_view.html("/trajectories/chain", **{"from": 101})
    assert 'href="/view/trajectories/chain?from=201"' in html
    assert "question 199" in html
    assert "question 200" not in html


def test_what_a_page_does_not_show_is_not_made(hard_view: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trajectory of 2,401 turns a page reads the messages of 100."""
    read = []
    real = reading.read_message
    monkeypatch.setattr(reading, "read_message", lambda *a, **named: read.append(1) or real(*a, **named))
    hard_view.get("/trajectories/forks.json")
    assert len(read) == 2 * SHOWN  # a message and a reply each
    read.clear()
    hard_view.get("/trajectories/chain.json", **{"from": 341})
    assert len(read) == 2 * 10


def test_thousands_of_forks_are_flat(hard_view: Viewer) -> None:
    """A branch has its depth, and the turn behind which it begins."""
    first, last = (hard_view.json("/trajectories/forks", **{"from": at}) for at in (1, 2301))
    assert [(b["depth"], b["behind"], b["numbers"]) for b in first["branches"]][:4] == [
        (0, None, [1]),
        (1, 1, [2]),
        (1, 1, [3]),
        (2, 3, [4]),
    ]
    assert max(branch["depth"] for branch in last["branches"]) == 1200
    assert sorted(n for branch in last["branches"] for n in branch["numbers"]) == list(range(2301, 2401))


def test_a_path_is_the_trainers_sample(hard_view: Viewer) -> None:
    """Though the others are not made: with the tokens and the mask of all samples of its trajectory."""
    trajectory = hard_view.log.trajectory("forks")
    assert trajectory is not None
    samples = {sample.leaf_turn_id: sample for sample in islice(samples_of(trajectory), 40)}
    for leaf in ("aside.0", "aside.1", "aside.39"):
        page = hard_view.json(f"/trajectories/forks/samples/{leaf}")
        assert [i for part in page["parts"] for i in part["ids"]] == samples[leaf].tokens.tolist()
        mask = hard_view.json(f"/trajectories/forks/samples/{leaf}/colours", by="mask")["classes"]
        assert [c == "0" for c in mask] == samples[leaf].loss_mask.tolist()


def test_a_hundred_thousand_tokens(hard_view: Viewer) -> None:
    """All of them are on the page, in chunks, each with its colour; compressed it is small."""
    reply = hard_view.get("/trajectories/long/samples/long.0")
    assert reply.text.count("<i") >= 100_000
    assert len(re.findall("<p(?: class=far)?><i", reply.text)) == 197  # 2 of the prompt, and chunks of 512
    assert int(reply.headers["content-length"]) < 400_000
    colours = hard_view.json("/trajectories/long/samples/long.0/colours", by="logprob")["classes"]
    assert (len(colours), colours[:2]) == (100_002, "..")


# Numbers and tokens -------------------------------------------------------------------------------------


def test_numbers_that_are_none(hard_view: Viewer) -> None:
    """NaN and infinities are words on a page, null in JSON, and no scale ends with them."""
    at = "/trajectories/number-0/samples/number-0.0"
    scale = hard_view.json(f"{at}/colours", by="logprob")
    assert scale["classes"] == ".....f"
    assert [words for _, words in scale["legend"]] == ["0 nats", "0.16 nats", "0.31 nats", "0.47 nats"]
    cards = [hard_view.html(f"{at}/tokens/{place}") for place in (2, 3, 4)]
    assert [re.search(r"logprob</dt><dd>(\S+)", card)[1] for card in cards] == ["nan", "-inf", "inf"]
    assert hard_view.json(f"{at}/tokens/2")["lineage"]["logprob"] is None


def test_a_part_of_a_character(store: Store, view: Callable[..., Viewer], tmp_path: Path) -> None:
    """A token that is a byte of one is shown by its escape, and its card has that byte."""
    model = write_text_model(tmp_path / "model", "")
    ids = make_tokenizer().encode("\u20ac\U0001f600").ids
    with store.writer("serve") as writer:
        records = [kinds.TrajectoryOpened("t", "t"), *hard.turn("t", "t.0", sampled=ids, logprobs=None)]
        writer.append([Event(record, "r") for record in records]).result(30)
    viewer = view(store, model=model)
    cards = [viewer.json(f"/trajectories/t/samples/t.0/tokens/{2 + at}") for at in range(len(ids))]
    assert "".join(card["bytes"] for card in cards).replace(" ", "") == "e282acf09f9880"
    assert "\\xe2" in viewer.html("/trajectories/t/samples/t.0")


# A store that is written --------------------------------------------------------------------------------


def test_pages_while_the_log_grows(store: Store, view: Callable[..., Viewer], monkeypatch: Any) -> None:
    """Every reply is whole: what one says of turns, tokens and rewards was so at one time."""
    monkeypatch.setattr(snapshots, "FRESH_S", 0.0)
    viewer, ended = view(store), threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        with store.writer("serve") as writer:
            while not ended.is_set():
                records = [kinds.TrajectoryOpened(f"t{written}", f"t{written}")]
                records += hard.turn(f"t{written}", f"t{written}.0")
                records += [kinds.RewardAssigned(f"t{written}", None, 1.0)]
                records += [kinds.TrajectoryFinished(f"t{written}")]
                writer.append([Event(record, "grows") for record in records]).result(30)
                written += 1
                ended.wait(0.02)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        counts = []
        for _ in range(4):
            [run] = viewer.json("/runs")["runs"] or [{"trajectories": 0, "open": 0}]
            counts.append(run["trajectories"])
            assert run["open"] == 0
            listed = viewer.json("/trajectories", run="grows")["trajectories"]
            assert [(t["status"], t["reward"], t["turns"]) for t in listed] == [("completed", 1.0, 1)] * len(
                listed
            )
            if listed:
                page = viewer.json(f"/trajectories/{listed[0]['trajectory_id']}")
                assert (page["facts"]["status"], page["count"], page["facts"]["sampled"]) == (
                    "completed",
                    1,
                    2,
                )
                ledger = viewer.json("/runs/grows/ledger")["ledger"]
                assert ledger["generated"]["tokens"] == 2 * ledger["generated"]["turns"]
    finally:
        ended.set()
        thread.join()
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] <= written


# Names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMED, "...", "~", "a~b", "\n", "x.json."], ids=ascii)
def test_a_name_is_one_part_of_an_address(name: str) -> None:
    """Whatever is in it, servers and browsers take it for one part, and it comes back as it was."""
    arrived = unquote(part(name))
    assert name_of(arrived) == name
    assert not re.search(r"[%/\x00-\x1f]|^\.*$|\.json$", arrived)


@pytest.mark.parametrize("name", NAMED, ids=ascii)
def test_what_has_a_hostile_name_has_pages(hard_view: Viewer, name: str) -> None:
    """Of a run, its policy and its step, at the addresses that other pages link to; each shows the name."""
    run, steps = link("", "runs", name), link("", "runs", name, "steps", name)
    assert hard_view.json(run)["line"]["run"] == name
    assert hard_view.json(steps)["steps"][0]["step"] == 0
    step = hard_view.json(f"{steps}/0")
    assert (step["run"], step["policy"], step["metrics"]["reward"]) == (name, name, 0.5)
    shown = hard_view.html(f"{steps}/0")
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\u2066]", shown)
    assert hard.SCRIPT not in shown
    assert f'href="{link("/view", "runs", name)}"' in shown
