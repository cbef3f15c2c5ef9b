"""All rollouts of a CONFIG: each place of each group is run, scored and told to the log, until none is left.

Nothing is known here that the log does not know: a process that is started again goes on from it. Where many
launches fail it warns, and it stops rollouts whose infrastructure is gone before they use up every attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.rollouts.config import RolloutConfig
from rollbook.rollouts.jobs import Agents, Job, Watch
from rollbook.rollouts.launchers.agent_environment import Address, folder_of, make_folder
from rollbook.rollouts.launchers.launching import Exit, Launcher, Leak
from rollbook.rollouts.outcome import Ended, Status, ended_as, lost_its_proxy, unsure, verdict
from rollbook.rollouts.places import (
    LABEL,
    OPENING,
    Place,
    Progress,
    RolloutProgress,
    more_attempts,
    places_of,
    read_course,
)
from rollbook.rollouts.proxy import Opened, Proxy
from rollbook.rollouts.scoring import AGENT, Scorers, Scores, assign
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import LaunchError, RequestError, RolloutError
from rollbook.store.events import VOID, Json
from rollbook.store.ids import new_id

SWEEP_S = 60.0
LAG_S = 0.25
"""An event loop that is late by more is told of: something blocks every agent in this process."""
SETTLE_S = 2.0
"""How long is waited for the requests of an agent that ended at once to come to the proxy."""
DIED = "the process that ran it ended"


@dataclass(frozen=True, slots=True)
class _End:
    """How a launch ended, why, and whether because the proxy was away."""

    status: Status
    why: str | None
    proxy_away: bool = False


class Rollouts:
    """Runs the rollouts of a CONFIG.

    Args:
        tasks: of the CONFIG.
        agents: that start them; launcher: of programs that score.
        owner: the name of this process in the log.
        say: told what somebody should know; tell: told how far they are.
        endless: go over the tasks until somebody stops.
        names: launches that run -> names of their trajectories; shared by rollouts of the same `agents`, each
            of which leaves those of the others alone.

    Raises:
        ConfigError: it names a function that scores, and there is none such.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tasks: list[Task],
        proxy: Proxy,
        agents: Agents,
        launcher: Launcher | None,
        owner: str,
        say: Callable[[str], None] = lambda text: None,
        tell: Callable[[Progress], None] = lambda progress: None,
        *,
        endless: bool = False,
        names: dict[str, str] | None = None,
    ) -> None:
        self._config, self._proxy, self._agents = config, proxy, agents
        self._tasks = {task.name: task for task in tasks}
        self._scorers = Scorers(config, proxy, launcher)
        self._owner, self._say, self._tell = owner, say, tell
        retries = config.retries
        self._breaker = Breaker(retries.window, retries.stop_share, retries.warn_share)
        self._stop = asyncio.Event()
        self._names = {} if names is None else names
        self._orphans: dict[str, str] = {}
        """As `_names`, of launches that another process left."""
        self._ended: Counter[Status] = Counter()
        self._rewards = 0.0
        self._endless = endless
        self.progress = Progress(None if endless else len(tasks) * config.samples * config.epochs)

    def stop(self) -> None:
        """Begin nothing more, and cancel what runs."""
        self._stop.set()

    @property
    def name(self) -> str:
        """That launches have in the log."""
        return self._config.name

    async def run(self) -> Progress:
        """Run all that is left to do.

        Raises:
            RolloutError: the proxy is away, or too many launches failed by their infrastructure.
        """
        run = await self._proxy.run_name()
        answer = await self._proxy.course(self._config.name)
        course, cut = read_course(answer), answer["cut"]
        await self._settle_orphans(course)
        left = self._left(course)
        async with self._scorers, Watch(self._proxy, run, cut) as watch:
            looks = (self._sweep(), self._look_at_the_loop(), self._look_at_waits())
            beside = [asyncio.create_task(look) for look in looks]
            many = min(self._config.concurrency, max(self.progress.total or self._config.concurrency, 1))
            workers = [asyncio.create_task(self._work(left, course, watch)) for _ in range(many)]
            try:
                await asyncio.gather(*workers)
            finally:
                self.stop()  # one that failed stops the others, each of which tells the log of its end
                for task in beside:
                    task.cancel()
                await asyncio.wait([*beside, *workers])
                await self._leaks(await self._agents.sweep(frozenset(self._names)), "end")
        if (why := self._breaker.open) is not None:
            raise RolloutError(why)
        return self.progress

    # What is left -----------------------------------------------------------------------------

    async def _settle_orphans(self, course: RolloutProgress) -> None:
        """Record the end of launches whose process ended without a word: nothing of them runs any more."""
        self._orphans = {
            lost.launch_id: lost.place.trajectory(self._config.name, lost.attempt)
            for lost in course.orphans.values()
        }
        orphans = frozenset(course.orphans)
        await self._leaks(await self._agents.sweep(frozenset(self._names), orphans), "start")
        for name in sorted(course.unlaunched):
            await self._proxy.finish(name, {"status": VOID})
        for orphan in course.orphans.values():
            name, finished = self._orphans.pop(orphan.launch_id), orphan.finished
            if finished is None:
                await self._proxy.finish(name, {"status": VOID})
            status = ended_as(finished or VOID)
            await self._proxy.end_launch(name, orphan.launch_id, {"status": status, "why": DIED})
            course.ended[orphan.place] = status

    def _left(self, course: RolloutProgress) -> Iterator[Place]:
        """The places in which something is left to do; those of which nothing is are counted."""
        config = self._config
        for place in places_of(
            list(self._tasks.values()), config.samples, None if self._endless else config.epochs
        ):
            if course.open(place, config.retries.attempts):
                yield place
            else:
                self._show(done=self.progress.done + 1)

    async def _work(self, left: Iterator[Place], course: RolloutProgress, watch: Watch) -> None:
        """Run one place after the other."""
        for place in left:
            if self._stop.is_set() or self._breaker.open is not None:
                return
            await self._fill(place, course, watch)

    async def _fill(self, place: Place, course: RolloutProgress, watch: Watch) -> None:
        """Run attempts in a place until one does not fail by its infrastructure, or there are none left.

        One that failed because the proxy was away does not count: another follows once that is back.
        """
        config, begun = self._config, course.attempts.get(place, 0)
        number, spared = begun, course.spared.get(place, 0)
        while not self._stop.is_set() and self._breaker.open is None:
            number += 1
            while place.trajectory(config.name, number) in course.unlaunched:
                number += 1
            end = await self._attempt(place, number, watch)
            self._count(end)
            spared += end.proxy_away
            if end.status is Status.cancelled:
                return
            if end.status is not Status.infra_error:
                self._show(done=self.progress.done + 1)
                return
            if not more_attempts(number, spared, config.retries.attempts):
                self._say(
                    f"task {place.task}, sample {place.sample}: given up after {number} attempts: {end.why}"
                )
                self._show(done=self.progress.done + 1, given_up=self.progress.given_up + 1)
                return
            counted = 0 if end.proxy_away else number - begun - 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), config.retries.pause_s * 2**counted)

    def _count(self, end: _End) -> None:
        """Count a launch that ended. The proxy's absence says nothing of what else is amiss."""
        self._ended[end.status] += 1
        if not end.proxy_away:
            if (warning := self._breaker.add(end.status, end.why)) is not None:
                self._say(warning)
            self._show()
            return
        if not self.progress.again:
            self._say("the proxy was away: launches that failed because of it are tried again")
        self._show(again=self.progress.again + 1)

    # One launch -------------------------------------------------------------------------------

    async def _attempt(self, place: Place, number: int, watch: Watch) -> _End:
        """Run one agent from its trajectory's opening to its end, and tell the log of each."""
        config, name = self._config, place.trajectory(self._config.name, number)
        group, launch_id = place.group(config.name), new_id()
        try:
            labels = {LABEL: config.name, OPENING: launch_id}
            opened = await self._proxy.open_unless(self._stop, name, group, place.task, config.split, labels)
        except RequestError as error:
            text = f"{error}: do others called {config.name!r} run? Give these another `name`"
            raise RolloutError(text) from error
        if opened is None:
            return _End(Status.cancelled, None)
        folder = folder_of(config.folder, name, launch_id)
        make_folder(folder, self._tasks[place.task])
        activity = watch.begin(opened.trajectory_id)
        self._names[launch_id] = name
        self._show(running=self.progress.running + 1)
        try:
            address = Address(self._proxy.url, name, opened.key)
            labels = {"rollbook.run": watch.run, "rollbook.rollout": config.name}
            job = Job(
                launch_id, self._tasks[place.task], group, address, folder, activity, self._stop, labels
            )
            return await self._launched(job, opened, place, number, watch)
        finally:
            del self._names[launch_id]
            watch.end(opened.trajectory_id)
            self._show(running=self.progress.running - 1)

    async def _launched(self, job: Job, opened: Opened, place: Place, number: int, watch: Watch) -> _End:
        began, exit_ = time.monotonic(), None
        fields = self._described(job, place, number)
        try:
            started = await self._agents.start(job)
        except LaunchError as error:
            await self._proxy.launch(opened.name, fields)
            ended = Ended(infrastructure=str(error))
        else:
            await self._proxy.launch(opened.name, fields | {"isolation": started.isolation})
            ended, exit_ = await started.end()
        await self._seen(job, ended, watch)
        seen = watch.seen(job.activity)
        status, why = verdict(ended, seen)
        away = lost_its_proxy(status, ended, seen)
        scores = await self._scored(job, status)
        await self._finish(opened.name, status, ended, scores)
        report = _of_exit(exit_, job.folder) | {"status": status, "why": why}
        report |= {"proxy_away": away or None}
        report |= {"seconds": time.monotonic() - began, "scoring": {} if scores is None else scores.described}
        if exit_ is not None and exit_.left:  # before its end, behind which nobody looks at it any more
            await self._proxy.leaked(
                opened.name, job.launch_id, {"processes": list(exit_.left), "found": "end"}
            )
            self._show(leaked=self.progress.leaked + len(exit_.left))
        await self._proxy.end_launch(opened.name, job.launch_id, report)
        return _End(status, why, away)

    def _described(self, job: Job, place: Place, number: int) -> Json:
        config, clocks = self._config, self._config.clocks
        return {
            "launch_id": job.launch_id,
            "rollout": config.name,
            "place": place.described,
            "attempt": number,
            "places": self.progress.total,
            "launcher": config.agent.launcher,
            "isolation": {},
            "owner": self._owner,
            "clocks": {
                **{"start": clocks.start_s, "idle": clocks.idle_s},
                **{"total": clocks.total_s, "scoring": clocks.scoring_s},
            },
        }

    async def _seen(self, job: Job, ended: Ended, watch: Watch) -> None:
        """See all that decides how an agent ended: its requests may come here long after its end."""
        by = time.monotonic() + SETTLE_S
        while unsure(ended, job.activity.seen) and time.monotonic() < by:
            if job.activity.seen.requests or ended.answered:
                break
            await asyncio.sleep(0.02)
        if unsure(ended, job.activity.seen):
            await watch.catch_up()

    async def _scored(self, job: Job, status: Status) -> Scores | None:
        """What the CONFIG's scorers say; None: there are none, or it has no reward."""
        if not status.rewarded:
            return None
        scores = await self._scorers.score(job.task, job.address.trajectory, job.folder)
        for component, why in scores.errors.items() if scores is not None else ():
            self._say(f"{job.address.trajectory}: scorer {component} failed: {why}")
        return scores

    async def _finish(self, name: str, status: Status, ended: Ended, scores: Scores | None) -> None:
        """Finish a trajectory, with its reward; one that its agent finished keeps its own, and gets these."""
        outcome = ended.outcome if status.rewarded else None
        reward: float | None = None
        parts: dict[str, float] = {} if scores is None else dict(scores.values)
        if scores is not None:
            reward = scores.total
        elif outcome is not None and isinstance(outcome.reward, Mapping):
            parts = dict(outcome.reward)
            reward = math.fsum(outcome.weights.get(part, 1.0) * value for part, value in parts.items())
        elif outcome is not None and not isinstance(outcome.reward, Mapping):
            reward = outcome.reward
        for source, value in parts.items():
            await self._proxy.reward(name, value, source)
        fields: Json = {"status": status.finish, "reward": reward}
        if outcome is not None:
            fields |= {"success": outcome.success, "turn_rewards": outcome.turn_rewards}
        if not await self._proxy.finish(name, fields) and scores is not None and reward is not None:
            await assign(self._proxy, name, {AGENT: reward})
        if reward is not None:
            self._rewards += reward
            self._show(rewarded=self.progress.rewarded + 1)

    # Beside -----------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._leaks(await self._agents.sweep(frozenset(self._names)), "running")

    async def _leaks(self, leaks: list[Leak], when: str) -> None:
        for leak in leaks:
            self._say(
                f"launch {leak.launch_id} left process {leak.pid} behind ({leak.command}); it was ended"
            )
            self._show(leaked=self.progress.leaked + 1)
            name = self._names.get(leak.launch_id) or self._orphans.get(leak.launch_id)
            if name is not None:
                process = {"pid": leak.pid, "command": leak.command}
                await self._proxy.leaked(name, leak.launch_id, {"processes": [process], "found": when})

    async def _look_at_waits(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._proxy.look()

    async def _look_at_the_loop(self) -> None:
        loop, warned = asyncio.get_running_loop(), -SWEEP_S
        while True:
            begun = loop.time()
            await asyncio.sleep(0.05)
            late = loop.time() - begun - 0.05
            if late > LAG_S and begun - warned > SWEEP_S:
                warned = begun
                self._say(f"this process was blocked for {late:.2f} s, and with it every agent in it")

    def _show(self, **changes: int) -> None:
        rate = self._breaker.failed_rate
        self.progress = replace(self.progress, **changes, by_status=dict(self._ended), infra_failed_rate=rate)
        if self.progress.rewarded:
            self.progress = replace(self.progress, reward=self._rewards / self.progress.rewarded)
        self._tell(self.progress)


def _of_exit(exit_: Exit | None, folder: Path) -> Json:
    """What the log says of a process's end."""
    if exit_ is None:
        return {}
    output = {
        stream: {
            "path": str(folder / f"{stream}.log"),
            "bytes": count,
            "kept": _size(folder / f"{stream}.log"),
        }
        for stream, count in exit_.printed.items()
    }
    return {
        **{"exit_code": exit_.code, "signal": exit_.signal, "cpu_s": exit_.cpu_s},
        **{"peak_rss_mb": exit_.peak_rss_mb, "output": output},
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Breaker:
    """A circuit breaker: judges launches, above all the latest, by how many failed by their
    infrastructure.

    Args:
        window: how many are the latest; fewer are not judged.
        stop_share: where this share of the latest failed, it is open.
        warn_share: where this share of all failed, it warns, once.
    """

    def __init__(self, window: int, stop_share: float, warn_share: float = 1.0) -> None:
        self._window, self._share, self._warn_share = window, stop_share, warn_share
        self._latest: deque[tuple[Status, str | None]] = deque(maxlen=window)
        self._ended = self._failed = self._rewarded = 0
        self._warned = self._warned_of_agents = False

    def add(self, status: Status, why: str | None) -> str | None:
        """Count a launch that ended, unless cancelled; returns a warning, if it is time for one."""
        if status is Status.cancelled:
            return None
        self._latest.append((status, why))
        self._ended += 1
        self._failed += status is Status.infra_error
        self._rewarded += status.rewarded
        return self._of_agents(why) or self._of_infrastructure()

    def _of_agents(self, why: str | None) -> str | None:
        """A warning if no agent ever came through: a mistake in a CONFIG looks so."""
        failed = self._ended - self._failed
        if self._warned_of_agents or self._rewarded or failed < self._window:
            return None
        self._warned_of_agents = True
        return f"each of {failed} agents failed, the last: {why}; stderr.log in a launch's folder may say why"

    def _of_infrastructure(self) -> str | None:
        if self._warned or self._ended < self._window or self._failed < self._warn_share * self._ended:
            return None
        self._warned = True
        failed = [why for status, why in self._latest if status is Status.infra_error]
        last = f", the last: {failed[-1]}" if failed else ""
        return f"{self._failed} of {self._ended} launches failed by their infrastructure{last}"

    @property
    def failed_rate(self) -> float | None:
        """The share of all launches that failed by their infrastructure; None: none ended."""
        return self._failed / self._ended if self._ended else None

    @property
    def open(self) -> str | None:
        """Why no more is to be launched; None: go on."""
        failed = [why for status, why in self._latest if status is Status.infra_error]
        if len(self._latest) < self._window or len(failed) < self._share * self._window:
            return None
        return (
            f"{len(failed)} of the last {self._window} launches failed by their infrastructure, the last: "
            f"{failed[-1]}; mend it, and start the rollouts again: they go on where they were"
        )
