"""`rollbook run`: runs the parts of a run, and shows how it goes: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rollbook.cli.terminal import Console, say

if TYPE_CHECKING:
    import asyncio

    import httpx
    from rich.console import Group

    from rollbook.online.address import Proof
    from rollbook.online.config import WholeConfig
    from rollbook.online.parts import Spec, Supervisor
    from rollbook.online.progress import Awaited, RunProgress
    from rollbook.store.events import Event, Record
    from rollbook.store.log.tail import Tail

    LineOf = Callable[[Record], str | None]


class Only(StrEnum):
    """Parts of a run."""

    engines = "engines"
    proxy = "proxy"
    trainer = "trainer"
    rollouts = "rollouts"


def run_online(
    config: Annotated[Path, typer.Argument(help="TOML file with [serve], [train], [rollout], [engines].")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Overrule a key, such as train.optimizer.lr=1e-5 or serve.port=9000."),
    ] = None,
    only: Annotated[
        list[Only] | None,
        typer.Option(help="Start this part alone, or these: the others run elsewhere."),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Have a Ray cluster place the trainer's ranks, and run the rollouts."),
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End what an earlier start of this run left running.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the commands that would be started, and start nothing.")
    ] = False,
) -> None:
    """Train online with one command: engines, proxy, trainer and rollouts.

    Each part is a process of its own, with a log of its own. What dies is
    started again, and goes on from the log. When the training has ended, or
    on SIGINT, SIGTERM and SIGHUP (a closed terminal), all are stopped: the
    rollouts, and the trainer after its step with a checkpoint, then the proxy,
    then the engines. The same command goes on.

    rollbook run online.toml
    rollbook run online.toml --set train.steps=500
    rollbook run online.toml --only engines        (on another machine)
    rollbook run online.toml --ray                 (on a node of a Ray cluster)

    Exit codes: 0 the training has ended, 2 a part cannot be started or died
    too often, 130 and 143 stopped by SIGINT and SIGTERM (or SIGHUP).
    """
    raise typer.Exit(
        run_whole(
            config,
            overrides or [],
            [part.value for part in only or ()],
            ray=ray,
            take_over=take_over,
            show=show,
        )
    )


LOOK_S = 0.5
LATEST_S = 30.0
"""Tokens a second are those of so long."""
_HELD = re.compile(r"^rollbook_held_trajectories(?:\{[^}]*\})? (\S+)", re.M)
_TOKENS = re.compile(r'^rollbook_tokens_total\{[^}]*kind="completion"[^}]*\} (\S+)', re.M)


def run_whole(
    path: Path, overrides: Sequence[str], only: Sequence[str], *, ray: bool, take_over: bool, show: bool
) -> int:
    """Run it to the end of its training, or until somebody interrupts; the exit code.

    Args:
        take_over: end what runs of it.

    Raises:
        ConfigError: the CONFIG cannot be used.
        LaneLockedError: it runs already.
        PartError: a part cannot be started, or died too often.
    """
    from rollbook.cli.train.training import line_of
    from rollbook.online.address import check_is_ours, placed_at
    from rollbook.online.config import load_whole
    from rollbook.online.earlier import alone, await_ends
    from rollbook.online.parts import PARTS, PROXY, specs_of

    config = load_whole(path, overrides)
    if show:
        _show(specs_of(config, only, ray=ray))
        return 0
    parts = [spec.name for stage in specs_of(config, only, ray=ray) for spec in stage if spec.name in PARTS]

    def tell(text: str) -> None:
        say(text, sys.stderr)

    await_ends(config, parts, tell, take_over=take_over)
    if PROXY in parts:
        config = placed_at(config, tell)
    else:
        check_is_ours(config)
    with alone(config, parts), _placed(config, only, tell) as placed:
        return _run_parts(placed, specs_of(placed, only, ray=ray), line_of)


@contextlib.contextmanager
def _placed(config: WholeConfig, only: Sequence[str], tell: Callable[[str], None]) -> Iterator[WholeConfig]:
    """The run with its engines placed, where Ray is to place them."""
    from rollbook.online.config import at_addresses

    engines = config.engines
    if engines is None or engines.placed is None or "engines" not in (only or ("engines",)):
        yield config
        return
    from rollbook.online.placed import placed

    with placed(engines.placed, tell) as (group, addresses):
        yield at_addresses(config, group, addresses)


def _show(stages: list[list[Spec]]) -> None:
    for stage in stages:
        for spec in stage:
            say(f"{spec.name}: {_line(spec)}")


def _run_parts(config: WholeConfig, stages: list[list[Spec]], line_of: LineOf) -> int:
    import asyncio

    from rollbook.online.address import Proof
    from rollbook.online.parts import PROXY
    from rollbook.store.ids import new_id

    start = new_id()
    names = {spec.name for stage in stages for spec in stage}
    proof = Proof.of(config, start) if PROXY in names and not config.serve.proxies else None
    stages = [[_of_start(spec, start, proof) for spec in stage] for stage in stages]
    return asyncio.run(_run(config, stages, start, line_of))


def _of_start(spec: Spec, start: str, proof: Proof | None) -> Spec:
    """A part's spec for one start of the run: its environment marks the start, and names its own proxy."""
    from rollbook.online.parts import PROXY
    from rollbook.store.whose import START, WANTED

    variables = {START: start} | ({} if proof is None else {WANTED: start})
    return replace(
        spec, environment={**spec.environment, **variables}, proof=proof if spec.name == PROXY else None
    )


def _line(spec: Spec) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return " ".join([*variables, shlex.join(spec.command)])


async def _run(config: WholeConfig, stages: list[list[Spec]], mark: str, line_of: LineOf) -> int:
    """Run the parts; a signal stops them orderly, and if this process is killed, nothing of them is left."""
    import asyncio

    from rollbook.online.earlier import guarded
    from rollbook.online.parts import Supervisor

    lines, stopped = Lines(Console(stderr=True)), list[int]()
    supervisor = Supervisor(stages, lambda text: lines.tell((text, "yellow")))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        stopped.append(number)
        lines.tell(f"{signal.Signals(number).name}: stopping in order; repeat the signal to end all now")
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    lines.tell(
        "run ", (config.run, "bold"), f" into {config.serve.store}, what each part prints: {config.logs}"
    )
    screen = Screen(config, supervisor, lines, line_of)
    shown = screen.begin()
    try:
        async with guarded(mark, lambda text: lines.tell((text, "yellow"))):
            await supervisor.run()
    finally:
        screen.over = True
        await shown
    if not stopped and (left := screen.steps_left):
        lines.tell(f"the training ended {left} steps before its end: {config.logs}/trainer.log says why")
    return 128 + stopped[0] if stopped else 0


class Lines:
    """The console, and how long nothing new was printed there."""

    def __init__(self, console: Console) -> None:
        from rollbook.online.progress import Silence

        self.console, self.silence = console, Silence(time.time())

    def tell(self, *texts: str | tuple[str, str]) -> None:
        """Print a line of texts, each with the style beside it, if it has one."""
        self.silence.hear(time.time())
        self.console.tell(*texts)


class Screen:
    """Shows the state of the parts, and the course of the run as its log has it.

    Args:
        line_of: the line of an event of the training, if it has one.
    """

    def __init__(self, config: WholeConfig, supervisor: Supervisor, lines: Lines, line_of: LineOf) -> None:
        from rollbook.online.progress import RunProgress

        self._line_of = line_of
        self._config, self._supervisor, self._lines, self._console = config, supervisor, lines, lines.console
        self.over = False
        self._course = RunProgress()
        self._tail: Tail | None = None
        self._tokens: list[tuple[float, float]] = []
        self._states: dict[str, str] = {}
        """Part -> its state, as it was said last."""
        self._held = 0

    @property
    def steps_left(self) -> int:
        """Steps that the training of this run, if there was one, did not take."""
        return max((self._course.steps or 0) - self._course.done, 0)

    def begin(self) -> asyncio.Task[None]:
        """Show it until `over`, and say so if a fault ends that before: silence would look well."""
        import asyncio

        shown = asyncio.create_task(self._show())
        shown.add_done_callback(self._tell_end)
        return shown

    def _tell_end(self, shown: asyncio.Task[None]) -> None:
        if not shown.cancelled() and (error := shown.exception()) is not None:
            self._lines.tell(f"from here on nothing is shown of this run, which goes on: {error!r}")

    async def _show(self) -> None:
        import asyncio

        from rollbook.store.errors import RollbookError

        with self._live() as update:
            following = asyncio.create_task(self._follow())
            while not self.over:
                await asyncio.wait([following], timeout=LOOK_S)
                if following.done():
                    following.result()
                self._tell_states()
                self._tell_waits()
                update()
            await following
            with contextlib.suppress(RollbookError, OSError):
                for event in self._events():
                    self._hear(event)
            self._tell_states()
            update()

    async def _follow(self) -> None:
        """Note what is new in the log and at the proxy until `over`; waits are said meanwhile."""
        import asyncio

        import httpx

        from rollbook.store.errors import RollbookError

        async with httpx.AsyncClient(timeout=2.0) as client:
            while not self.over:
                with contextlib.suppress(RollbookError, OSError):  # the store is not there yet
                    for event in await asyncio.to_thread(self._events):
                        self._hear(event)
                await self._ask_the_proxy(client)
                await asyncio.sleep(LOOK_S)

    @contextlib.contextmanager
    def _live(self) -> Iterator[Callable[[], None]]:
        """What updates the table; without a terminal it does nothing."""
        from rich.live import Live

        if not self._console.is_terminal:
            yield lambda: None
            return
        with Live(console=self._console, refresh_per_second=4) as live:
            yield lambda: live.update(self._table())

    def _events(self) -> list[Event]:
        """Those that are new; at first, those that say where the training stands."""
        from rollbook import store
        from rollbook.online.progress import KINDS
        from rollbook.store.events import CheckpointWritten
        from rollbook.store.log.tail import Filter

        if self._tail is None:
            log = store.open(self._config.serve.store)
            head = log.head()
            kinds = KINDS | {CheckpointWritten.KIND}
            self._tail = log.tail(head, Filter(kinds, run=self._config.run))
        events = self._tail.poll(2000)
        self._course.take(events)
        return events

    def _hear(self, event: Event) -> None:
        """Print a line for an event of the training, where there is no table."""
        line = self._line_of(event.record)
        if line is not None and not self._console.is_terminal:
            self._lines.tell(f"{_time(event.time_us / 1e6)} {line}")

    def _tell_states(self) -> None:
        for part in self._supervisor.parts:
            if self._states.get(part.spec.name) != part.state:
                self._states[part.spec.name] = part.state
                if not self._console.is_terminal:
                    self._lines.tell(f"{_time(time.time())} {part.spec.name}: {part.state}")

    def _awaited(self) -> list[Awaited]:
        """What the run waits for."""
        from rollbook.online.progress import Limits, PartState, awaited

        trained, parts = self._config.train, []
        for part in self._supervisor.parts:
            spec = part.spec
            limits_s = (spec.ready_s, spec.stop_s)
            parts.append(PartState(spec.name, part.state, part.since, *limits_s, str(spec.log)))
        limits = None
        if trained is not None:
            waits_s = 0.0 if trained.evaluation is None else trained.evaluation.wait_s
            limits = Limits(trained.algorithm.demand.groups, trained.idle_timeout_s, waits_s)
        return awaited(self._course, parts, limits, self._held, time.time())

    def _tell_waits(self) -> None:
        """Print a line for what is waited for for long; where there is a table, it has a row."""
        now = time.time()
        if not self._console.is_terminal:
            for wait in self._lines.silence.due(self._awaited(), now):
                self._console.tell(f"{_time(now)} {wait.in_words(now)}")

    async def _ask_the_proxy(self, client: httpx.AsyncClient) -> None:
        """Note how many tokens the proxy says were sampled, and how many trajectories it holds."""
        import httpx

        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await client.get(f"{self._config.proxy}/metrics")
            if answer.status_code == 200:
                total = sum(map(float, _TOKENS.findall(answer.text)))
                self._held = int(sum(map(float, _HELD.findall(answer.text))))
                now = time.monotonic()
                if self._tokens and total < self._tokens[-1][1]:
                    self._tokens.clear()  # the proxy was started again
                self._tokens = [(at, n) for at, n in self._tokens if now - at < LATEST_S] + [(now, total)]

    # The table --------------------------------------------------------------------------------

    def _table(self) -> Group:
        from rich.console import Group
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from rollbook.store.patience import SAY_AFTER_S

        course, columns = self._course, (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns)
        bar.add_task("steps", total=course.steps, completed=course.done)
        table = Table(show_header=False, box=None)
        for part in self._supervisor.parts:
            style = {"running": "green", "ended": "dim"}.get(part.state, "yellow")
            table.add_row(part.spec.name, part.state, style=style)
        for name, value in lines_of(course, self._per_second()):
            table.add_row(name, value)
        now = time.time()
        for wait in self._awaited():
            if now - wait.since > SAY_AFTER_S:
                table.add_row("", wait.in_words(now), style="yellow")
        return Group(bar, table)

    def _per_second(self) -> float | None:
        if len(self._tokens) < 2:
            return None
        (began, before), (ended, after) = self._tokens[0], self._tokens[-1]
        return (after - before) / (ended - began)


def lines_of(course: RunProgress, tokens_s: float | None) -> list[tuple[str, str]]:
    """What is shown of a course, line by line."""
    running, waiting = course.groups
    by_status = ", ".join(f"{count} {status}" for status, count in sorted(course.ended.items()))
    metrics, evaluation = course.metrics, course.evaluation
    trained = [f"version {course.version}"]
    for name, form in (
        ("loss", "loss {:.4f}"),
        ("reward", "reward {:.3f}"),
        ("staleness_mean", "staleness {:.2g}"),
    ):
        if metrics.get(name) is not None:
            trained.append(form.format(metrics[name]))
    rows = {
        "training": "  ".join(trained),
        "rollouts": f"{course.launched} running" + (f", {by_status}" if by_status else ""),
        "groups": f"{running} running, {waiting} waiting to be trained on",
        "reward": None if course.reward is None else f"{course.reward:.3f} (the last {len(course.rewards)})",
        "sampled": None if tokens_s is None else f"{tokens_s:.0f} tokens/s",
        "evaluated": _evaluated(evaluation, course.partial),
    }
    if course.evaluating is not None:
        rows["evaluating"] = f"version {course.evaluating}: {course.agents.in_words}"
    return [(name, value) for name, value in rows.items() if value is not None]


def _evaluated(evaluation: dict[str, object], partial: str | None) -> str | None:
    if not evaluation:
        return None
    scores = [f"{name} {value:.3f}" for name, value in evaluation.items() if isinstance(value, float)]
    version = f"version {evaluation['policy_version']}"
    return "  ".join([version, *([] if partial is None else [partial]), *scores])


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
