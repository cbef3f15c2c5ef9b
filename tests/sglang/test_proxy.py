"""`rollbook serve` between an OpenAI client and a real server: the log holds what SGLang said."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import orjson
import pytest
from tests.fakes.proxies.served import Served
from tests.sglang.conftest import ROUTING, Weights
from tests.sglang.server import SglangServer

from rollbook import store
from rollbook.bench.scripted.asgi import read_body
from rollbook.demo.processes import rollbook_command
from rollbook.store.events import PolicyActivated
from rollbook.store.events.routed_experts import unpack
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.testing.asgi import serving


class Tap:
    """Passes everything on to a server, and keeps each `/generate` with its last answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.said: list[tuple[Any, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        # A client of its own for each request: a test's loop ends with its server.
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream(
                scope["method"],
                self.url + scope["path"],
                content=body,
                headers={"content-type": "application/json"},
            ) as reply,
        ):
            kind = reply.headers.get("content-type", "text/plain").encode()
            await send(
                {
                    "type": "http.response.start",
                    "status": reply.status_code,
                    "headers": [(b"content-type", kind)],
                }
            )
            whole = b""
            async for part in reply.aiter_raw():
                whole += part
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if scope["path"] == "/generate":
                self.said.append((orjson.loads(body), whole))
            await send({"type": "http.response.body", "body": b""})


def _chunks(whole: bytes) -> list[Any]:
    """An answer's chunks; one that is not streamed is one."""
    if not whole.startswith(b"data:"):
        return [orjson.loads(whole)]
    lines = [line.removeprefix(b"data:").strip() for line in whole.splitlines() if line.startswith(b"data:")]
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


def _said(whole: bytes, incremental: bool) -> tuple[list[int], list[float], Any]:
    """(ids, logprobs, the last chunk's meta_info)"""
    chunks = _chunks(whole)
    counted = chunks if incremental else chunks[-1:]
    ids = [i for chunk in counted for i in chunk["output_ids"]]
    logprobs = [e[0] for chunk in counted for e in chunk["meta_info"]["output_token_logprobs"]]
    return ids, logprobs, chunks[-1]["meta_info"]


Serve = Callable[..., tuple[Served, Tap, Any]]


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Serve]:
    """Starts `rollbook serve` before a server, with a tap between them, and an OpenAI client."""
    stop: list[Any] = []

    def start(server: Any, *options: str) -> tuple[Served, Tap, Any]:
        tap = Tap(server.url)
        context = serving(tap)
        url = context.__enter__()
        stop.append(lambda: context.__exit__(None, None, None))
        words = ["--model", str(server.model), "--engine", "sglang", "--engine-url", url, *options]
        served = Served(tmp_path / "store", words)
        stop.append(served.stop)
        client = openai.OpenAI(base_url=f"{served.url}/t/one/v1", api_key="none", max_retries=0, timeout=60)
        return served, tap, client

    yield start
    for end in reversed(stop):
        end()


def _trajectory(served: Served, turns: int) -> Trajectory:
    for _ in range(200):
        trajectory = {t.opened.name: t for t in fold(store.open(served.path).events()).values()}.get("one")
        if (
            trajectory is not None
            and sum(t.delivered is not None for t in trajectory.turns.values()) == turns
        ):
            return trajectory
        time.sleep(0.05)
    raise AssertionError(f"no {turns} delivered turns:\n{served.log.read_text()}")


def _bound(served: Served) -> str:
    """What the server was told to call its weights, once its checksums were those of version 0."""
    [bound] = [e.record for e in store.open(served.path).events() if isinstance(e.record, PolicyActivated)]
    assert bound.policy_version == 0
    name: str = bound.weight_name
    return name


def _converse(client: Any) -> None:
    """Three turns, the second one streamed."""
    messages: list[Any] = [{"role": "user", "content": "What is 37 + 58?"}]
    for turn in range(3):
        request: Any = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0.8}
        if turn == 1:
            text = "".join(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(**request, stream=True)
                if chunk.choices
            )
        else:
            text = client.chat.completions.create(**request).choices[0].message.content or ""
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]


def _again(served: Served, server: Any, *words: str) -> Any:
    """What `rollbook replay rollout` says of the trajectory, by the server as it is now."""
    command = rollbook_command("replay", "rollout", "one", "--store", served.path, "--model", server.model)
    command += ["--engine", "sglang", "--engine-url", server.url, "--json", *words]
    ran = subprocess.run(command, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    return orjson.loads(ran.stdout)


def test_a_rollout_again(
    servers: dict[str, SglangServer],
    weights: Callable[[SglangServer], Weights],
    models: dict[str, Path],
    proxied: Serve,
) -> None:
    """Greedy turns have the same tokens by the same server and weights; of other weights it is not said that
    they should."""
    server = servers["dense"]
    weights(server)
    served, _, client = proxied(server)
    _bound(served)
    messages: list[Any] = [{"role": "user", "content": "What is 37 + 58?"}]
    for _ in range(2):
        reply = client.chat.completions.create(model="m", messages=messages, max_tokens=16, temperature=0)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    _trajectory(served, 2)
    httpx.post(f"{served.url}/v1/trajectories/one/finish", json={"reward": 1.0}).raise_for_status()
    served.stop()
    turns = _again(served, server)["turns"]
    assert [(turn["repeatable"], turn["same"]) for turn in turns] == [(True, True)] * 2
    weights(server).load(models["dense-next"])
    turns = _again(served, server)["turns"]
    assert [turn["repeatable"] for turn in turns] == [False, False]
    assert not all(turn["same"] for turn in turns)
    replays = [t for t in store.open(served.path).trajectories().values() if t.split == "replay"]
    assert [len(t.turns) for t in replays] == [2, 2]


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_log_holds_what_the_server_said(
    servers: dict[str, SglangServer], weights: Callable[[SglangServer], Weights], proxied: Serve, name: str
) -> None:
    """Ids, logprobs, versions and experts, of whole and streamed replies, bit for bit."""
    server, incremental = servers[name], name == "moe"
    weights(server)
    served, tap, client = proxied(server, *(["--routed-experts"] if incremental else []))
    name = _bound(served)
    _converse(client)
    trajectory = _trajectory(served, 3)
    for turn, (request, whole) in zip(trajectory.turns.values(), tap.said, strict=True):
        done = turn.completed
        assert done is not None
        ids, logprobs, meta = _said(whole, incremental)
        assert trajectory.prompt_ids(turn).tolist() == request["input_ids"]
        assert (done.completion_ids.tolist(), request["rid"]) == (ids, turn.turn_id)
        assert done.logprobs is not None
        assert done.logprobs.tolist() == np.float32(logprobs).tolist()
        assert meta["weight_versions"] == [{"version": name, "start": 0, "end": len(ids)}]
        assert [(s.policy, s.version, s.start, s.end) for s in done.version_spans] == [
            ("actor", 0, 0, len(ids))
        ]
        assert done.logprob_semantics["temperature"] == 0.8
        if incremental:
            raw = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            stored = unpack(done.routed_experts)
            assert done.routed_experts["start"] == request["routed_experts_start_len"]
            assert np.array_equal(stored, raw.reshape(-1, ROUTING.layers, ROUTING.topk))
            assert len(stored) + done.routed_experts["start"] == len(request["input_ids"]) + len(ids) - 1
        else:
            assert done.routed_experts == {}


def test_a_client_that_leaves_ends_the_servers_request(
    dense: SglangServer, weights: Callable[[SglangServer], Weights], proxied: Serve
) -> None:
    """The request ends at the server at once, and the log has what there was, with its version."""
    weights(dense)
    served, tap, client = proxied(dense)
    begun = time.monotonic()
    request: Any = {"model": "m", "max_tokens": 3000, "messages": [{"role": "user", "content": "Count."}]}
    request["extra_body"] = {"min_tokens": 3000}
    with client.chat.completions.create(**request, stream=True) as stream:
        for _, _chunk in zip(range(20), stream, strict=False):
            pass
    while not tap.said and time.monotonic() < begun + 30:
        time.sleep(0.05)
    ids, logprobs, meta = _said(tap.said[0][1], False)
    assert meta["finish_reason"]["type"] == "abort"
    assert len(ids) < 3000
    served.stop()
    (trajectory,) = fold(store.open(served.path).events()).values()
    (turn,) = trajectory.turns.values()
    assert turn.completed is not None
    assert turn.completed.logprobs is not None
    assert turn.completed.completion_ids.tolist() == ids
    assert turn.completed.logprobs.tolist() == np.float32(logprobs).tolist()
    assert [(s.version, s.end) for s in turn.completed.version_spans] == [(0, len(ids))]
    assert (turn.completed.finish_reason, turn.delivered) == ("abort", None)
