"""Runs a program in a bundle of a placement group, and ends with it: `python -m
rollbook.online.on_node`.

It stands in for that program on this host: it exits with its exit code, and passes a SIGTERM on to
it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import orjson

from rollbook.online.placed import actor_in
from rollbook.rollouts.ray_cluster import connected, error_line, quietly

START_S, LOOK_S, STOP_S = 60.0, 1.0, 30.0
LOST = 1


class Host:
    """Runs a program beside an actor, in a group of its own."""

    def start(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> str:
        """Start it; the address of this node."""
        import ray

        with open(log, "ab") as file:
            self._child = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        address: str = ray.util.get_node_ip_address()
        return address

    def ended(self, within_s: float) -> int | None:
        """Its exit code, if it ends within this time."""
        try:
            return self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, within_s: float) -> int:
        """End it: SIGTERM, and SIGKILL to what is left."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(within_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        return self._child.wait()


def main() -> None:
    """Start the program, wait for its end, and end as it did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True, help="name of the placement group")
    parser.add_argument("--bundle", type=int, required=True)
    parser.add_argument("--resources", required=True, help="JSON: those of the bundle")
    parser.add_argument("--environment", required=True, help="JSON: more variables")
    parser.add_argument("--host", required=True, help="address that the node is to have")
    parser.add_argument("--log", required=True)
    parser.add_argument("command", nargs="+")
    sys.exit(_run(parser.parse_args()))


def _run(args: argparse.Namespace) -> int:
    ray = connected()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    group = ray.util.get_placement_group(args.group)
    actor = actor_in(group, args.bundle, orjson.loads(args.resources), Host)
    try:
        sent = (list(args.command), orjson.loads(args.environment), os.getcwd(), args.log)
        address = ray.get(actor.start.remote(*sent), timeout=START_S)
        if address != args.host:
            print(f"the bundle is on {address} now, since {args.host} was lost: start the run again")
            return LOST
        return _ended(ray, actor, signals)
    except ray.exceptions.RayError as error:
        print(f"the engine's node was lost: {error_line(error)}")
        return LOST
    finally:
        quietly(ray.get, [actor.stop.remote(0.0)])
        quietly(ray.kill, actor)


def _ended(ray: Any, actor: Any, asked: list[int]) -> int:
    """Its exit code, once it has ended or somebody asked for it."""
    while not asked:
        code: int | None = ray.get(actor.ended.remote(LOOK_S), timeout=START_S)
        if code is not None:
            return code if code >= 0 else 128 - code
    stopped: int = ray.get(actor.stop.remote(STOP_S), timeout=STOP_S + START_S)
    return stopped


if __name__ == "__main__":
    main()
