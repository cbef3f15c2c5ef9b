"""Copies the teachers that a CONFIG names into the store, each a line of weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rollbook.engines.hub import model_folder
from rollbook.engines.model_files import model_file, require_folder
from rollbook.engines.weights.digests import Tensors, digest_like, read_unchanged
from rollbook.store import Store
from rollbook.store.catalog.catalog import note_checkpoint
from rollbook.store.errors import ModelError, TrainError
from rollbook.store.events import CheckpointWritten, Json, PolicyPublished, Record
from rollbook.train.checkpoints.checkpoint import write_checkpoint
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.sync import engine_key
from rollbook.train.config.teacher import TeacherConfig
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.model.weight_names import checked, weight_shapes
from rollbook.train.step.teacher_engine import TeacherEngine, check_text, weights_of
from rollbook.train.step.teachers import checkpoints_of, teacher_line
from rollbook.train.sync.control import EngineControl


def adopted_teachers(
    config: TrainConfig,
    log: Store,
    policy: Path,
    engines: Mapping[str | None, TeacherEngine],
    earlier: Sequence[Json],
    write: Callable[..., None],
) -> list[Json] | None:
    """The teachers of a training, as manifests describe them; None where it has none.

    One that the store does not have yet is copied, in the type of the training; it becomes the next version
    of its line.

    Args:
        policy: folder of the policy that they teach.
        engines: those that servers serve; earlier: the teachers of the training's last step.
        write: appends records together and waits until they are durable.

    Raises:
        TrainError: the version that is to teach has no checkpoint, or a teacher has another tokenizer.
        ModelError: a model cannot be read, or its architecture is not trained here.
        EngineError: a server has other weights than the training's steps so far learned from.
        ShortageError: the disk is full.
    """
    return [
        _of_engine(teacher, engines[teacher.name], earlier)
        if teacher.engine is not None
        else _described(config, log, teacher, policy, write)
        for teacher in config.teacher
    ] or None


def teacher_engines(
    config: TrainConfig, policy: Path, environment: Mapping[str, str]
) -> dict[str | None, TeacherEngine]:
    """What talks to the servers that serve teachers, by the teachers' names.

    Raises:
        ConfigError: the variable that is to have an engine's key has none.
        EngineError: a server does not answer, or has no checksums.
        TrainError: its tokenizer is another than the policy's.
    """
    engines: dict[str | None, TeacherEngine] = {}
    for teacher in config.teacher:
        if teacher.engine is None:
            continue
        key = engine_key(teacher.key_env, environment, "teacher.key_env")
        control = EngineControl(teacher.engine.url, key=key, login=teacher.engine.login)
        check_text(control, policy)
        engines[teacher.name] = TeacherEngine(control, weights_of(control))
    return engines


def _of_engine(teacher: TeacherConfig, engine: TeacherEngine, earlier: Sequence[Json]) -> Json:
    """The description of a teacher that a server serves.

    Args:
        earlier: the teachers of the last step.

    Raises:
        EngineError: it serves other weights than that step learned from.
    """
    for what in earlier:
        if what["name"] == teacher.name and "engine" in what:
            engine.digest, now = what["weights_digest"], engine.digest
            if now != engine.digest:
                engine.check_weights()
    return {
        "name": teacher.name,
        "labels": list(teacher.labels),
        "engine": engine.control.url,
        "weights_digest": engine.digest,
    }


def _described(
    config: TrainConfig, log: Store, teacher: TeacherConfig, policy: Path, write: Callable[..., None]
) -> Json:
    line = teacher_line(config.policy, teacher.name)
    held = checkpoints_of(log, config.run, line)
    folder = _folder(config, log, teacher)
    if folder.is_dir() or not held:
        record = _adopted(config, log, folder, line, held, policy, write)
    else:  # the model was moved away since
        record = held[-1]
    return {
        "name": teacher.name,
        "labels": list(teacher.labels),
        "line": line,
        "version": record.policy_version,
    }


def _folder(config: TrainConfig, log: Store, teacher: TeacherConfig) -> Path:
    """The folder of a teacher's weights.

    Raises:
        TrainError: the store has no checkpoint of the version that is to teach.
    """
    if teacher.version is None:
        assert teacher.model is not None
        return model_folder(teacher.model)
    run, policy = teacher.run or config.run, teacher.policy or config.policy
    held = [r for r in checkpoints_of(log, run, policy) if r.policy_version == teacher.version]
    if not held:
        there = sorted({r.policy_version for r in checkpoints_of(log, run, policy)})
        raise TrainError(
            f"teacher.version {teacher.version}: run {run!r} has no checkpoint of that version of policy "
            f"{policy!r} (it has: {', '.join(map(str, there)) or 'none'})"
        )
    return log.folder(held[-1].path)


def _adopted(
    config: TrainConfig,
    log: Store,
    folder: Path,
    line: str,
    held: Sequence[CheckpointWritten],
    policy: Path,
    write: Callable[[Record, Record], None],
) -> CheckpointWritten:
    """The checkpoint that has the weights of a folder, which is written unless there is one."""
    require_folder(folder, "`teacher.model`")
    shape = read_shape(folder)
    check_tokens(folder, shape, policy)
    weights = _weights(folder, shape, config.dtype)
    same = (r for r in held if digest_like(weights, r.weights_digest) == r.weights_digest)
    if (record := next(same, None)) is not None:
        return record
    version = max((r.policy_version for r in held), default=-1) + 1
    record = write_checkpoint(
        *(log.path, config.run, line, version, weights, None), like=folder, phase=None, tree=True
    )
    log.share(record.path)
    before = version - 1 if version else None
    write(record, PolicyPublished(line, version, before, record.path, record.weights_digest))
    note_checkpoint(log.path, config.run, record)
    return record


def _weights(folder: Path, shape: ModelShape, dtype: str) -> Tensors:
    tensors = checked(read_unchanged(folder), shape)
    return {name: tensors[name].to(getattr(torch, dtype)) for name in weight_shapes(shape)}


def check_tokens(teacher: Path, shape: ModelShape, policy: Path) -> None:
    """Check that a teacher's ids mean what the policy's do.

    Args:
        shape: the teacher's.

    Raises:
        TrainError: they do not; it names the first that differs.
    """
    student = read_shape(policy)
    if shape.scores:
        raise ModelError(f"{teacher}: is a reward model, which predicts no tokens, and so no teacher")
    own, theirs = _tokens(policy), _tokens(teacher)
    if own is None or theirs is None:
        if shape.vocab != student.vocab:
            raise TrainError(
                f"the teacher {teacher} has a vocabulary of {shape.vocab} and the policy one of "
                f"{student.vocab}, and without both tokenizers (tokenizer.json) nobody can say whether its "
                "ids are the policy's: put them into the models' folders"
            )
        return
    different = [i for i in sorted(own) if theirs.get(i) != own[i]]
    if different or max(own, default=-1) >= shape.vocab:
        at = different[0] if different else max(own)
        raise TrainError(
            f"the teacher {teacher} has another tokenizer than the policy: id {at} is {own[at]!r} to the "
            f"policy and {theirs.get(at, 'nothing')!r} to the teacher ({len(different)} ids differ). Its "
            "logprobs would be of other text: choose a teacher with the policy's tokenizer"
        )


def _tokens(folder: Path) -> dict[int, str] | None:
    """Id -> token of a model's tokenizer; None where there is none."""
    from tokenizers import Tokenizer

    file = model_file(folder, "tokenizer.json")
    if file is None:
        return None
    return {number: token for token, number in Tokenizer.from_file(str(file)).get_vocab().items()}
