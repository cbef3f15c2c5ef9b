"""Tenants, each with a key, interleaved at random: each has what it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.service.conftest import BASE, Done, Service, done_by

from rollbook.edge.keys import add_key

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
LOSSES = ("cross_entropy", "ppo", "importance_sampling", "cispo")
LEFT_OUT = ({}, {"train_unembed": False}, {"train_mlp": False}, {"train_attn": False})
MOST = 8
Alone = tuple[list[dict[str, Any]], list[Any], dict[str, list[list[Done]]]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(the file of keys, the options of each tenant's loop)"""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    return file, [
        {"key": add_key(file, f"tenant-{at}", "writer", None, "tml-"), "rank": 2 + at, "seed": at}
        | {"loss": LOSSES[at % 4]}
        | LEFT_OUT[at // 2]
        for at in range(MOST)
    ]


def _run(service: Service, loops: list[dict[str, Any]], *, at_once: bool) -> Any:
    options = {"base": BASE, "url": service.url, "loops": loops, "at_once": at_once}
    return service.run("tenants", **options, key=loops[0]["key"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, started: Callable[..., Service], keys: Any) -> Alone:
    """What each does while nobody else does anything."""
    file, loops = keys
    service = started(tmp_path_factory.mktemp("alone"), "store", "--keys", str(file))
    came = _run(service, loops, at_once=False)
    service.stop()
    return loops, came, done_by(service)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_together_each_has_what_it_has_alone(
    service_at: Callable[..., Service], keys: Any, alone: Alone, count: int
) -> None:
    """Losses, samples, and the digests of every operation."""
    loops, came, done = alone
    together = service_at("store", "--keys", str(keys[0]))
    assert _run(together, loops[:count], at_once=True) == came[:count]
    assert done_by(together) == {f"tenant-{at}": done[f"tenant-{at}"] for at in range(count)}
    assert len({str(one["losses"]) for one in came}) == MOST
