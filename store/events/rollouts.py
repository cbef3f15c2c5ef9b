"""Kinds of events about rollouts: runs, trajectories, turns, rewards, labels, and launches of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.store.events.about import (
    About,
    Record,
    each_marked,
    erased_text,
    gone_if_any,
    gone_unless,
    marked,
    marked_if_any,
    no_keys,
    no_text,
    nothing,
    only_key,
    only_numbers,
    unnamed,
)

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Json = dict[str, Any]

SPLITS = ("train", "eval", "teacher")
"""Splits a client may open a trajectory in; `eval` is never trained."""


QUARANTINE = "quarantine"
"""Split of traffic that named no trajectory: each conversation is its own trajectory and is never trained
on."""


REPLAY = "replay"
"""Split of recorded trajectories that were sampled again: never trained on. `origin` names what each repeats
or goes on from."""


JUDGE = "judge"
"""Split of what a model said when it was asked to judge a trajectory, which `origin` names: never trained
on."""


VOID = "void"
"""Status of a trajectory that counts for nothing: what it ran on failed, or nobody waits for it any more.
Once it is finished so its split is `void`, whatever it was opened in: it is never trained on, and takes no
place in its group."""


def token_ids(values: Any) -> TokenIds:
    """An int32 array of token ids from any sequence of integers."""
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens `start <= i < end` were sampled by `version` of `policy`."""

    policy: str
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RunOpened(Record, kind="run.opened"):
    """A process began to write events of this run (once per run and command)."""

    command: str
    config: Json
    model: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    environment: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrajectoryOpened(
    Record, kind="trajectory.opened", about=About(of="trajectory", text={"task": nothing, "labels": marked})
):
    """A trajectory started. `name` is given by the client and unique within the run; Rollbook makes
    `trajectory_id`.

    `by`, here and in other kinds, is the name of the API key that did it: `trajectory` is the trajectory's
    own, null that no keys were checked, or that it came by no API. A name is an operator's word for a key, no
    text of the trajectory, so erasure leaves it.

    `origin` is null but for two splits. Of `replay` it says what was sampled again: `trajectory_id`,
    `turn_id` (the first turn), `how` (`repeated`: each recorded request again; `continued`: the first, and
    then what follows from the new replies), `policy` and `policy_version` (null where the engine does not say
    which).
    Of `judge` it has the `trajectory_id` that is judged, and `how` is `judged`.
    """

    trajectory_id: str
    name: str
    group: str | None = None
    task: str | None = None
    split: str = "train"
    labels: Json = field(default_factory=dict)
    by: str | None = None
    origin: Json | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryFinished(Record, kind="trajectory.finished", about=About(of="trajectory")):
    """No more turns follow. `status` is completed, truncated, aborted, failed or void."""

    trajectory_id: str
    status: str = "completed"
    success: bool | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class TurnRequested(
    Record,
    kind="turn.requested",
    about=About(
        of="trajectory",
        text={
            "messages": each_marked,
            "request": marked,
            "requested_model": nothing,
            "sampling": only_numbers,
            "honoured": no_keys,
            "context_key": no_text,  # a digest of the tools could be found again by trying
            "wire": only_key,
        },
        large=("messages", "request", "wire"),
        fat=True,
    ),
):
    """A model call came in.

    The request's messages are the first `shared_messages` of `base_turn_id`'s request, then
    `messages`; the rest of its body is `request`. So a conversation of N turns is stored in O(N).
    `honoured` holds, as false, each field the engine cannot act on. `wire` says how the request came in:
    `endpoint` (/v1/chat/completions where it is absent), `choice` (place among the siblings of n > 1),
    `digest` (xxh3-128 of endpoint and body), `retry` (the client's count), `key` (the name of the API key, as
    `by` of other kinds; erasure leaves it), `repeats` (of a replay, the recorded turn whose request it is),
    and, where the endpoint's messages have another form than `messages`, the messages as sent: the first
    `shared_items` of the base turn's, then `items`.

    A request for n completions is stored once: of its later turns `sibling_of` names the first one, and
    `request`, `honoured`, `sampling` and `wire` hold only what differs from that (`fold.siblings`).
    """

    trajectory_id: str
    turn_id: str
    request_id: str
    parent_turn_id: str | None
    root_reason: str | None
    base_turn_id: str | None
    shared_messages: int
    messages: list[Json]
    request: Json
    requested_model: str | None
    sampling: Json
    honoured: Json
    context_key: str
    wire: Json = field(default_factory=dict)
    sibling_of: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TurnCompleted(
    Record,
    kind="turn.completed",
    about=About(
        of="trajectory",
        text={"reply": marked, "upstream": marked_if_any},
        large=("routed_experts",),
        fat=True,
    ),
):
    """The engine answered.

    `prompt_ids` is the part of the prompt that the parent's prompt and completion do not hold (the
    whole prompt of a root); `prompt_sha256` is over the little-endian int32 ids really sent.
    `logprobs` is null where the engine gave none (a teacher). `logprob_semantics` says what each
    number is a logprob of; `flags` names oddities (`malformed_tool_call`). `upstream` is what an upstream
    that was only recorded said besides, such as its id and usage. `routed_experts`, empty where the engine
    was not asked, is what `events.routed_experts` packs: the experts of the positions of prompt and
    completion from `start` on, but for the last, which was sampled and never passed through the model.
    """

    trajectory_id: str
    turn_id: str
    policy: str | None
    policy_version: int | None
    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs | None
    version_spans: tuple[VersionSpan, ...]
    prompt_length: int
    prompt_sha256: str
    finish_reason: str
    reply: Json
    logprob_semantics: Json
    flags: list[str]
    timings: Json
    upstream: Json = field(default_factory=dict)
    routed_experts: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnFailed(Record, kind="turn.failed", about=About(of="trajectory", text={"error": erased_text})):
    """The engine did not answer; nothing of the turn is trained.

    The prompt is kept as in `turn.completed`: what was, or would have been, sent. `prompt_ids` is null where
    no ids were made (an upstream's), and for a sibling, whose prompt is that of the turn `sibling_of`.
    """

    trajectory_id: str
    turn_id: str
    error: str
    prompt_ids: TokenIds | None = None
    prompt_length: int = 0
    prompt_sha256: str = ""


@dataclass(frozen=True, slots=True)
class TurnDelivered(Record, kind="turn.delivered", about=About(of="trajectory")):
    """The client took the reply's last byte (`how` = sent), or showed it in a later request (echoed)."""

    trajectory_id: str
    turn_id: str
    how: str


@dataclass(frozen=True, slots=True)
class RewardAssigned(
    Record, kind="reward.assigned", about=About(of="trajectory", counted={"source": gone_unless("agent")})
):
    """A number for a trajectory, or for one of its turns. `supersedes` names an earlier event_id.

    `source` is what the number is called, `by` whose key assigned it.
    """

    trajectory_id: str
    turn_id: str | None
    reward: float
    source: str = "agent"
    supersedes: str | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class PreferenceAdded(
    Record, kind="preference.added", about=About(of="trajectory", counted={"source": gone_unless("label")})
):
    """This trajectory was preferred to another, `rejected_trajectory_id`, by as much as `margin` says.

    `source` is whose preference it is, `by` whose key added it. It is kept and dropped with the trajectory
    that was chosen.
    """

    trajectory_id: str
    rejected_trajectory_id: str
    margin: float | None = None
    source: str = "label"
    by: str | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryAdopted(Record, kind="trajectory.adopted", about=About(of="trajectory")):
    """This lane writes the trajectory from here on; `from_lane` ends with `last_event_id` of it."""

    trajectory_id: str
    from_lane: str
    last_event_id: str


@dataclass(frozen=True, slots=True)
class LabelAdded(
    Record,
    kind="label.added",
    about=About(of="trajectory", text={"name": erased_text, "value": marked, "source": gone_unless("agent")}),
):
    """A note or tag on a trajectory, or on one of its turns; `by` is the name of the key that added it."""

    trajectory_id: str
    turn_id: str | None
    name: str
    value: Any
    source: str = "agent"
    by: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchStarted(
    Record,
    kind="launch.started",
    about=About(
        of="trajectory",
        text={
            "place": only_numbers,
            "launcher": erased_text,
            "isolation": only_numbers,
            "owner": erased_text,
        },
    ),
):
    """An agent program was started, to be this trajectory's agent.

    `launch_id` is unique in the trajectory, which may have several launches. `rollout` is the name of the
    configuration that says what to start; `place` is where in it this is: `epoch`, `task` and `sample`;
    `attempt` counts from 1. `launcher` is how it was started (`subprocess`, `docker`, `http`, `python`),
    `isolation` what really keeps it apart, `owner` the id of the process that started it. `clocks` are limits
    in seconds: `start`, `idle`, `total` and `scoring`; null where there is none. `places` is how many places
    these rollouts have in all; null: nobody said, or they have no end. Erasure takes the task out of `place`,
    as out of the trajectory's opening, and each word but names: `launch_id`, `rollout`, `by`.
    """

    trajectory_id: str
    launch_id: str
    rollout: str
    place: Json
    attempt: int
    launcher: str
    isolation: Json
    owner: str
    clocks: Json
    by: str | None = None
    places: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchEnded(
    Record,
    kind="launch.ended",
    about=About(of="trajectory", text={"why": gone_if_any, "output": unnamed, "scoring": unnamed}),
):
    """A launch is over, and so is the scoring of what it did.

    `status` is done, truncated, agent_error, infra_error, timeout or cancelled; `why` says more where there
    is more to say. `proxy_away` is true where it failed because the proxy was away: it is tried again, and
    is no attempt of the place; null: no, or nobody said. `exit_code` and `signal` are of its first process,
    `cpu_s` of all of them, `peak_rss_mb` of the largest, or where a cgroup counts of all, with what is cached
    of files; null: not known. `output` says of each stream how many bytes were printed and how many of them
    are kept in the file at `path`, which is not of the store. `scoring` has of each component its score, or
    an object that says why there is none.
    """

    trajectory_id: str
    launch_id: str
    status: str
    why: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    seconds: float | None = None
    cpu_s: float | None = None
    peak_rss_mb: float | None = None
    output: Json = field(default_factory=dict)
    scoring: Json = field(default_factory=dict)
    by: str | None = None
    proxy_away: bool | None = None


@dataclass(frozen=True, slots=True)
class LaunchLeaked(
    Record, kind="launch.leaked", about=About(of="trajectory", text={"processes": each_marked})
):
    """Processes of a launch were found where none should be any more, and were ended.

    Each has its `pid` and its `command`. `found` says when: at the `start` of another process that launches,
    while one was `running`, or at the launch's `end`.
    """

    trajectory_id: str
    launch_id: str
    processes: list[Json]
    found: str
    by: str | None = None
