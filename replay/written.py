"""Whether the checkpoint of the version that a step made is what the step made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.ingest.engines.weights.digests import Tensors, digest_tensors
from rollbook.replay.verdict import StageReplay, Verdict
from rollbook.store import Store
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.inside import place_inside
from rollbook.train.checkpoints.checkpoint import Checkpoint, read_checkpoint

STAGES_OF = {
    "weights": "weights",
    "optimizer": "optimizer",
    "critic": "critic_weights",
    "critic_optimizer": "critic_optimizer",
}
"""What a checkpoint may hold, and the stage that it is of."""


def written(
    log: Store, records: Sequence[CheckpointWritten], made: Mapping[str, Any], proven: bool
) -> tuple[StageReplay | None, Checkpoint | None]:
    """The stage `checkpoint`, and the checkpoint that was read; None where no checkpoint of the version was
    recorded.

    Args:
        records: of the version that the step made.
        made: stage -> its digest, as the step gives it now.
        proven: whether the step's update is.
    """
    for record in reversed(records):
        try:
            held = read_checkpoint(place_inside(log.path, record.path))
        except (ModelError, OutsideError, OSError) as error:
            if len(records) > 1 and record is not records[0]:
                continue
            return _unreadable(log, record, str(error)), None
        found = _digests(held)
        said = {"weights": record.weights_digest} | (
            {} if record.optimizer_digest is None else {"optimizer": record.optimizer_digest}
        )
        due: Json = {
            what: made[stage] for what, stage in STAGES_OF.items() if stage in made and what in found
        }
        if not proven:
            due = found
        wrong = [w for w in found if found[w] != due.get(w, found[w]) or found[w] != said.get(w, found[w])]
        digests = digest_of(due), digest_of(found)
        if wrong:
            why = f"{record.path}: {', '.join(wrong)} are not what the step made"
            return StageReplay("checkpoint", Verdict.differs, *digests, why=why), held
        if not proven:
            return StageReplay("checkpoint", Verdict.not_proven, why="the step's update is not proven"), held
        return StageReplay("checkpoint", Verdict.equal, *digests), held
    return None, None


def digest_of(said: Json) -> str:
    """A digest of digests."""
    from rollbook.store.digest import digest_json

    return digest_json(said)


def _digests(held: Checkpoint) -> Json:
    all_of: dict[str, Tensors | None] = {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "critic": held.critic,
        "critic_optimizer": held.critic_optimizer,
    }
    return {what: digest_tensors(tensors) for what, tensors in all_of.items() if tensors is not None}


def _unreadable(log: Store, record: CheckpointWritten, error: str) -> StageReplay:
    """One that is gone proves nothing; one that is damaged differs."""
    if not (log.path / record.path).exists():
        return StageReplay("checkpoint", Verdict.not_proven, why=f"{record.path} is not there any more")
    return StageReplay("checkpoint", Verdict.differs, why=error)
