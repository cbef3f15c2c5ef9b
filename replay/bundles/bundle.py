"""Exports one step as a bundle, and opens bundles. A bundle opens as a store in which the step is
replayed, as far as the bundle's contents allow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from rollbook import __version__
from rollbook.engines.model_files import is_sharded
from rollbook.replay.bundles.step_contents import CONFIG, StepContents, contents_of_step, events_of_versions
from rollbook.replay.step.partial import Part, why_no_losses
from rollbook.replay.step.run_log import recorded_vectors
from rollbook.replay.step.step import history_with, replay_step
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store, format_cut
from rollbook.store import open as open_store
from rollbook.store.errors import CorruptionError, ReplayError, RollbookError
from rollbook.store.events import CheckpointWritten
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
from rollbook.store.interchange.excerpt import Excerpt, Redaction, rows_about, rows_at, write_excerpt
from rollbook.store.marker import create_marker
from rollbook.store.safe_paths import place_inside
from rollbook.store.sealed.page_headers import GROUP_BYTES, PAGE_BYTES, refuse_large_pages
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.attach import end_with_units
from rollbook.store.upkeep.verify import verify_store
from rollbook.train.batches.manifest_batch import begins, samples_at_cut
from rollbook.train.checkpoints.export import without_optimizer


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
    if is_sharded(place_inside(log.path, contents.base.path)):
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
    folder = place_inside(log.path, checkpoint.path)
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
