"""Random batches that ours and a peer's code are given alike."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

LARGEST_LOG_RATIO = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A batch of B samples of up to T tokens; tensors are [B, T] of one dtype, the mask is bool.

    Attributes:
        logprobs, old, rollout, reference: of the policy in training (with a gradient), of the trainer as the
            batch began, of the engine, and of the reference policy.
        advantages: the same for all tokens of a sample.
        values, old_values, returns: of the critic; the first has a gradient.
        rewards: [B]; groups: int64 [B].
    """

    logprobs: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor

    @property
    def floats(self) -> torch.Tensor:
        """The mask in the dtype of the other tensors."""
        return self.mask.to(self.old.dtype)

    @property
    def group_size(self) -> int:
        """Samples of each group, where all groups are as large."""
        return int((self.groups == self.groups[0]).sum())

    @property
    def last(self) -> torch.Tensor:
        """Where the last trained token of each sample is, int64 [B]."""
        columns = torch.arange(self.mask.shape[1]).expand(self.mask.shape)
        return torch.where(self.mask, columns, -1).amax(-1)

    @property
    def logits(self) -> torch.Tensor:
        """Of distributions over three tokens, [B, T, 3], which the logprobs have a part in."""
        return torch.stack([self.logprobs, self.old, self.reference], -1)

    @property
    def turns(self) -> torch.Tensor:
        """Number of each token's turn, int64 [B, T]: trained tokens that follow each other are of one."""
        before = torch.nn.functional.pad(self.mask[:, :-1], (1, 0))
        return (self.mask & ~before).cumsum(-1)

    @property
    def turn_rewards(self) -> torch.Tensor:
        """Rewards of turns at their last tokens, [B, T], 0 elsewhere: the returns there."""
        after = torch.nn.functional.pad(self.mask[:, 1:], (0, 1))
        return torch.where(self.mask & ~after, self.returns, 0.0)

    @property
    def versions(self) -> torch.Tensor:
        """Of tokens, int64 [B, T]: as many as columns come before; -1 in every fourth row."""
        columns = torch.arange(self.mask.shape[1]).expand(self.mask.shape)
        return torch.where(torch.arange(len(self.mask))[:, None] % 4 == 3, -1, columns)

    @property
    def gaps(self) -> torch.Tensor:
        """Of pairs, float64: a third of them below 0."""
        values = self.old_values[self.mask].double()
        return torch.cat([values.abs() + 0.1, -values[: (len(values) + 1) // 2].abs() / 2])

    @property
    def truncated(self) -> torch.Tensor:
        """Samples that train the last column, bool [B]."""
        return self.mask[:, -1]


@dataclass(frozen=True, slots=True)
class Draw:
    """Which cases a row is tried on.

    Attributes:
        spread: standard deviation of log-ratios to the old policy, which are within +-30, and twice that of
            those to the reference policy.
        holes: whether tokens between trained ones may be untrained, as a tool's are.
        ragged: whether groups have different sizes, and their samples any order.
        least: samples of a group of a ragged case, 1 or more.
    """

    spread: float = 1.0
    holes: bool = True
    ragged: bool = False
    least: int = 2


USUAL = Draw()
EXTREME = Draw(spread=12.0)
"""Beyond all clamps."""
RAGGED = Draw(ragged=True)
ALONE = Draw(ragged=True, least=1)
"""With groups of one."""
WHOLE = Draw(holes=False)


def random_case(seed: int, draw: Draw, dtype: torch.dtype = torch.float32) -> Case:
    """A case of 1 to 4 groups of 2 to 6 samples of 1 to 12 tokens; every sample trains at least one."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    count, size = number(1, 4), number(2, 6)
    sizes = torch.tensor([number(draw.least, 6) if draw.ragged else size for _ in range(count)])
    groups = torch.arange(count).repeat_interleave(sizes)
    if draw.ragged:
        groups = groups[torch.randperm(len(groups), generator=generator)]
    shape = (len(groups), number(1, 12))

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims or shape, generator=generator)

    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = torch.arange(shape[1]) < lengths
    if draw.holes:
        mask &= torch.rand(shape, generator=generator) < 0.7
        mask[:, 0] = True
    if int(mask.sum()) == 1:  # what whitening cannot do with
        mask = torch.ones_like(mask)
    logprobs = -normal().abs() - 0.1
    ratios, differences = (
        (scale * draw.spread * normal()).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) for scale in (1.0, 0.5)
    )
    unmoved = torch.rand(shape, generator=generator) < 0.1
    unmoved[0, 0] = True  # so that corrections keep a token: verl divides by zero where they keep none
    advantages = normal(shape[0], 1) * (torch.rand(shape[0], 1, generator=generator) < 0.9)
    case = Case(
        logprobs=logprobs,
        old=torch.where(unmoved, logprobs, logprobs + ratios),
        rollout=logprobs + 0.3 * normal(),
        reference=logprobs + differences,
        advantages=advantages.expand(shape).clone(),
        mask=mask,
        values=normal(),
        old_values=normal(),
        returns=normal(),
        rewards=torch.randint(0, 4, (shape[0],), generator=generator).float(),
        groups=groups,
    )
    return _cast(case, dtype)


def written_case(mask: list[list[int]] | None = None, **values: list[Any]) -> Case:
    """A case in float64 of what is given; logprobs are -1 and the rest 0 otherwise; one group."""
    shape = torch.tensor(mask or next(v for k, v in values.items() if k != "rewards")).shape
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    blank = {name.name: torch.zeros(shape, dtype=torch.float64) for name in fields(Case)}
    blank |= {name: torch.full(shape, -1.0).double() for name in ("logprobs", "old", "rollout", "reference")}
    blank["rewards"] = torch.zeros(shape[0], dtype=torch.float64)
    groups = torch.zeros(shape[0], dtype=torch.int64)
    masked = torch.ones(shape, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return Case(**(blank | tensors | {"mask": masked, "groups": groups}))


def watched(case: Case) -> Case:
    """The same case, whose logprobs and values collect gradients of their own."""
    return replace(
        case,
        logprobs=case.logprobs.clone().requires_grad_(),
        values=case.values.clone().requires_grad_(),
    )


def _cast(case: Case, dtype: torch.dtype) -> Case:
    tensors = {field.name: getattr(case, field.name) for field in fields(Case)}
    return replace(case, **{k: t.to(dtype) for k, t in tensors.items() if t.is_floating_point()})
