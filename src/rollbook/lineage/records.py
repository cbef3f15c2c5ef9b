"""What lineages are made of, as frozen values; each is plain JSON when printed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class Place:
    """An event: where it stands in the log, and its id."""

    lane: str
    seq: int
    event_id: str


@dataclass(frozen=True, slots=True)
class Sync:
    """A transfer of a version's weights to an engine.

    Attributes:
        status: finished, failed or running.
        bytes, seconds: what was sent, and until it was verified; null unless it finished.
    """

    sync_id: str
    transport: str
    status: str
    bytes: int | None
    seconds: float | None
    started: datetime
    ended: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that a version came to.

    Attributes:
        verified: when it was first seen to hold these weights, UTC: by an activation, else by the end of a
            sync; null if it never was.
        activations: the events that say that it serves them.
        syncs: transfers to it; none where it read the weights by itself, as at its start.
    """

    engine: str
    verified: datetime | None
    activations: tuple[Place, ...]
    syncs: tuple[Sync, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A version's results on what is held out of training; null for what was not measured.

    `whole` is false if its rewards are those of a part: of `trajectories`, out of `expected` ones.
    """

    loss: float | None
    reward: float | None
    success: float | None
    time: datetime
    whole: bool | None = None
    trajectories: int | None = None
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version: its weights, the step that made it, and the engines that it came to.

    Attributes:
        parent: the version that its step began with, or whose weights it is under another number; where the
            log does not hold its step, that of the checkpoint before it; null for the first one.
        step, attempt: that made it; null where no step did, or the log does not hold it.
        renumbered: whether it is the weights of `parent` under another number, from which training went on.
        abandoned: whether it is no part of the run any more (`rollbook train --abandon-after`).
        weights_digest: null where no event names it.
        checkpoint: its folder, relative to the store; null where none was written.
    """

    run: str
    policy: str
    version: int
    parent: int | None = None
    step: int | None = None
    attempt: int | None = None
    renumbered: bool = False
    abandoned: bool = False
    weights_digest: str | None = None
    checkpoint: str | None = None
    engines: tuple[Engine, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of a turn that one version sampled, and their term of the ledger.

    Attributes:
        policy, version: null where the engine named none.
        term: trained, dropped, waiting, in flight or kept out.
        rule: of dropped the recipe's, of kept out the reason.
    """

    policy: str | None
    version: int | None
    tokens: int
    term: str
    rule: str | None


@dataclass(frozen=True, slots=True)
class TurnOrigin:
    """A turn: the events that hold it, and what became of the tokens that were sampled in it.

    Attributes:
        number: its place among the trajectory's turns, from 1.
        request_id: that of the model call; turns of one call share it.
        answered: its turn.completed or turn.failed; null while it runs.
        delivered: how the client came to have the reply; null if it is not known to.
    """

    turn_id: str
    number: int
    parent: str | None
    request_id: str
    requested: Place
    answered: Place | None
    status: str
    delivered: str | None
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class RewardGiven:
    """A reward of the trajectory, or of a turn.

    Attributes:
        superseded: whether a later one took its place.
        seen_by: (run, step) of the committed steps that trained on the trajectory and were planned at a cut
            that holds it; what trained without it is not among them.
    """

    reward: float
    source: str
    turn_id: str | None
    place: Place
    superseded: bool
    seen_by: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """An attempt at a step: planned, committed, failed or abandoned; only a committed one trained."""

    run: str
    policy: str
    step: int
    attempt: int
    status: str


@dataclass(frozen=True, slots=True)
class Use(StepAttempt):
    """An attempt at a step that consumed a sample.

    Attributes:
        position, rank, micro_batch: where it lay in the batch, each from 0.
        trained_tokens: with loss, as the attempt had the sample; null where they were erased since.
    """

    leaf_turn_id: str
    position: int
    rank: int
    micro_batch: int
    input_version: int
    output_version: int | None
    trained_tokens: int | None


@dataclass(frozen=True, slots=True)
class RewardComparison(StepAttempt):
    """An attempt at a step whose samples were compared with a trajectory's reward, without training on it."""

    reward: float | None


@dataclass(frozen=True, slots=True)
class Drop:
    """A sample that a rule kept out of an attempt at a step; final if the attempt committed."""

    run: str
    policy: str | None
    step: int
    attempt: int
    status: str | None
    leaf_turn_id: str
    rule: str
    detail: Json


@dataclass(frozen=True, slots=True)
class TrajectoryLineage:
    """Where a trajectory, or one sample of it, comes from and what it led to.

    Attributes:
        sample: leaf turn of the sample that this is about; null for the whole trajectory.
        lanes: that wrote it, one after the other.
        sampled_by: the versions that sampled its tokens.
        made: the versions that committed steps made of it.
        descendants: all versions after these, in order.
    """

    run: str
    trajectory_id: str
    trajectory: str
    sample: str | None
    split: str
    status: str
    lanes: tuple[str, ...]
    rewards: tuple[RewardGiven, ...]
    turns: tuple[TurnOrigin, ...]
    sampled_by: tuple[Version, ...]
    uses: tuple[Use, ...]
    compared: tuple[RewardComparison, ...]
    drops: tuple[Drop, ...]
    made: tuple[Version, ...]
    descendants: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class TokenUse:
    """What became of a token in an attempt that consumed a sample with the token's turn on its path.

    Attributes:
        trained: whether the token had a loss there.
        why: it had none: undelivered, altered, erased, cut off, or other sample (that of another leaf
            has it).
    """

    use: Use
    trained: bool
    why: str | None


@dataclass(frozen=True, slots=True)
class TokenLineage:
    """Where a sampled token comes from and what it led to.

    Attributes:
        index: its place in the turn's completion, from 0; place: in the sequence, the prompt included.
        token_id: -1 where it was erased.
        text: null without a tokenizer.
        logprob: natural; null where the engine gave none.
        version: that sampled it; null where the engine named none.
        share: the term of the ledger of the tokens of its turn and version; null where it was not read.
        reached: whether a committed step trained on it.
    """

    run: str
    trajectory_id: str
    trajectory: str
    turn: TurnOrigin
    index: int
    place: int
    token_id: int
    text: str | None
    logprob: float | None
    version: Version | None
    share: Share | None
    reached: bool
    uses: tuple[TokenUse, ...]
    drops: tuple[Drop, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a step, and its error if it failed."""

    attempt: int
    status: str
    error: str | None


@dataclass(frozen=True, slots=True)
class RequestPosition:
    """A turn, and where its request stands in the log."""

    turn_id: str
    lane: str
    seq: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """A sample of a step's batch.

    Attributes:
        position, rank, micro_batch: where it lay, each from 0.
        leaf_turn_id: that names it.
        turns: on its path, from the root to the leaf; none where the log does not hold them any more.
        tokens: sampled in these turns, shared ones counted in each sample.
    """

    position: int
    rank: int
    micro_batch: int
    trajectory_id: str
    trajectory: str | None
    leaf_turn_id: str
    turns: tuple[RequestPosition, ...]
    tokens: int
    min_version: int | None
    max_version: int | None


@dataclass(frozen=True, slots=True)
class SampledBy:
    """Tokens of a batch that one version sampled, in so many turns; null where the engine named none."""

    version: Version | None
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SampledTotals:
    """What a version sampled."""

    trajectories: int
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Consumer:
    """A committed step, and how much of its batch a version sampled."""

    run: str
    policy: str
    step: int
    output_version: int | None
    trajectories: int
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepLineage:
    """Where a step's batch comes from, and what the version that it made led to.

    Attributes:
        attempt, status: of the attempt that all this is about: the one that committed, else the last.
        cut: at which it was planned.
        drops: rule -> how many samples it kept out of the attempt.
        output: the version that it made, null unless it committed.
        sampled, consumers: what that version sampled, and the steps that consumed it.
        descendants: all versions after it, in order.
    """

    run: str
    policy: str
    step: int
    attempt: int
    status: str
    attempts: tuple[Attempt, ...]
    cut: str
    input: Version
    samples: tuple[StepSample, ...]
    sampled_by: tuple[SampledBy, ...]
    drops: dict[str, int]
    output: Version | None
    sampled: SampledTotals | None
    consumers: tuple[Consumer, ...]
    descendants: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class PolicyLineage:
    """Where a policy version comes from, and what it led to.

    Attributes:
        back: the versions before it, the nearest first, as far back as the log goes.
        consumers: the steps that consumed what it sampled.
        descendants: all versions after it, in order.
    """

    version: Version
    back: tuple[Version, ...]
    sampled: SampledTotals
    consumers: tuple[Consumer, ...]
    descendants: tuple[Version, ...]
