"""Finds what a lineage is asked of, has it made, and prints it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import typer
from rich.tree import Tree

from rollbook.cli.errors import interrupted_with
from rollbook.cli.lineage.draw import draw_policy, draw_step, draw_token, draw_trajectory
from rollbook.cli.runs import check_run, of_run
from rollbook.cli.show.finding import NEAR_NAMES, SHORTEST_END, NotFoundError, find_trajectory, openings_of
from rollbook.cli.terminal import Console, print_json, visible
from rollbook.engines.hub import model_folder
from rollbook.lineage.steps import policy_lineage, step_lineage
from rollbook.lineage.trajectories import token_lineage, trajectory_lineage
from rollbook.store.cut import Cut, format_cut
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.sql.object_storage import outage
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection, explained

_TURNS = """
    SELECT turn_id, trajectory_id FROM internal.turn_scalars
    WHERE {} AND ($run IS NULL OR run = $run) ORDER BY turn_id LIMIT $most"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A store at a cut, and SQL over it."""

    log: Store
    cut: Cut
    connection: Connection
    run: str | None

    def turns(self, condition: str, wanted: str) -> list[tuple[str, str]]:
        """(turn, trajectory) of the turns for which a condition on `turn_id` holds, a few at most."""
        values = {"wanted": wanted, "run": self.run, "most": NEAR_NAMES}
        rows: list[tuple[str, str]] = self.connection.execute(_TURNS.format(condition), values).fetchall()
        return rows

    def turn(self, wanted: str) -> tuple[str, str] | None:
        """The one turn with this id, or end of an id; None if there is none.

        Raises:
            NotFoundError: there are several.
        """
        found = self.turns("turn_id = $wanted", wanted)
        if not found and len(wanted) >= SHORTEST_END:
            found = self.turns("ends_with(turn_id, $wanted)", wanted)
        if len(found) > 1:
            ids = ", ".join(visible(turn_id) for turn_id, _ in found)
            raise NotFoundError(f"several turns are meant by {visible(wanted)!r}, {ids}: give a whole id")
        return found[0] if found else None


def ask_trajectory(name: str, store: Path, run: str | None, as_of: str, full: bool, as_json: bool) -> None:
    """Print the lineage of a trajectory.

    Raises:
        NotFoundError: no such trajectory at that cut, or several.
        CutError: no such run or cut.
        CorruptionError: a file that may hold it is damaged.
    """
    with _asked(store, run, as_of) as asked:
        found = find_trajectory(asked.log, asked.cut, name, run)
        lineage = trajectory_lineage(asked.log, asked.connection, asked.cut, found.trajectory_id)
    _print(lineage, draw_trajectory(lineage, full), as_json)


def ask_sample(leaf: str, store: Path, run: str | None, as_of: str, full: bool, as_json: bool) -> None:
    """Print the lineage of a sample.

    Raises:
        NotFoundError: no such turn at that cut, or several.
        ReplayError: the turn is no sample's leaf.
        CutError, CorruptionError: as `ask_trajectory`.
    """
    with _asked(store, run, as_of) as asked:
        found = asked.turn(leaf)
        if found is None:
            raise NotFoundError(
                f"no turn {visible(leaf)!r}: give the id of a sample's last turn, or at least "
                f"{SHORTEST_END} characters of its end; list them: rollbook sql 'select trajectory_id, "
                "turn_id from paths'"
            )
        turn_id, trajectory_id = found
        lineage = trajectory_lineage(asked.log, asked.connection, asked.cut, trajectory_id, turn_id)
    _print(lineage, draw_trajectory(lineage, full), as_json)


def ask_token(
    token: str, store: Path, run: str | None, as_of: str, model: Path | None, full: bool, as_json: bool
) -> None:
    """Print the lineage of a token.

    Raises:
        typer.BadParameter: the token is not written as NAME:INDEX.
        NotFoundError: no such turn or trajectory at that cut, or several.
        ReplayError: it sampled no such token.
        CutError, CorruptionError: as `ask_trajectory`.
        ModelError: the model directory has no tokenizer.
    """
    name, _, index = token.rpartition(":")
    if not name or not index.isdecimal():
        raise typer.BadParameter(
            f"{visible(token)!r} is not TURN:INDEX or TRAJECTORY:INDEX, such as task-7:0", param_hint="TOKEN"
        )
    with _asked(store, run, as_of, model) as asked:
        trajectory_id, turn_id = _holder(asked, name)
        lineage = token_lineage(asked.log, asked.connection, asked.cut, trajectory_id, turn_id, int(index))
    _print(lineage, draw_token(lineage, full), as_json)


def _holder(asked: Asked, name: str) -> tuple[str, str | None]:
    """(trajectory, turn) that a name means; the turn is None where it is a trajectory's. Whole names come
    first."""
    exact = asked.turns("turn_id = $wanted", name)
    named = [] if exact else openings_of(asked.log, asked.cut, name)
    of_trajectory = any(asked.run in (None, opening.run) for opening in named)
    if not of_trajectory and (found := asked.turn(name)) is not None:
        return found[1], found[0]
    try:
        return find_trajectory(asked.log, asked.cut, name, asked.run).trajectory_id, None
    except NotFoundError as error:
        raise NotFoundError(f"no turn {visible(name)!r}, and {error}") from None


def ask_step(
    step: int, store: Path, run: str | None, policy: str, as_of: str, full: bool, as_json: bool
) -> None:
    """Print the lineage of an optimizer step.

    Raises:
        ReplayError: no run planned it, or several did.
        CutError, CorruptionError: as `ask_trajectory`.
    """
    with _asked(store, run, as_of) as asked:
        lineage = step_lineage(asked.connection, step, run, policy)
    _print(lineage, draw_step(lineage, full), as_json)


def ask_policy(
    version: int, store: Path, run: str | None, policy: str, as_of: str, full: bool, as_json: bool
) -> None:
    """Print the lineage of a policy version.

    Raises:
        ReplayError: no run has it, or several have.
        CutError, CorruptionError: as `ask_trajectory`.
    """
    with _asked(store, run, as_of) as asked:
        lineage = policy_lineage(asked.connection, version, run, policy)
    _print(lineage, draw_policy(lineage, full), as_json)


@contextlib.contextmanager
def _asked(store: Path, run: str | None, as_of: str, model: Path | None = None) -> Iterator[Asked]:
    model = None if model is None else model_folder(model, weights=False)
    log = open_store(store)
    with of_run(log, run):
        cut = log.cut(as_of, run)
    if run is not None:
        check_run(log, run, cut)
    with connect_at(log, format_cut(cut), model=model) as connection, interrupted_with(connection.interrupt):
        try:
            yield Asked(log, cut, connection, run)
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            raise outage(error) or explained(error) from error


def _print(lineage: Any, tree: Tree, as_json: bool) -> None:
    if as_json:
        print_json(lineage)
    else:
        Console().print(tree)
