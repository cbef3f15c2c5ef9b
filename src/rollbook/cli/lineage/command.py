"""`rollbook lineage`: where things of the log come from, and what they led to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.lineage.tables import policy_parts, print_lineage, step_parts, token_parts, trajectory_parts
from rollbook.cli.options import AsJson, AsOf, Named, Policy, Run, StoreOption

if TYPE_CHECKING:
    from rollbook.store.cut import Cut
    from rollbook.store.log.store import Store
    from rollbook.store.sql.sandbox import Connection

lineage_app = typer.Typer(
    no_args_is_help=True,
    help="Where a token, sample, step, policy version or trajectory comes from, and all that it led to. "
    "See docs/lineage.md.",
)
Full = Annotated[bool, typer.Option("--full", help="Shorten no list.")]


@lineage_app.command("token")
def lineage_token(
    token: Annotated[
        str, typer.Argument(help="TURN:INDEX or TRAJECTORY:INDEX; sampled tokens count from 0.")
    ],
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    model: Annotated[
        Path | None, typer.Option(help="Model directory, whose tokenizer.json has the token's text.")
    ] = None,
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One sampled token: the event that holds it, the version and engines that made it, and its training.

    TURN is a turn's id or the id's end, and INDEX the token's place in its
    completion. TRAJECTORY is as `rollbook show` takes it, and INDEX counts the
    sampled tokens of all its turns, in turn order.

    rollbook lineage token task-7:12 --store runs
    rollbook lineage token 5f3b9a1c:0 --store runs --model ./my-model --json
    """
    from rollbook.lineage.trajectories import token_lineage

    name, _, index = token.rpartition(":")
    if not name or not index.isdecimal():
        raise typer.BadParameter(
            f"{token!r} is not TURN:INDEX or TRAJECTORY:INDEX, such as task-7:0", param_hint="TOKEN"
        )
    with _query(store, run, as_of, model) as query:
        trajectory_id, turn_id = query.holder(name)
        lineage = token_lineage(query.log, query.connection, query.cut, trajectory_id, turn_id, int(index))
    print_lineage(lineage, token_parts, full, json)


@lineage_app.command("sample")
def lineage_sample(
    leaf: Annotated[str, typer.Argument(help="The sample's last turn: its id, or the id's end.")],
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One sample: the turns of its path, the steps that consumed or dropped it, and what those made.

    rollbook lineage sample 5f3b9a1c --store runs
    """
    from rollbook.lineage.trajectories import trajectory_lineage

    with _query(store, run, as_of) as query:
        turn_id, trajectory_id = query.leaf(leaf)
        lineage = trajectory_lineage(query.log, query.connection, query.cut, trajectory_id, turn_id)
    print_lineage(lineage, trajectory_parts, full, json)


@lineage_app.command("step")
def lineage_step(
    step: Annotated[int, typer.Argument(help="Number of the optimizer step.")],
    store: StoreOption,
    run: Run = None,
    policy: Policy = "actor",
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One optimizer step: its samples, the versions and engines that sampled them, and what it led to.

    Back: trajectories, requests, versions, engines. Forward: the version it
    made, the engines that got it, what was sampled by it, and the steps that
    consumed that.

    rollbook lineage step 12 --store runs --full
    """
    from rollbook.lineage.steps import step_lineage

    with _query(store, run, as_of) as query:
        lineage = step_lineage(query.connection, step, run, policy)
    print_lineage(lineage, step_parts, full, json)


@lineage_app.command("policy")
def lineage_policy(
    version: Annotated[int, typer.Argument(help="Number of the policy version.")],
    store: StoreOption,
    run: Run = None,
    policy: Policy = "actor",
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One policy version: the steps that led to it, and the engines, tokens and steps that it led to.

    rollbook lineage policy 12 --store runs
    """
    from rollbook.lineage.steps import policy_lineage

    with _query(store, run, as_of) as query:
        lineage = policy_lineage(query.connection, version, run, policy)
    print_lineage(lineage, policy_parts, full, json)


@lineage_app.command("trajectory")
def lineage_trajectory(
    trajectory: Named,
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """One trajectory: the versions and engines that sampled it, its rewards, its training and its outcome.

    rollbook lineage trajectory task-7 --store runs
    rollbook lineage trajectory task-7 --store runs --as-of step:12 --json
    """
    from rollbook.lineage.trajectories import trajectory_lineage

    with _query(store, run, as_of) as query:
        lineage = trajectory_lineage(query.log, query.connection, query.cut, query.trajectory(trajectory))
    print_lineage(lineage, trajectory_parts, full, json)


# What is asked of -----------------------------------------------------------------------------------

_TURNS = """
    SELECT turn_id, trajectory_id FROM internal.turn_scalars
    WHERE {} AND ($run IS NULL OR run = $run) ORDER BY turn_id LIMIT $most"""


@dataclass(frozen=True, slots=True)
class _Query:
    """A store at a cut, and SQL over it."""

    log: Store
    cut: Cut
    connection: Connection
    run: str | None

    def turns(self, condition: str, wanted: str) -> list[tuple[str, str]]:
        """(turn, trajectory) of the turns for which a condition on `turn_id` holds, a few at most."""
        from rollbook.transcript.finding import NEAR_NAMES

        values = {"wanted": wanted, "run": self.run, "most": NEAR_NAMES}
        rows: list[tuple[str, str]] = self.connection.execute(_TURNS.format(condition), values).fetchall()
        return rows

    def turn(self, wanted: str) -> tuple[str, str] | None:
        """The one turn with this id, or end of an id; None if there is none.

        Raises:
            NotFoundError: there are several.
        """
        from rollbook.transcript.finding import SHORTEST_END, NotFoundError

        matches = self.turns("turn_id = $wanted", wanted)
        if not matches and len(wanted) >= SHORTEST_END:
            matches = self.turns("ends_with(turn_id, $wanted)", wanted)
        if len(matches) > 1:
            ids = ", ".join(turn_id for turn_id, _ in matches)
            raise NotFoundError(f"several turns are meant by {wanted!r}, {ids}: give a whole id")
        return matches[0] if matches else None

    def leaf(self, wanted: str) -> tuple[str, str]:
        """As `turn`, of a sample.

        Raises:
            NotFoundError: there are several, or none.
        """
        from rollbook.transcript.finding import SHORTEST_END, NotFoundError

        if (match := self.turn(wanted)) is None:
            raise NotFoundError(
                f"no turn {wanted!r}: give the id of a sample's last turn, or at least {SHORTEST_END} "
                "characters of its end; list them: rollbook sql 'select trajectory_id, turn_id from paths'"
            )
        return match

    def trajectory(self, name: str) -> str:
        """The id of the trajectory that a name means.

        Raises:
            NotFoundError: there is none, or there are several.
        """
        from rollbook.transcript.finding import find_trajectory

        return find_trajectory(self.log, self.cut, name, self.run).trajectory_id

    def holder(self, name: str) -> tuple[str, str | None]:
        """(trajectory, turn) that a name means; the turn is None where it is a trajectory's. Whole names come
        first.

        Raises:
            NotFoundError: there is none, or there are several.
        """
        from rollbook.transcript.finding import NotFoundError, openings_of

        exact = self.turns("turn_id = $wanted", name)
        named = [] if exact else openings_of(self.log, self.cut, name)
        of_trajectory = any(self.run in (None, opening.run) for opening in named)
        if not of_trajectory and (match := self.turn(name)) is not None:
            return match[1], match[0]
        try:
            return self.trajectory(name), None
        except NotFoundError as error:
            raise NotFoundError(f"no turn {name!r}, and {error}") from None


@contextlib.contextmanager
def _query(store: Path, run: str | None, as_of: str, model: Path | None = None) -> Iterator[_Query]:
    from rollbook.cli.errors import querying
    from rollbook.cli.runs import cut_of
    from rollbook.engines.hub import model_folder
    from rollbook.store.cut import format_cut
    from rollbook.store.open import open_store
    from rollbook.store.sql.query import connect_at

    model = None if model is None else model_folder(model, weights=False)
    log = open_store(store)
    cut = cut_of(log, as_of, run)
    with connect_at(log, format_cut(cut), model=model) as connection, querying(connection):
        yield _Query(log, cut, connection, run)
