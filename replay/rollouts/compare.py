"""Compares a turn sampled again with the recorded one: same tokens, or the first that differs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.reply import STOP_STRING
from rollbook.replay.rollouts.source import number_of
from rollbook.store.events import TokenIds, TurnCompleted, TurnRequested
from rollbook.store.fold.trajectory import Turn


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token at one place of a completion; `logprob` is None where the engine gave none."""

    token_id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TurnAgain:
    """A recorded turn and its replay.

    Attributes:
        number: of the recorded turn, from 1.
        turn_id, new_turn_id: of the recorded turn, and of its replay.
        same_prompt: whether the engine was sent the same ids.
        same_weights: whether one version sampled both.
        same_draws: whether both were to be sampled alike: temperature, limits and seed.
        prompt_tokens: of the replay.
        recorded_tokens, new_tokens: how many were sampled.
        versions: of the recorded turn's tokens, in order.
        differs_at: the place of the first token that differs, from 0; None: all are the same.
        recorded, new: the tokens there; None of a completion that had ended.
        largest_gap, mean_gap: |new logprob - recorded logprob| over the tokens before that; None where there
            is none, one has no logprobs, or they are of two temperatures.
    """

    number: int
    turn_id: str
    new_turn_id: str
    same_prompt: bool
    same_weights: bool
    same_draws: bool
    prompt_tokens: int
    recorded_tokens: int
    new_tokens: int
    versions: tuple[int, ...]
    differs_at: int | None
    recorded: SampledToken | None
    new: SampledToken | None
    largest_gap: float | None
    mean_gap: float | None

    @property
    def same(self) -> bool:
        """Whether all tokens are the same."""
        return self.differs_at is None

    @property
    def repeatable(self) -> bool:
        """Whether an engine that repeats itself gives the same tokens here."""
        return self.same_prompt and self.same_weights and self.same_draws


def compare(
    turn: Turn, again: CompletedTurn, decode: Callable[[int], str], *, same_run: bool, seeded: bool
) -> TurnAgain:
    """Compare a recorded turn, which is completed, with its replay.

    Args:
        decode: gives a token's text.
        same_run: whether both are of one run: a version is one set of weights within a run.
        seeded: whether the engine draws by the seed.
    """
    was, now = turn.completed, again.completed
    assert was is not None
    differs_at = _first_difference(was, now)
    common = min(len(was.completion_ids), len(now.completion_ids)) if differs_at is None else differs_at
    gaps = _gaps(was, now, common)
    return TurnAgain(
        number=number_of(turn),
        turn_id=turn.turn_id,
        new_turn_id=again.turn_id,
        same_prompt=was.prompt_sha256 == now.prompt_sha256,
        same_weights=same_run and _weights(was) is not None and _weights(was) == _weights(now),
        same_draws=_same_draws(turn.requested, again.requested, seeded=seeded),
        prompt_tokens=now.prompt_length,
        recorded_tokens=len(was.completion_ids),
        new_tokens=len(now.completion_ids),
        versions=tuple(dict.fromkeys(span.version for span in was.version_spans)),
        differs_at=differs_at,
        recorded=None if differs_at is None else _token(was, differs_at, decode),
        new=None if differs_at is None else _token(now, differs_at, decode),
        largest_gap=None if gaps is None else float(gaps.max()),
        mean_gap=None if gaps is None else float(gaps.mean()),
    )


def _first_difference(was: TurnCompleted, now: TurnCompleted) -> int | None:
    """Where two completions part; None where they do not. One that was cut off from outside may be the
    shorter."""
    recorded_ids, new_ids = was.completion_ids, now.completion_ids
    length = min(len(recorded_ids), len(new_ids))
    apart = np.flatnonzero(recorded_ids[:length] != new_ids[:length])
    if len(apart):
        return int(apart[0])
    shorter = was if len(recorded_ids) < len(new_ids) else now
    by_string = STOP_STRING in was.flags and STOP_STRING in now.flags  # an engine may be late to end there
    cut = shorter.finish_reason == "abort" or by_string
    return None if len(recorded_ids) == len(new_ids) or cut else length


def _weights(done: TurnCompleted) -> tuple[str, int] | None:
    """The policy and version that sampled all of it; None: none, or several."""
    versions = {(span.policy, span.version) for span in done.version_spans}
    return versions.pop() if len(versions) == 1 else None


def _same_draws(was: TurnRequested, now: TurnRequested, *, seeded: bool) -> bool:
    """Whether both ask for the same sampling, and the engine can act on it."""
    greedy = was.sampling.get("temperature") == now.sampling.get("temperature") == 0
    leave_out = {"seed"} if greedy else set()
    recorded, replayed = (
        {k: v for k, v in request.sampling.items() if k not in leave_out} for request in (was, now)
    )
    return recorded == replayed and was.honoured == now.honoured and (greedy or seeded)


def _gaps(was: TurnCompleted, now: TurnCompleted, common: int) -> npt.NDArray[np.float64] | None:
    """|new logprob - recorded logprob| of the first tokens, which are the same; None where none is known."""
    # A greedy turn's logprobs are those of temperature 1.
    temperatures = {done.logprob_semantics.get("temperature") or 1.0 for done in (was, now)}
    if was.logprobs is None or now.logprobs is None or len(temperatures) > 1 or not common:
        return None
    return np.abs(now.logprobs[:common].astype(np.float64) - was.logprobs[:common])


def _token(done: TurnCompleted, place: int, decode: Callable[[int], str]) -> SampledToken | None:
    ids: TokenIds = done.completion_ids
    if place >= len(ids):
        return None
    logprob = None if done.logprobs is None else float(done.logprobs[place])
    return SampledToken(int(ids[place]), decode(int(ids[place])), logprob)
