"""Engines that Ray places on the nodes of a cluster: each has a bundle of one placement group.

Their addresses are found out before anything is started, since all other parts are given them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollbook.rollouts.ray_cluster import connected, quietly
from rollbook.store.errors import RolloutError
from rollbook.store.ids import new_id
from rollbook.store.patience import Patience, waits

if TYPE_CHECKING:
    from rollbook.online.config import PlacedConfig

LOOK_S = 0.5
ANSWER_S = 60.0
"""How long a node may take to say its address."""


class Where:
    """An actor in a bundle, which says where that is."""

    def address(self, port: int) -> str:
        """This node's address, with a port on it that is free, from this one upward."""
        import socket

        import ray

        host = ray.util.get_node_ip_address()
        for candidate in range(port, port + 1000):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind((host, candidate))
                return f"{host}:{candidate}"
        raise OSError(f"{host}: no port is free from {port} on")


@contextlib.contextmanager
def placed(wanted: PlacedConfig, say: Callable[[str], None]) -> Iterator[tuple[str, list[str]]]:
    """The name of a placement group that is in place, and an address in each of its bundles.

    Args:
        say: told what takes long.

    Raises:
        ConfigError: Ray is not installed.
        RolloutError: it does not answer, or has no room in time; it says what is missing.
    """
    with _waiting_for("Ray to answer", None, say):
        ray = connected()
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"rollbook-engines-{new_id()[-12:]}"
    bundles = [dict(wanted.resources) for _ in range(wanted.count)]
    group = placement_group(bundles, strategy=wanted.strategy, name=name)
    try:
        amounts = ", ".join(f"{amount:g} {resource}" for resource, amount in wanted.resources.items())
        what = f"room in the Ray cluster for {wanted.count} engines, by {wanted.strategy}: {amounts} each"
        with _waiting_for(what, wanted.within_s, say):
            until = time.monotonic() + wanted.within_s
            while not group.wait(LOOK_S):  # a longer wait would not hear Ctrl-C
                if time.monotonic() > until:
                    raise RolloutError(_no_room(wanted))
        with _waiting_for(f"the addresses of {wanted.count} nodes for engines", wanted.count * ANSWER_S, say):
            addresses = _addresses(ray, wanted, group)
        yield name, addresses
    finally:
        quietly(remove_placement_group, group)


@contextlib.contextmanager
def _waiting_for(what: str, limit_s: float | None, say: Callable[[str], None]) -> Iterator[None]:
    """Context: a wait for something, which is announced when it takes long."""
    over, begun = threading.Event(), time.monotonic()
    patience = Patience(begun)

    def watch() -> None:
        while not over.wait(LOOK_S):
            if patience.due(now := time.monotonic()):
                left_s = None if limit_s is None else begun + limit_s - now
                say(waits(what, now - begun, left_s, time.time()))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def actor_in(group: Any, bundle: int, resources: dict[str, float], kind: type, *given: Any) -> Any:
    """An actor that takes all of a bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rest = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
    options = ray.remote(kind).options(
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        resources=rest,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    return options.remote(*given)


def _addresses(ray: Any, wanted: PlacedConfig, group: Any) -> list[str]:
    """An address in each bundle, with ports apart: several may be on one node."""
    addresses = []
    for bundle in range(wanted.count):
        actor = actor_in(group, bundle, dict(wanted.resources), Where)
        try:
            addresses.append(ray.get(actor.address.remote(wanted.port + 20 * bundle), timeout=ANSWER_S))
        finally:
            quietly(ray.kill, actor)
    return addresses


def _no_room(wanted: PlacedConfig) -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    needs = ", ".join(
        f"{amount:g} {name} each, of which the cluster has {total.get(name, 0):g}, {free.get(name, 0):g} free"
        for name, amount in wanted.resources.items()
    )
    return (
        f"Ray had no room for {wanted.count} engines within {wanted.within_s:g} s, by {wanted.strategy}: "
        f"asked for {needs}. Take fewer (engines.placed.count), add nodes, or wait longer "
        "(engines.placed.within_s)"
    )
