"""Sampling inside transformers' continuous batching: a generator per request, exact logprobs.

Each draw is a pure function of (request seed, position), so a request's tokens do not depend on what
else is in the batch (up to the engine's floating-point rounding). The token is the inverse of the
cumulative distribution at that draw. Logprobs are those of the distribution sampled from,
softmax(logits / temperature); a greedy turn (temperature 0) reports softmax(logits).
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import Any

import torch
import xxhash
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

GREEDY = -1.0
"""Stands for a draw where the most probable token is taken."""


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits (exact in float32), from a request's seed and position."""
    key = struct.pack("<QQ", seed & (2**64 - 1), position)
    return (xxhash.xxh3_64_intdigest(key) >> 40) / 2**24


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """A float per row, taken from the requests that get a new token in this forward pass."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  (declared so by transformers)
    ignored_kwargs: tuple[str, ...] = ()
    default = 1.0

    @abstractmethod
    def value(self, state: Any) -> float:
        """The request's number for this forward pass."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        filled = torch.full_like(int32_tensor, self.default, dtype=torch.float32)
        int32_tensor.copy_(filled.view(dtype=torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        values = [self.value(request.state) for request in requests_with_new_token]
        return torch.tensor(values, dtype=torch.float32).view(dtype=torch.int32)


class Temperature(_PerRequest):
    """Divides each row's logits by its request's temperature (1 where the request is greedy)."""

    supported_kwargs = {"temperature": float}  # noqa: RUF012

    def value(self, state: Any) -> float:
        temperature = float(state.logit_processor_kwargs.get("temperature", 1.0))
        return temperature if temperature > 0 else 1.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        rows = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores / rows.unsqueeze(-1)


class Draws(_PerRequest):
    """Leaves the logits alone and keeps each row's draw for the sampler."""

    supported_kwargs = {"seed": int, "prompt_tokens": int}  # noqa: RUF012
    default = GREEDY

    def __init__(self) -> None:
        self.rows = torch.empty(0)

    def value(self, state: Any) -> float:
        kwargs = state.logit_processor_kwargs
        if float(kwargs.get("temperature", 1.0)) <= 0:
            return GREEDY
        # A request that was put back into the queue has its own tokens behind its prompt.
        position = len(state.initial_tokens) - int(kwargs["prompt_tokens"]) + state.generated_len()
        return uniform_draw(int(kwargs["seed"]), position)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.rows = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores


def sample(scores: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs.

    Args:
        scores: float32 [rows, vocabulary], logits after temperature.
        draws: float32 [rows], in [0, 1), or `GREEDY`.

    Returns:
        (int64 [rows], float32 [rows])
    """
    logprobs = torch.log_softmax(scores, dim=-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = draws.double().unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    drawn = drawn.clamp_(max=scores.size(-1) - 1)
    tokens = torch.where(draws < 0, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
