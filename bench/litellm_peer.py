"""The LiteLLM proxy as a peer: where it is installed, and how it is started.

It needs other versions of many packages than Rollbook does, so it has its own environment, which
`python -m rollbook.bench.litellm_peer` makes with uv. Without it, the benchmark leaves the
comparisons with it out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import orjson

from rollbook.store.errors import ConfigError

VERSION = "1.106.2"
"""Also the extra `bench` of pyproject.toml."""
REMEDY = "run `python -m rollbook.bench.litellm_peer`, which installs it in an environment of its own"
UV_VARIABLE = "ROLLBOOK_UV"
"""Words of the command that runs uv, where it is not the one on the path: `make bench` has its own."""
MODEL = "bench"


def home() -> Path:
    """Where its environment is: $ROLLBOOK_LITELLM, or a folder of this version in the user's cache."""
    chosen = os.environ.get("ROLLBOOK_LITELLM")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "rollbook" / f"litellm-{VERSION}"


def find() -> Path | None:
    """Its command, in that environment or in this one; None where it is not installed."""
    beside = [home() / "bin" / "litellm", Path(sys.executable).with_name("litellm")]
    return next((path for path in beside if path.exists()), None)


def command(program: Path, folder: Path, upstream: str, port: int) -> list[str]:
    """Its command line in front of an OpenAI-compatible upstream; `folder` is for its configuration."""
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{upstream}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    config = folder / "litellm.yaml"
    config.write_bytes(orjson.dumps(settings))  # JSON is YAML
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return [str(program.with_name("python")), str(program), *options, "--telemetry", "False"]


ENVIRONMENT = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "NO_DOCS": "True",
    "DISABLE_ADMIN_UI": "True",
}
"""No authentication, which would cost it time; nothing from the network, and little to log."""


def uv() -> list[str]:
    """The command that runs uv.

    Raises:
        ConfigError: there is none.
    """
    words = shlex.split(os.environ.get(UV_VARIABLE, "uv"))
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"uv is not on the path: install it, or name it in {UV_VARIABLE}")
    return words


def main() -> None:
    """Make the environment, unless it is there."""
    folder = home()
    if not (folder / "bin" / "litellm").exists():
        print(f"installing litellm {VERSION} into {folder}", file=sys.stderr)
        make = ["venv", "--quiet", "--allow-existing", "--no-project", "--python", sys.executable]
        install = ["pip", "install", "--quiet", "--python", str(folder), f"litellm[proxy]=={VERSION}"]
        for words in ([*make, str(folder)], install):
            subprocess.run([*uv(), *words], check=True)
    print(folder)


if __name__ == "__main__":
    main()
