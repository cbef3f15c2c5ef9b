"""`rollbook show`: finds a trajectory, reads its events and prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollbook.cli.runs import of_run
from rollbook.cli.show.draw import TokenText, View, draw
from rollbook.cli.show.facts import TrajectoryFacts, TurnFacts
from rollbook.cli.show.finding import NotFoundError, find_trajectory
from rollbook.cli.show.reading import facts_of
from rollbook.cli.terminal import Console, print_json, short_id, visible
from rollbook.engines.hub import model_folder
from rollbook.store.cut import Cut, holds
from rollbook.store.log.store import Store
from rollbook.store.log.trajectory_reader import TrajectoryReader
from rollbook.store.open import open_store


def run_show(
    store: Path,
    trajectory: str,
    as_of: str,
    run: str | None,
    tokens: bool | None,
    model: Path | None,
    turn: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print one trajectory, or one turn of it.

    Args:
        tokens: whether to show them; by default where there is a model.

    Raises:
        NotFoundError: no such trajectory or turn at that cut, or several.
        CutError: no such run.
        ModelError: the model directory has no tokenizer.
        CorruptionError: a file that may hold the trajectory is damaged.
    """
    log = open_store(store)
    with of_run(log, run):
        cut = log.cut(as_of, run)
        found = find_trajectory(log, cut, trajectory, run)
    facts = read_facts(log, cut, found.trajectory_id)
    with_tokens = (model is not None) if tokens is None else tokens
    chosen = None if turn is None else find_turn(facts, turn)
    if as_json:
        shown = facts if chosen is None else replace(facts, turns=(chosen,))
        print_json(shown.as_json(tokens=with_tokens))
        return
    words = None
    if with_tokens:
        words = TokenText(None) if model is None else TokenText.load(model_folder(model, weights=False))
    only = None if chosen is None else frozenset({chosen.turn_id})
    view = View(full or chosen is not None, words, only)
    Console().print(draw(facts, view))


def read_facts(log: Store, cut: Cut, trajectory_id: str) -> TrajectoryFacts:
    """A trajectory at a cut; reads only what holds its events."""
    events = TrajectoryReader(log.path).events(sorted(cut), [trajectory_id])
    return facts_of([event for event in events if holds(cut, event.lane, event.seq)])


def find_turn(facts: TrajectoryFacts, wanted: str) -> TurnFacts:
    """A turn by its number, its id, or the end of its id.

    Raises:
        NotFoundError: there is none, or several.
    """
    found = [turn for turn in facts.turns if wanted in (turn.turn_id, f"{turn.number}")]
    found = found or [turn for turn in facts.turns if turn.turn_id.endswith(wanted)]
    if len(found) == 1:
        return found[0]
    name = visible(facts.name)
    what = f"{len(found)} turns" if found else "no turn"
    known = [f"{turn.number} {short_id(turn.turn_id)}" for turn in facts.turns]
    listed = ", ".join(known if len(known) <= 12 else [*known[:6], "...", *known[-6:]])
    raise NotFoundError(
        f"trajectory {name!r} has {what} {visible(wanted)!r}: give a number or an id, of {listed}"
    )
