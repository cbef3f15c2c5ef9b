#!/opt/rollbook/bin/python
"""The first process of a container: makes its volume one of a store's hosts, then becomes the command given.

In /etc/rollbook/store.toml are the settings of every host, where ${NAME} stands for a variable; the store's
id is in STORE_ID. Where there are no such settings, the command is run as it is.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

SETTINGS = Path("/etc/rollbook/store.toml")


def main(command: list[str]) -> None:
    """Begin."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # process 1 is asked only so
    if SETTINGS.exists():
        begin(Path(os.environ["ROLLBOOK_STORE"]), Template(SETTINGS.read_text()).substitute(os.environ))
    os.execvp(command[0], command)


def begin(store: Path, settings: str) -> None:
    """Join the store, if the folder is not one of its hosts, and give it the settings of now.

    One at a time, where several containers have the volume.
    """
    alone = (store.parent / f".{store.name}.begin").open("a")
    fcntl.flock(alone, fcntl.LOCK_EX)
    if not (store / "store.toml").exists():
        tables = tomllib.loads(settings)
        medium, remote = tables["medium"], tables.get("remote", {})
        words = [f"{medium['url']}/{os.environ['STORE_ID']}", "--create", "--store", str(store)]
        given = {
            "--endpoint": medium.get("endpoint"),
            "--remote": remote.get("uri"),
            "--remote-endpoint": remote.get("endpoint"),
        }
        words += [word for name, value in given.items() if value for word in (name, value)]
        subprocess.run(["rollbook", "store", "join", *words], check=True, stdout=sys.stderr)
    new = store / "store.toml.new"
    new.write_text(settings)
    new.rename(store / "store.toml")
    alone.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said why
    except KeyError as error:
        sys.exit(
            f"the variable {error.args[0]} is not set: {SETTINGS} and the store's address are made of it"
        )
