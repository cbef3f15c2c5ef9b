"""`rollbook ledger`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rollbook.cli.errors import querying
from rollbook.cli.options import AsJson, AsOf, Run, StoreOption
from rollbook.cli.terminal import Console, print_json, table_of

if TYPE_CHECKING:
    from rollbook.store.sql.balance import Comparison, Omitted, RunLedger


def ledger(
    store: StoreOption,
    run: Run = None,
    as_of: AsOf = "head",
    by_version: Annotated[bool, typer.Option("--by-version", help="A line per version, too.")] = False,
    json: AsJson = False,
) -> None:
    """Where every sampled token went, and whether what was dropped is like what was trained.

    generated = trained + dropped (by a rule) + waiting (finished, unused)
    + in flight (still open) + kept out (for a reason), at every cut. The last
    line says that it balances; exit code 1: it does not. See docs/ledger.md.
    """
    from rollbook.cli.runs import check_run, of_run
    from rollbook.store.cut import format_cut
    from rollbook.store.errors import CutError
    from rollbook.store.open import open_store
    from rollbook.store.sql.balance import read_ledger
    from rollbook.store.sql.query import connect_at

    log = open_store(store)
    with of_run(log, run):
        cut = format_cut(log.cut(as_of, run))
    with connect_at(log, cut) as connection, querying(connection):
        ledgers = read_ledger(connection)
    if run is not None and run not in {ledger.run for ledger in ledgers}:
        check_run(log, run)
        known = ", ".join(ledger.run for ledger in ledgers) or "none"
        raise CutError(f"run {run!r} has no completed turn at {as_of!r}; runs that have: {known}")
    ledgers = [ledger for ledger in ledgers if run in (None, ledger.run)]
    if json:
        print_json(_as_json(cut, ledgers))
    else:
        _print(Console(), cut, ledgers, by_version)
    raise typer.Exit(0 if all(ledger.balances for ledger in ledgers) else 1)


SIGNIFICANT = 0.05
"""Dropped and trained trajectories are said to differ below this p-value."""

NAMED = 10
"""Omitted trajectories that are named one by one."""


def _as_json(cut: str, ledgers: list[RunLedger]) -> dict[str, Any]:
    runs = [
        {
            "run": ledger.run,
            "generated": {"turns": ledger.generated.turns, "tokens": ledger.generated.tokens},
            "terms": [
                asdict(a) | {"share": _share(a.tokens, ledger.generated.tokens)} for a in ledger.amounts
            ],
            "versions": [asdict(v) | {"difference": v.difference} for v in ledger.versions],
            "omitted": [asdict(omission) for omission in ledger.omitted],
            "difference": ledger.difference,
            "balances": ledger.balances,
            "dropped_against_trained": {
                "tokens": ledger.length and _comparison(ledger.length),
                "seconds": ledger.seconds and _comparison(ledger.seconds),
            },
        }
        for ledger in ledgers
    ]
    return {"cut": cut, "balances": all(ledger.balances for ledger in ledgers), "runs": runs}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "dropped": asdict(comparison.first),
        "trained": asdict(comparison.second),
        "ks_statistic": comparison.statistic,
        "p_value": comparison.p_value,
    }


def _share(tokens: int, total: int) -> float:
    return tokens / total if total else 0.0


def _print(console: Console, cut: str, ledgers: list[RunLedger], by_version: bool) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    if not ledgers:
        say(f"no completed turn at {cut}")
    for ledger in ledgers:
        say(f"run {ledger.run} at {cut}\n")
        console.print(_terms(ledger))
        if by_version:
            say("")
            console.print(_by_version(ledger))
        if ledger.length is not None and ledger.seconds is not None:
            say("")
            say(comparison_line(ledger.length, "are longer", "are shorter", "length", "tokens"))
            say(comparison_line(ledger.seconds, "take longer", "take less time", "duration", "s"))
        for omission in ledger.omitted[:NAMED]:
            say(_omitted(omission))
        if len(ledger.omitted) > NAMED:
            say(f"and {len(ledger.omitted) - NAMED} more: --json names all")
        say("")
    for ledger in ledgers:
        say(_verdict(ledger))


def _terms(ledger: RunLedger) -> Table:
    from rollbook.store.sql.balance import TERMS

    table = table_of("term", ">tokens", ">turns", ">share")
    whole = ledger.generated
    for term in ("generated", *TERMS):
        of_term = [whole] if term == "generated" else [a for a in ledger.amounts if a.term == term]
        if not of_term:
            table.add_row(term, "0", "0", _percent(0, whole.tokens))
        for amount in of_term:
            name = term if amount.rule is None else f"  {amount.rule}"
            percent = _percent(amount.tokens, whole.tokens)
            table.add_row(name, f"{amount.tokens:,}", f"{amount.turns:,}", percent)
    return table


def _percent(tokens: int, total: int) -> str:
    return f"{100 * _share(tokens, total):.1f} %"


def _by_version(ledger: RunLedger) -> Table:
    from rollbook.store.sql.balance import TERMS

    table = table_of("policy", ">version", ">generated", *(f">{term}" for term in TERMS))
    for v in ledger.versions:
        version = "" if v.policy_version is None else str(v.policy_version)
        numbers = [v.generated, *(v.tokens[term] for term in TERMS)]
        table.add_row(v.policy or "none", version, *(f"{n:,}" for n in numbers))
    return table


def comparison_line(comparison: Comparison, more: str, less: str, what: str, unit: str) -> str:
    """One sentence on dropped trajectories (`first` of the comparison) against trained ones, in plain
    words."""
    dropped, trained = comparison.first, comparison.second
    if comparison.p_value >= SIGNIFICANT:
        claim = f"no sign that dropped trajectories differ in {what}"
    elif dropped.median == trained.median:
        claim = f"dropped trajectories differ in {what}"
    else:
        claim = f"dropped trajectories {more if dropped.median > trained.median else less}"
    chance = "p < 0.001" if comparison.p_value < 0.001 else f"p = {comparison.p_value:.3f}"
    return (
        f"{claim}: median {_number(dropped.median)} against {_number(trained.median)} {unit}, "
        f"p90 {_number(dropped.p90)} against {_number(trained.p90)}; KS {comparison.statistic:.2f}, {chance} "
        f"({dropped.count:,} dropped, {trained.count:,} trained)"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _omitted(omission: Omitted) -> str:
    what = f"turns {', '.join(omission.turns)} of trajectory" if omission.turns else "trajectory"
    return f"omitted without a reason: {what} {omission.trajectory_id} ({omission.tokens:,} tokens)"


def _verdict(ledger: RunLedger) -> str:
    from rollbook.store.sql.balance import TERMS

    terms = " + ".join(f"{ledger.tokens(term):,} {term}" for term in TERMS)
    if ledger.balances:
        return f"{ledger.run} balances: {ledger.generated.tokens:,} generated = {terms}"
    wrong = [f"{v.policy} {v.policy_version}: {v.difference:,}" for v in ledger.versions if v.difference]
    return (
        f"{ledger.run} does not balance: {ledger.generated.tokens:,} generated, {terms}; the difference is "
        f"{ledger.difference:,} tokens (by version: {', '.join(wrong) or 'none'}). "
        "Check the store with rollbook store verify"
    )
