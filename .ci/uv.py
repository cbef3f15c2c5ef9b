"""Runs uv where pip would look for packages: `.venv-uv/bin/python .ci/uv.py pip install ...`.

uv reads none of pip's settings. Where pip was given another index, a folder of wheels or a certificate
(pip.conf, PIP_INDEX_URL and so on), uv is told of them here. Its own variables have the last word.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
"""Setting of pip -> variable of uv, and what stands there between several values."""


def pip_settings() -> dict[str, str]:
    """What pip is told for every command, by setting: a variable (PIP_...) comes before a file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    values: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section in values:
            values[section][name] = str(ast.literal_eval(value))
    return values["global"] | values["install"] | values[":env:"]


def environment() -> dict[str, str]:
    """The variables that uv is run with."""
    settings = pip_settings()
    told = {
        name: between.join(settings[key].split()) for key, (name, between) in SAME.items() if key in settings
    }
    if "UV_INDEX" in told:
        # As pip does it: all indexes are equals, and the best version counts wherever it is.
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return told | {"UV_PYTHON_DOWNLOADS": "never"} | os.environ


if __name__ == "__main__":
    uv = Path(sys.executable).with_name("uv")
    os.execve(uv, [str(uv), *sys.argv[1:]], environment())
