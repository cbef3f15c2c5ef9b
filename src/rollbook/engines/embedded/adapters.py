"""Low-rank adapters beside the weights of a transformers model: those of many requests in one forward pass.

As the trainer computes it: a matrix gives `x W^T + scale * (x A^T) B^T` (arXiv:2106.09685). The rows of a
forward pass are those of its requests, one behind the other, so that each adapter is applied to its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from rollbook.engines.weights.digests import Tensors, digest_tensors
from rollbook.engines.weights.peft import PREFIX
from rollbook.store.errors import EngineError

_A, _B = ".lora_A.weight", ".lora_B.weight"
MOST_KEY = 1e6
"""Of a number in a key or a value, far beyond what a model computes with."""
Runs = tuple[tuple[int, str], ...]
"""(end, name of the adapter) of rows of one adapter, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Factors in an engine's memory.

    Attributes:
        factors: by PEFT's names, A [rank, in] and B [out, rank], float32 as the model's weights.
        scale: of their product.
        digest: of the factors as they are held.
    """

    factors: Tensors
    scale: float
    digest: str

    def of(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A matrix's factors, if it has any."""
        a = self.factors.get(f"{PREFIX}{module}{_A}")
        return None if a is None else (a, self.factors[f"{PREFIX}{module}{_B}"])


class Adapters:
    """The adapters that an engine holds, by name."""

    def __init__(self) -> None:
        self._held: dict[str, Adapter] = {}
        self._modules: dict[str, torch.Size] = {}
        self._rows = threading.local()
        """Of the forward pass of each thread: the runs of all tokens, and of those whose logits count."""

    def attach(self, model: Any) -> None:
        """Apply adapters to a model's matrices from here on."""
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                self._modules[name] = module.weight.shape
                module.register_forward_hook(self._hook(name))

    def put(self, name: str, factors: Tensors, scale: float) -> Adapter:
        """Hold an adapter.

        Raises:
            EngineError: it does not fit the model.
        """
        for key in factors:
            module = key.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)
            shape, own = self._modules.get(module), factors[key].shape
            side = 1 if key.endswith(_A) else 0
            if shape is None or not key.endswith((_A, _B)) or own[side] != shape[side]:
                raise EngineError(f"adapter {name}: {key} {list(own)} fits no matrix of this model")
        held = {key: tensor.to(torch.float32, copy=True) for key, tensor in factors.items()}
        self._held[name] = adapter = Adapter(held, scale, digest_tensors(held))
        return adapter

    def held(self, name: str) -> Adapter | None:
        """An adapter that was put here, and not dropped."""
        return self._held.get(name)

    def drop(self, name: str) -> None:
        """Hold an adapter no more; no request uses it."""
        self._held.pop(name, None)

    def begin(self, lengths: Sequence[int], names: Sequence[str], counts: Sequence[bool]) -> None:
        """Say whose the rows of this thread's next forward pass are.

        Args:
            lengths: of each request, its tokens in the pass; names: its adapter, "" for none.
            counts: whether logits of its last token are computed.
        """
        if not any(names):
            self._rows.tokens = self._rows.logits = ()
            return
        self._rows.tokens = _runs(lengths, names)
        self._rows.logits = _runs([int(c) for c in counts], names)

    def _hook(self, module: str) -> Callable[[Any, tuple[Any, ...], torch.Tensor], torch.Tensor]:
        def added(_: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            if tokens := getattr(self._rows, "tokens", ()):
                x = inputs[0]
                runs = tokens if x.shape[-2] == tokens[-1][0] else self._rows.logits
                self._add(module, x, output, runs)
                if module.endswith((".k_proj", ".v_proj")):
                    _bound(output, runs)
            return output

        return added

    def _add(self, module: str, x: torch.Tensor, output: torch.Tensor, runs: Runs) -> None:
        begin = 0
        for end, name in runs:
            adapter = self._held.get(name)
            if adapter is not None and (pair := adapter.of(module)) is not None:
                a, b = pair
                output[..., begin:end, :] += adapter.scale * linear(linear(x[..., begin:end, :], a), b)
            begin = end


def _bound(output: torch.Tensor, runs: Runs) -> None:
    """Keep keys and values of requests with adapters finite: attention multiplies those of all requests of a
    pass, and what is masked by 0, which is no number if they are none."""
    begin = 0
    for end, name in runs:
        if name:
            output[..., begin:end, :].nan_to_num_(0.0, 0.0, 0.0).clamp_(-MOST_KEY, MOST_KEY)
        begin = end


def _runs(lengths: Sequence[int], names: Sequence[str]) -> Runs:
    """(end, name) of each run of rows of one adapter, in order."""
    behind = zip(itertools.accumulate(lengths), names, [*names[1:], None], strict=True)
    return tuple((end, name) for end, name, following in behind if following != name)
