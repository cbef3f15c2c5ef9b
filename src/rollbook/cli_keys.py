"""`rollbook keys`: the file of keys that `rollbook serve --keys` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli_options import AsJson

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
) -> None:
    """Make a new random key, print it this once, and add its hash to the file. A running proxy sees it.

    operator: everything. writer: agents' requests, trajectories and their own
    rewards. judge: rewards and labels of any trajectory, not as its agent.
    reader: the log, cursors, metrics.
    """
    from rollbook.ingest.key_file import add_key
    from rollbook.ingest.keys import expiry_of

    key = add_key(file, name, role, expiry_of(expires) if expires else None)
    print(f"added {name}, a {role}'s, to {file}; its key is shown this once:", file=sys.stderr)
    print(key)


@keys_app.command("list")
def list_(file: KeysFile, json: AsJson = False) -> None:
    """Show the keys of a file: name, role, and until when each is good."""
    from rollbook.ingest.key_file import print_keys

    print_keys(file, json)
