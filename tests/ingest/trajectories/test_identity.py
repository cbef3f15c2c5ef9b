"""Which trajectory a request belongs to: path, header, key, hints, their order, and what names nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge.keys import key_name, trajectory_key
from rollbook.ingest.trajectories.identity import check_said_once, identify, split_path
from rollbook.store.errors import RequestError
from rollbook.store.events import QUARANTINE, LabelAdded
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import is_candidate
from rollbook.train.select.samples import all_samples

CHAT = PATHS["chat"]
NAMES = itertools.count()


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that says Hello."""
    return played()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"id-{next(NAMES)}"


def _code(error: RequestError) -> tuple[int, str]:
    return error.status, error.code


# The path ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/t/a/v1/x", {"id": "a"}),
        ("/t/org/repo/7/v1/x", {"id": "org/repo/7"}),
        ("/t/a%2Fb%20c/v1/x", {"id": "a/b c"}),
        ("/t/v1/v1/x", {"id": "v1"}),
        ("/t/a/v1/b/v1/x", {"id": "a/v1/b"}),
        ("/t/t/t/v1/x", {"id": "t/t"}),
        ("/t/group/v1/x", {"id": "group"}),
        ("/t/a/group/g/v1/x", {"id": "a", "group": "g"}),
        ("/t/a/b/group/g/v1/x", {"id": "a/b", "group": "g"}),
        ("/t/a%2Fgroup%2Fg/v1/x", {"id": "a/group/g"}),
        ("/t/a%2Fgroup/g/v1/x", {"id": "a/group/g"}),
        (
            "/t/a/split/eval/task/t%2F1/group/g/v1/x",
            {"id": "a", "split": "eval", "task": "t/1", "group": "g"},
        ),
        ("/t/a/label/k/v/label/n/2/v1/x", {"id": "a", "labels": {"k": "v", "n": "2"}}),
        ("/t/a/label/k/group/group/label/v1/x", {"id": "a", "labels": {"k": "group"}, "group": "label"}),
        ("/t/%D0%B4%D0%BE%D0%BC/v1/x", {"id": "дом"}),
    ],
)
def test_paths_are_split_into_trajectory_and_endpoint(path: str, fields: Any) -> None:
    """An id with slashes or without, escaped or not, and what stands behind it in any order."""
    assert split_path(path) == (fields, "/v1/x")


@pytest.mark.parametrize(
    "path",
    ["/t/v1/x", "/t//v1/x", "/t/a", "/t/a/group/v1/x", "/t/a/label/k/v1/x", "/t/a/group/g/other/v1/x"],
)
def test_a_path_that_says_nothing_is_a_404(path: str) -> None:
    """No id, or a word without its value: told, not guessed."""
    with pytest.raises(RequestError) as refused:
        split_path(path)
    assert _code(refused.value) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/t/a//v1/x", "bad_path"),
        ("/t/a//b/v1/x", "bad_path"),
        ("/t/a/group//v1/x", "bad_path"),
        ("/t/a/group/g/group/h/v1/x", "trajectory_conflict"),
        ("/t/a/label/k/1/label/k/2/v1/x", "trajectory_conflict"),
    ],
)
def test_a_path_that_says_two_things_is_a_400(path: str, code: str) -> None:
    """`a/` is no name that anybody means, and of two values none is the right one."""
    with pytest.raises(RequestError) as refused:
        split_path(path)
    assert _code(refused.value) == (400, code)


SEGMENT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=8)


@given(SEGMENT, st.none() | SEGMENT, st.none() | SEGMENT, st.dictionaries(SEGMENT, SEGMENT, max_size=3))
@settings(max_examples=200)
def test_any_text_goes_through_a_path(name: str, group: Any, task: Any, labels: Any) -> None:
    """Whatever is escaped comes out as it went in."""
    parts = [quote(name, safe="")]
    for word, value in (("group", group), ("task", task)):
        parts += [] if value is None else [word, quote(value, safe="")]
    for key, value in labels.items():
        parts += ["label", quote(key, safe=""), quote(value, safe="")]
    fields, rest = split_path(f"/t/{'/'.join(parts)}/v1/responses/x")
    wanted = {"id": name, "group": group, "task": task, "labels": labels or None}
    assert fields == {k: v for k, v in wanted.items() if v is not None}
    assert rest == "/v1/responses/x"


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_names_it_for_every_endpoint(proxy: InProcess, kind: str) -> None:
    """Id, group, task, split and labels, from the base URL alone."""
    base = f"/t/org%2Frepo/{kind}/group/g%2F1/task/sum/split/eval/label/k/%C3%A9"
    reply = proxy.ask(base + PATHS[kind], asked(kind))
    assert reply.status == 200
    opened = proxy.trajectories()[f"org/repo/{kind}"].opened
    assert (opened.group, opened.task, opened.split, opened.labels) == ("g/1", "sum", "eval", {"k": "é"})
    assert reply.headers["x-rollbook-trajectory-id"] == opened.trajectory_id
    assert "x-rollbook-quarantined" not in reply.headers


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/%761/chat/completions",
        "/t/a/v1/chat%2Fcompletions",
        "/t/a%2Fv1%2Fchat%2Fcompletions",
        "/t/x%2Fv1/chat/completions",
        "/t//v1/chat/completions",
        "/t/a/group/v1/chat/completions",
    ],
)
def test_odd_spellings_of_a_path_are_no_fault(proxy: InProcess, path: str) -> None:
    """Served or 404, never a 500."""
    reply = proxy.ask(path, asked("chat"))
    assert reply.status in (200, 404), reply.data
    if reply.status == 404:
        assert "error" in reply.json


def test_v1_may_be_a_part_of_an_id(proxy: InProcess) -> None:
    """The last one is the API's."""
    assert proxy.ask("/t/org/v1/run" + CHAT, asked("chat")).status == 200
    assert "org/v1/run" in proxy.trajectories()


def test_an_id_that_is_too_long_is_a_400(proxy: InProcess) -> None:
    """As where it is opened; nothing is cut."""
    reply = proxy.ask("/t/" + "x" * 257 + CHAT, asked("chat"))
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_request")
    assert proxy.ask("/t/" + "x" * 256 + CHAT, asked("chat")).status == 200


# Headers, keys, hints -----------------------------------------------------------------------------------


def _sent(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


WAYS: dict[str, Any] = {
    "header": lambda n: ({"X-Rollbook-Trajectory": n}, {}),
    "bearer": lambda n: (_sent(f"trajectory:{n}"), {}),
    "x-api-key": lambda n: ({"x-api-key": f"trajectory:{n}"}, {}),
    "session": lambda n: ({"X-Session-ID": n}, {}),
    "litellm": lambda n: ({"X-LiteLLM-Session-Id": n}, {}),
    "metadata": lambda n: ({}, {"metadata": {"trajectory_id": n}}),
    "metadata session": lambda n: ({}, {"metadata": {"session_id": n}}),
    "cache key": lambda n: ({}, {"prompt_cache_key": n}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_name_it(proxy: InProcess, way: str, kind: str) -> None:
    """Two requests of one name are turns of one trajectory, which can be trained."""
    wanted = f"way-{way.replace(' ', '-')}-{kind}"
    headers, fields = WAYS[way](wanted)
    for _ in range(2):
        reply = proxy.ask(PATHS[kind], asked(kind, **fields), headers=headers)
        assert reply.status == 200, reply.data
        assert "x-rollbook-quarantined" not in reply.headers
    trajectory = proxy.trajectories()[wanted]
    assert len(trajectory.turns) == 2
    assert trajectory.opened.split == "train"
    assert trajectory.opened.labels == {}


ORDER = ["path", "header", "bearer", "session", "litellm", "metadata", "metadata session", "cache key"]
EXPLICIT = ORDER[:3]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ORDER, 2)))
def test_explicit_names_come_before_hints(proxy: InProcess, first: str, second: str, name: str) -> None:
    """What comes first in the order names it; two explicit ones that differ are a 400."""
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for way, value in ((second, f"{name}-second"), (first, f"{name}-first")):
        if way != "path":
            more, body = WAYS[way](value)
            headers |= more
            fields["metadata"] = fields.get("metadata", {}) | body.pop("metadata", {})
            fields |= body
    path = f"/t/{name}-first{CHAT}" if first == "path" else CHAT
    reply = proxy.ask(path, asked("chat", **fields), headers=headers)
    trajectories = proxy.trajectories()
    if second in EXPLICIT:
        assert (reply.status, reply.json["error"]["code"]) == (400, "trajectory_conflict")
        assert name not in " ".join(trajectories)
        return
    assert reply.status == 200
    assert f"{name}-second" not in trajectories
    labels = trajectories[f"{name}-first"].opened.labels
    assert labels == ({"session_id": f"{name}-second"} if first in EXPLICIT else {})


def test_two_that_agree_are_one(proxy: InProcess, name: str) -> None:
    """Path, header, key and hint of one name: no conflict, and no label."""
    headers = {"X-Rollbook-Trajectory": name, "X-Session-ID": name} | _sent(f"trajectory:{name}")
    assert proxy.ask(f"/t/{name}{CHAT}", asked("chat"), headers=headers).status == 200
    assert proxy.trajectories()[name].opened.labels == {}


@pytest.mark.parametrize("hint", ["", "x" * 257, 5, None, ["a"], {"a": 1}])
def test_a_hint_that_is_no_name_names_nothing(proxy: InProcess, hint: Any) -> None:
    """An agent's own field may hold anything: the request is kept, in quarantine."""
    reply = proxy.ask(CHAT, asked("chat", prompt_cache_key=hint, metadata={"session_id": hint}))
    assert reply.status == 200
    assert "x-rollbook-quarantined" in reply.headers


@pytest.mark.parametrize("metadata", [None, "text", [], 5])
def test_metadata_of_another_form_is_kept(proxy: InProcess, name: str, metadata: Any) -> None:
    """It names nothing, and is recorded as it came."""
    assert proxy.ask(f"/t/{name}{CHAT}", asked("chat", metadata=metadata)).status == 200
    (turn,) = proxy.trajectories()[name].turns.values()
    assert turn.requested.request["metadata"] == metadata


@given(SEGMENT, st.none() | st.binary(min_size=1, max_size=9))
@settings(max_examples=200)
def test_a_key_names_its_trajectory(name: str, secret: bytes | None) -> None:
    """What a key is made of comes out of it, with a secret and without."""
    assert key_name(trajectory_key(name, "run", secret)) == name


def test_keys_that_name_nothing() -> None:
    """A client's own key, an empty one and none."""
    assert [key_name(k) for k in (None, "", "none", "sk-123", "trajectory:", "Trajectory:x")] == [None] * 6
    assert key_name("trajectory:org:7") == "org:7"


def test_headers_give_group_task_split_and_labels(proxy: InProcess, name: str) -> None:
    """Group, task, split and labels; UTF-8 in them is text."""
    headers = {
        "X-Rollbook-Trajectory": f"{name}-é".encode().decode("latin-1"),
        "X-Rollbook-Group": "g",
        "X-Rollbook-Task": "t",
        "X-Rollbook-Split": "teacher",
        "X-Rollbook-Labels": '{"attempt": 2, "who": "é"}'.encode().decode("latin-1"),
    }
    assert proxy.ask(CHAT, asked("chat"), headers=headers).status == 200
    opened = proxy.trajectories()[f"{name}-é"].opened
    assert (opened.group, opened.task, opened.split) == ("g", "t", "teacher")
    assert opened.labels == {"attempt": 2, "who": "é"}


def _bad_headers() -> list[Any]:
    return [
        ({"X-Rollbook-Labels": "{"}, "bad_labels"),
        ({"X-Rollbook-Labels": "[1]"}, "bad_labels"),
        ({"X-Rollbook-Split": "quarantine"}, "unknown_split"),
        ({"X-Rollbook-Split": ""}, "unknown_split"),
        ({"X-Rollbook-Group": "other"}, "trajectory_conflict"),
    ]


@pytest.mark.parametrize(("headers", "code"), _bad_headers())
def test_headers_that_cannot_be_meant(proxy: InProcess, name: str, headers: Any, code: str) -> None:
    """Each is a 400 with its own code, and opens nothing."""
    reply = proxy.ask(f"/t/{name}/group/g{CHAT}", asked("chat"), headers=headers)
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert name not in proxy.trajectories()


def test_what_was_said_at_the_opening_stands(proxy: InProcess, name: str) -> None:
    """Group, task and split may be repeated, and not changed; what says nothing of them is fine."""
    base = f"/t/{name}/group/g/split/eval"
    assert proxy.ask(base + CHAT, asked("chat")).status == 200
    assert proxy.ask(base + CHAT, asked("chat")).status == 200
    assert proxy.ask(f"/t/{name}{CHAT}", asked("chat")).status == 200
    for other in (f"/t/{name}/group/h", f"/t/{name}/split/train", f"/t/{name}/task/t"):
        reply = proxy.ask(other + CHAT, asked("chat"))
        assert (reply.status, reply.json["error"]["code"]) == (409, "trajectory_conflict")
    assert len(proxy.trajectories()[name].turns) == 3


# Labels ---------------------------------------------------------------------------------------------


def _labels(proxy: Any, name: str) -> list[Any]:
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    events = [e.record for e in proxy.store.events()]
    return [
        (r.turn_id, r.name, r.value, r.source)
        for r in events
        if isinstance(r, LabelAdded) and r.trajectory_id == trajectory_id
    ]


def test_labels_come_at_any_time(proxy: Any, name: str) -> None:
    """With the opening, with a later request, and by a route of their own, for a turn too."""
    first = proxy.ask(f"/t/{name}/label/a/1{CHAT}", asked("chat"))
    assert proxy.trajectories()[name].opened.labels == {"a": "1"}
    proxy.ask(
        f"/t/{name}/label/a/1/label/b/2{CHAT}", asked("chat"), headers={"X-Rollbook-Labels": '{"c": [3]}'}
    )
    proxy.ask(f"/t/{name}/label/b/2{CHAT}", asked("chat"))
    assert _labels(proxy, name) == [(None, "c", [3], "agent"), (None, "b", "2", "agent")]
    sent = {"name": "quality", "value": {"x": None}, "source": "judge", "turn": first.json["id"]}
    reply = proxy.ask(f"/v1/trajectories/{name}/labels", sent)
    assert reply.status == 201
    turn_id = first.json["id"].removeprefix("chatcmpl-")
    assert _labels(proxy, name)[2:] == [(turn_id, "quality", {"x": None}, "judge")]
    (event,) = [e for e in proxy.store.events() if e.event_id == reply.json["event_id"]]
    assert event.record.name == "quality"
    assert proxy.ask(f"/v1/trajectories/{name}/finish", {}).status == 200
    assert proxy.ask(f"/v1/trajectories/{name}/labels", {"name": "late"}).status == 201
    assert _labels(proxy, name)[3:] == [(None, "late", None, "agent")]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {}),
        (400, {"name": ""}),
        (400, {"name": "a", "valu": 1}),
        (422, {"name": "a", "turn": "chatcmpl-x"}),
    ],
)
def test_a_label_that_does_not_fit_is_refused(proxy: InProcess, name: str, status: int, body: Any) -> None:
    """And nothing is recorded of it."""
    proxy.ask(f"/t/{name}{CHAT}", asked("chat"))
    assert proxy.ask(f"/v1/trajectories/{name}/labels", body).status == status
    assert _labels(proxy, name) == []
    assert proxy.ask(f"/v1/trajectories/{name}-no/labels", {"name": "a"}).status == 404


def test_a_refused_request_labels_nothing(proxy: InProcess, name: str) -> None:
    """Labels are recorded with the turn they came with, or not at all."""
    proxy.ask(f"/t/{name}{CHAT}", asked("chat"))
    bad = {"messages": [{"role": "user", "content": 5}]}
    assert proxy.ask(f"/t/{name}/label/a/1{CHAT}", bad).status == 400
    assert _labels(proxy, name) == []


# Quarantine -----------------------------------------------------------------------------------------


def _conversation(proxy: Any, kind: str, text: str, turns: int) -> set[str]:
    """The quarantined trajectories of one conversation that names none."""
    names = set()
    items: list[Any] = [{"role": "user", "content": text}]
    key = "input" if kind == "responses" else "messages"
    for turn in range(turns):
        reply = proxy.ask(PATHS[kind], asked(kind) | {key: items})
        names.add(reply.headers["x-rollbook-quarantined"])
        message = {"role": "assistant", "content": "Hello"}
        items = [*items, message, {"role": "user", "content": f"{text} {turn}"}]
    return names


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_what_names_nothing_is_kept_apart(proxy: InProcess, kind: str) -> None:
    """Each conversation is one quarantined trajectory, and no sample of it is ever trained."""
    mine, theirs = (_conversation(proxy, kind, f"{kind} {who}", 4) for who in ("mine", "theirs"))
    assert len(mine) == len(theirs) == 1
    assert mine != theirs
    name = next(iter(mine))
    assert name.startswith(QUARANTINE)
    trajectory = proxy.trajectories()[name]
    assert trajectory.opened.split == QUARANTINE
    turns = list(trajectory.turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, *(t.turn_id for t in turns[:-1])]
    samples = all_samples([trajectory])
    assert samples
    assert not any(is_candidate(s, RecipeConfig()) for s in samples)


def test_equal_first_messages_are_two_conversations(proxy: InProcess) -> None:
    """What begins alike is not the same agent."""
    first, second = (proxy.ask(CHAT, asked("chat", text="alike")) for _ in range(2))
    assert first.headers["x-rollbook-quarantined"] != second.headers["x-rollbook-quarantined"]


def test_a_quarantined_trajectory_can_be_named_and_finished(proxy: InProcess) -> None:
    """The header says its name; with that it is as any other, and stays in quarantine."""
    reply = proxy.ask(CHAT, asked("chat"), headers={"X-Rollbook-Labels": '{"who": "me"}'})
    name = reply.headers["x-rollbook-quarantined"]
    assert proxy.ask(f"/t/{name}{CHAT}", asked("chat")).status == 200
    assert proxy.ask(f"/v1/trajectories/{name}/finish", {"reward": 1}).json["turns"] == 2
    trajectory = proxy.trajectories()[name]
    assert trajectory.opened.split == QUARANTINE
    assert _labels(proxy, name) == [(None, "who", "me", "agent")]


# All of it, at random -------------------------------------------------------------------------------

HEADER = st.text(st.characters(codec="latin-1", exclude_categories=("Cc",)), max_size=12)


@given(
    st.fixed_dictionaries(
        {}, optional={"id": SEGMENT, "group": SEGMENT, "split": SEGMENT, "labels": st.just({})}
    ),
    st.dictionaries(
        st.sampled_from(
            [
                "x-rollbook-trajectory",
                "x-rollbook-split",
                "x-rollbook-labels",
                "x-session-id",
                "x-rollbook-task",
            ]
        ),
        HEADER,
    ),
    st.dictionaries(st.sampled_from(["metadata", "prompt_cache_key"]), st.none() | st.text() | st.just({})),
    st.none() | st.text(max_size=20) | st.text(max_size=9).map("trajectory:".__add__),
)
@settings(max_examples=200)
def test_identity_is_total(fields: Any, headers: Any, body: Any, key: str | None) -> None:
    """Anything gives an identity or a 400; the same twice; and what it says can be written down."""
    status = 200
    try:
        identity = identify(fields, headers, body, key)
        wanted = identity.wanted()
    except RequestError as error:
        status = error.status
    if status != 200:
        assert status == 400
        return
    assert identify(fields, headers, body, key) == identity
    assert (identity.name is None) == (identity.by == "nothing")
    orjson.dumps(wanted.model_dump())


# Said twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Rollbook-Trajectory", "a"), ("x-rollbook-trajectory", "b")],
        [("X-Rollbook-Labels", "{}"), ("X-Rollbook-Labels", '{"a": 1}')],
        [("X-Rollbook-Split", "train"), ("X-Rollbook-Split", "eval")],
        [("Authorization", "Bearer trajectory:a"), ("Authorization", "Bearer trajectory:b")],
        [("Authorization", "Bearer trajectory:a"), ("X-Api-Key", "trajectory:b")],
        [("X-Session-Id", "a"), ("X-Session-Id", "b")],
    ],
)
def test_headers_that_disagree_are_a_400(headers: Any) -> None:
    """A mapping of headers shows the first, and would take it for the only one."""
    with pytest.raises(RequestError) as refused:
        check_said_once([(k.lower().encode(), v.encode()) for k, v in headers])
    assert _code(refused.value) == (400, "trajectory_conflict")
    assert headers[0][0].lower() in refused.value.message


def test_headers_that_agree_are_fine() -> None:
    """Twice the same is one thing; a key of no trajectory beside another's is somebody else's matter."""
    check_said_once([(b"x-rollbook-trajectory", b"a"), (b"x-rollbook-trajectory", b"a")])
    check_said_once([(b"authorization", b"Bearer trajectory:a"), (b"x-api-key", b"sk-1")])
    check_said_once([(b"accept", b"a"), (b"accept", b"b")])


@pytest.mark.parametrize("kind", KINDS)
def test_two_trajectories_in_one_request_are_refused_over_http(proxy: InProcess, kind: str) -> None:
    """Nothing is recorded in either of them."""
    twice = [("x-rollbook-trajectory", "twice-a"), ("x-rollbook-trajectory", "twice-b")]
    reply = proxy.ask(PATHS[kind], asked(kind), headers=twice)
    assert (reply.status, reply.json["error"]["code"]) == (400, "trajectory_conflict")
    assert not {"twice-a", "twice-b"} & proxy.trajectories().keys()
