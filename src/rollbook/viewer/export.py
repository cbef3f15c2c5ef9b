"""A trajectory or a step as one HTML file, to send to somebody who has no access to the log.

It is the viewer's own page, with what a browser would ask for in place, and no script. Secrets of known forms
are taken out of all text; a path's tokens are left out where they spell one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import unquote

from markupsafe import Markup
from starlette.routing import compile_path

from rollbook.ingest.recording.redact import KNOWN, Redactor
from rollbook.lineage.records import TrajectoryLineage
from rollbook.viewer import rendering
from rollbook.viewer.app import PAGES
from rollbook.viewer.pages import missing
from rollbook.viewer.rendering import Templates
from rollbook.viewer.samples import COLOURS, SamplePage, read_sample
from rollbook.viewer.snapshots import Snapshot
from rollbook.viewer.steps import SampleLine, Step, read_samples, read_step
from rollbook.viewer.trajectories import SHOWN, TrajectoryPage, read_lineage, read_trajectory

PATHS, CONVERSATIONS = 8, 200
"""Paths of a trajectory that are shown token by token; samples of a step of which a conversation is shown."""
_ROUTES = [(compile_path(page.path)[0], page) for page in PAGES]
Further = tuple[str, str, Markup]
"""What comes behind a page: its anchor, its heading, and itself."""


class Export:
    """Pages of a snapshot as files.

    Args:
        patterns: of secrets, beside the known ones: regular expressions.
    """

    def __init__(self, snapshot: Snapshot, patterns: Sequence[str] = ()) -> None:
        self._snapshot = snapshot
        self._redact = Redactor([KNOWN, *patterns]).text
        self._templates = Templates("")
        self._anchors: set[str] = set()
        environment = self._templates.environment
        for name in ("brief", "json", "line", "visible"):
            environment.filters[name] = _redacted(
                environment.filters[name], self._redact, after=name == "json"
            )
        environment.filters |= {"tokens": self._tokens, "ago": _exact, "moment": _exact_us}
        environment.finalize = lambda value: (
            rendering.shown(self._redact(value)) if type(value) is str else value
        )
        environment.globals |= {"link": self._link, "embedded": self._embedded}

    def trajectory(self, trajectory_id: str) -> str:
        """A trajectory: its turns, what was said of it, what it led to, and its paths token by token.

        Raises:
            RequestError: 404, the log does not hold it.
        """
        query = {"trajectory_id": trajectory_id}
        page = read_trajectory(self._snapshot, query)
        lineage = read_lineage(self._snapshot, query)
        further = [*self._later_turns(page, query), *self._paths(page.leaves, lineage)]
        beyond = len(page.leaves) - PATHS
        left = f"{beyond:,} paths more are not shown token by token." if beyond > 0 else ""
        return self._file("trajectory.html", page, further, left)

    def step(self, run: str, policy: str, step: int) -> str:
        """A step: its samples with their advantages, metrics, manifest, and what each trajectory said.

        Raises:
            RequestError: 404, no attempt at it was planned.
        """
        query = {"run": run, "policy": policy, "step": str(step)}
        page = read_step(self._snapshot, query)
        samples = [line for group in read_samples(self._snapshot, query).groups for line in group.samples]
        shown = samples[:CONVERSATIONS]
        self._anchors = {sample.trajectory_id for sample in shown}
        further = list(self._conversations(shown))
        beyond = len(samples) - len(shown)
        left = f"{beyond:,} samples more are not shown as conversations." if beyond else ""
        return self._file("step.html", page, further, left)

    def _file(self, template: str, page: TrajectoryPage | Step, further: Sequence[Further], left: str) -> str:
        css = Markup((files("rollbook.viewer") / "static" / "viewer.css").read_text())  # our own
        opens = isinstance(page, TrajectoryPage)
        return self._templates.draw(
            template,
            page,
            self._snapshot.cut,
            layout="export.html",
            css=css,
            further=further,
            left=left,
            opens=opens,
        )

    def _later_turns(self, page: TrajectoryPage, query: dict[str, str]) -> Iterator[Further]:
        """The pages of turns behind the first."""
        while page.after is not None:
            first = page.after
            page = read_trajectory(self._snapshot, query | {"from": str(first)})
            heading = f"turns {first} to {min(first + SHOWN - 1, page.count)}"
            yield f"from-{first}", heading, self._drawn("conversation.html", page)

    def _paths(self, leaves: Sequence[str], lineage: TrajectoryLineage) -> Iterator[Further]:
        """Paths token by token, by each colour of which there are values; as the last step had them."""
        for leaf in leaves[:PATHS]:
            query = {"trajectory_id": lineage.trajectory_id, "turn_id": leaf}
            uses = [use for use in lineage.uses if use.leaf_turn_id == leaf and use.status == "committed"]
            if uses:
                query |= {"run": uses[-1].run, "policy": uses[-1].policy, "step": str(uses[-1].step)}
            for by in COLOURS:
                page = read_sample(self._snapshot, query | {"by": by})
                if not page.scale.why:
                    yield f"{by}-{page.number}", _heading(page, by), self._drawn("sample.html", page)

    def _conversations(self, samples: Sequence[SampleLine]) -> Iterator[Further]:
        known = set[str]()
        for sample in samples:
            if sample.trajectory_id in known:
                continue
            known.add(sample.trajectory_id)
            page = read_trajectory(self._snapshot, {"trajectory_id": sample.trajectory_id})
            heading = (
                f"{sample.trajectory or sample.trajectory_id}, reward {rendering.number(sample.reward, 3)}"
            )
            yield sample.trajectory_id, heading, self._drawn("conversation.html", page)

    def _drawn(self, template: str, page: Any) -> Markup:
        return Markup(self._templates.draw(template, page, layout="fragment.html"))

    # What templates call --------------------------------------------------------------------------------

    def _link(self, *parts: Any, **query: Any) -> str:
        """To what is in the file; to nothing for what is not."""
        anchor = str(parts[1]) if len(parts) > 1 and parts[0] == "trajectories" else ""
        return f"#{anchor}" if anchor in self._anchors else "#"

    def _embedded(self, *parts: Any, trigger: str = "", id: str = "", **query: Any) -> Markup:
        """The page that a browser would ask for."""
        path = "/" + "/".join(rendering.part(str(name)) for name in parts)
        given = {name: str(value) for name, value in query.items()}
        for pattern, page in _ROUTES:
            if match := pattern.fullmatch(path):
                names = {key: rendering.name_of(unquote(text)) for key, text in match.groupdict().items()}
                return self._drawn(page.template, page.read(self._snapshot, given | names))
        raise AssertionError(f"no page at {path}")

    def _tokens(self, ids: Sequence[int], texts: Sequence[str | None], classes: str) -> Markup:
        joined = "".join(text or "" for text in texts)
        if self._redact(joined) != joined:
            return Markup('<p class="mark">left out: these tokens spell what looks like a secret</p>')
        return rendering.tokens(ids, texts, classes)


def _exact(time: datetime | None) -> str:
    """A time of UTC, and not how long ago it was: a file is read later."""
    return rendering.DASH if time is None else f"{time.isoformat(' ', 'seconds')} UTC"


def _exact_us(time_us: int) -> str:
    return _exact(datetime.fromtimestamp(time_us / 1e6, UTC).replace(tzinfo=None))


def _heading(page: SamplePage, by: str) -> str:
    path = f"path {page.number}, " if page.paths > 1 else ""
    return f"{path}token by token, by {'trainer less engine' if by == 'gap' else by}"


def _redacted(shown: Callable[..., Any], redact: Callable[[str], str], *, after: bool) -> Callable[..., Any]:
    """A filter that shows text without secrets: taken out before, or of what it makes of a value."""

    def filtered(value: Any, *arguments: Any) -> Any:
        return redact(shown(value, *arguments)) if after else shown(redact(str(value)), *arguments)

    return filtered


_RUNS = "SELECT DISTINCT run FROM steps WHERE policy = $policy AND step = $step ORDER BY run"


def only_run(snapshot: Snapshot, policy: str, step: int) -> str:
    """The one run that has a step of this policy.

    Raises:
        RequestError: 404, none has, or several have.
    """
    runs = [row["run"] for row in snapshot.rows(_RUNS, policy=policy, step=step)]
    if len(runs) == 1:
        return str(runs[0])
    remedy = (
        f"runs {', '.join(runs)} have one each: name it with --run" if runs else "rollbook view lists them"
    )
    raise missing(f"step {step} of {policy!r}, of one run,", remedy)
