"""Exports one step as a bundle, and opens bundles. A bundle opens as a store in which the step is
replayed, as far as the bundle's contents allow.

What the replay of one step needs of a store: events, trajectories and checkpoints, found by the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollbook import __version__
from rollbook.engines.model_files import is_sharded
from rollbook.replay.step.partial import Part, why_no_losses
from rollbook.replay.step.run_log import RunLog, recorded_vectors
from rollbook.replay.step.starts import find_start
from rollbook.replay.step.step import history_with, replay_step
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store, format_cut, parse_cut
from rollbook.store import open as open_store
from rollbook.store.errors import CorruptionError, ReplayError, RollbookError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    PolicyActivated,
    PolicyPublished,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
    StepRetired,
    StepVectors,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.fold.history import KINDS, CommittedStep, History, all_samples, with_drops
from rollbook.store.interchange.bundle import (
    FORMAT,
    LAST_WITHOUT_WEIGHTS,
    OPTIMIZER,
    WEIGHTS,
    Bundle,
    member_of,
    of_model,
    refused,
    unpack_bundle,
    write_bundle,
)
from rollbook.store.interchange.destination import destination
from rollbook.store.interchange.excerpt import Excerpt, Redaction, Rows, rows_about, rows_at, write_excerpt
from rollbook.store.marker import create_marker
from rollbook.store.safe_paths import place_inside
from rollbook.store.sealed.page_headers import GROUP_BYTES, PAGE_BYTES, refuse_large_pages
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.attach import end_with_units
from rollbook.store.upkeep.verify import verify_store
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.manifest_batch import begins, samples_at_cut
from rollbook.train.checkpoints.export import without_optimizer
from rollbook.train.config.lora import recorded_lora


@dataclass(frozen=True, slots=True)
class Exported:
    """A bundle that was written.

    Attributes:
        bytes, sha256: of the whole file.
    """

    to: str
    bytes: int
    sha256: str
    bundle: Bundle


def export_step(
    log: Store,
    out: Path,
    step: int,
    run: str | None = None,
    policy: str = "actor",
    *,
    redact: bool = False,
    without: str | None = None,
    trust_parts: bool = False,
) -> Exported:
    """Write a bundle of all that the replay of a step needs.

    Args:
        redact: leave out text; token ids, logprobs and numbers stay, and the step replays as before.
        without: `OPTIMIZER` leaves out the optimizer's state, which is most of a bundle: the stages
            before the optimizer's step can still be proven. `WEIGHTS` leaves out the weights too: what
            the log alone gives can still be proven.
        trust_parts: import the user's parts that a manifest names: they say what it needs.

    Raises:
        TrainError: a part is named that is not trusted or cannot be loaded.
        ReplayError: there is no such step, or it cannot be replayed, or not without what is left out.
        InterchangeError: something is at `out`, or it cannot be written there.
        CorruptionError: the log is damaged.
    """
    contents = contents_of_step(log, step, run, policy, weights=without != WEIGHTS, trust_parts=trust_parts)
    if without == OPTIMIZER:
        _check_alone(log, contents)
    with tempfile.TemporaryDirectory(prefix="rollbook-bundle-") as temporary:
        folder = Path(temporary) / "store"
        excerpt = _excerpt(log, contents, folder, redact=redact)
        up_to = _last_stage(open_store(folder), contents) if without == WEIGHTS else None
        files = {str(path.relative_to(folder)): path for path in sorted(folder.glob("sealed/*/*/*"))}
        for checkpoint in contents.checkpoints:
            held = _files_of(log, contents, checkpoint, folder, optimizer=without is None)
            files |= {f"{checkpoint.path}/{name}": path for name, path in held.items()}
        members = tuple(member_of(name, path) for name, path in files.items())
        left = () if without is None else (without,)
        described = _described(log, contents, excerpt, redact=redact, without=left)
        bundle = replace(described, up_to=up_to, members=members)
        digest = write_bundle(out, bundle, files)
    return Exported(str(out), out.stat().st_size, digest, bundle)


@contextmanager
def opened_bundle(path: Path, extract: Path | None = None) -> Iterator[tuple[Bundle, Store]]:
    """Context: a bundle's manifest and the store that it opens as, in a temporary folder or in `extract`.

    Nothing of the bundle is run, and nothing outside of that folder is written.

    Raises:
        InterchangeError: it is no bundle, damaged, or holds what no bundle does; or `extract` is not empty.
        FormatError: a newer Rollbook made it.
    """
    if extract is None:
        with tempfile.TemporaryDirectory(prefix="rollbook-bundle-") as temporary:
            folder = Path(temporary) / "store"
            yield _unpacked(path, folder), open_store(folder)
        return
    with destination(extract, folder=True, option="--extract") as folder:
        folder.chmod(0o700)
        bundle = _unpacked(path, folder)
    yield bundle, open_store(extract)


# Export -------------------------------------------------------------------------------------------


def _check_alone(log: Store, contents: StepContents) -> None:
    """Check that the step is the only one to be run: others before it would need the optimizer's state."""
    assert contents.base is not None
    if len(contents.steps) > 1:
        planned = contents.step.planned
        raise ReplayError(
            f"step {planned.step} cannot be bundled without the optimizer: it begins with version "
            f"{planned.policy_version}, of which there is no checkpoint; from that of version "
            f"{contents.base.policy_version} on, {len(contents.steps) - 1} steps are run first, which need "
            "the optimizer's state. Leave out --without, or choose a step after a checkpoint"
        )
    if is_sharded(log.folder(contents.base.path)):
        raise ReplayError(
            f"step {contents.step.planned.step} cannot be bundled without the optimizer: "
            f"{contents.base.path} is of shards, which hold weights and the optimizer's state together. "
            "Leave out --without"
        )


def _excerpt(log: Store, contents: StepContents, folder: Path, *, redact: bool) -> Excerpt:
    """Make the excerpt, and see that every step has its samples in it."""
    end = log.head()
    about = rows_about(log, contents.trajectories, end)
    events = [*contents.events, *events_of_versions(log, contents, about)]
    rows = [about, rows_at(log, events, end)]
    head = {lane: count for lane, count in end.items() if lane in contents.lanes(rows)}
    excerpt = write_excerpt(folder, head, rows, redaction=Redaction() if redact else None)
    store = open_store(folder)
    for step in contents.steps:
        if begins(step.planned):
            samples_at_cut(store, step.planned, contents.history.run)
    return excerpt


def _last_stage(store: Store, contents: StepContents) -> str:
    """The last stage that a bundle without weights proves; tried by a replay of the excerpt."""
    plan, history = contents.step.planned, contents.history
    values = recorded_vectors(store, history).get((plan.step, plan.attempt), {})
    last = LAST_WITHOUT_WEIGHTS[why_no_losses(plan, values) is None]
    try:
        replay_step(store, plan.step, history.run, history.policy, part=Part(last=last, model=False))
    except ReplayError as error:
        raise ReplayError(f"{error}. Leave out --without {WEIGHTS}, or --without {OPTIMIZER}") from error
    return last


def _files_of(
    log: Store, contents: StepContents, checkpoint: CheckpointWritten, target: Path, *, optimizer: bool
) -> dict[str, Path]:
    """The files of a checkpoint that go into the bundle, by name; without the optimizer's state where the
    replay can do without it."""
    folder = log.folder(checkpoint.path)
    if contents.base is None:
        return {CONFIG: folder / CONFIG}
    held = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and of_model(path.name)}
    whole = checkpoint is contents.base and contents.goes_on and optimizer
    if whole or is_sharded(folder):
        return held
    return without_optimizer(folder, held, target / checkpoint.path)


def _described(
    log: Store, contents: StepContents, excerpt: Excerpt, *, redact: bool, without: tuple[str, ...]
) -> Bundle:
    planned = contents.step.planned
    return Bundle(
        bundle=FORMAT,
        rollbook=__version__,
        store=log.store_id,
        run=contents.history.run,
        policy=contents.history.policy,
        step=planned.step,
        attempt=planned.attempt,
        cut=planned.cut,
        policy_version=planned.policy_version,
        from_version=None if contents.base is None else contents.base.policy_version,
        steps=tuple(step.planned.step for step in contents.steps),
        head=format_cut(excerpt.head),
        events=excerpt.events,
        trajectories=excerpt.trajectories,
        redacted=redact,
        without=without,
        up_to=None,
        members=(),
    )


# Opening ------------------------------------------------------------------------------------------


def _unpacked(path: Path, folder: Path) -> Bundle:
    """Unpack a bundle into a folder, and check that it is a store with what the manifest says."""
    create_marker(folder)
    bundle = unpack_bundle(path, folder)
    sealed = [member.name for member in bundle.members if member.name.startswith("sealed/")]
    try:
        for name in sealed:
            if name.endswith(".parquet"):
                _check_pages(folder / name, name)
        for lane in sorted({name.split("/")[1] for name in sealed}):
            end_with_units(folder, lane)
        log = open_store(folder)
        wrong = _wrong(bundle, log)
    except RollbookError as error:
        raise refused(path, str(error)) from error
    if wrong is not None:
        raise refused(path, wrong)
    return bundle


def _check_pages(file: Path, name: str) -> None:
    """Check, before it is decoded, that a foreign sealed file takes no more memory than one of ours may.

    Raises:
        CorruptionError: it would take more, or cannot be read.
    """
    try:
        refuse_large_pages(file, PAGE_BYTES, GROUP_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(f"{name} cannot be read: {error}") from error


def _wrong(bundle: Bundle, log: Store) -> str | None:
    """What is wrong with a bundle that was unpacked, if anything is."""
    away = [u for lane in log.lanes() for u in current_units(log.path, lane) if u.remote or u.dropped_us]
    if away:
        return f"sealed unit {away[0].lane}/{away[0].name} is said to be elsewhere"
    lanes = verify_store(log)
    for lane in lanes:
        if lane.fault is not None:
            return str(lane.fault)
    history = history_with(log, bundle.step, bundle.run, bundle.policy)
    target = history.steps[bundle.step]
    there = [c for c in history.checkpoints if place_inside(log.path, c.path).is_dir()]
    base = next((c for c in there if c.policy_version == bundle.from_version), None)
    if base is None and bundle.from_version is not None:
        return f"the checkpoint of version {bundle.from_version} is not in it"
    steps = (*(history.between(base, bundle.step) if base is not None else ()), target)
    planned = target.planned
    actual = (
        *(format_cut(log.head()), sum(lane.events for lane in lanes)),
        *(planned.attempt, planned.cut, planned.policy_version),
        tuple(step.planned.step for step in steps),
    )
    declared = (
        *(bundle.head, bundle.events),
        *(bundle.attempt, bundle.cut, bundle.policy_version, bundle.steps),
    )
    return None if actual == declared else f"its manifest tells of {declared}, and its log of {actual}"


def replay_bundle(bundle: Bundle, log: Store, *, trust_parts: bool = False) -> StepReplay:
    """Replay the step of a bundle in the store that it was opened as.

    Raises:
        as `replay_step`
    """
    part = None if bundle.up_to is None else Part(last=bundle.up_to, model=False)
    return replay_step(log, bundle.step, bundle.run, bundle.policy, trust_parts=trust_parts, part=part)


CONFIG = "config.json"
"""A model's architecture, in a checkpoint's folder."""
_OfVersion = PolicyPublished | PolicyActivated | SyncStarted | SyncFinished | SyncFailed
_OfStep = StepPlanned | StepCommitted | StepVectors | StepRetired
_OF_VERSION = frozenset(record.KIND for record in _OfVersion.__args__)


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step's replay needs.

    Attributes:
        steps: the steps to run again, in order; the step itself is the last one.
        base: the checkpoint that they start from; None where no model is run.
        checkpoints: `base`, and those of the versions that the steps name; where no model is run, the
            one whose `CONFIG` says what a model takes.
        events: the training's, each with its place: `run.opened`, those of the steps and checkpoints,
            and the earlier steps that are only looked up.
        trajectories: ids of those that the steps trained on, compared with, or dropped.
    """

    history: History
    steps: tuple[CommittedStep, ...]
    base: CheckpointWritten | None
    checkpoints: tuple[CheckpointWritten, ...]
    events: tuple[Event, ...]
    trajectories: frozenset[str]

    @property
    def step(self) -> CommittedStep:
        """The step itself."""
        return self.steps[-1]

    @property
    def goes_on(self) -> bool:
        """Whether the optimizer goes on from the checkpoint's state; else it begins anew."""
        return self.base is not None and self.base.phase == self.step.planned.phase

    def lanes(self, rows: Iterable[Rows]) -> set[str]:
        """The lanes that have rows here, or that the cut of a plan or of a drop names."""
        records = (event.record for event in self.events)
        cuts = {made.cut for made in records if isinstance(made, StepPlanned | SampleDropped) and made.cut}
        return set[str]().union(*rows, *(parse_cut(cut) for cut in cuts))


def contents_of_step(
    log: Store, step: int, run: str | None, policy: str, *, weights: bool = True, trust_parts: bool = False
) -> StepContents:
    """What the replay of a step needs.

    Args:
        weights: whether it runs a model; else it goes as far as the log alone does.
        trust_parts: import the user's parts that a manifest names: they say what it needs.

    Raises:
        ReplayError: no such step, no start for it, or a checkpoint that its manifest names is not
            there.
        TrainError: it names a user's part that is not trusted, or cannot be loaded.
        CorruptionError: the log is damaged.
    """
    history = history_with(log, step, run, policy)
    steps: tuple[CommittedStep, ...] = (history.steps[step],)
    base = None
    if weights:
        start = find_start(RunLog(log, history), steps[0])
        steps, base = (*start.between, *steps), start.record
    if trust_parts:
        for name in sorted(
            {name for committed in steps for name in named_parts(committed.planned.algorithm)}
        ):
            load_part(name)
    if base is None:
        checkpoints = _with_config(log, history)
    else:
        named = _versions_named(steps) - {base.policy_version}
        checkpoints = [base, *(_checkpoint(log, history, version) for version in sorted(named))]
    plans = [committed.planned for committed in steps]
    refs = (ref for plan in plans for ref in (all_samples(plan) if begins(plan) else plan.samples))
    ids = {ref["trajectory_id"] for ref in refs}
    ids |= {other["trajectory_id"] for plan in plans for other in plan.others or ()}
    events, dropped = _training_events(log, history, steps, checkpoints)
    ids |= dropped
    events += _earlier_events(log, history, steps, ids)
    return StepContents(history, steps, base, tuple(checkpoints), tuple(events), frozenset(ids))


def events_of_versions(log: Store, contents: StepContents, rows: Rows) -> list[Event]:
    """The publications, syncs and activations of the versions of the steps and checkpoints, and of those
    that sampled these rows."""
    step_versions = {
        version for s in contents.steps for version in (s.planned.policy_version, s.committed.policy_version)
    }
    versions = (
        step_versions
        | {c.policy_version for c in contents.checkpoints}
        | _sampled_by(rows, contents.history.policy)
    )
    which = contents.history.run, contents.history.policy
    return [
        event
        for event in log.events_of(_OF_VERSION)
        if isinstance(event.record, _OfVersion)
        and (event.run, event.record.policy) == which
        and event.record.policy_version in versions
    ]


def _checkpoint(log: Store, history: History, version: int) -> CheckpointWritten:
    """The checkpoint of a version that a step names, which a replay reads."""
    matches = [c for c in history.checkpoints if c.policy_version == version]
    if not matches or not log.folder(matches[-1].path).is_dir():
        raise ReplayError(
            f"run {history.run!r} has no checkpoint of version {version} of policy {history.policy!r}, which "
            "the step's manifest names: restore it from a copy"
        )
    return matches[-1]


def _with_config(log: Store, history: History) -> list[CheckpointWritten]:
    """The newest checkpoint that tells the model's architecture, if there is one."""
    candidates = (c for c in reversed(history.checkpoints) if (log.folder(c.path) / CONFIG).is_file())
    return [c for c in (next(candidates, None),) if c is not None]


def _versions_named(steps: Iterable[CommittedStep]) -> set[int]:
    """The other versions whose weights the steps need: of references, and the base of LoRA factors."""
    plans = [step.planned for step in steps]
    named = {recorded_algorithm(plan.algorithm).reference for plan in plans}
    named |= {recorded_lora(plan.lora).base_version for plan in plans if plan.lora is not None}
    return {version for version in named if version is not None}


def _training_events(
    log: Store, history: History, steps: Sequence[CommittedStep], checkpoints: Collection[CheckpointWritten]
) -> tuple[list[Event], set[str]]:
    """The events of these steps and checkpoints, and the trajectories that their plans dropped."""
    attempts = {step.planned.step: step.planned.attempt for step in steps}
    kept: list[Event] = []
    dropped: set[str] = set()
    for event, drops in with_drops(log.events_of(KINDS | {RunOpened.KIND, StepVectors.KIND})):
        if isinstance(event.record, StepPlanned):
            if _is_of(event, history, attempts):
                kept += [*(noted for noted, _ in drops), event]
                dropped |= {drop.trajectory_id for _, drop in drops}
        elif isinstance(event.record, CheckpointWritten):
            kept += [event] if event.run == history.run and event.record in checkpoints else []
        elif isinstance(event.record, RunOpened):
            kept += [event] if event.run == history.run else []
        elif _is_of(event, history, attempts):
            kept.append(event)
    return kept, dropped


def _earlier_events(
    log: Store, history: History, steps: Sequence[CommittedStep], ids: Collection[str]
) -> list[Event]:
    """The plans and results of earlier steps that the replay looks up: the step that made the version that
    the first one starts from; steps that used samples of these trajectories, which are not used again;
    and earlier attempts at the step itself, whose samples it may have dropped."""
    first, last = steps[0].planned, steps[-1].planned
    attempts: dict[int, int] = {}
    for number, step in history.steps.items():
        before, plan = step.committed.policy_version == first.policy_version, step.planned
        used = {ref["trajectory_id"] for ref in plan.samples} if _is_once(last) else set[str]()
        if number < first.step and ((before and plan.phase == first.phase) or not used.isdisjoint(ids)):
            attempts[number] = plan.attempt
    events = log.events_of([StepPlanned.KIND, StepCommitted.KIND, StepFailed.KIND])
    return [e for e in events if _is_of(e, history, attempts) or _is_attempt_before(e, history, last)]


def _is_attempt_before(event: Event, history: History, plan: StepPlanned) -> bool:
    """Whether an event belongs to an earlier attempt at this plan's step."""
    record = event.record
    return (
        isinstance(record, StepPlanned | StepFailed)
        and (event.run, record.policy, record.step) == (history.run, plan.policy, plan.step)
        and record.attempt < plan.attempt
    )


def _is_once(plan: StepPlanned) -> bool:
    """Whether each sample is used once; else epochs go over all of them, which no excerpt has."""
    return plan.schedule is None or plan.schedule["slice"] is None


def _is_of(event: Event, history: History, attempts: Mapping[int, int]) -> bool:
    """Whether an event belongs to one of these attempts at steps: step -> attempt."""
    record = event.record
    if not isinstance(record, _OfStep) or (event.run, record.policy) != (history.run, history.policy):
        return False
    if isinstance(record, StepRetired):
        return record.step in attempts
    return attempts.get(record.step) == record.attempt


def _sampled_by(rows: Rows, policy: str) -> set[int]:
    """The versions of the policy that sampled tokens in these rows."""
    versions: set[int] = set()
    for table in rows.values():
        spans = pc.list_flatten(table["version_spans"])
        if isinstance(spans, pa.ChunkedArray):
            spans = spans.combine_chunks()
        mine = spans.filter(pc.equal(pc.struct_field(spans, "policy"), policy))
        versions.update(pc.struct_field(mine, "version").unique().to_pylist())
    return versions
