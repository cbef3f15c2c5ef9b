"""What the proxy's HTTP surface takes, as an OpenAPI schema: for tests that draw requests from it.

It says what clients send, so that drawn requests reach deep; the proxy itself takes much more.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 20}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": 64}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}


def thing(required: str = "", **properties: Schema) -> Schema:
    """An object; `required` names the keys it must have."""
    return {"type": "object", "properties": properties, "required": required.split()}


def one_of(*choices: Schema) -> Schema:
    """Any of these."""
    return {"anyOf": list(choices)}


def several(item: Schema, least: int = 0) -> Schema:
    """A list of up to four."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": 4}


def word(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


OPENAI_PART = one_of(
    thing("type text", type=word("text"), text=TEXT),
    thing("type image_url", type=word("image_url"), image_url=thing("url", url=TEXT)),
)
CALL = thing(
    "type function",
    id=TEXT,
    type=word("function"),
    function=thing(
        "name arguments", name=TEXT, arguments=one_of(TEXT, word('{"a": 1}', "{}", '{"a": "\\ud800"}'))
    ),
)
CHAT_MESSAGE = one_of(
    thing(
        "role content", role=word("system", "developer", "user"), content=one_of(TEXT, several(OPENAI_PART))
    ),
    thing(
        "role",
        role=word("assistant"),
        content=one_of(TEXT, word(None)),
        tool_calls=several(CALL),
        reasoning_content=TEXT,
    ),
    thing("role tool_call_id content", role=word("tool"), tool_call_id=TEXT, content=TEXT),
)
FUNCTION = thing("name", name=TEXT, description=TEXT, parameters=thing())
SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer"},
    "seed": {"type": "integer"},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "max_tokens": COUNT,
    "stop": one_of(TEXT, several(TEXT), word(None)),
    "stream": FLAG,
    "stream_options": thing(include_usage=FLAG),
    "logprobs": one_of(FLAG, {"type": "integer"}),
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "response_format": one_of(
        thing("type", type=word("text", "json_object")),
        thing("type json_schema", type=word("json_schema"), json_schema=thing("schema", schema=thing())),
    ),
    "metadata": thing(trajectory_id=TEXT, session_id=TEXT),
    "prompt_cache_key": TEXT,
    "user": TEXT,
    "chat_template_kwargs": thing(enable_thinking=FLAG),
}
CHAT = thing(
    "messages",
    messages=several(CHAT_MESSAGE, 1),
    tools=several(thing("type function", type=word("function", "web_search"), function=FUNCTION)),
    tool_choice=one_of(word("auto", "none", "required"), thing(type=word("function"))),
    max_completion_tokens=COUNT,
    reasoning_effort=TEXT,
    **SAMPLING,
)
COMPLETION = thing(
    "prompt",
    prompt=one_of(TEXT, several({"type": "integer", "minimum": 0, "maximum": 400}, 1), several(TEXT)),
    suffix=TEXT,
    echo=FLAG,
    return_token_ids=FLAG,
    **SAMPLING,
)
ITEM = one_of(
    thing(
        "role content",
        type=word("message"),
        role=word("system", "developer", "user", "assistant"),
        content=one_of(
            TEXT, several(thing("type text", type=word("input_text", "output_text", "refusal"), text=TEXT))
        ),
    ),
    thing(
        "type",
        type=word("reasoning"),
        id=TEXT,
        summary=several(thing(text=TEXT)),
        content=several(thing(text=TEXT)),
    ),
    thing("type call_id name arguments", type=word("function_call"), call_id=TEXT, name=TEXT, arguments=TEXT),
    thing(
        "type call_id output",
        type=word("function_call_output"),
        call_id=TEXT,
        output=one_of(TEXT, several(ANY)),
    ),
    thing("type id", type=word("item_reference"), id=TEXT),
)
RESPONSE = thing(
    "input",
    input=one_of(TEXT, several(ITEM, 1)),
    instructions=one_of(TEXT, word(None)),
    previous_response_id=one_of(TEXT, word(None)),
    tools=several(
        one_of(thing("type name", type=word("function"), name=TEXT), thing("type", type=word("mcp")))
    ),
    text=thing(format=thing("type", type=word("text", "json_object", "json_schema"))),
    reasoning=thing(effort=TEXT),
    max_output_tokens=COUNT,
    background=FLAG,
    **{k: SAMPLING[k] for k in ("model", "temperature", "top_p", "stream", "metadata")},
)
BLOCK = one_of(
    thing("type text", type=word("text"), text=TEXT, cache_control=thing(type=word("ephemeral"))),
    thing("type thinking", type=word("thinking"), thinking=TEXT, signature=TEXT),
    thing("type data", type=word("redacted_thinking"), data=TEXT),
    thing("type id name input", type=word("tool_use"), id=TEXT, name=TEXT, input=thing()),
    thing(
        "type tool_use_id",
        type=word("tool_result"),
        tool_use_id=TEXT,
        content=one_of(TEXT, several(ANY)),
        is_error=FLAG,
    ),
    thing(
        "type source",
        type=word("image"),
        source=thing("type", type=word("base64", "url"), data=TEXT, url=TEXT),
    ),
)
MESSAGE = thing(
    "messages max_tokens",
    messages=several(
        thing("role content", role=word("user", "assistant"), content=one_of(TEXT, several(BLOCK))), 1
    ),
    system=one_of(TEXT, several(thing("type text", type=word("text"), text=TEXT))),
    tools=several(
        one_of(thing("name", name=TEXT, input_schema=thing()), thing("type name", type=TEXT, name=TEXT))
    ),
    tool_choice=thing("type", type=word("auto", "any", "tool", "none"), name=TEXT),
    stop_sequences=several(TEXT),
    thinking=thing(type=word("enabled", "disabled"), budget_tokens={"type": "integer"}),
    **{
        k: SAMPLING[k] for k in ("model", "temperature", "top_p", "top_k", "max_tokens", "stream", "metadata")
    },
)
OPENING = thing(id=TEXT, group=TEXT, task=TEXT, split=word("train", "eval", "teacher"), labels=thing())
FINISH = thing(
    reward=NUMBER,
    success=FLAG,
    turn_rewards=one_of(several(NUMBER), {"type": "object", "additionalProperties": NUMBER}),
    status=word("completed", "truncated", "aborted", "failed"),
)
REWARD = thing("reward", reward=NUMBER, source=TEXT, turn=TEXT, supersedes=TEXT)
LABEL = thing("name", name=TEXT, value=ANY, source=TEXT, turn=TEXT)
AMOUNT: Schema = {"type": "number", "minimum": 0}
LAUNCH = thing(
    "rollout place attempt launcher owner",
    launch_id=word("one", "two"),
    rollout=TEXT | {"minLength": 1},
    place=thing("epoch task sample", epoch=COUNT, task=TEXT, sample=COUNT),
    attempt=COUNT,
    launcher=word("subprocess", "python"),
    isolation=thing(),
    owner=TEXT | {"minLength": 1},
    clocks=thing(start=AMOUNT, idle=AMOUNT, total=one_of(AMOUNT, word(None)), scoring=AMOUNT),
)
LAUNCH_END = thing(
    "status",
    status=word("done", "truncated", "agent_error", "infra_error", "timeout", "cancelled"),
    why=one_of(TEXT, word(None)),
    exit_code=one_of(COUNT, word(None)),
    signal=one_of(COUNT, word(None)),
    seconds=AMOUNT,
    cpu_s=AMOUNT,
    peak_rss_mb=AMOUNT,
    output=thing(stdout=thing("path bytes kept", path=TEXT, bytes=COUNT, kept=COUNT)),
    scoring=thing(exact=one_of(NUMBER, word(None), thing(error=TEXT))),
)
LEAKS = thing(
    "processes found",
    processes=several(thing("pid command", pid=COUNT, command=TEXT), 1),
    found=word("start", "running", "end"),
)
EVALUATED = thing(
    "policy policy_version rollout trajectories",
    policy=TEXT | {"minLength": 1},
    policy_version=COUNT,
    rollout=TEXT | {"minLength": 1},
    trajectories=COUNT,
)

BODIES: dict[str, Schema] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/v1/trajectories": OPENING,
    "/v1/trajectories/{id}/finish": FINISH,
    "/v1/trajectories/{id}/rewards": REWARD,
    "/v1/trajectories/{id}/labels": LABEL,
    "/v1/trajectories/{id}/launches": LAUNCH,
    "/v1/trajectories/{id}/launches/{launch_id}/end": LAUNCH_END,
    "/v1/trajectories/{id}/launches/{launch_id}/leaks": LEAKS,
    "/v1/evaluations": EVALUATED,
}
HEADERS = (
    "X-Rollbook-Trajectory",
    "X-Rollbook-Group",
    "X-Rollbook-Split",
    "X-Rollbook-Labels",
    "X-Session-ID",
    "x-stainless-retry-count",
)
QUERIES: dict[str, tuple[str, ...]] = {
    "/v1/events": ("from", "limit", "kinds", "run", "format"),
    "/v1/responses/{id}": (),
    "/v1/cursors/{id}": (),
    "/v1/rollouts/{id}": (),
    "/v1/models/{id}": (),
}


def _parameter(name: str, where: str) -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": TEXT | {"minLength": 1}}


def _names(path: str) -> list[Schema]:
    return [_parameter(name, "path") for name in ("id", "launch_id") if f"{{{name}}}" in path]


def _post(path: str, body: Schema) -> Schema:
    headers = [_parameter(name, "header") for name in HEADERS]
    content = {"application/json": {"schema": body}}
    request = {"required": True, "content": content}
    return {
        "parameters": _names(path) + headers,
        "requestBody": request,
        "responses": {"200": {"description": "fine"}},
    }


def _get(path: str, query: tuple[str, ...]) -> Schema:
    return {
        "parameters": _names(path) + [_parameter(name, "query") for name in query],
        "responses": {"200": {"description": "fine"}},
    }


def openapi() -> Schema:
    """The whole surface."""
    paths: dict[str, Any] = {path: {"post": _post(path, body)} for path, body in BODIES.items()}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        paths["/t/{id}" + path] = {"post": _post("/t/{id}" + path, BODIES[path])}
    paths |= {path: {"get": _get(path, query)} for path, query in QUERIES.items()}
    cut = {"application/json": {"schema": thing("cut", cut=TEXT)}}
    paths["/v1/cursors/{id}"]["put"] = _get("/v1/cursors/{id}", ()) | {
        "requestBody": {"required": True, "content": cut}
    }
    return {"openapi": "3.1.0", "info": {"title": "Rollbook", "version": "1"}, "paths": paths}
