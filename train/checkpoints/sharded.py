"""Writes a checkpoint of which each rank of the training writes its own pieces: nothing is gathered."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.ingest.engines.weights.digests import digest_tensors
from rollbook.store.errors import ConfigError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.inside import place_inside
from rollbook.store.permissions import make_empty
from rollbook.train.checkpoints.building import building_beside
from rollbook.train.checkpoints.directory import (
    LORA,
    SHARDS,
    checkpoint_name,
    copy_along,
    free_name,
    make_durable,
    manifest_of,
    name_dtype,
    size_of,
    write_manifest,
)
from rollbook.train.checkpoints.shards import CRITIC, POLICY, WORD, SeeWord, Shard, WriteShard
from rollbook.train.config.lora import LoraTraining
from rollbook.train.megatron.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a checkpoint is of: a policy, the training of its low-rank factors, its critic."""

    policy: Policy
    lora: LoraTraining | None = None
    critic: Policy | None = None

    def digests(self) -> Json:
        """Those of whole tensors, as the manifest has them; a step knows all but that of the factors."""
        said = {
            "weights": self.policy.weights_digest().digest,
            "optimizer": self.policy.optimizer_digest().digest,
        }
        if self.critic is not None:
            said |= {
                "critic": self.critic.weights_digest().digest,
                "critic_optimizer": self.critic.optimizer_digest().digest,
            }
        if self.lora is not None:
            said["adapter"] = digest_tensors(self.policy.adapter())
        return {f"{what}_digest": digest for what, digest in said.items()}


def begin_sharded(
    store: Path,
    run: str,
    policy: str,
    version: int,
    of: Trained,
    *,
    like: Path,
    phase: str,
    dtype: Any,
    meanwhile: bool,
) -> Callable[[], CheckpointWritten]:
    """Begin a checkpoint of shards.

    Args:
        like: a model directory whose other files (config, tokenizer, template) are copied.
        dtype: torch's type of the weights.
        meanwhile: ranks copy their pieces first, and write while training goes on.

    Returns:
        Waits until all ranks have written, makes it durable, and gives the event that records it. It has to
        be called, once, in whichever thread.

    Raises:
        ShortageError: the disk is full; the result raises it too, and RankError, which names a rank that
            failed. Nothing of the checkpoint is left then.
    """
    name = free_name(store, checkpoint_name(run, policy, version))
    target = place_inside(store, str(name)).absolute()  # other ranks have working directories of their own
    said = of.digests()
    with contextlib.ExitStack() as stack:
        building = stack.enter_context(building_beside(target))
        copy_along(like, building)
        name_dtype(building / "config.json", dtype)
        waits = [of.policy.each(WriteShard(building, POLICY), meanwhile=meanwhile)]
        if of.critic is not None:
            waits.append(of.critic.each(WriteShard(building, CRITIC), meanwhile=meanwhile))
        whole = stack.pop_all()

    def finish() -> CheckpointWritten:
        with whole:
            shards = [shard for wait in waits for shard in wait()]
            size, digests = size_of(building), (said["weights_digest"], said["optimizer_digest"])
            record = CheckpointWritten(policy, version, str(name), *digests, phase, size)
            write_manifest(building, _manifest(run, record, said, shards, of.lora))
            make_durable(building, target)
        return record

    return finish


def _manifest(
    run: str, record: CheckpointWritten, said: Json, shards: list[Shard], lora: LoraTraining | None
) -> Json:
    manifest = manifest_of(run, record, {}) | said | {SHARDS: {shard.name: shard.pieces for shard in shards}}
    del manifest["optimizer_tensors"]  # of whole tensors, which nobody has
    return manifest if lora is None else manifest | {LORA: lora.described}


def check_shared(store: Path, run: str, policy: str, of: Policy) -> None:
    """See that every rank sees the store's folder at the same path, by a random word in a file there.

    Raises:
        ConfigError: one does not; it names the rank, its host and the folder.
    """
    name = free_name(store, checkpoint_name(run, policy, 0))
    with building_beside(place_inside(store, str(name)).absolute()) as building:
        word = secrets.token_hex(8)
        make_empty(building / WORD).write_text(word)
        for rank, host in enumerate(of.each(SeeWord(building, word))()):
            if host is not None:
                raise ConfigError(
                    f"rank {rank} on {host} does not see what rank 0 wrote in the store, {store.absolute()}: "
                    "with checkpoint.sharded = true every rank writes there. Let all hosts have that folder, "
                    "on a shared disk, or set checkpoint.sharded = false"
                )
        shutil.rmtree(building)
