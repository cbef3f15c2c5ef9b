"""A recorded trajectory as the source of a replay: which of its turns are sampled again, and in which order.
Nothing of it is ever written."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.ingest.endpoints.completions.read import PATH as COMPLETIONS
from rollbook.ingest.tokens.normal_form import chain, chain_all
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import TrajectoryErased
from rollbook.store.fold.trajectory import Trajectory, Turn, fold


def recorded(log: Store, trajectory_id: str) -> Trajectory:
    """The trajectory as the log has it.

    Raises:
        ReplayError: the log has it no more, or its text was erased.
        CorruptionError: a file that may hold it is damaged.
    """
    events = log.events_about([trajectory_id])
    found = fold(events).get(trajectory_id)
    if found is None:
        raise ReplayError(f"trajectory {trajectory_id}: the log has it no more, retention dropped it")
    erasures = [event.record for event in events if isinstance(event.record, TrajectoryErased)]
    if erasures or any(turn.tokens_erased for turn in found.turns.values()):
        why = erasures[-1].reason if erasures else "not recorded yet: the erasure was cut short, run it again"
        raise ReplayError(
            f"trajectory {found.opened.name!r} was erased ({why}): its requests are gone, and nothing is "
            "left to sample again"
        )
    return found


def endpoint_of(turn: Turn) -> str:
    """The path that the turn's request came to."""
    return str(turn.requested.wire.get("endpoint", "/v1/chat/completions"))


def number_of(turn: Turn) -> int:
    """The turn's number, from 1, as `rollbook show` counts."""
    return turn.position + 1


def turns_between(source: Trajectory, first: int | None, last: int | None) -> list[Turn]:
    """The turns with these numbers and between them that were answered, in the order they were asked.

    Args:
        first, last: None: those of the first and the last turn that was answered.

    Raises:
        ReplayError: there is none to sample again, or one of them has no token ids.
    """
    answered = [turn for turn in source.turns.values() if turn.completed is not None]
    for name, number in (("--from-turn", first), ("--until-turn", last)):
        if number is not None and number not in map(number_of, answered):
            known = _listed(number_of(turn) for turn in answered)
            text = f"{name} {number}: trajectory {source.opened.name!r} has no such answered turn; there are "
            raise ReplayError(text + known)
    chosen = [turn for turn in answered if (first or 1) <= number_of(turn) <= (last or len(source.turns))]
    if not chosen:
        text = f"trajectory {source.opened.name!r} has no answered turn to sample again"
        raise ReplayError(text if not answered else f"{text}: --until-turn lies before --from-turn")
    for turn in chosen:
        if (
            turn.completed is None
            or not len(turn.completed.completion_ids)
            or not turn.completed.prompt_length
        ):
            raise ReplayError(
                f"turn {number_of(turn)} of trajectory {source.opened.name!r} was recorded without token "
                "ids, so there is nothing to compare: leave it out with --from-turn and --until-turn"
            )
    return chosen


def conversation_from(source: Trajectory, first: int | None, last: int | None) -> list[Turn]:
    """The turns of one conversation from a fork on: the fork, and each that goes on from the one before.

    Where several conversations go on from the fork, it is the one that was asked last.

    Args:
        first: number of the fork; None: the first turn that was answered.
        last: number of the last turn; None: where the conversation ends.

    Raises:
        ReplayError: there is none, it has no token ids, or it is no conversation.
    """
    turns = turns_between(source, first, last)
    fork = turns[0]
    if endpoint_of(fork) == COMPLETIONS:
        raise ReplayError(
            f"turn {number_of(fork)} of trajectory {source.opened.name!r} is a raw prompt, which has no "
            "messages to go on from: repeat it, without --continue"
        )
    before = _earlier_turns(source, turns)
    path = [fork]
    for leaf in reversed(turns):
        found = [leaf]
        while found[-1] is not fork and (earlier := before[found[-1].turn_id]) is not None:
            found.append(earlier)
        if found[-1] is fork:
            path = found[::-1]
            break
    return path


def added_messages(source: Trajectory, turn: Turn, then: Turn) -> list[dict[str, object]]:
    """What a later turn's request says beyond an earlier turn's messages and reply."""
    return source.messages(then)[len(source.messages(turn)) + 1 :]


def _earlier_turns(source: Trajectory, turns: list[Turn]) -> dict[str, Turn | None]:
    """Turn -> the turn among these whose messages and reply its request repeats first: the latest, and the
    one that knows most."""
    found: dict[str, Turn | None] = {}
    tips: dict[bytes, Turn] = {}
    for turn in turns:
        hashes = chain_all(source.messages(turn))
        parent = source.parent(turn)
        echoed = next((tips[tip] for tip in reversed(hashes) if tip in tips), None)
        found[turn.turn_id] = parent if parent in turns else echoed
        assert turn.completed is not None
        tips[chain(hashes[-1], turn.completed.reply)] = turn
    return found


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
