"""A sync records how an engine holds what it was given: from that and the weights its checksums follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.fakes.engines.parallel import spread
from tests.train.sync.conftest import BUCKET, LAYER, SHAPES, World, make_weights

from rollbook.engines.weights.compare import Expected, expected_ranks_digest
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated
from rollbook.train.sync.session import Release
from rollbook.train.sync.transports import FromTensors, Weights

MERGED = ["gate_up_proj", "qkv_proj"]


def _synced(
    world: Any, syncer: Any, dtype: str = "float32", head_dim: int = 4, names: Any = tuple(SHAPES)
) -> PolicyActivated:
    """The record of a sync of version 1, sent in this type."""
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in make_weights(1).items()}
    release = Release("actor", 1, "w1", "", head_dim, "run", names, None, dtype)
    syncer.sync(release, lambda: iter(weights.items()))
    [record] = [event for event in world.records if isinstance(event, PolicyActivated)]
    return record


def _stream(dtype: str) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The weights of version 1 in float32, with the values that a type has left them."""
    return lambda: (
        (name, tensor.to(getattr(torch, dtype)).float()) for name, tensor in make_weights(1).items()
    )


@pytest.mark.parametrize(
    ("transport", "size", "kv_heads", "held", "sent"),
    [
        ("tensor", 1, 2, "float32", "float32"),
        ("tensor", 2, 2, "bfloat16", "bfloat16"),
        ("tensor", 2, 1, "float32", "bfloat16"),
        ("disk", 2, 1, "bfloat16", "bfloat16"),
    ],
)
def test_checksums_follow_from_what_is_recorded(
    world: World, transport: str, size: int, kv_heads: int, held: str, sent: str
) -> None:
    """Of one rank and of two, which cut merged tensors and pad, in their own type or that of what comes."""
    engine = world.engine(dtype=held)
    spread(engine.app, size, kv_heads)
    head_dim = 8 // kv_heads
    record = _synced(world, world.syncer([engine.url], world.transport(transport)), sent, head_dim)
    assert record.held == {
        **{"checksum": "sha256", "dtype": held, "head_dim": head_dim, "padded": True},
        **{"tp_size": size, "tp_ranks": list(range(size)), "merged": MERGED},
    }
    stream = _stream(sent)
    assert expected_ranks_digest(stream(), record.held) == record.checksums
    changed = dict(stream())
    changed[f"{LAYER}.mlp.down_proj.weight"].view(-1).view(torch.int32)[-1] ^= 1 << 16
    assert expected_ranks_digest(changed.items(), record.held) != record.checksums


class _Skipping(FromTensors):
    """Forgets a tensor, and does not expect it either."""

    def send(self, weights: Weights, receivers: Any) -> int:
        """All but one."""
        return super().send(
            lambda: (item for item in weights() if item[0] != f"{LAYER}.self_attn.v_proj.weight"), receivers
        )


def test_a_tensor_that_was_never_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the verification of the sync is wrong too, what is recorded does not follow from the weights."""
    engine = world.engine()
    syncer = world.syncer([engine.url], _Skipping(BUCKET))
    with pytest.raises(EngineError, match=r"are not those sent, such as .*qkv_proj"):
        _synced(world, syncer)
    world.records.clear()
    monkeypatch.setattr(Expected, "check", lambda *_: None)
    record = _synced(world, syncer)
    assert record.held is not None
    assert expected_ranks_digest(make_weights(1).items(), record.held) != record.checksums


def test_names_that_do_not_follow_from_the_models(world: World) -> None:
    """A release that does not name its tensors: how they are held is not known."""
    engine = world.engine()
    record = _synced(world, world.syncer([engine.url], world.transport("tensor")), names=())
    assert record.checksums
    assert record.held is None
