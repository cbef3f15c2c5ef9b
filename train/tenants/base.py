"""The base model that clients' models share, as a service's settings say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.store.events import Json
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.environment import fingerprint
from rollbook.train.model.model import Build, choose_device
from rollbook.train.model.shape import read_shape
from rollbook.train.model.varlen import serves
from rollbook.train.ranks.backend import TrainablePolicy


@dataclass(frozen=True, slots=True)
class Base:
    """A base model in memory.

    Attributes:
        name: that clients call it by; digest: of its weights.
        policy: holds the weights; how: it computes.
    """

    name: str
    folder: Path
    digest: str
    policy: TrainablePolicy
    how: Build

    def environment(self) -> Json:
        """Everything known to change bits, here and now."""
        return fingerprint(self.how.device, dtype=self.how.dtype, flash=self.how.flash)


def load_base(
    name: str, folder: Path, *, device: str, dtype: str, threads: int, recompute: bool, flash: bool = True
) -> Base:
    """Read a base model into memory.

    Args:
        flash: whether attention of packed samples may be that of `varlen`.

    Raises:
        ModelError: it cannot be trained.
    """
    shape, weights = read_shape(folder), read_weights(folder)
    how = Build(1, choose_device(device), 0, threads, dtype, recompute=recompute)
    how = replace(how, flash=flash and serves(how.device, how.type))
    policy = TrainablePolicy(shape, OptimizerConfig(), replace(how, trains=False))
    policy.load_weights(weights)
    return Base(name, folder, digest_tensors(weights), policy, how)
