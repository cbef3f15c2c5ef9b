"""Whether the checkpoint of a step's version holds what the step made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.engines.weights.digests import Tensors, digest_like
from rollbook.replay.verdict import StageReplay, Verdict
from rollbook.store import Store
from rollbook.store.digest import digest_json
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.train.checkpoints.checkpoint import Checkpoint, read_checkpoint

STAGES_OF = {
    "weights": "weights",
    "optimizer": "optimizer",
    "critic": "critic_weights",
    "critic_optimizer": "critic_optimizer",
}
"""What a checkpoint may hold, and the stage that it is of."""


def written(
    log: Store, records: Sequence[CheckpointWritten], step: Mapping[str, Any]
) -> tuple[StageReplay | None, Checkpoint | None]:
    """The stage `checkpoint`, and the checkpoint that was read; None where the version has none recorded.

    The step's other stages prove that it gives these digests.

    Args:
        records: of the version that the step made; the last that is there counts.
        step: stage -> the digest that the step recorded.
    """
    failure: StageReplay | None = None
    for record in reversed(records):
        try:
            held = read_checkpoint(log.folder(record.path))
        except (ModelError, OutsideError, OSError) as error:
            failure = failure or _unreadable(log, record, str(error))
            continue
        due = {what: step.get(stage) for what, stage in STAGES_OF.items()}
        due["weights"] = record.weights_digest if due["weights"] is None else due["weights"]
        there = digests_of(held, due)
        due = {what: digest for what, digest in due.items() if what in there}
        digests = digest_json(due), digest_json(there)
        if there == due and record.weights_digest == due["weights"]:
            return StageReplay("checkpoint", Verdict.equal, *digests), held
        wrong = [what for what in there if there[what] != due[what]] or ["weights in the log"]
        why = f"{record.path}: {', '.join(wrong)} are not what the step made"
        return StageReplay("checkpoint", Verdict.differs, *digests, why=why), held
    return failure, None


def digests_of(held: Checkpoint, due: Json) -> Json:
    """What a checkpoint holds -> its digest, of the kind of the one that is due."""
    all_of: dict[str, Tensors | None] = {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "critic": held.critic,
        "critic_optimizer": held.critic_optimizer,
    }
    return {what: digest_like(t, due.get(what) or "") for what, t in all_of.items() if t is not None}


def _unreadable(log: Store, record: CheckpointWritten, error: str) -> StageReplay:
    """The verdict on a checkpoint that cannot be read: not proven if it is gone, differing if damaged."""
    if not (log.path / record.path).exists():
        return StageReplay("checkpoint", Verdict.not_proven, why=f"{record.path} is not there any more")
    return StageReplay("checkpoint", Verdict.differs, why=error)
