"""`rollbook show`: finds a trajectory, reads its events and prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.options import AsJson, AsOf, Named, Run, StoreOption
from rollbook.cli.terminal import Console, print_json
from rollbook.transcript.text import short_id, visible

if TYPE_CHECKING:
    from rollbook.store.cut import Cut
    from rollbook.store.log.store import Store
    from rollbook.transcript.facts import TrajectoryFacts, TurnFacts

Tokens = Annotated[
    bool | None,
    typer.Option("--tokens/--no-tokens", help="Each token, coloured by logprob. Default: with --model."),
]
Model = Annotated[
    Path | None, typer.Option(help="Model, or its name at the hub, whose tokenizer has the tokens' text.")
]
OneTurn = Annotated[
    str | None, typer.Option(help="Only this turn, all of it: its number, id, or the id's end.")
]


def show(
    trajectory: Named,
    store: StoreOption,
    as_of: AsOf = "head",
    run: Run = None,
    tokens: Tokens = None,
    model: Model = None,
    turn: OneTurn = None,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Look at one trajectory: its outcome, and its turns as a tree, each with messages, reply and tokens.

    A turn's line says which turn it extends, or why it is a root; then its
    finish reason, prompt + completion tokens, the policy versions that
    sampled them, their mean and lowest logprob, whether the client has the
    reply, and how long it took. Beneath: the messages it added, the reply.

    rollbook show task-7 --store runs
    rollbook show task-7 --store runs --turn 3 --model ./my-model
    rollbook show task-7 --store runs --as-of step:12 --json
    """
    from rollbook.cli.runs import of_run
    from rollbook.cli.show.draw import TokenText, View, draw
    from rollbook.engines.hub import model_folder
    from rollbook.store.open import open_store
    from rollbook.transcript.finding import find_trajectory

    log = open_store(store)
    with of_run(log, run):
        cut = log.cut(as_of, run)
        opening = find_trajectory(log, cut, trajectory, run)
    facts = read_facts(log, cut, opening.trajectory_id)
    with_tokens = (model is not None) if tokens is None else tokens
    chosen = None if turn is None else find_turn(facts, turn)
    if json:
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
    from rollbook.store.cut import holds
    from rollbook.store.log.store import TrajectoryReader
    from rollbook.transcript.reading import facts_of

    events = TrajectoryReader(log.path).events(sorted(cut), [trajectory_id])
    return facts_of([event for event in events if holds(cut, event.lane, event.seq)])


def find_turn(facts: TrajectoryFacts, wanted: str) -> TurnFacts:
    """A turn by its number, its id, or the end of its id.

    Raises:
        NotFoundError: there is none, or several.
    """
    from rollbook.transcript.finding import NotFoundError

    matches = [turn for turn in facts.turns if wanted in (turn.turn_id, f"{turn.number}")]
    matches = matches or [turn for turn in facts.turns if turn.turn_id.endswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    name = visible(facts.name)
    what = f"{len(matches)} turns" if matches else "no turn"
    known = [f"{turn.number} {short_id(turn.turn_id)}" for turn in facts.turns]
    listed = ", ".join(known if len(known) <= 12 else [*known[:6], "...", *known[-6:]])
    raise NotFoundError(
        f"trajectory {name!r} has {what} {visible(wanted)!r}: give a number or an id, of {listed}"
    )
