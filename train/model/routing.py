"""Routers that send tokens to recorded experts: one object for all layers of a rank's part of a
model.

Megatron's own (`megatron.core.transformer.moe.router_replay`) keeps all routers of a process in
one list, whether a policy's or a critic's, and replays all positions or none. Its routers ask an
object that they are given; here they are given one of ours.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rollbook.store.events.routed_experts import ExpertIds
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.model.reshard import RankLayout
from rollbook.train.select.routing import FREE


class Routing:
    """Replays experts in the routers of a model.

    Args:
        module: a rank's part of megatron's GPTModel; for a dense one there is nothing to do.
        again: its layers are computed again in the backward pass.
    """

    def __init__(self, module: Any, layout: RankLayout, *, again: bool) -> None:
        self._layout, self._again = layout, again
        self._routers = dict[int, _Router]()
        """Number of the layer in the whole model -> its router."""
        for layer in module.decoder.layers:
            if (router := getattr(layer.mlp, "router", None)) is not None:
                router.router_replay = self._routers[layer.layer_number - 1] = _Router()

    def begin(self) -> None:
        """Prepare for the passes of a step: forget what an interrupted one has left."""
        for router in self._routers.values():
            router.later.clear()

    @contextlib.contextmanager
    def of(self, micro: MicroBatch, multiple: int, device: torch.device) -> Iterator[None]:
        """A context in which a forward pass sends the tokens of a micro-batch to its experts.

        In a pass with gradients over layers that are computed again, each router keeps what it
        replays until it is asked outside of the context: backward passes take micro-batches in
        the order of forward passes, on every pipeline stage.

        Args:
            multiple: the length of the pass is a multiple of it.
        """
        later = self._again and torch.is_grad_enabled()
        placed = None if micro.experts is None else torch.from_numpy(in_rows(micro, multiple)).to(device)
        for layer, router in self._routers.items():
            router.now = None if placed is None else self._own(placed[:, layer])
            router.within = True
            if later:
                router.later.append(router.now)
        try:
            yield
        finally:
            for router in self._routers.values():
                router.now, router.within = None, False

    def _own(self, experts: torch.Tensor) -> torch.Tensor:
        """This rank's positions of [positions, rows, topk], as its routers see them: [N, topk]."""
        if self._layout.sequence:
            experts = experts.chunk(self._layout.tensor)[self._layout.tensor_rank]
        return experts.flatten(0, 1)


class _Router:
    """Chooses the experts of one layer.

    Attributes:
        now: int16 [N, topk], what the current forward pass replays; None: nothing.
        within: whether a forward pass is under way.
        later: what was replayed by passes whose layers will be computed again.
    """

    def __init__(self) -> None:
        self.now: torch.Tensor | None = None
        self.within = False
        self.later: deque[torch.Tensor | None] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of each token's experts, [N, topk], highest score first, as Megatron asks.

        This order has the same experts give the same bits however they are recorded.

        Args:
            scores: of all experts, [N, experts].
        """
        own: tuple[torch.Tensor, torch.Tensor] = default_compute_topk(scores, topk, num_groups, group_topk)
        recorded = self.now if self.within else self.later.popleft()
        if recorded is None:
            return own
        chosen = torch.where(recorded == FREE, own[1], recorded.long())
        values, order = scores.gather(1, chosen).sort(dim=1, descending=True, stable=True)
        return values, chosen.gather(1, order)


def in_rows(micro: MicroBatch, multiple: int) -> ExpertIds:
    """The experts of a micro-batch in the layout of its pass, int16 [positions, layers, rows,
    topk]; a packed one has one row, and its padding is `FREE`."""
    assert micro.experts is not None
    rows = micro.experts
    if micro.lengths is not None:
        rows = rows[np.arange(rows.shape[1]) < micro.lengths[:, None]][None]
    more = ((0, 0), (0, -rows.shape[1] % multiple), (0, 0), (0, 0))
    return np.pad(rows, more, constant_values=FREE).transpose(1, 2, 0, 3)
