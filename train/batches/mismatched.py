"""Samples whose completions are exchanged: what follows the prompt of each is the completion of another one.

How likely a policy finds completions of other prompts, and how likely its reference does, estimates the
divergence between the two (Ethayarajh et al. 2024, arXiv:2402.01306). They follow from the batch alone, so a
replay needs nothing else. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.train.batches.batch import Partition, micro_batches_of, packed_partition
from rollbook.train.select.samples import Sample

Bools = npt.NDArray[np.bool_]


def mismatched(
    samples: Sequence[Sample], masks: Sequence[Bools], context: int, unit: int = 1
) -> tuple[list[Sample], list[Bools]]:
    """Each sample up to its first trained token, followed by what the next one has from its own on; with the
    masks of these. The first sample's completion follows the last one's prompt.

    Args:
        masks: the trained tokens of each sample.
        context: the model's, in tokens; what is longer is cut.
        unit: how many samples further the next one is: 2 passes over the other sample of a pair, which may
            have the same prompt.
    """
    firsts = [_first(mask) for mask in masks]
    mixed, trained = list[Sample](), list[Bools]()
    for at, sample in enumerate(samples):
        other = (at + unit) % len(samples)
        mixed.append(_mixed(sample, firsts[at], samples[other], firsts[other], context))
        mask = np.concatenate([np.zeros(firsts[at], np.bool_), masks[other][firsts[other] :]])
        trained.append(mask[:context])
    return mixed, trained


def mismatched_parts(samples: Sequence[Sample], mixed: Sequence[Sample], parts: Partition) -> Partition:
    """The micro-batches of mixed samples that are packed: of no more tokens than the batch's own have.

    Args:
        samples: of the batch; mixed: of them; parts: the batch's own micro-batches.
    """
    most = max(sum(len(samples[i]) for i in part) for part in micro_batches_of(parts))
    return packed_partition(mixed, most, int, 1, len(parts))


def _first(mask: Bools) -> int:
    """The place of the first trained token; behind the last token where none is."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _mixed(sample: Sample, prompt: int, other: Sample, completion: int, context: int) -> Sample:
    """The tokens of a sample before `prompt`, and those of another one from `completion` on."""

    def joined(name: str) -> Any:
        both = getattr(sample, name)[:prompt], getattr(other, name)[completion:]
        return np.concatenate(both)[:context]

    arrays = ("tokens", "loss_mask", "logprobs", "versions", "temperatures")
    return replace(sample, **{name: joined(name) for name in arrays})
