"""A row of the table, and how far its two sides are from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from parity.cases import USUAL, Case, Draw, random_case, watched

Of = Callable[[Case], torch.Tensor]
SINGLE = 1e-6
"""Greatest difference of values and of gradients in float32; relative where the greatest one is above 1."""
LEAST_SCALE = 0.1
"""In float64 differences are relative to the greatest value, or gradient, if that is above this."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Two functions of a case that are equal, in value and in gradient.

    Attributes:
        part: of ours, as docs/algorithms.md names it.
        peer: its name; called: what of it is compared, by its own names; what stands in brackets tells rows
            apart, and is not in the page.
        own, theirs: a case -> a loss, or numbers of tokens [B, T] that are 0 outside the mask.
        double: greatest difference in float64; None where the peer rounds to float32; 1e-7 where it adds 1e-8
            to a count of tokens or to a variance, or does not clamp a ratio of e^-20.
    """

    part: str
    peer: str
    called: str
    own: Of
    theirs: Of
    draw: Draw = USUAL
    double: float | None = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Fixture:
    """A small case and what comes of it, worked out by hand.

    Attributes:
        value: a number, or one of each token.
        gradient: with respect to the logprobs, of each token; None: there is none.
        functions: by name.
        within: 1e-6 where a function rounds to float32 or adds 1e-8.
    """

    name: str
    case: Case
    value: Any
    functions: Mapping[str, Of]
    gradient: Any = None
    within: float = field(default=1e-12)


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Two functions that the same words describe, and that are not equal.

    Attributes:
        part: that it is about.
        one, other: as a reader may know them; says: what they differ in.
        here: the key by which ours are either, or why there is none.
    """

    part: str
    one: str
    other: str
    says: str
    here: str
    of_one: Of
    of_other: Of
    draw: Draw = USUAL


@dataclass(frozen=True, slots=True)
class Distance:
    """Greatest differences of values and of gradients, relative to a scale."""

    value: float
    gradient: float

    @property
    def greatest(self) -> float:
        """Of both."""
        return max(self.value, self.gradient)


def distance(own: Of, other: Of, seed: int, draw: Draw, dtype: torch.dtype = torch.float32) -> Distance:
    """How far two functions are from each other on a random case."""
    pairs = zip(
        *(evaluated(function, random_case(seed, draw, dtype)) for function in (own, other)), strict=True
    )
    least = 1.0 if dtype == torch.float32 else LEAST_SCALE
    return Distance(*(_relative(*pair, least) for pair in pairs))


def evaluated(function: Of, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The value, and its gradients with respect to the logprobs and the values [2, B, T], 0 where there is
    none."""
    case = watched(case)
    value = function(case)
    gradients = [torch.zeros_like(case.logprobs)] * 2
    if value.requires_grad:
        raw = torch.autograd.grad(value, [case.logprobs, case.values], allow_unused=True)
        gradients = [torch.zeros_like(case.logprobs) if gradient is None else gradient for gradient in raw]
    return value.detach(), torch.where(case.mask, torch.stack(gradients), 0.0)


def _relative(own: torch.Tensor, other: torch.Tensor, least: float) -> float:
    """NaN, which is below no limit, where either is not finite."""
    scale = other.abs().max().clamp(min=least)
    ratio = float((own.double() - other.double()).abs().max() / scale)
    return ratio if bool(own.isfinite().all() & other.isfinite().all()) else float("nan")
