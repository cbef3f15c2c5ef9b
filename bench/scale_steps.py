"""The steps of a long run: the last ones really trained, the earlier ones written as copies of a
real one.

The trainer takes two steps of a tiny model on a separate store; every step here is a copy of
what it wrote there, with its own number, versions, samples, cut, seed and digests. So a run of
many steps costs no training. It ends in a checkpoint of real weights, from which the trainer
takes the last steps: these are replayed bit for bit. Their configuration differs from that of
the written ones (supervised, two samples each, so that a step takes a second), so they are a
phase of their own, which the trainer begins with a new optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook import store
from rollbook.bench.scale_turns import GROUP, LANE, POLICY, RUN, Agents, events_of, is_flat
from rollbook.store import Event, Store, format_cut
from rollbook.store.digest import digest_json
from rollbook.store.events import (
    CheckpointWritten,
    PolicyActivated,
    PolicyPublished,
    Record,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.ids import new_id
from rollbook.store.log.writer import LaneWriter

TRAIN_LANE = "train"
TRAINED = 3
"""Steps at the end that are really trained."""
GRPO = f'name = "grpo"\ngroups = 2\ngroup_size = {GROUP}'
SFT = 'name = "sft"\nbatch_size = 2'
"""Of the steps at the end: a sample that is sealed, and one that is not."""
CHECKPOINT_EVERY = 50
ENGINE = "http://127.0.0.1:30000"
CONTEXT = 8192
CONFIG = """\
run = "{run}"
model = "{model}"
steps = {steps}
checkpoint_every = 1
device = "cpu"
micro_batch_size = 1
[algorithm]
{algorithm}
"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """All trajectories of a store, in the order in which they began; five each make a group.

    Attributes:
        trajectory_ids, leaf_ids: of each, its id and that of its last turn.
        ends: events of the lane after which each has finished, and all before it.
    """

    trajectory_ids: list[str]
    leaf_ids: list[str]
    ends: list[int]

    def members(self, group: int) -> range:
        """Places of a group's trajectories."""
        return range(group * GROUP, (group + 1) * GROUP)


@dataclass(frozen=True, slots=True)
class Image:
    """The trainer's records of a real step, and checkpoints of the weights before and after it."""

    opened: RunOpened
    dropped: SampleDropped
    planned: StepPlanned
    committed: StepCommitted
    checkpoint: CheckpointWritten
    published: PolicyPublished
    begun: Path
    ended: Path


def write_model(folder: Path) -> Path:
    """A model of some ten thousand parameters, with the demo's tokenizer, for long contexts."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollbook.demo.model import make_model

    make_model(folder, seed=0)
    smaller = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 16}
    smaller |= {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
    config = orjson.loads((folder / "config.json").read_bytes())
    torch.manual_seed(0)
    settings = {
        name: value for name, value in config.items() if name not in ("layer_types", "max_window_layers")
    }
    Qwen3ForCausalLM(Qwen3Config(**settings | smaller)).save_pretrained(folder)
    return folder


def config_text(model: Path, steps: int, algorithm: str) -> str:
    """CONFIG of `rollbook train`."""
    return CONFIG.format(run=RUN, model=model, steps=steps, algorithm=algorithm)


def take_steps(log: Store, model: Path, algorithm: str, steps: Sequence[Sequence[str]]) -> None:
    """Let the trainer take a step on each of these lists of trajectories, and record it as usual.

    The trajectories are given instead of selected from the log: everything else of `rollbook
    train` is unchanged.
    """
    import tomllib

    from rollbook.store.fold.history import fold_history
    from rollbook.train.config.config import parse_config
    from rollbook.train.config.phase import family_in
    from rollbook.train.loop.trainer import Trainer
    from rollbook.train.ranks.ranks import Ranks
    from rollbook.train.select.samples import all_samples
    from rollbook.train.select.sorting import select
    from rollbook.train.sources.selection import Selection

    config = parse_config(tomllib.loads(config_text(model, len(steps), algorithm)), "CONFIG")
    own = {lane: count for lane, count in log.head().items() if lane != TRAIN_LANE}
    with log.writer(TRAIN_LANE) as writer:
        history = fold_history(log.events(None, own), RUN, POLICY)
        trainer = Trainer(config, log, writer, history, family_in(history, config, "tail"), Ranks())
        settings = config.as_json() | {"source": "tail", "steps_done": 0}
        trainer.write(RunOpened("train", settings, environment=trainer.environment))
        for chosen in steps:
            trajectories = log.trajectories(ids=chosen)
            samples = all_samples(trajectories[trajectory_id] for trajectory_id in chosen)
            kept, drops = select(samples, config.recipe, config.algorithm, trainer.version)
            trainer.begin(Selection(kept, drops, log.head()))
            trainer.take_step()
            trainer.publish()
        trainer.close()


def make_image(folder: Path, model: Path) -> Image:
    """Train two steps on a store of its own in `folder`, in the second of which a group is dropped."""
    from rollbook.train.checkpoints.directory import checkpoint_name

    log = store.open(folder, create=True)
    flat = next(group for group in range(32) if is_flat(group))
    wave = Agents(lambda number: 0).wave((flat + 1) * GROUP)
    with log.writer(LANE) as writer:
        writer.append(events_of(wave.table)).result()
    group = [wave.trajectory_ids[g * GROUP : (g + 1) * GROUP] for g in (0, 1, 2, 3, flat)]
    take_steps(log, model, GRPO, [[*group[0], *group[1]], [*group[2], *group[3], *group[4]]])
    records: dict[str, Any] = {e.kind: e.record for e in log.events() if e.lane == TRAIN_LANE}
    checkpoint = records[CheckpointWritten.KIND]
    return Image(
        records[RunOpened.KIND],
        records[SampleDropped.KIND],
        records[StepPlanned.KIND],
        records[StepCommitted.KIND],
        checkpoint,
        records[PolicyPublished.KIND],
        begun=log.path / checkpoint_name(RUN, POLICY, 0),
        ended=log.path / checkpoint.path,
    )


def write_steps(writer: LaneWriter, log: Store, image: Image, sampled: Sampled, steps: int, each: int) -> int:
    """Write so many steps, of `each` groups, as copies of a real one; the number of groups they used."""
    from rollbook.train.algorithms.policy_gradient import Grpo
    from rollbook.train.checkpoints.checkpoint import read_checkpoint, write_checkpoint
    from rollbook.train.config.config import parse_config
    from rollbook.train.config.phase import family_names

    algorithm = Grpo(name="grpo", groups=each, group_size=GROUP)
    values = image.opened.config | {"algorithm": algorithm.model_dump(mode="json"), "steps": steps}
    settings = {key: value for key, value in values.items() if key not in ("source", "steps_done")}
    phase = family_names(parse_config(settings, "CONFIG"), "tail")[0]
    begun, ended = read_checkpoint(image.begun), read_checkpoint(image.ended)
    image = replace(image, planned=replace(image.planned, phase=phase, algorithm=values["algorithm"]))

    def checkpoint(version: int) -> tuple[CheckpointWritten, PolicyPublished]:
        held = ended if version else begun
        record = write_checkpoint(
            *(log.path, RUN, POLICY, version, held.weights, held.optimizer),
            like=image.begun,
            phase=phase if version else None,
        )
        parent = max(version - CHECKPOINT_EVERY, 0) if version else None
        return record, replace(
            image.published,
            policy_version=version,
            parent_version=parent,
            path=record.path,
            weights_digest=record.weights_digest,
        )

    _append(writer, [replace(image.opened, config=values), *checkpoint(0)])
    for step in range(steps):
        cut = {LANE: sampled.ends[sampled.members((step + 1) * each - 1)[-1]], TRAIN_LANE: step}
        groups = range(step * each, (step + 1) * each)
        records = list(_step(image, sampled, step, groups, format_cut(cut)))
        due = (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps
        _append(writer, [*records, *(checkpoint(step + 1) if due else ())])
    return steps * each


def _append(writer: LaneWriter, records: Sequence[Record]) -> None:
    writer.append([Event(record, RUN) for record in records]).result()


def _step(image: Image, sampled: Sampled, step: int, groups: range, cut: str) -> Iterator[Record]:
    """What one step writes: drops, manifest, results, and the sync of the version it made."""
    from rollbook.train.batches.batch import partition
    from rollbook.train.step.step import step_seed

    recipe = digest_json(image.planned.recipe)
    places = [place for group in groups if not is_flat(group) for place in sampled.members(group)]
    for group in filter(is_flat, groups):
        for place in sampled.members(group):
            yield replace(
                image.dropped,
                trajectory_id=sampled.trajectory_ids[place],
                turn_id=sampled.leaf_ids[place],
                recipe=recipe,
                step=step,
                attempt=1,
            )
    yield replace(
        image.planned,
        step=step,
        attempt=1,
        policy_version=step,
        cut=cut,
        samples=[
            {"trajectory_id": sampled.trajectory_ids[place], "turn_id": sampled.leaf_ids[place]}
            for place in places
        ],
        partition=partition(len(places), 1),
        seed=step_seed(0, step),
        input_digests=_digests(step, image.planned.input_digests),
    )
    digests = _digests(step, image.committed.digests)
    yield replace(image.committed, step=step, attempt=1, policy_version=step + 1, digests=digests)
    version = (POLICY, step + 1)
    sync = new_id()
    yield SyncStarted(*version, sync, ENGINE, "disk")
    yield PolicyActivated(*version, ENGINE, digests["weights"], "", f"{RUN}-{step + 1}-{sync[-8:]}", sync)
    yield SyncFinished(*version, sync, ENGINE, image.checkpoint.bytes, 0.5)


def _digests(step: int, like: dict[str, str]) -> dict[str, str]:
    """Digests with the length and names of these, but of no data."""
    rng = np.random.default_rng(step)
    return {name: hashlib.sha256(rng.bytes(16)).hexdigest()[: len(value)] for name, value in like.items()}
