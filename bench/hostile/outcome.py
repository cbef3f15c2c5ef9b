"""The findings of the hostile benchmark, as figures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from rollbook.bench.figure import Figure, Spread, quantile, spread
from rollbook.bench.hostile.checks import Held
from rollbook.bench.hostile.kills import Killed
from rollbook.bench.hostile.laps import Fought, Round
from rollbook.bench.hostile.secret_runs import Searched

FEW = 3
"""So many of what is wrong are told."""


@dataclass(slots=True)
class Measured:
    """Everything that was measured.

    Attributes:
        quiet: kind of proxy -> bytes that it has resident before any attack.
        held: kind of proxy -> what its log says of all that was acknowledged.
        wrong: replies that honest clients got and that no engine gave.
    """

    rounds: list[Round] = field(default_factory=list)
    quiet: dict[str, int] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    killed: Killed = field(default_factory=Killed)
    searched: Searched = field(default_factory=Searched)
    wrong: list[str] = field(default_factory=list)


def _every(measured: Measured) -> Iterator[tuple[Round, Fought]]:
    return ((entry, fought) for entry in measured.rounds for fought in entry.fought)


def _with_examples(what: str, wrong: Iterable[str]) -> str:
    """A count's description, with the first examples of what is wrong."""
    few = list(dict.fromkeys(wrong))[:FEW]
    return f"{what}; first: {'; '.join(few)}" if few else what


def ratios(measured: Measured) -> dict[str, list[float]]:
    """Attack -> honest p99 under it over that of the quiet laps, round by round.

    Attacks under which nothing can be recorded are left out, since refusals take no time.
    """
    by_attack: dict[str, list[float]] = defaultdict(list)
    for entry in measured.rounds:
        quiet = quantile([ms for lap in entry.quiet for ms in lap.ms], 99)
        for fought in entry.fought:
            if not fought.refuses and quiet:
                by_attack[f"{fought.name} ({entry.kind})"].append(fought.lap.p99 / quiet)
    return dict(by_attack)


def figures(measured: Measured) -> Iterator[Figure]:
    """The figures that have a goal, then the accompanying ones."""
    helds = [*measured.held.values(), measured.killed.held]
    acks, kills = sum(held.acks for held in helds), measured.killed.kills
    runs = max(len(measured.rounds) // 2, 1)
    lost = [text for held in helds for text in held.lost]
    changed = [text for held in helds for text in (*held.changed, *held.damage)]
    changed += [*measured.wrong, *measured.killed.wrong]
    scope = f"{acks} acknowledgements, {kills} kills"
    yield Figure("hostile.lost", len(lost), "acks", _with_examples(scope, lost), None, runs)
    yield Figure("hostile.changed", len(changed), "acks", _with_examples(scope, changed), None, runs)
    tallies = [fought.tally for _, fought in _every(measured)] + [measured.killed.tally]
    answers = f"{sum(t.answers.total() for t in tallies)} answers to attacks"
    wrong = [text for tally in tallies for text in tally.wrong_200]
    yield Figure("hostile.wrong_200", len(wrong), "answers", _with_examples(answers, wrong), None, runs)
    yield _errors(measured, answers, runs)
    yield _p99(measured, runs)
    yield _peak(measured, runs)
    places = f"{measured.searched.planted} outside the conversation, {measured.searched.inside} inside it"
    secrets = [*measured.searched.found.values()]
    text = _with_examples(places, [*secrets, *measured.searched.unanswered])
    yield Figure("hostile.secrets_on_disk", len(secrets), "secrets", text, None, 1)
    refused = [t for _, f in _every(measured) if not f.refuses for t in f.lap.told]
    count = sum(f.lap.refused for _, f in _every(measured) if not f.refuses)
    requests = sum(len(f.lap.ms) + f.lap.refused for _, f in _every(measured) if not f.refuses)
    text = _with_examples(f"{requests} honest requests beside attacks", refused)
    yield Figure("hostile.refused", count, "requests", text, None, runs)


def _errors(measured: Measured, answers: str, runs: int) -> Figure:
    """500s, to anybody, and tracebacks that the proxy printed."""
    texts: list[str] = []
    count = 0
    for _, fought in _every(measured):
        texts += [*fought.tally.errors_500, *fought.tracebacks]
        count += len(fought.tally.errors_500) + fought.lap.errors_500 + len(fought.tracebacks)
    killed = [*measured.killed.tally.errors_500, *measured.killed.tracebacks]
    text = _with_examples(answers, [*texts, *killed])
    return Figure("hostile.errors_500", count + len(killed), "answers", text, None, runs)


def _p99(measured: Measured, runs: int) -> Figure:
    worst, ratio = max(
        ((name, median(values)) for name, values in ratios(measured).items()),
        key=lambda item: item[1],
        default=("no attack", 0.0),
    )
    quiet = median(_quiet(measured)) if measured.rounds else 0.0
    text = f"{quiet:.1f} ms without; worst: {worst}"
    return Figure("hostile.p99_ratio", ratio, "times", text, ratio, runs)


def _quiet(measured: Measured) -> list[float]:
    """p99 of the quiet laps, round by round, in ms."""
    return [quantile([ms for lap in entry.quiet for ms in lap.ms], 99) for entry in measured.rounds]


def _peak(measured: Measured, runs: int) -> Figure:
    most = max((f.peak - measured.quiet[entry.kind] for entry, f in _every(measured)), default=0)
    grew = [(f.peak - f.before, f"{f.name} ({entry.kind})") for entry, f in _every(measured)]
    by, worst = max(grew, default=(0, "no attack"))
    quiet = ", ".join(f"{kind} {size >> 20} MB" for kind, size in measured.quiet.items())
    text = f"quiet: {quiet}; it grew most, by {by >> 20} MB, under {worst}"
    return Figure("hostile.rss_peak_mb", most / 2**20, "MB", text, None, runs)


def spreads(measured: Measured) -> Iterator[Spread]:
    """Attack by attack: the honest clients' p99, and the proxy's memory beyond a quiet one's."""
    yield spread("p99 without an attack", "ms", _quiet(measured))
    by_name: dict[str, list[Fought]] = defaultdict(list)
    for entry, fought in _every(measured):
        by_name[f"{fought.name} ({entry.kind})"].append(fought)
    for name, laps in by_name.items():
        yield spread(f"p99: {name}", "ms", [fought.lap.p99 for fought in laps])
    for name, laps in by_name.items():
        kind = name.rpartition("(")[2][:-1]
        over = [(fought.peak - measured.quiet[kind]) / 2**20 for fought in laps]
        yield spread(f"memory: {name}", "MB", over)
