"""What an upstream said it counted, as columns of `turns`: live, sealed, and at no cost for others."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import TrajectoryOpened, TurnCompleted, TurnRequested, token_ids
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings

USAGES: dict[str, tuple[Any, tuple[int | None, ...]]] = {
    "anthropic": ({"input_tokens": 3, "output_tokens": 7}, (3, 7, None)),
    "cached": (
        {
            "input_tokens": 3,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 20,
            "output_tokens": 7,
        },
        (123, 7, None),
    ),
    "chat": ({"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 12}, (3, 7, 12)),
    "half": ({"prompt_tokens": 3}, (3, None, None)),
    "junk": ({"prompt_tokens": "x", "completion_tokens": -1, "total_tokens": {"of": 2}}, (None, None, None)),
    "list": ([1, 2], (None, None, None)),
    "none": (None, (None, None, None)),
    "responses": ({"input_tokens": 3, "output_tokens": 7, "total_tokens": 10}, (3, 7, 10)),
    "vast": (
        {"input_tokens": 2**63 - 1, "cache_read_input_tokens": 9, "output_tokens": 1e30, "total_tokens": 2},
        (None, None, 2),
    ),
}
"""Name -> the usage that came, and the counts that the columns say."""
COUNTS = "upstream_prompt_tokens, upstream_completion_tokens, upstream_total_tokens"


def _records(name: str, usage: Any) -> list[Any]:
    nothing, names = token_ids([]), (f"id-{name}", name)
    requested = TurnRequested(*names, f"r-{name}", None, "first_turn", None, 0, [], {}, "m", {}, {}, "key")
    done = TurnCompleted(
        *(*names, None, None, nothing, nothing, None, (), 0, prompt_sha256(nothing), "stop"),
        *({"role": "assistant", "content": "prompt_tokens"}, {"kind": "none"}, ["text_only"], {}),
        {"id": "u"} if usage is None else {"id": "u", "usage": usage},
    )
    return [TrajectoryOpened(names[0], name), requested, done]


@pytest.fixture(scope="module", params=[False, True], ids=["live", "sealed"])
def charged(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Store:
    """A turn of each usage; sealed ones are derived too. Only read it."""
    store = rb.open(tmp_path_factory.mktemp("charged") / "store", create=True)
    with store.writer("serve", AppendSettings(segment_bytes=1)) as writer:
        for name, (usage, _) in USAGES.items():
            for record in _records(name, usage):
                writer.append([Event(record, "demo")]).result(30)
        writer.append([Event(TrajectoryOpened("last", "last"), "demo")]).result(30)
    if request.param:
        list(seal_closed(store.path, "serve", SealSettings()))
        for unit in current_units(store.path, "serve"):
            build_derived(store.path, unit)
    return store


def test_what_was_told(charged: Store) -> None:
    """OpenAI's names and Anthropic's; what is no count is null, and ends no question."""
    rows = (
        rb.connect(charged.path).execute(f"select turn_id, {COUNTS} from turns order by turn_id").fetchall()
    )
    assert rows == [(name, *counts) for name, (_, counts) in USAGES.items()]


def test_they_are_scalars(charged: Store) -> None:
    """A sum over all turns joins nothing of the events."""
    query = "explain select sum(upstream_prompt_tokens), sum(upstream_completion_tokens) from turns"
    plan = str(rb.connect(charged.path).execute(query).fetchall()[0][1])
    assert "Join" not in plan
