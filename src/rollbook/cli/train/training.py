"""What `rollbook train` shows: a bar on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rollbook.cli.terminal import Console
from rollbook.store.errors import ConfigError, ModelError
from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    EvalFinished,
    Json,
    Record,
    StepCommitted,
    StepFailed,
    SyncFailed,
    SyncFinished,
)
from rollbook.store.sql.training_views import RECORDED
from rollbook.train.config.config import TrainConfig
from rollbook.train.loop.watcher import TrainingStart
from rollbook.train.ranks.launch import Launch

SHOWN = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "gradient_norm": "gradient norm {:.3g}",
    "entropy": "entropy {:.3g}",
    "kl": "KL {:.2g}",
    "engine_logprob_gap": "engine gap {:.2g}",
    "samples": "{} samples",
    "trained_tokens": "{} trained tokens",
    "staleness_mean": "staleness {:.2g}",
    "tokens_s": "{:.0f} tokens/s",
    "memory_gib": "{:.1f} GiB",
}
"""The metrics of a step that are shown, in this order; those that it does not have are left out."""
EVALUATED = {
    "loss": "loss {:.4f}",
    "preference_accuracy": "accuracy {:.3f}",
    "preference_margin": "margin {:.3f}",
    "reward": "reward {:.3f}",
    "success": "success {:.3f}",
}
"""The metrics of an evaluation that are shown."""
IN_BAR = {name: SHOWN[name] for name in ("loss", "reward", "tokens_s", "memory_gib")}
PARTS = tuple(column.name.removesuffix("_s") for column in RECORDED if column.name.endswith("_s"))
"""Where the time of a step goes, in the order in which it is shown."""


def run_train(
    config: TrainConfig,
    store: Path,
    source: str,
    as_of: str,
    lane: str,
    abandon_after: int | None,
    count: int | None,
    placing: tuple[str, float] | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Train, with the ranks that are asked for; or follow, as a rank that a launcher started.

    Args:
        placing: Ray places the ranks: its strategy, and how long it may take.
        before: what rank 0 does first, once, while the others wait.
    """
    from rollbook.engines.hub import model_folder
    from rollbook.train.curves.reporter import Reporter
    from rollbook.train.loop.loop import train
    from rollbook.train.ranks.launch import launch_here
    from rollbook.train.ranks.ranks import Ranks, follow_at, meet_others, place_in, shared_secret

    place = place_in(os.environ)
    if place is not None and count not in (None, place.count):
        raise ConfigError(f"--ranks {count}: the launcher started {place.count} ranks; leave it out")
    if place is not None and placing is not None:
        raise ConfigError(f"--launch ray: a launcher started {place.count} ranks already; leave it out")
    launch: Launch = launch_here if placing is None else _by_ray(config, *placing)
    if place is not None:
        secret = shared_secret(place, store)
        if place.rank > 0:
            follow_at(place, secret)
            return
        count, launch = place.count, functools.partial(meet_others, place, secret)
    with contextlib.suppress(ModelError):  # a run that has begun goes on without it
        config = config.model_copy(update={"model": model_folder(config.model)})
    ranks = Ranks(config.parallel, count or config.parallel.fewest, launch)
    with ranks:
        if before is not None:
            before()
        with TrainingProgress() as progress, Reporter(config, store, progress) as watcher:
            train(config, store, source, as_of, lane, watcher, abandon_after, ranks)


def _by_ray(config: TrainConfig, strategy: str, within_s: float) -> Launch:
    """Has Ray place the ranks."""
    import torch

    from rollbook.train.ranks.ray_ranks import Room, launch_by_ray

    # Unlike `is_available`, this starts nothing of CUDA: Ray has yet to say which GPU is rank 0's.
    gpus = config.device == "cuda" or (config.device == "auto" and torch.cuda.device_count() > 0)
    return functools.partial(launch_by_ray, Room(strategy, gpus, within_s))


class TrainingProgress(contextlib.AbstractContextManager["TrainingProgress"]):
    """Shows the steps of a training on standard error.

    Failures and evaluations are lines everywhere; steps, checkpoints and syncs are lines with their time
    where standard error is no terminal, as in a batch job's file.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._watched = self._console.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._watched)
        self._task: TaskID | None = None

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begun(self, start: TrainingStart) -> None:
        """Print where training starts from, and show the bar."""
        if start.done:
            self.note(f"going on after {start.done} of {start.steps} steps")
        if start.other:
            self.note(
                f"this training is another than before: {start.other} steps of this policy were committed by "
                f"other configurations. Its steps count anew, {start.done} of {start.steps} are done; it "
                f"goes on from version {start.version}"
            )
        log = "tail of the log" if start.cut is None else f"log at {start.cut}"
        how = f" with {start.algorithm} from the {log}, from version {start.version}"
        self._console.tell("training run ", (start.run, "bold"), how)
        self._task = self._bar.add_task("steps", total=start.steps, completed=start.done)
        self._bar.start()

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.tell(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.tell((text, "yellow"))

    def tell(self, *records: Record) -> None:
        """Show an event that was just written."""
        for record in records:
            line = line_of(record)
            always = isinstance(record, StepFailed | SyncFailed | EvalFinished)
            if line is not None and (always or not self._watched):
                self._console.tell(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}")

    def committed(self, done: int, step: int, metrics: Json) -> None:
        """Advance the bar."""
        described = "  ".join([f"step {step}", *_formatted(_with_speed(metrics), IN_BAR)])
        if self._task is not None:
            self._bar.update(self._task, completed=done, description=described)


def line_of(record: Record) -> str | None:
    """The line for an event of a training; None for events that are not shown."""
    match record:
        case StepCommitted():
            head = f"step {record.step}: version {record.policy_version}"
            return "  ".join([head, *_formatted(_with_speed(record.metrics), SHOWN), *_times(record.metrics)])
        case EvalFinished():
            counts = [f"{record.samples} samples"] if record.samples else []
            counts += [f"{record.trajectories} trajectories"] if record.trajectories else []
            held_out = f"version {record.policy_version}: held out ({', '.join(counts)})"
            partial = [] if record.partial is None else [record.partial]
            return "  ".join([held_out, *partial, *_formatted(record.metrics, EVALUATED)])
        case StepFailed():
            return f"step {record.step} failed (attempt {record.attempt}): {record.error}"
        case CheckpointWritten():
            whole = "" if record.optimizer_digest else ", weights alone"
            megabytes = record.bytes / 2**20
            return f"version {record.policy_version}: checkpoint {record.path} ({megabytes:.1f} MiB{whole})"
        case CheckpointRemoved():
            return f"version {record.policy_version}: removed checkpoint {record.path} ({record.reason})"
        case SyncFinished():
            held = f"{record.engine} holds it, {record.bytes / 2**20:.1f} MiB in {record.seconds:.2f} s"
            return f"version {record.policy_version}: {held}"
        case SyncFailed():
            return f"version {record.policy_version}: the sync to {record.engine} failed: {record.error}"
    return None


def _seconds(metrics: Json) -> dict[str, float]:
    """What each part of a step took; all 0 of steps that do not say."""
    return {part: metrics.get(f"{part}_s") or 0.0 for part in PARTS}


def _with_speed(metrics: Json) -> Json:
    """With the trained tokens in a second of all that a step took."""
    total = sum(_seconds(metrics).values())
    return metrics | {"tokens_s": metrics["trained_tokens"] / total} if total else metrics


def _times(metrics: Json) -> list[str]:
    """Where the time went: the parts that took a twentieth of it or more; empty of steps that do not say."""
    seconds = _seconds(metrics)
    total = sum(seconds.values())
    shown = [f"{part} {took:.2g}" for part, took in seconds.items() if took >= total / 20]
    return [f"{total:.2g} s ({', '.join(shown)})"] if total else []


def _formatted(metrics: Json, shown: Mapping[str, str]) -> list[str]:
    return [form.format(metrics[name]) for name, form in shown.items() if metrics.get(name) is not None]
