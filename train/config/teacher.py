"""`[[teacher]]` of a CONFIG: a model that the policy learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from rollbook.store.config import Count, Table
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.recipe import Name
from rollbook.train.config.sync import KEY_VARIABLE, Address


class TeacherConfig(Table):
    """A model whose logprobs of the policy's tokens the algorithm asks for (`teacher_kl`): one of `model`,
    `version` and `engine` says where it is. Its tokenizer is the policy's."""

    name: Name | None = None
    """Its name, where there are several."""
    labels: tuple[Annotated[str, Field(pattern=r"^[^=]+=.*$")], ...] = ()
    """The trajectories that it teaches: those with all of these labels, each as name=value. The first teacher
    that teaches a trajectory is its only one; one that nobody teaches has no divergence."""
    model: Path | None = None
    """Hugging Face model directory, or the name of a model at the hub. It is copied into the store once, so
    that steps can be replayed."""
    version: Count | None = None
    """A policy version in this store, of which there is a checkpoint; it is copied likewise."""
    run: Name | None = None
    """With `version`: whose it is; absent: the run in training."""
    policy: Name | None = None
    """With `version`: which line of weights; absent: the policy in training."""
    engine: Address | None = None
    """URL of an SGLang server, which is asked for the logprobs. Replays take its answers from the log."""
    key_env: Annotated[str, Field(min_length=1)] = KEY_VARIABLE
    """Environment variable with the key sent to the engine."""
    apart: bool = False
    """With `model` or `version`: the teacher is a process of its own, which computes while the policy does,
    on as many ranks as a copy of the policy takes; else they take turns. The bits are the same."""

    @model_validator(mode="after")
    def _one_place(self) -> TeacherConfig:
        given = [key for key in ("model", "version", "engine") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                "a teacher has exactly one of model, version and engine "
                f"(got {' and '.join(given) or 'none'})"
            )
        if self.version is None and (self.run or self.policy):
            raise ValueError("run and policy go with version")
        if self.engine is not None and self.apart:
            raise ValueError("apart: an engine is a process of its own already; leave it out")
        return self


def check_teachers(teachers: Sequence[TeacherConfig], algorithm: Algorithm) -> None:
    """Check that there are teachers if the algorithm asks for one, and that they can be told apart.

    Raises:
        ValueError: there are none, or some that nobody asks for; two have one name; or one can teach nothing,
            as those before it teach all.
    """
    asked, name = "teacher" in algorithm.needs, algorithm.algorithm_name
    if asked and not teachers:
        raise ValueError(f'algorithm "{name}" learns from a teacher here: say which, in [[teacher]]')
    if teachers and not asked:
        raise ValueError(f'[[teacher]]: algorithm "{name}" asks for none: set algorithm.teacher_kl above 0')
    names = [teacher.name for teacher in teachers]
    if len(set(names)) < len(names):
        raise ValueError("[[teacher]]: each of several has a name of its own")
    if any(not teacher.labels for teacher in teachers[:-1]):
        raise ValueError("[[teacher]]: one without labels teaches every trajectory: let it be the last")
