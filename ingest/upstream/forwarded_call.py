"""A request that is forwarded to an upstream: its prompts, its turns, and their records. Pure."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.upstream_reply import AskedPrompts
from rollbook.ingest.recording.turn_records import known_items
from rollbook.ingest.tokens.message_form import chain_all
from rollbook.ingest.tokens.tree import TreeTurn, grown
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json, TurnCompleted, TurnRequested
from rollbook.store.ids import new_id

CONTEXT = "upstream"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPrompt:
    """A prompt of a request among the turns of its trajectory.

    Attributes:
        requested: the first of its completions.
        echoed: the turn whose reply it shows.
    """

    messages: list[Json]
    hashes: list[bytes]
    parent: TreeTurn | None
    requested: TurnRequested
    echoed: TreeTurn | None


@dataclass(slots=True, eq=False)
class ForwardedCall:
    """A forwarded request, with a turn for each completion that it asks for.

    Attributes:
        asked: its prompts, which are `placed` one by one.
        redacted: something was taken out of it, so its tokens are not to be kept.
        depends_on: the appends of its trajectory's opening and of the request itself.
        written: the append of how it came out.
        answered: turns that came back.
        settled: whether it was recorded how the request came out.
    """

    api: AgentApi
    live: LiveTrajectory
    call: ModelCall
    asked: AskedPrompts
    placed: list[PlacedPrompt]
    requested: list[TurnRequested]
    redacted: bool = False
    begun_s: float = field(default_factory=time.perf_counter)
    depends_on: list[Future[int] | None] = field(default_factory=list)
    written: Future[int] | None = None
    answered: list[CompletedTurn] = field(default_factory=list)
    settled: bool = False

    def begin(self) -> None:
        """Note that the request is forwarded."""
        self.live.running += 1
        self.live.active_s = time.monotonic()

    def refused(self) -> None:
        """Note that the request is not forwarded after all."""
        self.live.running -= 1

    def replying(self) -> None:
        """Note that the reply begins. From here on a finish waits for its end: a client may be faster."""
        self.live.running -= 1
        self.live.sending += 1

    def left(self) -> None:
        """Note the end of a reply that began."""
        self.live.active_s = time.monotonic()
        self.live.sent()


def which_prompt(prompts: AskedPrompts, prompt: int) -> Json:
    """Which of a request's several prompts a turn answers."""
    return {"prompt": prompt} if len(prompts.prompts) > 1 else {}


def of_choice(forwarded: ForwardedCall, choice: int) -> TurnRequested:
    """The request for one completion. Completions of one prompt share the messages of the first."""
    prompt, each = forwarded.asked.of(choice), forwarded.asked.each
    placed = forwarded.placed[prompt or 0]
    first = placed.requested
    if prompt is None:  # it was not asked for, so its prompt is unknown
        wire = {k: v for k, v in first.wire.items() if k != "prompt"} | {"choice": choice}
        return replace(first, turn_id=new_id(), base_turn_id=None, shared_messages=0, messages=[], wire=wire)
    if choice == prompt * each:
        return replace(first, wire=first.wire | ({"choice": choice} if choice else {}))
    wire = first.wire | {"choice": choice}
    if "items" in wire:
        wire |= {"shared_items": wire["shared_items"] + len(wire["items"]), "items": []}
    return replace(
        first,
        turn_id=new_id(),
        base_turn_id=first.turn_id,
        shared_messages=len(placed.messages),
        messages=[],
        wire=wire,
    )


def sent_items(live: LiveTrajectory, base: TreeTurn | None, call: ModelCall) -> Json:
    """The messages as sent, where their form is not chat's, without those of the base turn."""
    items, shared = known_items(live, base.turn_id if base else None, call)
    return {} if items is None else {"shared_items": shared, "items": items[shared:]}


def grown_turn(forwarded: ForwardedCall, requested: TurnRequested, completed: TurnCompleted) -> TreeTurn:
    """The completed turn for the tree. A turn that cannot be indexed now could not be after a restart
    either."""
    chain_all([completed.reply])
    parts = (completed.prompt_ids, completed.completion_ids)
    prompt = forwarded.asked.of(requested.wire.get("choice", 0))
    if prompt is None:
        return grown(requested.turn_id, CONTEXT, [], chain_all([]), completed.reply, None, parts)
    placed = forwarded.placed[prompt]
    node = (placed.messages, placed.hashes, completed.reply, placed.parent)
    return grown(requested.turn_id, CONTEXT, *node, parts)
