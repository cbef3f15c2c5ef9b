"""Finds the checkpoint to resume from, the newest undamaged one, and checks whether its weights can
be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollbook.store import Store
from rollbook.store.errors import ModelError, OutsideError, TrainError
from rollbook.store.events import CheckpointWritten
from rollbook.store.fold.history import History
from rollbook.store.safe_paths import place_inside
from rollbook.train.checkpoints.checkpoint import Checkpoint, checkpoint_named
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.ranks.policy import Policy
from rollbook.train.step.scoring import References


@dataclass(frozen=True, slots=True, eq=False)
class WholeCheckpoint:
    """A checkpoint that was read and matches the digests in the log."""

    record: CheckpointWritten
    path: Path
    shape: ModelShape
    held: Checkpoint


def nearest_whole(log: Store, history: History, phase: str, warn: Callable[[str], None]) -> WholeCheckpoint:
    """The newest undamaged checkpoint to resume from. Damaged ones are removed from the history.

    Args:
        warn: called for each that is damaged.

    Raises:
        ModelError: all are damaged; the message gives the reason for each.
        TrainError: there is none.
    """
    bases = history.bases_for(history.next_step, phase)
    damaged: list[str] = []
    for base in bases:
        try:
            whole = _read(log, base)
        except (ModelError, OutsideError, OSError) as error:
            damaged.append(f"version {base.policy_version}: {error}")
            continue
        for reason, bad in zip(damaged, bases, strict=False):
            history.checkpoints.remove(bad)
            since = len(history.between(base, history.next_step))
            warn(
                f"the checkpoint of {reason}. Going on from version {base.policy_version} instead: {since} "
                "steps since are run again"
            )
        return whole
    there = "\n  ".join(damaged)
    what = f"no checkpoint that run {history.run!r} could go on from is whole"
    raise ModelError(f"{what}: restore one from a copy\n  {there}")


def folder_to_copy(log: Store, history: History, base: WholeCheckpoint) -> Path:
    """The folder whose configuration and tokenizer later checkpoints copy: version 0's, which
    nothing removes; if it is gone all the same, that of the checkpoint that training goes on
    from."""
    begun = [place_inside(log.path, c.path) for c in history.checkpoints if c.policy_version == 0]
    return next((folder for folder in begun if (folder / "config.json").is_file()), base.path)


def check_exact(policy: Policy, base: CheckpointWritten, config: TrainConfig) -> None:
    """Check that the weights in place are exactly those of their version: a narrower type may have
    rounded them.

    Raises:
        TrainError: they were rounded.
    """
    if config.dtype != "float32" and policy.weights_digest().digest != base.weights_digest:
        raise TrainError(
            f"version {base.policy_version} of run {config.run!r} has float32 weights, which "
            f'dtype = "{config.dtype}" would round: train it on in float32, or begin a run of its own '
            "with them (`rollbook export model`, and its folder as `model`)"
        )


def put_in_place(
    policy: Policy, held: Checkpoint, lora: LoraTraining | None, references: References, *, goes_on: bool
) -> None:
    """Load the contents of a checkpoint into the policy.

    Args:
        lora: the training of low-rank factors, if it is one.
        references: reads the base weights of the factors.
        goes_on: whether the checkpoint is one of the same training; else the training begins
            there.

    Raises:
        TrainError: there is no checkpoint of the factors' base weights.
        ModelError: it is damaged.
    """
    if lora is None or not goes_on:
        policy.load_weights(held.weights)
    else:
        policy.load_weights(references.read(lora.base_version, "the base of [lora]: version"))
    if lora is not None:
        went = held.adapter.tensors if goes_on and held.adapter is not None else None
        policy.load_adapter(went or fresh_factors(policy.shape, lora.config, lora.seed))
    policy.load_optimizer_state(held.optimizer or {} if goes_on else {})


def _read(log: Store, base: CheckpointWritten) -> WholeCheckpoint:
    path = place_inside(log.path, base.path)
    held = checkpoint_named(path, base.weights_digest)
    return WholeCheckpoint(base, path, read_shape(path), held)
