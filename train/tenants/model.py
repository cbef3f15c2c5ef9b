"""A client's model: low-rank factors of its own beside base weights that all models share, or, whole, weights
of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollbook.engines.weights.digests import Tensors, digest_tensors
from rollbook.engines.weights.peft import Probe, probe_ids
from rollbook.store.errors import ModelError, RequestError
from rollbook.store.events import Json
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.model import Build
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.backend import AdamSettings, TrainablePolicy
from rollbook.train.tenants.losses import LOSSES, token_losses
from rollbook.train.tenants.operations import FACTORS, GRADIENTS, OPTIMIZER, WHOLE
from rollbook.train.tenants.wire import Datum, Pass

PASS_TOKENS = 8192
"""Tokens of a forward pass; a longer datum is a pass of its own."""
MOST_SQUARE = float(torch.finfo(torch.float32).max)
"""The square of gradients' norm is below it, so that the optimizer's numbers are finite."""
TARGETS = "target_tokens"
Outputs = dict[str, npt.NDArray[Any]]
"""Name -> array of a datum, as the client gets it."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a model is made of between two operations.

    Attributes:
        parts: by name: `adapter`, the factors under PEFT's names, or, of a whole model, `weights` under
            Hugging Face's; `optimizer`: its moments and step counts; `gradients`: what passes have added up
            since the last optimizer step, under Megatron's names.
    """

    parts: Mapping[str, Tensors]

    @property
    def whole(self) -> bool:
        """Whether it is a whole model's."""
        return WHOLE in self.parts

    def digests(self) -> Json:
        """The digest of each part."""
        return {name: digest_tensors(tensors) for name, tensors in self.parts.items()}

    def on_host(self) -> State:
        """The same in this host's memory."""
        items = self.parts.items()
        return State({part: {name: t.cpu() for name, t in tensors.items()} for part, tensors in items})

    def weights_alone(self) -> State:
        """Its weights or factors, as a training begins with them."""
        return State({**self.parts, OPTIMIZER: {}, GRADIENTS: {}})


@dataclass(frozen=True, slots=True, eq=False)
class PassBatch(MicroBatch):
    """Datums of a pass, one after the other; `datums` are as they were sent."""

    datums: tuple[Datum, ...] = ()


class ClientModel:
    """A model in training. Its methods are called one at a time, and by one thread for all models.

    Args:
        base: holds the weights that all models share, and of which a whole model has a copy.
        lora: the factors; None: it is a whole model. seed: of their initial values.

    Attributes:
        trained: the part of its state that is trained: its factors, or all of its weights.
    """

    def __init__(self, base: TrainablePolicy, how: Build, lora: LoraConfig | None, seed: int) -> None:
        self.shape: ModelShape = base.shape
        self.lora, self._dtype, self.trained = lora, how.dtype, WHOLE if lora is None else FACTORS
        weights = base.own_weights()
        if lora is None:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        self._policy = TrainablePolicy(base.shape, OptimizerConfig(), replace(how, lora=lora), weights)
        if lora is not None:
            self._policy.load_adapter(fresh_factors(base.shape, lora, seed))
        self._gradients: Tensors = {}

    def state(self, *parts: str) -> State:
        """These parts of what it is made of, without any all, where they are in memory: the next operation
        changes them."""
        return State({name: self._part(name) for name in parts or (self.trained, OPTIMIZER, GRADIENTS)})

    def digests(self, *parts: str) -> Json:
        """A digest of each of these parts of its state; without any, of all."""
        return self.state(*parts).digests()

    def _part(self, name: str) -> Tensors:
        if name == GRADIENTS:
            return self._gradients
        if name == OPTIMIZER:
            return self._policy.optimizer_state()
        return self._policy.adapter() if name == FACTORS else self._policy.weights()

    def load(self, state: State) -> None:
        """Put another state in place.

        Raises:
            ModelError: its factors are of another shape, or one of the two is whole and the other is not.
        """
        if self.trained not in state.parts:
            kinds = ("a whole model", "an adapter") if state.whole else ("an adapter", "a whole model")
            raise ModelError(f"they are those of {kinds[0]}, and this is {kinds[1]}: make a model from them")
        if self.lora is None:
            self._policy.load_weights(state.parts[WHOLE])
        else:
            self._policy.load_adapter(state.parts[FACTORS])
        self._policy.load_optimizer_state(state.parts[OPTIMIZER])
        device, gradients = self._policy.device, state.parts[GRADIENTS].items()
        self._gradients = {name: tensor.to(device, copy=True) for name, tensor in gradients}

    def run_pass(self, sent: Pass, keys: Mapping[str, float]) -> tuple[list[Outputs], dict[str, float]]:
        """The outputs of each datum, and metrics; a backward pass adds all its gradients, or none.

        Raises:
            RequestError: 400, a number that it comes to is not finite.
        """
        batches = list(_batches(sent.data))
        read = partial(_scored, loss=sent.loss, keys=keys)
        if sent.forward_only:
            results = self._policy.forward(batches, read)
        else:
            results = self._policy.forward_backward(batches, partial(_summed, read=read))
        outputs = [output for losses, own in results for output in own]
        total = sum(float(losses) for losses, _ in results)
        if not np.isfinite(total) or not all(np.isfinite(o["logprobs"]).all() for o in outputs):
            raise RequestError(400, "not_finite", f"the loss is {total}: nothing was added to the gradients")
        if not sent.forward_only:
            self._add_gradients()
        return outputs, {"loss:sum": total}

    def probe(self) -> Probe:
        """What it makes of the fixed sequence of its vocabulary, by the forward pass that trains it."""
        ids = probe_ids(self.shape.vocab, self.shape.context)
        datum = Datum(ids[:-1], {TARGETS: ids[1:].astype(np.int64)}, (), ())
        read = partial(_scored, loss="cross_entropy", keys={})
        [(_, [outputs])] = self._policy.forward([_batch((datum,))], read)
        return Probe(ids, outputs["logprobs"], self._dtype)

    def _add_gradients(self) -> None:
        before = self._gradients
        added = {
            name: before[name] + gradient if before else gradient.clone()
            for name, gradient in self._policy.gradients().items()
        }
        square = sum(float(gradient.double().square().sum()) for gradient in added.values())
        if not square < MOST_SQUARE:  # nor if it is no number
            text = "a gradient is not finite, or too large: nothing was added to the gradients"
            raise RequestError(400, "not_finite", text)
        self._gradients = added

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """An optimizer step by the gradients added up so far, of which none is left; its metrics."""
        pending = bool(self._gradients)
        self._policy.load_gradients(self._gradients)
        norm = self._policy.adam_step(settings)
        self._gradients = {}
        return {"gradient_norm:mean": norm, "pending_gradients:sum": float(pending)}


def _batches(data: Sequence[Datum]) -> Iterator[PassBatch]:
    """The datums in order, as many to a forward pass as fit."""
    begin = 0
    while begin < len(data):
        end, tokens = begin, 0
        while end < len(data):
            tokens += len(data[end].tokens)
            if end > begin and tokens > PASS_TOKENS:
                break
            end += 1
        yield _batch(tuple(data[begin:end]))
        begin = end


def _batch(datums: tuple[Datum, ...]) -> PassBatch:
    lengths = np.array([len(datum.tokens) for datum in datums], np.int64)
    # Logits are computed of places whose next token counts: one behind the last makes it all places.
    shape = (len(datums), int(lengths.max()) + 1)
    tokens = np.zeros(shape, np.int64)
    for row, datum in enumerate(datums):
        tokens[row, : len(datum.tokens)] = datum.tokens
    zeros = np.zeros(shape, np.float32)
    return PassBatch(
        tokens,
        np.ones(shape, np.bool_),
        zeros,
        np.ones(shape, np.float32),
        zeros,
        np.full(shape, -1),
        lengths=lengths,
        datums=datums,
    )


Scored = tuple[torch.Tensor, list[Outputs]]
"""The sum of a forward pass's losses, and the outputs of its datums."""


def _scored(logits: torch.Tensor, micro: MicroBatch, *, loss: str, keys: Mapping[str, float]) -> Scored:
    """The losses of logits [N, V] of all tokens, datum after datum."""
    assert isinstance(micro, PassBatch)
    total, outputs = logits.new_zeros((), dtype=torch.float32), list[Outputs]()
    rows = logits.split([len(datum.tokens) for datum in micro.datums])
    for datum, row in zip(micro.datums, rows, strict=True):
        targets = _placed(datum.inputs[TARGETS], logits.device)
        distributions = row.float().log_softmax(-1)
        wide = targets.unsqueeze(-1) if targets.dim() == 1 else targets
        logprobs = distributions.gather(-1, wide).view(targets.shape)
        inputs = {n: _placed(v, logits.device) for n, v in datum.inputs.items() if n != TARGETS}
        losses = token_losses(loss, keys, logprobs, inputs)
        total = total + losses.sum()
        outputs.append({"logprobs": logprobs.detach().cpu().numpy()})
    return total, outputs


def _summed(
    logits: torch.Tensor, micro: MicroBatch, *, read: Callable[[torch.Tensor, MicroBatch], Scored]
) -> tuple[torch.Tensor, Scored]:
    total, outputs = read(logits, micro)
    return total, (total.detach(), outputs)


def _placed(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(device)


def check_pass(sent: Pass, shape: ModelShape) -> None:
    """Check what a pass needs of its datums.

    Raises:
        RequestError: 400, it names the datum, and what is wrong with it.
    """
    needs = (TARGETS, *LOSSES[sent.loss].needs)
    for at, datum in enumerate(sent.data):
        where, count = f"datum {at}", len(datum.tokens)
        if not 0 < count <= shape.context:
            raise _bad(f"{where} has {count} tokens: give 1 to {shape.context}")
        if missing := [name for name in needs if name not in datum.inputs]:
            raise _bad(f"{where} has no {missing[0]!r}: loss {sent.loss} needs {', '.join(needs)}")
        targets = datum.inputs[TARGETS]
        if targets.dtype != np.int64 or targets.shape[:1] != (count,) or targets.ndim > 2:
            raise _bad(
                f"{where}: target_tokens are {targets.dtype} {list(targets.shape)}: give int64 [{count}]"
            )
        for name, values in datum.inputs.items():
            if values.shape != targets.shape:
                raise _bad(f"{where}: {name} are {list(values.shape)}, and its targets {list(targets.shape)}")
        ids = np.concatenate([datum.tokens, targets.reshape(-1)])
        if not ((ids >= 0) & (ids < shape.vocab)).all():
            raise _bad(f"{where} has a token outside of the vocabulary: ids are 0 to {shape.vocab - 1}")


def _bad(text: str) -> RequestError:
    return RequestError(400, "bad_datum", text)
