"""Logprobs of given tokens: a whole forward pass beside the batch, by the same weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from rollbook.engines.embedded.adapters import Adapters
from rollbook.engines.engine import Scores, TopTokens
from rollbook.store.events import TokenIds


class Scorer:
    """A second module around the tensors of a model, whose attention reads no cache.

    Args:
        model: as it is before continuous batching changes its attention.
    """

    def __init__(self, model: Any, adapters: Adapters) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        adapters.attach(self._model)
        self._adapters = adapters

    def score(self, ids: TokenIds, adapter: str, temperature: float, top: int) -> Scores:
        """The logprobs of tokens by softmax(logits / temperature), and of the `top` likeliest."""
        count = len(ids)
        self._adapters.begin([count], [adapter], [True])
        with torch.no_grad():
            logits = self._model(torch.from_numpy(ids[None].astype(np.int64)).to(self._model.device)).logits
            wide = logits[0, :-1].float() / (temperature if temperature > 0 else 1.0)
            logprobs = wide.log_softmax(-1)
            targets = torch.from_numpy(ids[1:].astype(np.int64)).to(logprobs.device)
            own = np.full(count, np.nan, np.float32)
            own[1:] = logprobs.gather(-1, targets.unsqueeze(-1))[:, 0].cpu().numpy()
            if not top:
                return Scores(own)
            values, tokens = logprobs.topk(min(top, logprobs.shape[-1]), -1)
        likeliest = TopTokens(np.zeros((count, top), np.int32), np.full((count, top), np.nan, np.float32))
        likeliest.ids[1:, : tokens.shape[1]] = tokens.cpu().numpy()
        likeliest.logprobs[1:, : tokens.shape[1]] = values.cpu().numpy()
        return Scores(own, likeliest)
