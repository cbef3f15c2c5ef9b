"""Attacks through identity: keys, names, pages of other origins, the operator's routes."""

from __future__ import annotations

from rollbook.bench.hostile.attack import OK, RECORD, REFUSED, TOKENS, Ground, attack
from rollbook.bench.hostile.stage import EXPIRED, JUDGE, READER, WRITER
from rollbook.bench.hostile.wire import CHAT_BODY

BOTH = (TOKENS, RECORD)
ENGINE_ROUTES = (
    "pause_generation",
    "continue_generation",
    "update_weights_from_disk",
    "flush_cache",
    "abort_request",
    "get_weights_by_name",
    "update_weight_version",
    "weights_checker",
    "release_memory_occupation",
)


@attack(proxies=BOTH)
async def no_key_and_wrong_keys(ground: Ground) -> None:
    """No key, an empty one, a foreign one or half of a right one opens nothing."""
    wrong = (
        "",
        "x",
        ground.operator[:-1],
        ground.operator + "\0",
        "trajectory:x",
        "trajectory:x:" + "0" * 32,
    )
    for path, method in (
        ("/v1/chat/completions", "POST"),
        ("/v1/trajectories", "POST"),
        ("/v1/events", "GET"),
        ("/v1/cursors/x", "GET"),
        ("/metrics", "GET"),
        ("/docs", "GET"),
        ("/openapi.json", "GET"),
    ):
        for key in wrong:
            header = {"Authorization": f"Bearer {key}"} if key else {"x-api-key": ""}
            body = CHAT_BODY if method == "POST" else None
            await ground.ask(path, body, header, method=method)


@attack(proxies=BOTH)
async def keys_of_other_trajectories(ground: Ground) -> None:
    """A trajectory's key neither adds to, ends, rewards nor labels another, nor reads the log."""
    mine, other = ground.name(), ground.name()
    key = await ground.key(mine)
    await ground.key(other)
    await ground.ask(f"/t/{other}/v1/chat/completions", CHAT_BODY, key=key)
    await ground.ask("/v1/chat/completions", CHAT_BODY, {"X-Rollbook-Trajectory": other}, key=key)
    for what, body in (("finish", {}), ("rewards", {"reward": 1}), ("labels", {"name": "a"})):
        await ground.ask(f"/v1/trajectories/{other}/{what}", body, key=key)
        await ground.ask(f"/v1/trajectories/{mine}/../{other}/{what}", body, key=key)
        await ground.ask(f"/v1/trajectories/{mine}%2f..%2f{other}/{what}", body, key=key)
    for path in ("/v1/events?follow=false", "/v1/cursors/a", "/metrics"):
        await ground.ask(path, method="GET", key=key)
    await ground.ask("/v1/cursors/a", {"cut": "serve=1"}, method="PUT", key=key)
    await ground.ask("/v1/trajectories", {"id": ground.name()}, key=key)


@attack(proxies=BOTH)
async def roles_beyond_their_own(ground: Ground) -> None:
    """A writer reads nothing, a judge records nothing, a reader changes nothing; an old key is none."""
    name = ground.name()
    await ground.key(name)
    path = f"/v1/trajectories/{name}"
    turn, opening = ("POST", f"/t/{name}/v1/chat/completions", CHAT_BODY), ("POST", "/v1/trajectories", b"{}")
    finish, reward = ("POST", f"{path}/finish", b"{}"), ("POST", f"{path}/rewards", b'{"reward": 1}')
    judged = ("POST", f"{path}/rewards", b'{"reward": 1, "source": "judge"}')
    engine, cursor = ("POST", "/engine/pause_generation", b"{}"), ("PUT", "/v1/cursors/a", b'{"cut": "x=1"}')
    events, metrics = ("GET", "/v1/events?follow=false&limit=1", None), ("GET", "/metrics", None)
    forbidden = {
        WRITER: (judged, engine, cursor, events, metrics),
        JUDGE: (turn, opening, finish, engine, cursor, metrics),
        READER: (turn, opening, finish, reward, engine),
        EXPIRED: (turn, opening, finish, reward, engine, cursor, events, metrics),
    }
    for key, requests in forbidden.items():
        for method, where, body in requests:
            await ground.ask(where, body, method=method, key=key)


@attack()
async def rewards_of_ones_own(ground: Ground) -> None:
    """A trajectory's key cannot reward as another source, nor after its finish."""
    name = ground.name()
    key = await ground.key(name)
    await ground.chat(name, "hi")
    path = f"/v1/trajectories/{name}"
    await ground.ask(f"{path}/rewards", {"reward": 1e6, "source": "judge"}, key=key)
    await ground.ask(f"{path}/finish", {"reward": 0.5}, key=key, allowed=OK)
    await ground.ask(f"{path}/rewards", {"reward": 1e6}, key=key)
    await ground.ask(f"{path}/finish", {"reward": 1e6}, key=key)
    await ground.chat(name, "more", allowed=REFUSED)


@attack(proxies=BOTH)
async def names_that_disagree(ground: Ground) -> None:
    """Two names in one request, an empty one, and paths that hide one are refused."""
    first, second = ground.name(), ground.name()
    head = f"Host: {ground.host}\r\nAuthorization: Bearer {ground.operator}\r\n"
    twice = f"{head}X-Rollbook-Trajectory: {first}\r\nX-Rollbook-Trajectory: {second}\r\n"
    data = f"POST /v1/chat/completions HTTP/1.1\r\n{twice}Content-Length: {len(CHAT_BODY)}\r\n\r\n"
    ground.check("two identity headers", await ground.send(data.encode() + CHAT_BODY), REFUSED)
    for path in (
        f"/t/{first}//v1/chat/completions",
        "/t//v1/chat/completions",
        "/t/v1/chat/completions",
        f"/t/{first}/label/a/v1/chat/completions",
        f"/t/{'x' * 300}/v1/chat/completions",
    ):
        await ground.ask(path, CHAT_BODY, key=ground.operator)
    header = {"X-Rollbook-Trajectory": second}
    await ground.ask(f"/t/{first}/v1/chat/completions", CHAT_BODY, header, key=ground.operator)


@attack(proxies=BOTH)
async def pages_of_other_origins(ground: Ground) -> None:
    """A page elsewhere cannot record or read: foreign hosts, origins and forms are refused."""
    name = ground.name()
    key, path = await ground.key(name), f"/t/{name}/v1/chat/completions"
    for headers in (
        {"Host": "rebound.example"},
        {"Host": f"rebound.example:{ground.host.rpartition(':')[2]}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://{ground.host}.evil.example"},
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "http://evil.example", "Content-Type": "application/x-www-form-urlencoded"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"},
    ):
        await ground.ask(path, CHAT_BODY, headers, key=key)
        await ground.ask("/v1/events?follow=false", None, headers, method="GET", key=ground.operator)


@attack()
async def control_of_the_engine(ground: Ground) -> None:
    """The engine's control routes are the operator's: not a trajectory key's, nor a forwarded address's."""
    key = await ground.key(ground.name())
    for route in ENGINE_ROUTES:
        for spoofed in ({}, {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}):
            await ground.ask(f"/engine/{route}", {}, spoofed, key=key)
            await ground.ask(f"/engine/{route}", {}, spoofed)


@attack(proxies=(RECORD,))
async def paths_of_the_upstream(ground: Ground) -> None:
    """Paths that climb reach nothing of a record-only proxy's own."""
    for path in ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1//..//metrics", "/v1/files/../../metrics"):
        for key in ("", "trajectory:x"):
            await ground.ask(path, method="GET", key=key)
