"""`rollbook keys`: the file of keys that `rollbook serve --keys` reads."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson
from rollbook.cli.terminal import Console, json_for_terminal, table_of

keys_app = typer.Typer(
    no_args_is_help=True,
    help="Keys that open a proxy, each for what its role is for: operator, writer, judge or reader.",
)
KeysFile = Annotated[Path, typer.Argument(help="TOML file; it holds hashes, never a key.")]


@keys_app.command("add")
def add(
    file: KeysFile,
    name: Annotated[str, typer.Option(help="What the log calls it.")],
    role: Annotated[str, typer.Option(help="operator, writer, judge or reader.")],
    expires: Annotated[
        str | None, typer.Option(help="From when on it opens nothing: 2027-01-01, or a time with its zone.")
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="What the key begins with: tml- for clients of `rollbook service`.")
    ] = "",
) -> None:
    """Make a new random key, print it this once, and add its hash to the file. A running proxy sees it.

    operator: everything. writer: agents' requests, trajectories and their own
    rewards. judge: rewards and labels of any trajectory, not as its agent.
    reader: the log, cursors, metrics.
    """
    from rollbook.edge.keys import add_key, expiry_of

    key = add_key(file, name, role, expiry_of(expires) if expires else None, prefix)
    print(f"added {name}, a {role}'s, to {file}; its key is shown this once:", file=sys.stderr)
    print(key)


@keys_app.command("list")
def list_(file: KeysFile, json: AsJson = False) -> None:
    """Show the keys of a file: name, role, and until when each is good."""
    import orjson

    from rollbook.edge.keys import read_keys

    keys, _ = read_keys(file)
    now = datetime.now(UTC)
    if json:
        rows = [{"name": k.name, "role": k.role.value, "expires": k.expires} for k in keys]
        sys.stdout.write(json_for_terminal(orjson.dumps(rows, option=orjson.OPT_UTC_Z)) + "\n")
        return
    table = table_of("name", "role", "expires")
    for key in keys:
        until = "" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M} UTC"
        table.add_row(key.name, key.role.value, f"{until}, expired" if key.expired(now) else until)
    Console().print(table)
