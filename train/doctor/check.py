"""A preflight check, its verdict, and what is known of a CONFIG's model for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollbook.engines.hub import model_folder
from rollbook.store.errors import ModelError
from rollbook.train.config.config import TrainConfig
from rollbook.train.model.shape import shape_to_train
from rollbook.train.select.recipe import ModelLimits

Verdict = Literal["green", "yellow", "red"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `red` will fail or teach nothing, `yellow` is worth a look; `lever` names what
    acts on it."""

    name: str
    verdict: Verdict
    said: str
    lever: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a check found, and what acts on it."""

    verdict: Verdict
    summary: str
    lever: str


def check_of(name: str, summary: str, faults: Sequence[Fault]) -> Check:
    """A check that may find several faults: as bad as the worst of them.

    Args:
        summary: what is there, put before the faults; the whole text of a check that found none.
    """
    if not faults:
        return Check(name, "green", summary)
    verdict: Verdict = "red" if any(fault.verdict == "red" for fault in faults) else "yellow"
    levers = dict.fromkeys(fault.lever for fault in faults)
    return Check(name, verdict, "; ".join([summary, *(fault.summary for fault in faults)]), "; ".join(levers))


def limits_of(config: TrainConfig) -> ModelLimits | None:
    """The model's vocabulary, context, and mixture of experts if routing is replayed; None if the
    model cannot be read."""
    try:
        shape = shape_to_train(model_folder(config.model, weights=False), config.algorithm.head_width)
    except ModelError:
        return None
    return ModelLimits(shape.vocab, shape.context, shape.mixture if config.routing_replay else None)
