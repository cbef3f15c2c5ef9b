"""Whatever a client wrote about a trajectory, by any route and in any field, is in no file once it is erased.

Bodies are made of the models that check them: each text that a model lets through is a mark. So a new field
is marked too, and found here unless its event's kind says that erasure removes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from rollbook import store as rb
from rollbook.ingest.fields import (
    AddLabel,
    AddPreference,
    AssignReward,
    EndLaunch,
    FinishTrajectory,
    OpenTrajectory,
    StartLaunch,
    TellLeaks,
)
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.erase import erase_trajectory

MARK = "QXZ-mark"
NAMES = {"id": "kept-name", "group": "kept-group", "rollout": "kept-rollout", "launch_id": "kept-launch"}
"""Names are not text: docs/keeping.md says that they stay."""
TRAJECTORY = "/v1/trajectories/kept-name"
COVERED = {
    *("/v1/trajectories", "/v1/trajectories/{name:path}/finish", "/v1/trajectories/{name:path}/rewards"),
    *("/v1/trajectories/{name:path}/labels", "/v1/preferences", "/v1/trajectories/{name:path}/launches"),
    "/v1/trajectories/{name:path}/launches/{launch_id}/end",
    "/v1/trajectories/{name:path}/launches/{launch_id}/leaks",
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
}
NOT_ABOUT_ONE = {"/v1/evaluations", "/v1/messages/count_tokens", "/events/cursors/{consumer:path}"}
"""Routes that write nothing of a single trajectory."""


def _marked(schema: dict[str, Any], whole: dict[str, Any], place: str = "") -> Any:
    """A value that a JSON schema allows, with a mark as each text, and as each name of an entry."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        kinds = [option for option in schema["anyOf"] if option.get("type") != "null"]
        texts = [option for option in kinds if option.get("type") in ("string", "object") or "$ref" in option]
        return _marked((texts or kinds)[-1], whole, place)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "string":
            return f"{MARK}{place}"
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return True
        case "array":
            return [_marked(schema["items"], whole, f"{place}.0")]
        case "object" if "properties" in schema:
            return {
                name: NAMES.get(name) or _marked(field, whole, f"{place}.{name}")
                for name, field in schema["properties"].items()
            }
        case "object":
            entry = schema.get("additionalProperties")
            inner = entry if isinstance(entry, dict) else {}
            return {f"{MARK}{place}.key": _marked(inner, whole, f"{place}.value")}
    return {f"{MARK}{place}": [f"{MARK}{place}"]}  # anything


def _body(model: type[BaseModel], **values: Any) -> dict[str, Any]:
    """A body of every field that a model has, each text a mark, but for what is given; absent where None."""
    schema = model.model_json_schema()
    body = _marked(schema, schema) | values
    return {name: value for name, value in body.items() if value is not None}


def _answer(proxy: Any, path: str, body: Any, **headers: str) -> Any:
    """What a route answered to a body that it took."""
    reply = proxy.ask(path, body, headers={name.replace("_", "-"): text for name, text in headers.items()})
    assert reply.status in (200, 201), (path, reply.json)
    return reply.json


def _model_calls(proxy: Any, name: str, **headers: str) -> str:
    """A call of each endpoint, with a mark in whatever a client may write; the id of the first reply.

    Args:
        headers: of the first call, which opens the trajectory if nothing did.
    """
    text = f"{MARK} said"
    tool = {"name": MARK, "description": MARK, "parameters": {"type": "object", "properties": {MARK: {}}}}
    common = {"model": MARK, "metadata": {MARK: MARK}, "user": MARK, "unheard_of": MARK}
    first = _answer(
        proxy,
        f"/t/{name}/v1/chat/completions",
        common
        | {"messages": [{"role": "user", "content": text, "name": MARK}], "stop": [MARK], "max_tokens": 4}
        | {"tools": [{"type": "function", "function": tool}]},
        **headers,
    )
    plain = {"prompt": text, "max_tokens": 4, "suffix": None}
    _answer(proxy, f"/t/{name}/v1/completions", common | plain)
    spoken = {"input": text, "instructions": text, "max_output_tokens": 4, "store": False}
    _answer(proxy, f"/t/{name}/v1/responses", common | spoken)
    anthropic = {"messages": [{"role": "user", "content": text}], "system": text, "max_tokens": 4}
    _answer(proxy, f"/t/{name}/v1/messages", common | anthropic | {"metadata": {"user_id": MARK}})
    return str(first["id"])


@pytest.fixture(scope="module")
def erased(played: Any, proxies_started: list[Any]) -> Path:
    """A store in which all was said of two trajectories that were erased then; sealed, with a new catalog."""
    proxy = played(f"{MARK} replied")
    routes = {r.path for r in proxy.app.routes if "POST" in (getattr(r, "methods", None) or ())}
    of_clients = {path for path in routes if not path.startswith(("/engine", "/t/", "/{"))}
    assert of_clients <= COVERED | NOT_ABOUT_ONE, "a route is new: say what it writes here"
    _answer(proxy, "/v1/trajectories", {"id": "other"})
    _answer(proxy, "/v1/trajectories", _body(OpenTrajectory, split="train", judges=None))
    reply = _model_calls(proxy, "kept-name")
    labels = orjson.dumps({MARK: MARK}).decode()
    ours = {"x_rollbook_task": MARK, "x_rollbook_labels": labels}
    _model_calls(proxy, "by-headers", user_agent=MARK, x_request_id=MARK, **ours)
    reward = _answer(proxy, f"{TRAJECTORY}/rewards", _body(AssignReward, turn=reply, supersedes=None))
    again = _body(AssignReward, turn=reply, supersedes=reward["event_id"], reward=3.0)
    _answer(proxy, f"{TRAJECTORY}/rewards", again)
    _answer(proxy, f"{TRAJECTORY}/labels", _body(AddLabel, turn=reply))
    _answer(proxy, "/v1/preferences", _body(AddPreference, chosen="kept-name", rejected="other"))
    _answer(proxy, f"{TRAJECTORY}/launches", _body(StartLaunch))
    _answer(proxy, f"{TRAJECTORY}/launches/kept-launch/leaks", _body(TellLeaks))
    _answer(proxy, f"{TRAJECTORY}/launches/kept-launch/end", _body(EndLaunch))
    _answer(proxy, f"{TRAJECTORY}/finish", _body(FinishTrajectory, turn_rewards=None))
    log, path = proxy.store, proxy.store.path
    assert list(_with_marks(path)), "what is looked for is found before the erasure"
    proxies_started.remove(proxy)
    proxy.close()
    erase_trajectory(rb.open(path), "by-headers", "asked")
    report = erase_trajectory(rb.open(path), "kept-name", "asked")
    assert [MARK in output for output in report.outputs] == [True]
    for lane in log.lanes():
        for unit in seal_closed(path, lane, SealSettings()):
            build_derived(path, unit)
        for unit in current_units(path, lane):
            build_derived(path, unit)
    rebuild_catalog(log)
    return Path(path)


def _with_marks(path: Path) -> Iterator[str]:
    """Files that hold a mark, as they are or as a value of Parquet, and what stands around the first."""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        if file.suffix == ".parquet":
            values = pq.read_table(file).combine_chunks()
            data += b"".join(
                buffer.to_pybytes()
                for column in values.columns
                for chunk in column.chunks
                for buffer in chunk.buffers()
                if buffer is not None
            )
        if (place := data.find(MARK.encode())) >= 0:
            yield f"{file.relative_to(path)}: ...{data[max(0, place - 80) : place + 60]!r}"


def test_no_text_is_left_in_any_file(erased: Path) -> None:
    """Of all that was written to all routes, after erasure, sealing, and with a new catalog."""
    assert list(_with_marks(erased)) == []


def test_names_and_numbers_stay(erased: Path) -> None:
    """The trajectory is there under its names, with its rewards, its launch and its turns."""
    with rb.connect(erased) as connection:
        ask = connection.execute
        opened = ask('SELECT trajectory, "group", task, labels FROM trajectories ORDER BY 1').fetchall()
        assert opened[1] == ("kept-name", "kept-group", None, '{"erased":true}')
        rewards = ask("SELECT reward, source FROM rewards ORDER BY seq").fetchall()
        assert rewards == [(1.0, "erased"), (3.0, "erased"), (1.0, "agent")]
        launch = ask("SELECT launch_id, rollout, launcher, owner, output, scoring FROM launches").fetchall()
        assert launch == [
            (
                "kept-launch",
                "kept-rollout",
                "erased",
                "erased",
                '{"0":{"bytes":1,"kept":1}}',
                '{"0":{"erased":true}}',
            )
        ]
        assert ask("SELECT count(*) FROM turns WHERE trajectory = 'kept-name'").fetchall() == [(4,)]
