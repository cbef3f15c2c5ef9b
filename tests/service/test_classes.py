"""docs/service.md says of every method of the pinned client's classes whether it is served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.service
LOCAL = {
    *("close", "create", "create_rest_client", "from_sampler_handle", "get_base_model", "get_console_url"),
    *("get_sampler_handle", "get_telemetry", "on_queue_state_change", "create_sampling_client"),
}
"""Methods that only make objects of the client's, or ask for what it knows."""


def test_every_method_is_on_the_page(run_client: Callable[..., str], root: Path) -> None:
    """As served, or as refused; none that the client does not have."""
    page = (root / "docs" / "service.md").read_text()
    rows = re.findall(r"^\| `(\w+Client)` \|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    named = {kind: [re.findall(r"`(\w+)`", cell) for cell in cells] for kind, *cells in rows}
    there = json.loads(run_client("client_classes.py").splitlines()[-1])
    assert [*named] == [*there]
    for kind, methods in there.items():
        served, refused = named[kind]
        assert sorted([*served, *refused]) == sorted(set(methods) - LOCAL), kind
