"""Draws lineages as Rich's trees: what a thing comes from, then what it led to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.text import Text
from rich.tree import Tree

from rollbook.cli.terminal import one_line, short_id, visible
from rollbook.lineage.records import (
    Consumer,
    Drop,
    Engine,
    PolicyLineage,
    RewardGiven,
    Sampled,
    Share,
    StepLineage,
    StepSample,
    TokenLineage,
    TokenUse,
    TrajectoryLineage,
    TurnOrigin,
    Use,
    Version,
)

MOST = 8
"""Of a longer list the first ones are drawn, and how many more there are."""
STATUS = {"committed": "green", "abandoned": "red", "failed": "red", "planned": "yellow"}
TERMS = {"trained": "green", "dropped": "red", "kept out": "yellow"}
_T = TypeVar("_T")
Words = list[tuple[str, str]]
"""Pieces of a line with their styles."""


def draw_trajectory(of: TrajectoryLineage, full: bool) -> Tree:
    """A trajectory, or one sample of it."""
    tree = _root(
        "trajectory" if of.sample is None else "sample", of.trajectory, of.sample or of.trajectory_id
    )
    where = f"run {of.run}, split {of.split}, {of.status}, written by {' then '.join(of.lanes)}"
    tree.add(Text(visible(where), "dim"))
    if of.sample is not None:
        tree.add(_line([("of trajectory ", ""), (visible(of.trajectory_id), "dim")]))
    _versions(tree, "sampled by", of.sampled_by, full)
    _listed(tree, "rewards", of.rewards, _reward, full)
    shares = [share for turn in of.turns for share in turn.shares]
    _listed(tree, f"turns, {_terms(shares)}", of.turns, _turn, full)
    _listed(tree, "consumed by", of.uses, _use, full)
    others = [(one.run, one.step, one.status) for one in of.compared]
    _listed(
        tree,
        "compared with, not trained on, by",
        others,
        lambda one: [(f"step {one[1]} ", ""), (one[2], "")],
        full,
    )
    _listed(tree, "dropped", of.drops, _drop, full)
    _versions(tree, "made", of.made, full)
    _range(tree, "descendants", of.descendants, full)
    return tree


def draw_token(of: TokenLineage, full: bool) -> Tree:
    """A token."""
    tree = _root("token", of.trajectory, f"{of.turn.turn_id}:{of.index}")
    text = "" if of.text is None else f" {of.text!r}"
    said = "no logprob" if of.logprob is None else f"logprob {of.logprob:.4f}"
    tree.add(_line([(f"id {of.token_id}{visible(text)}", "bold"), (f", {said}", "")]))
    place = of.turn.answered
    if place is not None:
        held = f"{place.lane}={place.seq}, event {place.event_id}"
        tree.add(_line([("held by ", ""), (visible(held), "cyan"), (", turn.completed", "dim")]))
    asked = of.turn.requested
    where = f"turn {of.turn.number} of run {of.run}, asked at {asked.lane}={asked.seq}"
    tree.add(Text(visible(f"{where}; token {of.place} of the sequence"), "dim"))
    _versions(tree, "sampled by", [] if of.version is None else [of.version], full, none="no known version")
    if of.share is not None:
        tree.add(_line([("its turn's tokens: ", ""), *_term(of.share)]))
    if not of.reached:
        tree.add(_line([("no committed step trained on it", "yellow")]))
    _listed(tree, "consumed by", of.uses, _token_use, full)
    _listed(tree, "dropped", of.drops, _drop, full)
    return tree


def draw_step(of: StepLineage, full: bool) -> Tree:
    """A step."""
    tree = _root("step", f"{of.step}", f"policy {of.policy}, run {of.run}")
    tree.add(
        _line(
            [
                (of.status, STATUS.get(of.status, "")),
                (f", attempt {of.attempt}, planned at ", ""),
                (visible(of.cut), "cyan"),
            ]
        )
    )
    others = [one for one in of.attempts if one.attempt != of.attempt]
    _listed(
        tree,
        "other attempts",
        others,
        lambda one: [
            (f"{one.attempt} ", ""),
            (one.status, STATUS.get(one.status, "")),
            (f": {one_line(one.error, 200)}" if one.error else "", ""),
        ],
        full,
    )
    back = tree.add(_line([("from", "bold magenta")]))
    _versions(back, "version", [of.input], full)
    trajectories = len({sample.trajectory_id for sample in of.samples})
    _listed(back, f"samples of {_count(trajectories, 'trajectory')}", of.samples, _step_sample, full)
    made = back.add(_line([("sampled by", "bold")]))
    for by in of.sampled_by:
        counted = f"{_count(by.turns, 'turn')}, {_count(by.tokens, 'token')} by "
        branch = made.add(
            _line(
                [
                    (counted, ""),
                    *(_version_words(by.version) if by.version else [("no known version", "yellow")]),
                ]
            )
        )
        _engines(branch, by.version, full)
    rules = ", ".join(f"{count:,} by {visible(rule)}" for rule, count in of.drops.items())
    if rules:
        back.add(_line([("samples dropped", "bold"), (f": {rules}", "red")]))
    if of.output is not None:
        ahead = tree.add(_line([("to", "bold magenta")]))
        _versions(ahead, "version", [of.output], full)
        _consumed(ahead, of.sampled, of.consumers, full)
        _range(ahead, "descendants", of.descendants, full)
    return tree


def draw_policy(of: PolicyLineage, full: bool) -> Tree:
    """A policy version."""
    tree = _root("version", f"{of.version.version}", f"policy {of.version.policy}, run {of.version.run}")
    back = tree.add(_line([("from", "bold magenta")]))
    _versions(back, "this", [of.version], full)
    _range(back, "made from", of.back, full, none="no earlier version")
    ahead = tree.add(_line([("to", "bold magenta")]))
    _consumed(ahead, of.sampled, of.consumers, full)
    _range(ahead, "descendants", of.descendants, full)
    return tree


# Parts ----------------------------------------------------------------------------------------------


def _root(kind: str, name: str, identity: str) -> Tree:
    label = _line([(f"{kind} ", ""), (visible(name), "bold"), (f"  {visible(identity)}", "dim")])
    return Tree(label, guide_style="dim")


def _count(number: int, noun: str) -> str:
    """A number of things."""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _line(words: Words) -> Text:
    return Text.assemble(*words, overflow="fold")


def _listed(tree: Tree, name: str, items: Sequence[_T], words: Callable[[_T], Words], full: bool) -> None:
    """A branch with a line for each item, of many only for the first; none where there is no item."""
    if not items:
        return
    branch = tree.add(_line([(f"{name}: ", "bold"), (f"{len(items):,}", "")]))
    shown = items if full else items[:MOST]
    for item in shown:
        branch.add(_line(words(item)))
    _more(branch, len(items) - len(shown))


def _more(branch: Tree, left: int) -> None:
    if left:
        branch.add(Text(f"and {left:,} more: --full", "dim"))


def _versions(tree: Tree, name: str, versions: Sequence[Version], full: bool, *, none: str = "") -> None:
    """A branch with each version, and beneath it the engines that it came to."""
    if not versions and not none:
        return
    branch = tree.add(_line([(name, "bold"), (f": {none}" if not versions else "", "yellow")]))
    shown = versions if full else versions[:MOST]
    for version in shown:
        _engines(branch.add(_line(_version_words(version))), version, full)
    _more(branch, len(versions) - len(shown))


def _version_words(version: Version) -> Words:
    words: Words = [(f"{visible(version.policy)} v{version.version}", "magenta")]
    if version.weights_digest:
        words.append((f" weights {version.weights_digest[:16]}", "dim"))
    if version.step is not None:
        words.append((f", made by step {version.step} from v{version.parent}", ""))
    elif version.parent is not None:
        how = "the weights of v{} under another number" if version.renumbered else "some time after v{}"
        words.append((f", {how.format(version.parent)}", ""))
    if version.abandoned:
        words.append((", abandoned", "red"))
    if version.checkpoint:
        words.append((f", {visible(version.checkpoint)}", "cyan"))
    for one in version.evaluations[-1:]:
        numbers = (("reward", one.reward), ("success", one.success), ("loss", one.loss))
        said = ", ".join(f"{name} {value:.4g}" for name, value in numbers if value is not None)
        words.append((f", evaluated: {said or 'nothing measured'}", "yellow"))
        if one.whole is False:
            of = "" if one.expected is None else f" of {one.expected}"
            words.append((f", NOT WHOLE: {one.trajectories}{of} trajectories", "red"))
    return words


def _engines(branch: Tree, version: Version | None, full: bool) -> None:
    engines = () if version is None else version.engines
    shown = engines if full else engines[:MOST]
    for engine in shown:
        branch.add(_line(_engine_words(engine)))
    _more(branch, len(engines) - len(shown))


def _engine_words(engine: Engine) -> Words:
    words: Words = [("engine ", ""), (visible(engine.engine), "blue")]
    if engine.verified is None:
        words.append((", never seen to hold it", "red"))
    else:
        words.append((f", verified {engine.verified:%Y-%m-%d %H:%M:%S}", "green"))
        words += [(f" ({place.lane}={place.seq})", "dim") for place in engine.activations[:1]]
    if not engine.syncs:
        words.append((", read by itself", "dim"))
    for sync in engine.syncs[-1:]:
        took = "" if sync.seconds is None else f", {sync.bytes or 0:,} bytes in {sync.seconds:.2f} s"
        style = "" if sync.status == "finished" else "red"
        words.append((visible(f", sync {sync.sync_id} by {sync.transport} {sync.status}{took}"), style))
        words += [(visible(f": {one_line(sync.error, 200)}"), "red")] if sync.error else []
    more = len(engine.syncs) - 1
    return words + ([(f", {more} before", "dim")] if more > 0 else [])


def _range(tree: Tree, name: str, versions: Sequence[Version], full: bool, *, none: str = "") -> None:
    """Many versions: their range, and those with a checkpoint or an evaluation; of few, all of them."""
    if not versions:
        if none:
            tree.add(_line([(name, "bold"), (f": {none}", "dim")]))
        return
    gone = sum(version.abandoned for version in versions)
    counted = f", {_count(len(versions), 'version')}" if len(versions) > 1 else ""
    lost = f", {gone:,} of them abandoned" if gone else ""
    span = f"v{versions[0].version}" + (f" to v{versions[-1].version}" if len(versions) > 1 else "")
    branch = tree.add(_line([(name, "bold"), (f": {span}{counted}{lost}", "")]))
    every = full or len(versions) <= MOST
    shown = versions if every else [v for v in versions if v.checkpoint or v.evaluations][:MOST]
    for version in shown:
        line = branch.add(_line(_version_words(version)))
        if full:
            _engines(line, version, full)
    _more(branch, len(versions) - len(shown))


def _consumed(tree: Tree, sampled: Sampled | None, consumers: Sequence[Consumer], full: bool) -> None:
    if sampled is None:
        return
    counted = f"{_count(sampled.tokens, 'token')} in {_count(sampled.turns, 'turn')}"
    of = _count(sampled.trajectories, "trajectory")
    tree.add(_line([("sampled", "bold"), (f": {counted} of {of}", "")]))
    _listed(tree, "steps that consumed samples with them", consumers, _consumer, full)


# Lines ----------------------------------------------------------------------------------------------


def _consumer(one: Consumer) -> Words:
    counted = f"{_count(one.turns, 'turn')}, {_count(one.tokens, 'token')}, made v{one.output_version}"
    return [(f"step {one.step}", "bold"), (f" of {visible(one.policy)}, {counted}", "")]


def _reward(one: RewardGiven) -> Words:
    of = "" if one.turn_id is None else f" of turn {short_id(one.turn_id)}"
    words: Words = [(f"{visible(one.source)} {one.reward:g}", "bold yellow"), (of, "")]
    words.append((visible(f" at {one.place.lane}={one.place.seq}"), "cyan"))
    words += [(", superseded", "dim")] if one.superseded else []
    steps = ", ".join(f"{step}" for _, step in one.seen_by)
    return [*words, (f", known to step {steps}" if steps else ", known to no step that trained on it", "")]


def _turn(turn: TurnOrigin) -> Words:
    words: Words = [(f"{turn.number}", "bold"), (f" {short_id(turn.turn_id)}", "dim")]
    words.append((visible(f" at {turn.requested.lane}={turn.requested.seq}"), "cyan"))
    if turn.status != "completed":
        return [*words, (f" {turn.status}", "red")]
    for share in turn.shares:
        words += [(", ", ""), *_share(share)]
    return words


def _share(share: Share) -> Words:
    by = "no known version" if share.version is None else f"{visible(share.policy or '')} v{share.version}"
    return [(f"{_count(share.tokens, 'token')} by ", ""), (by, "magenta"), (" ", ""), *_term(share)]


def _term(share: Share) -> Words:
    rule = f" ({visible(share.rule)})" if share.rule else ""
    return [(f"{share.term}{rule}", TERMS.get(share.term, ""))]


def _terms(shares: Iterable[Share]) -> str:
    """Tokens by term, in words."""
    tokens: Counter[str] = Counter()
    for share in shares:
        tokens[share.term] += share.tokens
    said = ", ".join(f"{count:,} {term}" for term, count in tokens.items())
    return f"{_count(tokens.total(), 'sampled token')}" + (f" ({said})" if said else "")


def _use(use: Use) -> Words:
    words: Words = [(f"step {use.step}", "bold"), (f" of {visible(use.policy)}", "")]
    words += [(f", attempt {use.attempt}", "")] if use.attempt > 1 else []
    words += [(" ", ""), (use.status, STATUS.get(use.status, ""))]
    words.append((f": sample {short_id(use.leaf_turn_id)}, position {use.position}, rank {use.rank}, ", ""))
    tokens = (
        "erased since" if use.trained_tokens is None else f"{_count(use.trained_tokens, 'token')} with loss"
    )
    words.append((f"micro-batch {use.micro_batch}, {tokens}, from v{use.input_version}", ""))
    return words + ([] if use.output_version is None else [(f" to v{use.output_version}", "")])


def _token_use(one: TokenUse) -> Words:
    trained = ("trained", "green") if one.trained else (f"not trained: {one.why}", "yellow")
    return [trained, ("  ", ""), *_use(one.use)]


def _drop(drop: Drop) -> Words:
    words: Words = [(visible(drop.rule), "red"), (f" at step {drop.step}, attempt {drop.attempt} ", "")]
    words.append((drop.status or "unknown", STATUS.get(drop.status or "", "")))
    words.append((f": sample {short_id(drop.leaf_turn_id)}", ""))
    return words + ([(f" {one_line(drop.detail, 200)}", "dim")] if drop.detail else [])


def _step_sample(sample: StepSample) -> Words:
    name = visible(sample.trajectory or sample.trajectory_id)
    words: Words = [
        (f"{sample.position}", "bold"),
        (f" {name}", ""),
        (f" {short_id(sample.leaf_turn_id)}", "dim"),
    ]
    if not sample.turns:
        return [*words, (", not in the log any more", "yellow")]
    versions = "" if sample.min_version is None else f" by v{sample.min_version}"
    if sample.max_version != sample.min_version:
        versions += f" to v{sample.max_version}"
    first = sample.turns[0]
    counted = f"{_count(len(sample.turns), 'turn')} from {first.lane}={first.seq}"
    words.append((visible(f", {counted}, {_count(sample.tokens, 'token')}"), ""))
    words.append((versions, "magenta"))
    return [*words, (f", rank {sample.rank}, micro-batch {sample.micro_batch}", "dim")]
