"""Authorization at the proxy: which roles may use each route, and what each role may do to a
trajectory.

Without configured keys everybody is an operator, and `/engine` is for this host alone.
"""

from __future__ import annotations

from pathlib import Path

from rollbook.edge.guard import Guard
from rollbook.edge.keys import ANY, Caller, Keys, Role, Rule, Rules
from rollbook.store.errors import RequestError
from rollbook.store.secret import store_secret

OPERATORS = frozenset({Role.operator})
READERS = OPERATORS | {Role.reader}
AGENTS = OPERATORS | {Role.writer, Role.trajectory}
LAUNCHERS = OPERATORS | {Role.writer}  # an agent, who has its trajectory's key, is not asked of its launch
JUDGES = OPERATORS | {Role.judge}
ALL = frozenset(Role)
JUDGED_PAGES = (
    "static/{name:path}",
    "trajectories",
    "trajectories.json",
    "trajectories/{page:path}",
    "compare/trajectories",
    "compare/trajectories.json",
)
"""Of the viewer: what a judge sees."""

RULES = (
    Rule("GET", "/healthz", READERS, open=True),  # its details
    Rule("GET", "/metrics", READERS),
    # A person who judges reads trajectories; the rest of the log is for readers.
    *(Rule("GET", f"/view/{pages}", READERS | {Role.judge}, browser=True) for pages in JUDGED_PAGES),
    Rule("GET", "/view", READERS, browser=True),
    Rule("GET", "/view/{page:path}", READERS, browser=True),
    Rule(ANY, "/view/{page:path}", JUDGES, browser=True),
    Rule("GET", "/docs", ALL),
    Rule("GET", "/docs/oauth2-redirect", ALL),
    Rule("GET", "/redoc", ALL),
    Rule("GET", "/openapi.json", ALL),
    Rule(ANY, "/engine/{action:path}", OPERATORS, local=True),
    Rule("GET", "/v1/events", READERS | {Role.judge}),  # a judge: `JUDGES_KINDS`
    Rule("GET", "/v1/cursors/{name}", READERS),
    Rule("PUT", "/v1/cursors/{name}", OPERATORS),
    Rule("POST", "/v1/trajectories", AGENTS),
    Rule("GET", "/v1/trajectories/{name:path}", READERS),
    Rule("POST", "/v1/trajectories/{name:path}/finish", AGENTS),
    Rule("POST", "/v1/trajectories/{name:path}/rewards", AGENTS | {Role.judge}),
    Rule("POST", "/v1/trajectories/{name:path}/labels", AGENTS | {Role.judge}),
    Rule("POST", "/v1/trajectories/{name:path}/launches", LAUNCHERS),
    Rule("POST", "/v1/trajectories/{name:path}/launches/{launch_id}/end", LAUNCHERS),
    Rule("POST", "/v1/trajectories/{name:path}/launches/{launch_id}/leaks", LAUNCHERS),
    Rule("GET", "/v1/rollouts/{name}", LAUNCHERS),
    Rule("POST", "/v1/evaluations", LAUNCHERS),
    Rule("POST", "/v1/preferences", JUDGES),
    # The agents' APIs; all of them where requests only pass.
    Rule(ANY, "/v1/{path:path}", AGENTS),
    Rule(ANY, "/t/{said:path}", AGENTS),
)
OTHERWISE = Rule(ANY, "", OPERATORS)
"""The rule for paths that no other rule fits, such as routes that do not exist."""

JUDGES_KINDS = frozenset(
    {"trajectory.opened", "trajectory.finished", "reward.assigned", "preference.added", "label.added"}
)
"""What a judge may read of the log: which trajectories there are, and what was said of them."""
AGENT = "agent"
"""The source of what an agent says of itself, which recipes train on by default."""

ROUTES = Rules(RULES, OTHERWISE)


def run_guard(keys: Keys, run: str, store: Path) -> Guard:
    """The guard of a run in a store: its trajectories' keys outlive those of operators."""
    return Guard(keys, ROUTES, run, store_secret(store, "trajectory keys") if keys.configured else None)


def check_trajectory(caller: Caller, name: str | None) -> None:
    """Refuse a trajectory's own key for another one.

    Raises:
        RequestError: 403.
    """
    if caller.role is Role.trajectory and caller.trajectory != name:
        text = f"this API key is of trajectory {caller.trajectory!r} alone"
        raise RequestError(403, "other_trajectory", text)


def check_source(caller: Caller, source: str) -> None:
    """Refuse a reward or label in another's name: an agent speaks as `agent`, and a judge never does.

    Raises:
        RequestError: 403.
    """
    if caller.role in (Role.writer, Role.trajectory) and source != AGENT:
        text = (
            f"source is {source!r}: a trajectory's key and a writer's say what they say as {AGENT!r} alone; "
        )
        raise RequestError(
            403, "other_source", text + "for other sources send a judge's or an operator's key"
        )
    if caller.role is Role.judge and source == AGENT:
        text = (
            f"source is {AGENT!r}, which is the agent's own word: send a judge's with a source of its own, "
        )
        raise RequestError(403, "other_source", text + "such as 'judge'")


def check_unfinished(caller: Caller, name: str, *, finished: bool) -> None:
    """Refuse an agent's reward or label after its trajectory's end: training may have begun.

    Raises:
        RequestError: 403.
    """
    if finished and caller.role in (Role.writer, Role.trajectory):
        text = (
            f"trajectory {name!r} is finished, and its agent has had its say: later rewards and labels need "
        )
        raise RequestError(403, "after_finish", text + "a judge's or an operator's key")


def may_read_kinds(caller: Caller, kinds: frozenset[str] | None) -> bool:
    """Whether events of these kinds (None: all) are for the caller."""
    return caller.role is not Role.judge or (kinds is not None and kinds <= JUDGES_KINDS)


def sees_details(caller: Caller) -> bool:
    """Whether `/healthz` shows a caller the details."""
    return caller.role in READERS
