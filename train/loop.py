"""`rollbook train`: take steps from a source until the configuration's number is reached."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollbook import store
from rollbook.store import Store
from rollbook.store.cut import Cut, parse_cut
from rollbook.store.events import RunOpened
from rollbook.train.config import TrainConfig
from rollbook.train.environment import fingerprint
from rollbook.train.history import History, fold_history
from rollbook.train.source import Source, make_source
from rollbook.train.trainer import StepOutcome, Trainer


def train(config: TrainConfig, path: Path, source: str, as_of: str, lane: str) -> None:
    """Train a phase to its end. A phase that was interrupted goes on where it stopped.

    Raises:
        RollbookError: the configuration, the model or the log cannot be used.
    """
    console = Console(stderr=True)
    log = store.open(path)
    with log.writer(lane) as writer:
        history = fold_history(log.events(), config.run, config.policy)
        phase = config.phase(source)
        cut = _phase_cut(log, history, phase, as_of, config.run)
        trainer = Trainer(config, log, writer, history, phase)
        try:
            _announce(console, trainer, config, source)
            trainer.write(
                RunOpened("train", config.as_json(), environment=fingerprint(trainer.policy.device))
            )
            trainer.sync_current()
            feed = make_source(config, log, history, source, cut, trainer.done)
            _steps(console, trainer, config, feed)
        finally:
            trainer.close()


def _phase_cut(log: Store, history: History, phase: str, as_of: str, run: str) -> Cut:
    """The cut a phase trains at: decided when it starts, and kept when it goes on."""
    earlier = history.of_phase(phase)
    return parse_cut(earlier[0].planned.cut) if earlier else log.cut(as_of, run)


def _announce(console: Console, trainer: Trainer, config: TrainConfig, source: str) -> None:
    if trainer.done:
        console.print(f"going on after {trainer.done} of {config.steps} steps")
    console.print(
        f"training run [bold]{config.run}[/] with {config.algorithm.name} from the "
        f"{'tail of the log' if source == 'tail' else 'log at a cut'}, from version {trainer.version}"
    )


def _steps(console: Console, trainer: Trainer, config: TrainConfig, source: Source) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcome: StepOutcome | None = None
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("steps", total=config.steps, completed=trainer.done)
        while trainer.done < config.steps:
            selection = source.take(trainer.version)
            if selection is None:
                console.print("the log holds no more complete batches at this cut")
                break
            outcome = trainer.take_step(selection)
            due = trainer.done % config.checkpoint_every == 0 or trainer.done == config.steps
            trainer.publish(checkpoint=due)
            progress.update(bar, completed=trainer.done, description=_describe(outcome))
        # Also where a crash came between the last step and its checkpoint: what follows starts from it.
        trainer.ensure_checkpoint()
    if outcome is None:
        console.print("nothing to do: every step of this configuration is committed")


def _describe(outcome: StepOutcome) -> str:
    metrics = outcome.metrics
    reward = metrics["reward"]
    shown = "" if reward is None else f"  reward {reward:.3f}"
    return f"step {outcome.step}  loss {metrics['loss']:.4f}{shown}"
