"""Pages show what the log has: their values are those of SQL, of the trainer and of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested
from tests.viewer.conftest import Viewer

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.train.select.samples import samples_of
from rollbook.viewer import snapshots
from rollbook.viewer.app import PAGES, POLICY
from rollbook.viewer.search import ORDERS

GRPO_STEP = 11
"""The newest step of the trained store but one, of GRPO."""
SCRIPT = "<script>alert(1)</script>"


def rows(viewer: Viewer, query: str) -> list[Any]:
    """The rows of a query."""
    with rb.connect(viewer.log.path) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def step(trained_view: Viewer) -> dict[str, Any]:
    """The samples of a step."""
    value: dict[str, Any] = trained_view.json(f"/runs/demo/steps/actor/{GRPO_STEP}/samples")
    return value


def lines(step: dict[str, Any]) -> list[dict[str, Any]]:
    """All samples of a step."""
    return [sample for group in step["groups"] for sample in group["samples"]]


def test_every_page_is_there_on_an_empty_store(store: Store, view: Callable[[Store], Viewer]) -> None:
    """What is not about something says that there is nothing; what is, that it is not in the log."""
    viewer = view(store)
    for page in PAGES:
        path = (
            re.sub(r"\{\w+\}", "x", page.path).replace("/tokens/x", "/tokens/0").replace("actor/x", "actor/0")
        )
        path = path.replace("/steps/x/x", "/steps/x/0")
        reply = viewer.get(path)
        allowed = (200, 400) if path.startswith("/compare/") else (200, 404)
        assert reply.status_code in allowed, f"{path}: {reply.status_code} {reply.text}"
        assert reply.headers["content-security-policy"] == POLICY
        assert viewer.get(f"{path}.json").status_code == reply.status_code, path
    assert "no run yet" in viewer.html("/runs")
    missing = viewer.get("/trajectories/x.json")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_in_log")


def test_runs_and_a_run(trained_view: Viewer) -> None:
    """Counts, rewards and versions are those of the views."""
    [run] = trained_view.json("/runs")["runs"]
    [policy] = run["policies"]
    assert (run["run"], policy["policy"], policy["version"]) == ("demo", "actor", 12)
    assert [(policy["steps"], policy["algorithm"])] == rows(
        trained_view, "SELECT count(*), arg_max(algorithm, step) FROM metrics WHERE status = 'committed'"
    )
    rewards = rows(trained_view, "SELECT reward FROM metrics WHERE status = 'committed' ORDER BY step")
    assert policy["rewards"] == [reward for (reward,) in rewards if reward is not None]
    page = trained_view.json("/runs/demo")
    counts = rows(trained_view, "SELECT split, status, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL")
    assert sorted((g["split"], g["status"], g["trajectories"]) for g in page["groups"]) == counts
    curves = trained_view.json("/runs/demo/curves/actor")
    assert curves["step"] == list(range(12))
    losses = rows(trained_view, "SELECT loss FROM metrics WHERE status = 'committed' ORDER BY step")
    assert curves["metrics"]["loss"] == [loss for (loss,) in losses]
    assert trained_view.json("/runs/demo/signs/actor")["steps"] == 3  # of the newest training
    ledger = trained_view.json("/runs/demo/ledger")["ledger"]
    assert ledger["generated"]["tokens"] == sum(a["tokens"] for a in ledger["amounts"] if a["rule"] is None)
    assert '<svg class="spark"' in trained_view.html("/runs")


def test_steps_are_paged_by_their_numbers(trained_view: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest first; each page goes on before the last step of the one before."""
    monkeypatch.setattr("rollbook.viewer.runs.LISTED", 5)
    seen, before = [], None
    while True:
        page = trained_view.json("/runs/demo/steps/actor", **({} if before is None else {"before": before}))
        seen += [step["step"] for step in page["steps"]]
        if (before := page["more"]) is None:
            break
    assert seen == list(range(11, -1, -1))


@pytest.mark.parametrize("order", ORDERS)
def test_tables_are_paged_by_their_order(
    trained_view: Viewer, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Each page goes on behind the last row of the one before, equals and rows without a value included."""
    [whole] = rows(trained_view, "SELECT count(*) FROM trajectories")[0]
    monkeypatch.setattr("rollbook.viewer.search.LISTED", whole)
    expected = [
        line["trajectory_id"] for line in trained_view.json("/trajectories", by=order)["trajectories"]
    ]
    monkeypatch.setattr("rollbook.viewer.search.LISTED", whole // 4)
    seen, after = list[str](), dict[str, Any]()
    for _ in range(9):
        page = trained_view.json("/trajectories", by=order, **after)
        seen += [line["trajectory_id"] for line in page["trajectories"]]
        after = {name: value for name, value in page["next"].items() if value is not None}
        if not page["more"]:
            break
    assert len(set(expected)) == whole
    assert (seen, after) == (expected, {})


def test_a_steps_advantages_are_proven(trained_view: Viewer, step: dict[str, Any]) -> None:
    """They are computed from the log, with the digest that the step recorded; more reward is more of it."""
    assert (step["proven"], step["why"]) == (True, "")
    named = rows(
        trained_view,
        f"SELECT turn_id FROM samples WHERE step = {GRPO_STEP} AND status = 'committed' ORDER BY position",
    )
    assert [s["turn_id"] for s in sorted(lines(step), key=lambda s: s["position"])] == [t for (t,) in named]
    for group in step["groups"]:
        by_reward = sorted((sample["reward"], sample["advantage"]) for sample in group["samples"])
        assert [a for _, a in by_reward] == sorted(a for _, a in by_reward)
        assert group["flat"] == (len({sample["reward"] for sample in group["samples"]}) == 1)
    ordered = trained_view.json(f"/runs/demo/steps/actor/{GRPO_STEP}/samples", by="advantage")
    advantages = [sample["advantage"] for sample in lines(ordered)]
    assert advantages[0] == max(advantages)


def test_a_digest_that_is_another_is_told(trained_view: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages that are not what the step had are shown, and said not to be proven."""
    from rollbook.train.batches.experience import Experience

    monkeypatch.setattr(Experience, "digests", lambda self: {"advantages": "another"})
    page = trained_view.json("/runs/demo/steps/actor/10/samples")
    assert page["proven"] is False
    assert "digest is not the step" in trained_view.html("/runs/demo/steps/actor/10/samples")


def test_a_step(trained_view: Viewer) -> None:
    """Its metrics, digests and manifest are those of the log; a step that was never planned is a 404."""
    page = trained_view.json(f"/runs/demo/steps/actor/{GRPO_STEP}")
    [(metrics, digests, cut)] = rows(
        trained_view,
        f"SELECT metrics, digests, cut FROM steps WHERE step = {GRPO_STEP} AND status = 'committed'",
    )
    assert (page["metrics"], page["digests"], page["cut"]) == (
        orjson.loads(metrics),
        orjson.loads(digests),
        cut,
    )
    assert (page["before"], page["after"]) == (GRPO_STEP - 1, None)
    assert trained_view.get("/runs/demo/steps/actor/99").status_code == 404
    assert trained_view.get("/runs/demo/steps/actor/x.json").json()["error"]["code"] == "bad_query"


def test_a_sample_token_by_token(trained_view: Viewer, step: dict[str, Any]) -> None:
    """Ids, what was trained, and a colour for each token; of a token all that is known of it."""
    line = lines(step)[0]
    at = f"/trajectories/{line['trajectory_id']}/samples/{line['turn_id']}"
    named = {"run": "demo", "policy": "actor", "step": GRPO_STEP}
    page = trained_view.json(at, **named)
    trajectory = trained_view.log.trajectory(line["trajectory_id"])
    assert trajectory is not None
    sample = next(s for s in samples_of(trajectory) if s.leaf_turn_id == line["turn_id"])
    assert [i for part in page["parts"] for i in part["ids"]] == sample.tokens.tolist()
    assert sum(part["trained"] for part in page["parts"]) == page["trained"] == sample.trained
    assert page["advantage"] == pytest.approx(line["advantage"])
    for by in page["colours"]:
        scale = trained_view.json(f"{at}/colours", by=by, **named)
        assert len(scale["classes"]) in (0, len(sample)), by
        assert bool(scale["classes"]) != bool(scale["why"]), by
    masked = trained_view.json(f"{at}/colours", by="mask", **named)["classes"]
    assert [c == "0" for c in masked] == sample.loss_mask.tolist()
    place = int(np.flatnonzero(sample.loss_mask)[0])
    token = trained_view.json(f"{at}/tokens/{place}", **named)
    assert (token["token_id"], token["trained"]) == (int(sample.tokens[place]), True)
    assert token["lineage"]["logprob"] == pytest.approx(float(sample.logprobs[place]))
    assert GRPO_STEP in [use["use"]["step"] for use in token["lineage"]["uses"]]
    assert trained_view.json(f"{at}/tokens/0", **named)["lineage"] is None
    assert trained_view.get(f"{at}/tokens/99999", **named).status_code == 404
    assert trained_view.html(at, **named).count("<i") >= len(sample)


# Trajectories -----------------------------------------------------------------------------------------


def _turn(trajectory: str, turn: str, prompt: list[int], **fields: Any) -> list[Any]:
    """A turn that was answered with two tokens, and delivered."""
    content = fields.pop("content", "fine")
    known = {"root_reason": "first_turn", "messages": [{"role": "user", "content": content}]} | fields
    ids = np.array(prompt, np.int32)
    parent = known.get("parent_turn_id")
    return [
        turn_requested(trajectory, turn, **(known | ({"root_reason": None} if parent else {}))),
        turn_completed(
            trajectory,
            turn,
            policy_version=3,
            prompt_ids=ids if not parent else ids[-1:],
            completion_ids=np.array([7, 8], np.int32),
            logprobs=np.array([-0.5, -2.0], np.float32),
            version_spans=(kinds.VersionSpan("actor", 3, 0, 2),),
            prompt_length=len(prompt),
            prompt_sha256=prompt_sha256(ids),
            reply={"role": "assistant", "content": f"so be it: {content}"},
            timings={"held_us": 0, "engine_us": 10, "first_token_us": 1},
        ),
        kinds.TurnDelivered(trajectory, turn, "sent"),
    ]


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory, view: Callable[[Store], Viewer]) -> Iterator[Viewer]:
    """A store with a trajectory of two branches whose texts are hostile, and one that is open."""
    log = rb.open(tmp_path_factory.mktemp("branched") / "store", create=True)
    records = [
        kinds.TrajectoryOpened("id-a", SCRIPT, SCRIPT, "2+2", "train", {"lang": "py"}),
        *_turn("id-a", "a1", [1, 2], content=SCRIPT),
        *_turn("id-a", "a2", [1, 2, 7, 8, 3], parent_turn_id="a1", content='quo"ted\nline'),
        *_turn("id-a", "a3", [1, 2, 7, 8, 4], parent_turn_id="a1", content="\u202eright to left\x1b[31m"),
        kinds.RewardAssigned("id-a", None, 0.5),
        kinds.TrajectoryFinished("id-a", "completed", True),
        kinds.TrajectoryOpened("id-b", "b", None, "2+2", "eval"),
        turn_requested("id-b", "b1", root_reason="first_turn", messages=[{"role": "user", "content": "hm"}]),
    ]
    at_us = 1_700_000_000_000_000  # a millisecond between two: what is sampled in none is no stretch
    events = [Event(r, "run one", time_us=at_us + 1000 * at) for at, r in enumerate(records)]
    with log.writer("serve") as writer:
        writer.append(events).result(30)
    return iter([view(log)])


@pytest.fixture(scope="module")
def branches(branched: Iterator[Viewer]) -> Viewer:
    """The viewer of that store."""
    return next(branched)


def test_a_trajectory_is_a_tree(branches: Viewer) -> None:
    """Turns that follow each other are one branch; behind a fork there is a branch for each."""
    page = branches.json("/trajectories/id-a")
    assert [(branch["depth"], branch["behind"], branch["numbers"]) for branch in page["branches"]] == [
        (0, None, [1]),
        (1, 1, [2]),
        (1, 1, [3]),
    ]
    assert page["leaves"] == ["a2", "a3"]
    assert sum(page["sums"].values()) <= page["seconds"] * len(page["facts"]["turns"]) + 1e-6
    prefills = [stretch for stretch in page["lane"] if stretch["kind"] == "prefill"]
    assert {round(1e6 * stretch["seconds"]) for stretch in prefills} == {1}
    assert {stretch["kind"] for stretch in page["lane"]} > {"prefill", "sampling"}
    raw = branches.json("/trajectories/id-a/turns/a2")
    assert [event["kind"] for event in raw["events"]] == [
        "turn.requested",
        "turn.completed",
        "turn.delivered",
    ]
    assert branches.get("/trajectories/id-a/turns/none").status_code == 404
    assert branches.json("/trajectories/id-b")["facts"]["status"] == "open"


def test_shared_tokens_are_trained_in_one_sample(branches: Viewer) -> None:
    """The other path has them as context, and says so."""
    first, second = (branches.json(f"/trajectories/id-a/samples/{leaf}") for leaf in ("a2", "a3"))
    assert [(p["sampled"], p["trained"], p["why"]) for p in first["parts"] if p["sampled"]] == [
        (True, 2, ""),
        (True, 2, ""),
    ]
    assert [(p["trained"], p["why"]) for p in second["parts"] if p["sampled"]] == [
        (0, "other sample"),
        (2, ""),
    ]


def test_recorded_text_is_text(branches: Viewer) -> None:
    """No tag of it is one, and what would lead the eye is shown as its escape."""
    for path in ("/runs", "/trajectories", "/trajectories/id-a", "/trajectories/id-a/turns/a1"):
        page = branches.html(path)
        assert SCRIPT not in page
        assert set(re.findall(r"<script[^>]*>", page)) <= {
            f'<script defer src="/view/static/{name}">'
            for name in ("vendor/htmx.min.js", "vendor/uPlot.iife.min.js", "viewer.js")
        }
    page = branches.html("/trajectories/id-a")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\u202e" not in page
    assert "\\u202eright to left\\x1b[31m" in page


def test_words_are_found_as_they_were_said(branches: Viewer) -> None:
    """Also where JSON spells them otherwise; small letters in any case, others exactly."""
    for words, turns in {
        'quo"ted\nline': {"a2"},
        "right to": {"a3"},
        "RIGHT": set(),
        "so be it": {"a1", "a2", "a3"},
        "<script>": {"a1"},
        "nowhere": set(),
        "so.be it": set(),
        "(so": set(),
    }.items():
        assert {hit["turn_id"] for hit in branches.json("/trajectories", q=words)["hits"]} == turns, words
    assert branches.json("/trajectories", q="hm", split="train")["hits"] == []
    assert "<mark>right</mark> to left" in branches.html("/trajectories", q="right")


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["b", SCRIPT]),
        ({"by": "best"}, [SCRIPT, "b"]),
        ({"split": "eval"}, ["b"]),
        ({"label": "lang=py"}, [SCRIPT]),
        ({"label": "lang=js"}, []),
        ({"version": 3}, [SCRIPT]),
        ({"version": 4}, []),
        ({"least": 0.5}, [SCRIPT]),
        ({"least": 0.6}, []),
        ({"before": "id-b"}, [SCRIPT]),
        ({"run": "none"}, []),
    ],
)
def test_trajectories_are_selected(branches: Viewer, query: dict[str, Any], names: list[str]) -> None:
    """By what the address says."""
    listed = branches.json("/trajectories", **query)["trajectories"]
    assert [line["trajectory"] for line in listed] == names


def test_a_run_may_have_any_name(branches: Viewer) -> None:
    """Its address is quoted."""
    assert 'href="/view/runs/run%20one"' in branches.html("/runs")
    assert branches.json("/runs/run one")["line"]["open"] == 1


# The viewer itself ------------------------------------------------------------------------------------


def test_it_shows_what_came_since(store: Store, view: Callable[[Store], Viewer], monkeypatch: Any) -> None:
    """A snapshot is replaced once the log has grown, and the one before is closed."""
    monkeypatch.setattr(snapshots, "FRESH_S", 0.0)
    viewer = view(store)
    assert viewer.json("/runs")["runs"] == []
    with viewer.snapshots.reading() as before:
        with store.writer("serve") as writer:
            writer.append([Event(kinds.TrajectoryOpened("t", "t"), "r")]).result(30)
        assert [run["run"] for run in viewer.json("/runs")["runs"]] == ["r"]
        assert before.rows("SELECT count(*) AS n FROM trajectories") == [{"n": 0}]
    with pytest.raises(Exception, match="closed"):
        before.rows("SELECT 1")


def test_what_others_wrote_is_as_they_released_it() -> None:
    """The vendored files have the digests that stand beside them, and their licences."""
    folder = files("rollbook.viewer") / "static" / "vendor"
    sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert {path.name for path in folder.iterdir()} == {*sums, "SHA256SUMS"}
    for name, digest in sums.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert {name for name in sums if name.endswith("LICENSE")} == {"htmx.LICENSE", "uPlot.LICENSE"}


def test_our_own_script_is_short() -> None:
    """At most 400 lines: what a page shows comes from the server."""
    script = (files("rollbook.viewer") / "static" / "viewer.js").read_text()
    assert len(script.splitlines()) <= 400


def test_files_are_the_viewers_own(branches: Viewer) -> None:
    """Nothing beside its folder is sent."""
    assert branches.get("/static/viewer.css").headers["content-type"].startswith("text/css")
    for name in ("none.js", "../app.py", "%2e%2e/app.py", "vendor"):
        assert branches.get(f"/static/{name}").status_code == 404, name


def test_tools_and_labels(store: Store, view: Callable[..., Viewer]) -> None:
    """A tool that was called, not one that was offered; a label from the opening, or one that was added."""
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    offered = {"request": {"tools": [{"type": "function", "function": {"name": "calc"}}]}}
    records: list[Any] = [
        kinds.TrajectoryOpened("a", "calls"),
        turn_requested("a", "a1"),
        turn_completed("a", "a1", reply={"role": "assistant", "content": None, "tool_calls": [call]}),
        kinds.LabelAdded("a", None, "garbled", True, "human"),
        kinds.TrajectoryOpened("b", "offers", labels={"garbled": "no"}),
        turn_requested("b", "b1", **offered),
        turn_completed("b", "b1", reply={"role": "assistant", "content": 'it is "name":"calc"'}),
    ]
    with store.writer("serve") as writer:
        writer.append([Event(record, "r") for record in records]).result(30)
    viewer = view(store)

    def names(**query: str) -> list[str]:
        return [line["trajectory"] for line in viewer.json("/trajectories", **query)["trajectories"]]

    assert names(tool="calc") == ["calls"]
    assert names(tool="other") == []
    assert sorted(names(label="garbled")) == ["calls", "offers"]
    assert names(label="garbled=true") == ["calls"]
    assert names(label="garbled=no") == ["offers"]
