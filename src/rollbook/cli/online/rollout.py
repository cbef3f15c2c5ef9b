"""`rollbook rollout`: runs the rollouts of a CONFIG and shows how far they are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rollbook.cli.options import AsJson
from rollbook.cli.terminal import Console, print_json, say

if TYPE_CHECKING:
    from rollbook.rollouts.config import RolloutConfig
    from rollbook.rollouts.manager import RolloutManager
    from rollbook.rollouts.places import Progress
    from rollbook.rollouts.ray_manager import RayRollouts
    from rollbook.rollouts.scoring import Rescored

Config = Annotated[Path, typer.Argument(help="TOML file: tasks, agent, clocks, scores.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrule a key, such as concurrency=8 or clocks.total_s=600."),
]
Key = Annotated[
    str | None,
    typer.Option(envvar="ROLLBOOK_KEY", help="An operator's key, if the proxy asks for keys."),
]
Follow = Annotated[
    bool,
    typer.Option("--follow", help="Go over the tasks again and again, until an online training ends."),
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Have an actor of a Ray cluster run them: that of RAY_ADDRESS.")
]
Resources = Annotated[
    list[str] | None,
    typer.Option(help="With --ray: what the actor takes, such as cpu_node=0.01; once for each."),
]
ScoreAgain = Annotated[
    bool,
    typer.Option(
        "--score-again",
        help="Run nothing: score again what ended and left its folder; what changed is superseded.",
    ),
]


def rollout(
    config: Config,
    overrides: Set = None,
    key: Key = None,
    follow: Follow = False,
    ray: OnRay = False,
    resources: Resources = None,
    score_again: ScoreAgain = False,
    json: AsJson = False,
) -> None:
    """Run agents on tasks: started, watched and scored, each a trajectory of the proxy's log.

    An agent is a program that speaks OpenAI's or Anthropic's API, unchanged, or
    a class in Python. Trajectories whose infrastructure failed are void, and
    tried again. Interrupted, the same command goes on where it was.

    rollbook serve serve.toml --store runs
    rollbook rollout rollouts.toml --set samples=8
    rollbook rollout rollouts.toml --follow
    rollbook rollout rollouts.toml --ray --resources cpu_node=0.01
    rollbook sql "select status, count(*) from launches group by 1" --store runs

    Exit codes: 0 all places have their trajectory, 1 some were given up (or, of
    --score-again, some scorers failed), 2 they could not begin or go on, 75 the
    proxy was lost: the same command goes on.
    """
    if resources and not ray:
        raise typer.BadParameter("goes with --ray", param_hint="--resources")
    from rollbook.rollouts.config import load_rollouts

    settings = load_rollouts(config, overrides or [])
    if score_again:
        raise typer.Exit(run_scoring(settings, key, json=json))
    cluster = resources_of(resources or []) if ray else None
    raise typer.Exit(run_rollouts(settings, key, follow, cluster, json=json))


def run_rollouts(
    config: RolloutConfig, key: str | None, follow: bool, cluster: Mapping[str, float] | None, *, json: bool
) -> int:
    """Run them to their end, or until somebody interrupts; the exit code.

    Args:
        follow: beside an online training, as long as it goes on.
        cluster: an actor of a Ray cluster runs them, which takes these resources; None: this process.

    Raises:
        ConfigError: its tasks cannot be used.
        RolloutError: the proxy is away, or too many launches failed by their infrastructure.
    """
    import asyncio

    stopped: list[int] = []
    with _shown(config) as tell:
        progress = asyncio.run(_run(config, key, follow, cluster, tell, stopped))
    if json:
        print_json(
            asdict(progress) | {"by_status": {str(key): value for key, value in progress.by_status.items()}}
        )
    else:
        for line in _lines(progress):
            say(line)
    if stopped:
        return 128 + stopped[0]
    if follow:
        return 0  # it ends with its training
    return 1 if progress.given_up or progress.done < (progress.total or 0) else 0


def run_scoring(config: RolloutConfig, key: str | None, *, json: bool) -> int:
    """Score what ended again; the exit code.

    Raises:
        ConfigError: its tasks or its scorers cannot be used.
        RolloutError: the proxy is away, or another process scores these rollouts.
    """
    import asyncio

    from rollbook.rollouts.launchers.agents import launcher_of
    from rollbook.rollouts.manager import alone, wanted
    from rollbook.rollouts.proxy import Proxy
    from rollbook.rollouts.scoring import Scorers, score_again
    from rollbook.rollouts.tasks import read_tasks

    async def again() -> Rescored:
        tasks = await asyncio.to_thread(read_tasks, config.tasks, config.limit)
        async with Proxy(config.proxy, key, wanted(config)) as proxy:
            return await score_again(config, tasks, proxy, Scorers(config, proxy, launcher_of(config)), _warn)

    with alone(config, "scoring"):
        result = asyncio.run(again())
    if json:
        print_json(asdict(result))
    else:
        failed = f", {result.failed} with a scorer that failed" if result.failed else ""
        say(f"scored {result.scored} launches{failed}; {result.rewards} rewards are new")
        for why, count in sorted(result.left_out.items()):
            say(f"left out: {count}, {why}")
    return 1 if result.failed else 0


async def _run(
    config: RolloutConfig,
    key: str | None,
    follow: bool,
    cluster: Mapping[str, float] | None,
    tell: Callable[[Progress], None],
    stopped: list[int],
) -> Progress:
    """Run them; a signal stops them orderly, and is noted."""
    import asyncio

    from rollbook.rollouts.manager import RolloutManager

    manager: RolloutManager | RayRollouts
    if cluster is None:
        manager = RolloutManager(config, key, follow=follow, say=_warn, tell=tell)
    else:
        from rollbook.rollouts.ray_manager import RayRollouts

        manager = RayRollouts(config, key, follow=follow, resources=cluster, say=_warn, tell=tell)

    def stop(number: int) -> None:
        stopped.append(number)
        manager.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await manager.run()


def resources_of(texts: list[str]) -> dict[str, float]:
    """Resources of Ray, of texts such as `cpu_node=0.01`.

    Raises:
        ConfigError: one is no such text.
    """
    from rollbook.store.errors import ConfigError

    resources = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError as error:
            raise ConfigError(f"--resources {text!r}: write NAME=AMOUNT, such as cpu_node=0.01") from error
    return resources


def _warn(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _shown(config: RolloutConfig) -> Iterator[Callable[[Progress], None]]:
    """A table on standard error that says how far they are; nothing if it is no terminal."""
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield lambda progress: live.update(_table(config, progress))


def _table(config: RolloutConfig, progress: Progress) -> Table:
    table = Table(title=f"rollouts {config.name}", title_justify="left", show_header=False, box=None)
    for line in _lines(progress):
        name, _, value = line.partition(": ")
        table.add_row(name, value)
    return table


def _lines(progress: Progress) -> list[str]:
    by_status = ", ".join(f"{count} {status}" for status, count in sorted(progress.by_status.items()))
    rate = progress.infra_failed_rate
    rows: dict[str, Any] = {
        "done": f"{progress.done}" if progress.total is None else f"{progress.done} of {progress.total}",
        "running": progress.running or None,
        "launches": by_status or None,
        "mean reward": None if progress.reward is None else f"{progress.reward:.3f} ({progress.rewarded})",
        "failed by infrastructure": f"{rate:.0%} of launches" if rate else None,
        "tried again": f"{progress.again} launches, the proxy was away" if progress.again else None,
        "given up": progress.given_up or None,
        "left behind": f"{progress.leaked} processes, ended" if progress.leaked else None,
    }
    return [f"{name}: {value}" for name, value in rows.items() if value is not None]
