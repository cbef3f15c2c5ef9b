"""What `rollbook lineage` prints: what a thing comes from, then what it led to, as tables or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollbook.cli.terminal import Console, draw_table, print_json
from rollbook.transcript.text import short_id

if TYPE_CHECKING:
    from rollbook.lineage import records

MOST, LONGEST = 8, 200
"""Of a longer list the first ones are printed, and how many more there are; of a text so many characters."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """A line, and beneath it a table if it has rows, of which some may be left out."""

    line: str
    rows: Sequence[Row] = ()
    left: int = 0


def print_lineage(
    lineage: Any, parts: Callable[[Any, bool], Iterable[_Part]], full: bool, as_json: bool
) -> None:
    """Print a lineage."""
    if as_json:
        print_json(lineage)
        return
    console = Console()
    for part in parts(lineage, full):
        console.print(f"\n{part.line}" if part.rows else part.line, style="bold" if part.rows else None)
        if part.rows:
            # A column in which nothing stands says nothing.
            names = [name for name in part.rows[0] if any(row[name] not in (None, "") for row in part.rows)]
            draw_table(console, names, [tuple(row[name] for name in names) for row in part.rows], LONGEST)
        if part.left:
            console.print(f"and {part.left:,} more: --full", style="dim")


def trajectory_parts(lineage: records.TrajectoryLineage, full: bool) -> Iterator[_Part]:
    """A trajectory, or one sample of it."""
    kind = "trajectory" if lineage.sample is None else "sample"
    yield _Part(f"{kind} {lineage.trajectory}  {lineage.sample or lineage.trajectory_id}")
    yield _Part(
        f"run {lineage.run}, split {lineage.split}, {lineage.status}, written by "
        f"{' then '.join(lineage.lanes)}"
    )
    if lineage.sample is not None:
        yield _Part(f"of trajectory {lineage.trajectory_id}")
    yield from _versions("sampled by", lineage.sampled_by, full)
    yield from _listed("rewards", lineage.rewards, _reward, full)
    terms: Counter[str] = Counter()
    for share in (share for turn in lineage.turns for share in turn.shares):
        terms[share.term] += share.tokens
    by_term = ", ".join(f"{count:,} {term}" for term, count in terms.items())
    tokens = f"{_count(terms.total(), 'sampled token')}" + (f" ({by_term})" if by_term else "")
    shown = lineage.turns if full else lineage.turns[:MOST]
    if shown:
        rows = [row for turn in shown for row in _turn(turn)]
        yield _Part(f"turns, {tokens}: {len(lineage.turns):,}", rows, len(lineage.turns) - len(shown))
    yield from _listed("consumed by", lineage.uses, _use, full)
    yield from _listed(
        "compared with, not trained on, by",
        lineage.compared,
        lambda step: {"step": f"{step.policy} {step.step}", "status": step.status},
        full,
    )
    yield from _listed("dropped", lineage.drops, _drop, full)
    yield from _versions("made", lineage.made, full)
    yield from _range("descendants", lineage.descendants, full)


def token_parts(lineage: records.TokenLineage, full: bool) -> Iterator[_Part]:
    """A token."""
    yield _Part(f"token {lineage.trajectory}  {lineage.turn.turn_id}:{lineage.index}")
    text = "" if lineage.text is None else f" {lineage.text!r}"
    yield _Part(
        f"id {lineage.token_id}{text}, "
        f"{'no logprob' if lineage.logprob is None else f'logprob {lineage.logprob:.4f}'}"
    )
    if (place := lineage.turn.answered) is not None:
        yield _Part(f"held by {place.lane}={place.seq}, event {place.event_id}, turn.completed")
    requested = f"asked at {lineage.turn.requested.lane}={lineage.turn.requested.seq}"
    yield _Part(
        f"turn {lineage.turn.number} of run {lineage.run}, {requested}; token {lineage.place} of the sequence"
    )
    if lineage.version is None:
        yield _Part("sampled by: no known version")
    else:
        yield from _versions("sampled by", [lineage.version], full)
    if lineage.share is not None:
        yield _Part(
            f"its turn's tokens: {lineage.share.term}"
            + (f" ({lineage.share.rule})" if lineage.share.rule else "")
        )
    if not lineage.reached:
        yield _Part("no committed step trained on it")
    yield from _listed(
        "consumed by",
        lineage.uses,
        lambda token: (
            {"token": "trained" if token.trained else f"not trained: {token.why}"} | _use(token.use)
        ),
        full,
    )
    yield from _listed("dropped", lineage.drops, _drop, full)


def step_parts(lineage: records.StepLineage, full: bool) -> Iterator[_Part]:
    """A step."""
    yield _Part(f"step {lineage.step}  policy {lineage.policy}, run {lineage.run}")
    yield _Part(f"{lineage.status}, attempt {lineage.attempt}, planned at {lineage.cut}")
    others = [attempt for attempt in lineage.attempts if attempt.attempt != lineage.attempt]
    yield from _listed(
        "other attempts",
        others,
        lambda attempt: {"attempt": attempt.attempt, "status": attempt.status, "error": attempt.error},
        full,
    )
    yield from _versions("from version", [lineage.input], full)
    trajectories = _count(len({sample.trajectory_id for sample in lineage.samples}), "trajectory")
    yield from _listed(f"samples of {trajectories}", lineage.samples, _step_sample, full)
    rows = [
        {"turns": by.turns, "tokens": by.tokens}
        | (_version(by.version) if by.version else {"version": "no known version"})
        for by in lineage.sampled_by
    ]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        yield _Part("sampled by", [{name: row.get(name) for name in names} for row in rows])
        yield from _engines([by.version for by in lineage.sampled_by if by.version], full)
    if lineage.drops:
        rules = ", ".join(f"{count:,} by {rule}" for rule, count in lineage.drops.items())
        yield _Part(f"samples dropped: {rules}")
    if lineage.output is not None:
        yield from _versions("made version", [lineage.output], full)
        yield from _consumed(lineage.sampled, lineage.consumers, full)
        yield from _range("descendants", lineage.descendants, full)


def policy_parts(lineage: records.PolicyLineage, full: bool) -> Iterator[_Part]:
    """A policy version."""
    yield _Part(
        f"version {lineage.version.version}  policy {lineage.version.policy}, run {lineage.version.run}"
    )
    yield from _versions("this", [lineage.version], full)
    if lineage.back:
        yield from _range("made from", lineage.back, full)
    else:
        yield _Part("made from: no earlier version")
    yield from _consumed(lineage.sampled, lineage.consumers, full)
    yield from _range("descendants", lineage.descendants, full)


def _count(number: int, noun: str) -> str:
    """A number of things."""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _listed(name: str, items: Sequence[Any], row: Callable[[Any], Row], full: bool) -> Iterator[_Part]:
    """A row for each item, of many only for the first; nothing where there is no item."""
    if items:
        shown = items if full else items[:MOST]
        yield _Part(f"{name}: {len(items):,}", [row(item) for item in shown], len(items) - len(shown))


def _versions(name: str, versions: Sequence[records.Version], full: bool) -> Iterator[_Part]:
    """Each version, then the engines that they came to."""
    if versions:
        shown = versions if full else versions[:MOST]
        yield _Part(name, [_version(version) for version in shown], len(versions) - len(shown))
        yield from _engines(shown, full)


def _range(name: str, versions: Sequence[records.Version], full: bool) -> Iterator[_Part]:
    """Many versions: their range, and those with a checkpoint or an evaluation; of few, all of them."""
    if not versions:
        return
    gone = sum(version.abandoned for version in versions)
    counted = f", {_count(len(versions), 'version')}" if len(versions) > 1 else ""
    lost = f", {gone:,} of them abandoned" if gone else ""
    span = f"v{versions[0].version}" + (f" to v{versions[-1].version}" if len(versions) > 1 else "")
    every = full or len(versions) <= MOST
    shown = versions if every else [v for v in versions if v.checkpoint or v.evaluations][:MOST]
    rows = [_version(version) for version in shown]
    yield _Part(f"{name}: {span}{counted}{lost}", rows, len(versions) - len(shown))
    if full:
        yield from _engines(shown, full)


def _engines(versions: Sequence[records.Version], full: bool) -> Iterator[_Part]:
    rows = [
        {"version": f"{version.policy} v{version.version}"} | _engine(engine)
        for version in versions
        for engine in (version.engines if full else version.engines[:MOST])
    ]
    if rows:
        yield _Part("engines", rows, sum(len(version.engines) for version in versions) - len(rows))


def _consumed(
    sampled: records.SampledTotals | None, consumers: Sequence[records.Consumer], full: bool
) -> Iterator[_Part]:
    if sampled is None:
        return
    counted = f"{_count(sampled.tokens, 'token')} in {_count(sampled.turns, 'turn')}"
    yield _Part(f"sampled: {counted} of {_count(sampled.trajectories, 'trajectory')}")
    yield from _listed("steps that consumed samples with them", consumers, _consumer, full)


# Rows -----------------------------------------------------------------------------------------------


def _version(version: records.Version) -> Row:
    made_by = None
    if version.step is not None:
        made_by = f"step {version.step} from v{version.parent}"
    elif version.parent is not None:
        made_by = (
            f"v{version.parent} renumbered" if version.renumbered else f"some time after v{version.parent}"
        )
    evaluated = None
    for evaluation in version.evaluations[-1:]:
        numbers = (("reward", evaluation.reward), ("success", evaluation.success), ("loss", evaluation.loss))
        evaluated = ", ".join(f"{name} {value:.4g}" for name, value in numbers if value is not None)
        evaluated = evaluated or "nothing measured"
        if evaluation.whole is False:
            expected = "" if evaluation.expected is None else f" of {evaluation.expected}"
            evaluated = f"NOT WHOLE ({evaluation.trajectories}{expected} trajectories): {evaluated}"
    return {
        "version": f"{version.policy} v{version.version}",
        "weights": version.weights_digest and version.weights_digest[:16],
        "made by": made_by,
        "abandoned": "abandoned" if version.abandoned else None,
        "checkpoint": version.checkpoint,
        "evaluated": evaluated,
    }


def _engine(engine: records.Engine) -> Row:
    sync = engine.syncs[-1] if engine.syncs else None
    return {
        "engine": engine.engine,
        "verified": "never" if engine.verified is None else f"{engine.verified:%Y-%m-%d %H:%M:%S}",
        "at": next((f"{place.lane}={place.seq}" for place in engine.activations), None),
        "sync": f"{sync.sync_id} by {sync.transport} {sync.status}" if sync else "read by itself",
        "bytes": sync.bytes if sync else None,
        "seconds": sync.seconds if sync else None,
        "error": sync.error if sync else None,
        "earlier": len(engine.syncs) - 1 if len(engine.syncs) > 1 else None,
    }


def _consumer(consumer: records.Consumer) -> Row:
    output = f"v{consumer.output_version}"
    return {
        "step": f"{consumer.policy} {consumer.step}",
        "turns": consumer.turns,
        "tokens": consumer.tokens,
        "made": output,
    }


def _reward(reward: records.RewardGiven) -> Row:
    steps = ", ".join(f"{step}" for _, step in reward.seen_by)
    return {
        "source": reward.source,
        "reward": reward.reward,
        "turn": reward.turn_id and short_id(reward.turn_id),
        "at": f"{reward.place.lane}={reward.place.seq}",
        "superseded": "superseded" if reward.superseded else None,
        "known to": f"step {steps}" if steps else "no step that trained on it",
    }


def _turn(turn: records.TurnOrigin) -> list[Row]:
    """A row for each version that sampled some of it; one for a turn without tokens."""
    at = f"{turn.requested.lane}={turn.requested.seq}"
    row: Row = {"turn": turn.number, "id": short_id(turn.turn_id), "at": at, "status": turn.status}
    none = {"tokens": None, "version": None, "term": None, "rule": None}
    if turn.status != "completed" or not turn.shares:
        return [row | none]
    return [
        row
        | {
            "tokens": share.tokens,
            "version": "no known version" if share.version is None else f"{share.policy} v{share.version}",
            "term": share.term,
            "rule": share.rule,
        }
        for share in turn.shares
    ]


def _use(use: records.Use) -> Row:
    output = "" if use.output_version is None else f" to v{use.output_version}"
    return {
        "step": f"{use.policy} {use.step}",
        "attempt": use.attempt,
        "status": use.status,
        "sample": short_id(use.leaf_turn_id),
        "place": use.position,
        "rank": use.rank,
        "micro": use.micro_batch,
        "with loss": "erased since" if use.trained_tokens is None else use.trained_tokens,
        "version": f"v{use.input_version}{output}",
    }


def _drop(drop: records.Drop) -> Row:
    return {
        "rule": drop.rule,
        "step": drop.step,
        "attempt": drop.attempt,
        "status": drop.status or "unknown",
        "sample": short_id(drop.leaf_turn_id),
        "detail": drop.detail or None,
    }


def _step_sample(sample: records.StepSample) -> Row:
    versions = None if sample.min_version is None else f"v{sample.min_version}"
    if sample.max_version != sample.min_version:
        versions = f"{versions} to v{sample.max_version}"
    first = sample.turns[0] if sample.turns else None
    return {
        "place": sample.position,
        "trajectory": sample.trajectory or sample.trajectory_id,
        "sample": short_id(sample.leaf_turn_id),
        "turns": len(sample.turns) or None,
        "from": f"{first.lane}={first.seq}" if first else "not in the log any more",
        "tokens": sample.tokens if first else None,
        "by": versions,
        "rank": sample.rank,
        "micro": sample.micro_batch,
    }
