"""Somebody's agent service, by the table of docs/rollouts.md: a program, `service.py PORT LOG`.

Each agent is a process of its own that makes a request and then does what its task says; the file LOG has a
line for each that was started and each that was ended before its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from typing import Any

from aiohttp import web

AGENT = """
import json, os, sys, time, urllib.request

body = json.load(sys.stdin)
headers = {"content-type": "application/json", "authorization": "Bearer " + body["api_key"]}
said = {"model": "policy", "messages": [{"role": "user", "content": body["task"].get("say", "hello")}]}
request = urllib.request.Request(body["base_url"] + "/chat/completions", json.dumps(said).encode(), headers)
urllib.request.urlopen(request).read()
what = body["task"]["do"]
if what == "wait":
    time.sleep(600)
if what == "exit":
    sys.exit("it could not")
"""


class Service:
    """The agents that were asked for, by launch."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.agents: dict[str, dict[str, Any]] = {}

    def tell(self, text: str) -> None:
        """A line to the log."""
        with open(self.log, "a") as file:
            file.write(text + "\n")

    async def start(self, request: web.Request) -> web.Response:
        """202, or at once the outcome where the task says so; a launch is started once."""
        body = await request.json()
        launch_id = request.headers["idempotency-key"]
        what = body["task"]["do"]
        if what == "refuse":
            return web.Response(status=422, text="no such task here")
        if launch_id not in self.agents:
            self.tell(f"start {launch_id} {what} {request.headers.get('authorization', '-')}")
            self.agents[launch_id] = {
                "status": "running",
                "heard": time.monotonic(),
                "lease": body["lease_s"],
            }
            task = asyncio.create_task(self.run(launch_id, body))
            self.agents[launch_id]["task"] = task
            if what == "lose":  # the answer to the first request never comes
                assert request.transport is not None
                request.transport.close()
            if what == "at once":
                await task
        return self.said(launch_id, 200 if what == "at once" else 202)

    async def run(self, launch_id: str, body: Any) -> None:
        """One agent, to its end."""
        agent = self.agents[launch_id]
        agent["process"] = process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", AGENT, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate(json.dumps(body).encode())
        if agent["status"] == "cancelled":
            return
        if body["task"]["do"] == "nonsense":
            agent["status"] = "splendid"
        elif process.returncode == 0:
            agent |= {"status": "done", "reward": {"form": 0.25, "sense": 0.5}, "success": True}
        elif b"HTTP Error 5" in errors:
            agent |= {"status": "infra_failed", "error": "the policy was away"}
        else:
            agent |= {"status": "failed", "error": errors.decode().strip().splitlines()[-1]}

    def said(self, launch_id: str, status: int = 200) -> web.Response:
        """How an agent is."""
        hidden = ("task", "process", "heard", "lease")
        shown = {name: value for name, value in self.agents[launch_id].items() if name not in hidden}
        return web.json_response(shown, status=status)

    async def look(self, request: web.Request) -> web.Response:
        """How it is; whoever asks renews its lease."""
        launch_id = request.match_info["launch"]
        if launch_id not in self.agents:
            return web.Response(status=404)
        self.agents[launch_id]["heard"] = time.monotonic()
        return self.said(launch_id)

    async def cancel(self, request: web.Request) -> web.Response:
        """End it."""
        launch_id = request.match_info["launch"]
        if launch_id in self.agents:
            self.end(launch_id, "cancel")
        return web.Response(status=204 if launch_id in self.agents else 404)

    def end(self, launch_id: str, why: str) -> None:
        """End an agent that runs."""
        agent = self.agents[launch_id]
        if agent["status"] == "running" and "process" in agent:
            self.tell(f"{why} {launch_id}")
            agent["status"] = "cancelled"
            with contextlib.suppress(ProcessLookupError):
                agent["process"].kill()

    async def leases(self, _: web.Application) -> None:
        """End what nobody asks for."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.05)
                for launch_id, agent in self.agents.items():
                    if time.monotonic() - agent["heard"] > agent["lease"]:
                        self.end(launch_id, "lease")

        self.watching = asyncio.create_task(watch())


if __name__ == "__main__":
    service = Service(sys.argv[2])
    app = web.Application()
    app.add_routes(
        [
            web.post("/agents", service.start),
            web.get("/agents/{launch}", service.look),
            web.delete("/agents/{launch}", service.cancel),
        ]
    )
    app.on_startup.append(service.leases)
    os.setpgrp()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
