"""Secrets planted wherever clients and operators put them, and searched for in everything on disk."""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import orjson
import pyarrow.parquet as pq

from rollbook import store
from rollbook.store.events.event_json import json_bytes

LETTERS = string.ascii_letters + string.digits
KNOWN: Mapping[str, Callable[[random.Random], str]] = {
    "sk-": lambda rng: "sk-" + _random(rng, 48),
    "sk-proj-": lambda rng: "sk-proj-" + _random(rng, 64),
    "sk-ant-": lambda rng: "sk-ant-api03-" + _random(rng, 80),
    "AKIA": lambda rng: "AKIA" + _random(rng, 16, string.ascii_uppercase + "234567"),
    "ghp_": lambda rng: "ghp_" + _random(rng, 36),
    "github_pat_": lambda rng: f"github_pat_{_random(rng, 22)}_{_random(rng, 59)}",
    "glpat-": lambda rng: "glpat-" + _random(rng, 20),
    "AIza": lambda rng: "AIza" + _random(rng, 35),
    "hf_": lambda rng: "hf_" + _random(rng, 34, string.ascii_letters),
    "sk_live_": lambda rng: "sk_live_" + _random(rng, 24),
    "xoxb-": lambda rng: f"xoxb-{_random(rng, 12, string.digits)}-{_random(rng, 24)}",
    "JWT": lambda rng: f"eyJ{_random(rng, 33)}.eyJ{_random(rng, 61)}.{_random(rng, 43)}",
}
"""Formats that are told by their look."""


def _random(rng: random.Random, size: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=size))


def pem(rng: random.Random) -> str:
    """A private key as a PEM block, with random lines."""
    lines = "\n".join(_random(rng, 64, LETTERS + "+/") for _ in range(4))
    return f"-----BEGIN PRIVATE KEY-----\n{lines}\n-----END PRIVATE KEY-----"


def known(rng: random.Random) -> str:
    """A secret of a well-known format."""
    return KNOWN[rng.choice(list(KNOWN))](rng)


def unknown(rng: random.Random) -> str:
    """A secret of no known format, with characters that URLs and JSON escape."""
    return f"{_random(rng, 10)}&{_random(rng, 6)}+{_random(rng, 6)}/{_random(rng, 4)}=%"


@dataclass(frozen=True, slots=True)
class Sent:
    """A request with a secret in it."""

    path: str
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)


MESSAGES = [{"role": "user", "content": "what is the weather?"}]
CHAT = {"model": "m", "messages": MESSAGES}
Plant = Callable[[str, str], Sent]
"""(name of a trajectory, secret) -> the request."""


def _chat(name: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Sent:
    return Sent(f"/t/{name}/v1/chat/completions", CHAT | dict(body or {}), dict(headers or {}))


def _responses(name: str, **tool: Any) -> Sent:
    mcp = {"type": "mcp", "server_label": "files", "server_url": "https://mcp.example/sse"} | tool
    return Sent(f"/t/{name}/v1/responses", {"model": "m", "input": MESSAGES, "tools": [mcp]})


def _messages(name: str, **server: Any) -> Sent:
    mcp_server = {"type": "url", "name": "files", "url": "https://mcp.example/sse"} | server
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "mcp_servers": [mcp_server]}
    return Sent(f"/t/{name}/v1/messages", body)


PLACES: Mapping[str, Plant] = {
    "header: x-api-key": lambda t, s: _chat(t, headers={"x-api-key": s}),
    "header: cookie": lambda t, s: _chat(t, headers={"Cookie": f"session={s}; token={s}"}),
    "header: proxy-authorization": lambda t, s: _chat(t, headers={"Proxy-Authorization": _basic(s)}),
    "header: of one's own": lambda t, s: _chat(t, headers={"X-Auth-Token": s, "User-Agent": f"agent ({s})"}),
    "query": lambda t, s: Sent(f"/t/{t}/v1/chat/completions?api_key={quote(s, safe='')}", CHAT),
    "labels in a header": lambda t, s: _chat(t, headers={"X-Rollbook-Labels": _json({"password": s})}),
    "label by a request": lambda t, s: Sent(f"/v1/trajectories/{t}/labels", {"name": "password", "value": s}),
    "MCP: headers": lambda t, s: _responses(t, headers={"Authorization": f"Bearer {s}", "X-Key": s}),
    "MCP: authorization": lambda t, s: _responses(t, authorization=s),
    "MCP: address": lambda t, s: _responses(t, server_url=_url(s)),
    "MCP of Anthropic": lambda t, s: _messages(t, authorization_token=s),
    "MCP of Anthropic: address": lambda t, s: _messages(t, url=_url(s)),
    "metadata": lambda t, s: _chat(t, {"metadata": {"api_key": s, "nested": {"access_token": s}}}),
    "extra_headers": lambda t, s: _chat(t, {"extra_headers": {"Authorization": f"Bearer {s}"}}),
    "extra_body": lambda t, s: _chat(t, {"extra_body": {"api_key": s, "client_secret": s}}),
}
"""Where clients put secrets outside the conversation, but for the key by which they are let in."""

OPERATORS = (
    "key of a client",
    "engine's address: login",
    "engine's address: query",
    "engine's key",
    "engine-ask",
)
"""Where operators do; an upstream's errors repeat all of them."""


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _basic(secret: str) -> str:
    return "Basic " + base64.b64encode(f"user:{secret}".encode()).decode()


def _url(secret: str) -> str:
    """An address with a login and with signed parameters."""
    escaped = quote(secret, safe="")
    return f"https://user:{escaped}@mcp.example/sse?X-Amz-Signature={escaped}&access_token={escaped}"


def conversation(secret: str) -> list[dict[str, Any]]:
    """Messages that have a secret in every part: texts, a call's arguments, a tool's result."""
    function = {"name": "login", "arguments": _json({"key": secret})}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "system", "content": f"Use {secret}."},
        {"role": "user", "content": [{"type": "text", "text": f"my key is {secret}, and what is yours?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": f"logged in with {secret}"},
        {"role": "user", "content": f"so: {secret}"},
    ]


# Looking for them ---------------------------------------------------------------------------------


def spellings(secret: str) -> list[bytes]:
    """The secret as bytes: plain, as URLs write it, as JSON does, and in base64 at each of three offsets."""
    raw = secret.encode()
    forms = {raw, quote(secret, safe="").encode(), quote_plus(secret).encode(), _json(secret)[1:-1].encode()}
    for offset in range(3):
        padded = b"\0" * offset + raw
        # What stands at the edges depends on the neighbours: only whole groups of three bytes are looked for.
        whole = padded[: len(padded) // 3 * 3]
        first = 4 if offset else 0
        forms |= {base64.b64encode(whole)[first:], base64.urlsafe_b64encode(whole)[first:]}
    return sorted(forms)


def haystacks(folder: Path, more: Iterable[tuple[str, bytes]] = ()) -> Iterable[tuple[str, bytes]]:
    """Everything in a store: its files as bytes, Parquet's also unpacked, and its events as JSON."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_bytes()
            if path.suffix == ".parquet":
                rows = pq.read_table(path).to_pylist()
                yield f"{path.relative_to(folder)}, unpacked", orjson.dumps(rows, default=str)
    lines = [json_bytes(event) for event in store.open(folder).events()]
    yield "events", b"\n".join(lines)
    yield from more


@dataclass(frozen=True, slots=True)
class Planted:
    """A secret, and where it was put."""

    place: str
    secret: str


def found_in(planted: Sequence[Planted], stacks: Iterable[tuple[str, bytes]]) -> dict[Planted, str]:
    """The secrets that were found, and where each was first seen."""
    looked = [(item, spellings(item.secret)) for item in planted]
    places: dict[Planted, str] = {}
    for name, data in stacks:
        for item, forms in looked:
            if item not in places and any(form in data for form in forms):
                places[item] = name
    return places
