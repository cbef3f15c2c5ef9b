"""`rollbook samples` and `rollbook recipe diff`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.options import AsJson, AsOf, Ray, RayStore, Run, StoreOption, ray_workers
from rollbook.cli.terminal import Console, json_items, print_items, print_json, say, table_of
from rollbook.transcript.text import visible

if TYPE_CHECKING:
    from rollbook.store.cut import Cut
    from rollbook.store.fold.trajectory import Trajectory
    from rollbook.store.log.store import Store
    from rollbook.train.batches.units import Applied
    from rollbook.train.config.files import NamedRecipe
    from rollbook.train.select.sample_ref import SampleRef
    from rollbook.train.select.samples import Sample

recipe_app = typer.Typer(no_args_is_help=True, help="What recipes make of a log.")


def samples(
    store: StoreOption,
    trajectory: Annotated[
        str | None, typer.Option(help="Only this trajectory: the client's name or the id.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="What this recipe, or the recipe of this CONFIG, keeps and drops.")
    ] = None,
    as_of: AsOf = "head",
    run: Run = None,
    ray: Ray = 0,
    ray_store: RayStore = None,
    json: AsJson = False,
) -> None:
    """Print training samples: tokens, loss mask, logprobs, policy versions of each path.

    With --recipe: which of them a training would use at the cut, and which rule drops each of the others.

    rollbook samples --store runs --trajectory task-7 --json
    rollbook samples --store runs --recipe grpo.toml --as-of step:12
    """
    if recipe is not None:
        for name, value in (("--trajectory", trajectory), ("--ray", ray or None)):
            if value is not None:
                why = "goes without --recipe, which is about all of a run and reads no token"
                raise typer.BadParameter(why, param_hint=name)
        print_recipe(store, recipe, as_of, run, json)
        return
    from rollbook.cli.runs import cut_of
    from rollbook.store.errors import CutError
    from rollbook.store.open import open_store
    from rollbook.store.workers import made_of_trajectories, sliced, spread, store_there

    workers, log = ray_workers(ray, ray_store), open_store(store)
    cut = cut_of(log, as_of, run)
    ids = [*_opened(log, cut, trajectory, run)]
    if trajectory is not None and not ids:
        raise CutError(f"no trajectory {trajectory!r} at {as_of!r}; list them: select * from trajectories")
    there = store_there(log, cut, workers)
    render: Any = _items if json else _rows
    with spread(partial(made_of_trajectories, there, render), workers) as results:
        parts = results(sliced(ids))
        print_items(parts) if json else _print_table(row for part in parts for row in part)


def _opened(log: Store, cut: Cut, named: str | None, run: str | None) -> Iterator[str]:
    """The ids of trajectories in the order in which they were opened: a run's, or those of a name or id."""
    from rollbook.store.events import TrajectoryOpened
    from rollbook.transcript.finding import openings_of

    if named is not None:
        yield from (o.trajectory_id for o in openings_of(log, cut, named) if run in (None, o.run))
        return
    for event in log.events_of([TrajectoryOpened.KIND], cut):
        if isinstance(event.record, TrajectoryOpened) and run in (None, event.run):
            yield event.record.trajectory_id


def _items(trajectories: list[Trajectory]) -> str:
    """The samples of trajectories, as items of a JSON list."""
    from rollbook.train.select.samples import all_samples

    return json_items([sample.as_json() for sample in all_samples(trajectories)])


def _rows(trajectories: list[Trajectory]) -> list[tuple[str, ...]]:
    """The samples of trajectories, as rows of a table."""
    from rollbook.train.select.samples import all_samples

    return [_row(sample) for sample in all_samples(trajectories)]


@recipe_app.command("diff")
def recipe_diff(
    a: Annotated[Path, typer.Argument(help="A recipe file, or a CONFIG.")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    store: StoreOption,
    as_of: AsOf = "head",
    run: Run = None,
    json: AsJson = False,
) -> None:
    """How the samples that two recipes keep at a cut differ, and by which rules.

    rollbook recipe diff grpo.toml fresh.toml --store runs --as-of step:12
    """
    from rollbook.store.open import open_store
    from rollbook.train.config.files import load_recipe

    log, named = open_store(store), (load_recipe(a), load_recipe(b))
    (first, where), (second, _) = (_applied(log, recipe, as_of, run) for recipe in named)
    kept = [{ref.leaf_turn_id: ref for ref in applied.kept} for applied in (first, second)]
    only = [[ref for leaf, ref in mine.items() if leaf not in other] for mine, other in (kept, kept[::-1])]
    both = [ref for leaf, ref in kept[0].items() if leaf in kept[1]]
    reasons = [_reasons(refs, other) for refs, other in zip(only, (second, first), strict=True)]
    if json:
        print_json(
            where
            | {
                "both": [ref.reference for ref in both],
                "only_a": _with_reasons(only[0], reasons[0]),
                "only_b": _with_reasons(only[1], reasons[1]),
            }
        )
        return
    table = table_of("kept by", ">samples", ">trained tokens", "the other drops them by")
    table.add_row("both", str(len(both)), str(sum(ref.trained for ref in both)), "")
    for recipe, refs, why in zip(named, only, reasons, strict=True):
        rules = sorted(set(why.values()))
        counts = ", ".join(f"{rule} ({list(why.values()).count(rule)})" for rule in rules)
        table.add_row(
            f"{visible(recipe.name)} alone", str(len(refs)), str(sum(ref.trained for ref in refs)), counts
        )
    Console().print(table)


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    numbers = (">turns", ">tokens", ">trained", ">versions", ">logprob", ">reward")
    table = table_of("trajectory", "split", "group", *numbers)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _row(s: Sample) -> tuple[str, ...]:
    versions = s.versions[s.versions >= 0]
    span = f"{versions.min()}..{versions.max()}" if versions.size else ""
    total = float(s.logprobs.sum())
    return (
        s.name,
        s.split,
        s.group or "",
        str(len(s.turn_ids)),
        str(len(s)),
        str(int(s.loss_mask.sum())),
        span,
        "" if total != total else f"{total:.3f}",
        "" if s.reward is None else f"{s.reward:g}",
    )


SHOWN = 20
"""Samples listed on a terminal; `--json` has all."""


def print_recipe(path: Path, recipe: Path, as_of: str, run: str | None, as_json: bool) -> None:
    """Print which samples of a run a recipe keeps at a cut, and what each rule drops.

    Raises:
        ConfigError: the recipe cannot be used.
        CutError: no such run or cut.
    """
    from rollbook import store
    from rollbook.train.config.files import load_recipe

    named, log = load_recipe(recipe), store.open(path)
    applied, where = _applied(log, named, as_of, run)
    if as_json:
        print_json(where | _as_json(applied))
        return
    text = f"{visible(named.name)}, run {visible(where['run'])} at {where['cut'] or 'its beginning'}"
    say(f"{text}, version {applied.version}: {_counted(applied)}")
    if named.config is not None and where["model_limits"] is None:
        model = visible(str(named.config.model))
        say(f"no model can be read at {model}: nothing is held against its vocabulary and context")
    _print_rules(applied)
    _print_samples(applied.kept)


def _applied(log: Store, named: NamedRecipe, as_of: str, run: str | None) -> tuple[Applied, dict[str, Any]]:
    """What a recipe makes of a run's samples, and where: run, cut, version."""
    from rollbook.cli.runs import cut_of, only_run
    from rollbook.store import format_cut
    from rollbook.train.batches.units import apply_recipe
    from rollbook.train.doctor.check import limits_of

    config = named.config
    run = run or (config.run if config else only_run(log))
    cut = cut_of(log, as_of, run)
    policy, limits = (config.policy, limits_of(config)) if config else ("actor", None)
    applied = apply_recipe(log, cut, run, policy, named.recipe, named.algorithm, limits=limits)
    held = None if limits is None else {"vocabulary": limits.vocabulary, "context": limits.context}
    where = {"run": run, "cut": format_cut(cut), "policy_version": applied.version, "model_limits": held}
    return applied, where


def _counted(applied: Applied) -> str:
    refs = applied.kept
    groups = {ref.group for ref in refs if ref.group is not None}
    trajectories = len({ref.trajectory_id for ref in refs})
    trained = sum(ref.trained for ref in refs)
    within = f"{len(groups)} groups" if applied.pairs is None else f"{len(applied.pairs)} pairs"
    return f"keeps {len(refs)} samples of {trajectories} trajectories in {within}, {trained} trained tokens"


def _print_rules(applied: Applied) -> None:
    from rollbook.train.select.sample_ref import SampleRef

    if not applied.drops:
        return
    table = table_of("dropped by", ">samples", "the first of them")
    for rule, count in applied.rules.most_common():
        first = next(drop for drop in applied.drops if drop.rule == rule)
        assert isinstance(first.sample, SampleRef)
        detail = ", ".join(f"{key} {value}" for key, value in first.detail.items())
        table.add_row(rule, str(count), visible(f"{first.sample.name}{f': {detail}' if detail else ''}"))
    Console().print(table)


def _print_samples(refs: list[SampleRef]) -> None:
    if not refs:
        return
    table = table_of("kept", "group", ">tokens", ">trained", ">versions", ">reward")
    for ref in refs[:SHOWN]:
        versions = "" if ref.oldest_version is None else f"{ref.oldest_version}..{ref.newest_version}"
        reward = "" if ref.reward is None else f"{ref.reward:g}"
        numbers = (str(ref.length), str(ref.trained), versions, reward)
        table.add_row(visible(ref.name), visible(ref.group or ""), *numbers)
    Console().print(table)
    if len(refs) > SHOWN:
        say(f"and {len(refs) - SHOWN} more: --json lists all")


def _as_json(applied: Applied) -> dict[str, Any]:
    drops = [
        {"turn_id": drop.sample.leaf_turn_id, "rule": drop.rule, "detail": drop.detail}
        for drop in applied.drops
    ]
    kept = [
        ref.reference
        | {"trajectory": ref.name, "group": ref.group, "reward": ref.reward, "trained": ref.trained}
        for ref in applied.kept
    ]
    fields: dict[str, Any] = {"kept": kept, "dropped": drops}
    if applied.pairs is not None:
        fields["pairs"] = [
            {"chosen": chosen.reference, "rejected": rejected.reference} for chosen, rejected in applied.pairs
        ]
    return fields


def _reasons(refs: Iterable[SampleRef], other: Applied) -> dict[str, str]:
    """Leaf turn -> the rule by which the other recipe drops it; a sample of another split is no candidate
    of that recipe."""
    rules = {drop.sample.leaf_turn_id: drop.rule for drop in other.drops}
    return {ref.leaf_turn_id: rules.get(ref.leaf_turn_id, "splits") for ref in refs}


def _with_reasons(refs: list[SampleRef], reasons: dict[str, str]) -> list[dict[str, Any]]:
    return [ref.reference | {"rule": reasons[ref.leaf_turn_id]} for ref in refs]
