"""A program: a scripted SGLang that joins process groups and receives broadcasts, as the real one does.

    python broadcast.py MODEL PORT [FAULT...]

Prints its address. A collective blocks its routes of groups, as the real scheduler stands still in one.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rollbook.bench.scripted.asgi import run_alone
from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault
from rollbook.bench.tied import end_with_parent

LONG = timedelta(minutes=30)
"""SGLang's groups wait as long: only the other side's end can end it sooner."""


class Groups:
    """The process groups of this engine by name, and the routes that use them."""

    def __init__(self, app: ScriptedSGLang) -> None:
        self._app, self._groups, self._busy = app, {}, asyncio.Lock()
        self._groups: dict[str, Any]
        app.weights.routes |= {
            "/init_weights_update_group": self._in_turn(self._join),
            "/update_weights_from_distributed": self._in_turn(self._receive),
            "/destroy_weights_update_group": self._in_turn(self._leave),
            "/scripted/well": self._well,
        }

    def _in_turn(self, work: Any) -> Any:
        async def route(body: Any) -> tuple[int, Any]:
            async with self._busy:
                try:
                    await asyncio.to_thread(work, body)
                except Exception as error:
                    return 400, {"success": False, "message": str(error)[:200]}
                return 200, {"success": True, "message": "Success"}

        return route

    async def _well(self, body: Any) -> tuple[int, Any]:
        """Nothing goes wrong any more."""
        self._app.faults.faults.clear()
        return 200, {"success": True}

    def _join(self, body: Any) -> None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            body["master_address"],
            body["master_port"],
            body["world_size"],
            is_master=False,
            timeout=LONG,
        )
        name = body["group_name"]
        group, _ = c10d._new_process_group_helper(
            body["world_size"],
            body["rank_offset"],
            [],
            c10d.Backend(body["backend"]),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=LONG,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(body["world_size"])}
        self._groups[name] = group

    def _receive(self, body: Any) -> None:
        assert body["load_format"] == "flattened_bucket"
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._groups[body["group_name"]])
        parts = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
        named = [(name, part.clone().view(dtype).view(shape)) for name, part, dtype, shape in parts]
        assert self._app.weights.held is not None
        self._app.weights.held.take(named)

    def _leave(self, body: Any) -> None:
        dist.destroy_process_group(self._groups.pop(body["group_name"]))


def main(model: str, port: str, *faults: str) -> None:
    """Serve until the parent ends."""
    app = ScriptedSGLang(None, Options(model_path=str(Path(model)), weights="float32", weight_version="0"))
    Groups(app)
    for fault in faults:
        app.faults.add(Fault(**orjson.loads(fault)))
    run_alone(app, int(port))


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
