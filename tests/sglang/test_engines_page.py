"""docs/engines.md: SGLang takes every line as it stands there, knows every flag, and the CPU's serves."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import httpx
from tests.fakes.proxies.served import Served
from tests.sglang.server import ENVIRONMENT, Process, environment

from rollbook.engines.sglang.protocol import OLDEST_SERVER
from rollbook.testing.asgi import free_port
from rollbook.train.config.config import TrainConfig
from rollbook.train.sync.control import SESSIONS_SINCE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text()
FENCE = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = str(ENVIRONMENT / "bin" / "python")
PARSE = """
import json, sys
from sglang.srt.server_args import ServerArgs, prepare_server_args
import argparse
asked = json.load(sys.stdin)
known = argparse.ArgumentParser()
ServerArgs.add_cli_args(known)
unknown = [flag for flag in asked["flags"] if flag not in known._option_string_actions]
parsed = [prepare_server_args(words).model_path for words in asked["lines"]]
from sglang_router.launch_router import parse_router_args
routers = [parse_router_args(words).port for words in asked["routers"]]
json.dump({"unknown": unknown, "parsed": parsed, "routers": routers}, sys.stdout)
"""


def lines(module: str) -> list[tuple[dict[str, str], list[str]]]:
    """(variables, words behind the module) of each line of the page that starts such a program."""
    parsed = []
    for block in FENCE.findall(PAGE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if module not in words:
                continue
            variables = dict(word.split("=", 1) for word in words[: words.index("python")])
            parsed.append((variables, words[words.index(module) + 1 :]))
    return parsed


def test_sglang_takes_every_line(models: dict[str, Path], tmp_path: Path) -> None:
    """And has every flag that the page speaks of."""
    servers, routers = lines("sglang.launch_server"), lines("sglang_router.launch_router")
    assert (len(servers), len(routers)) == (6, 1)
    table = PAGE.partition("## Flags that matter")[2].partition("## ")[0]
    flags = re.findall(
        r"`(--[a-z-]+)", "".join(row.split("|")[1] for row in table.splitlines() if "`--" in row)
    )
    assert len(flags) > 10
    words = [[str(models["dense"]) if w.startswith("./my-") else w for w in line] for _, line in servers]
    request = {"flags": flags, "lines": words, "routers": [line for _, line in routers]}
    result = subprocess.run(
        [PYTHON, "-c", PARSE],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer == {"unknown": [], "parsed": [str(models["dense"])] * 6, "routers": [30050]}


def test_the_cpus_line_serves(models: dict[str, Path], tmp_path: Path) -> None:
    """As it stands, but for the model and the port; the proxy in front finds out that it is version 0."""
    [(variables, words)] = [line for line in lines("sglang.launch_server") if "cpu" in line[1]]
    port = str(free_port())
    values = {"./my-model": str(models["dense"]), "30000": port}
    command = [PYTHON, "-m", "sglang.launch_server", *(values.get(word, word) for word in words)]
    # The wheel that is on PyPI is made for CUDA: the shim lets it start here.
    server = Process(tmp_path / "server", "page", command, environment(tmp_path) | variables)
    try:
        server.wait(f"http://127.0.0.1:{port}/health")
        options = ["--model", str(models["dense"]), "--engine", "sglang"]
        proxy = Served(tmp_path / "store", [*options, "--engine-url", f"http://127.0.0.1:{port}"])
        (engine,) = httpx.get(f"{proxy.url}/healthz").json()["engines"]
        assert (engine["policy_version"], engine["unverified"]) == (0, None)
        proxy.stop()
    finally:
        server.stop()


def test_the_versions_it_names() -> None:
    """Those that the code knows."""
    assert f"| {OLDEST_SERVER} |" in PAGE
    assert f"| {SESSIONS_SINCE} |" in PAGE


def test_the_alarm_it_names() -> None:
    """The default is the configuration's."""
    default = TrainConfig.model_fields["engine_gap_alarm"].default
    assert f"above `engine_gap_alarm` ({default:g})" in PAGE
