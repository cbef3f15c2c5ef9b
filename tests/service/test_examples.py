"""examples/tinker: its loops, unmodified, against a service; and the commands of its page."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.service.conftest import PYTHON, Service, client_environment
from typer.testing import CliRunner

from rollbook.cli.app import app

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]


def _begin(service: Service, root: Path, program: str, *words: object) -> subprocess.Popen[str]:
    """Begin a program of the examples, as its page does."""
    told = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-any", "HOME": os.environ["HOME"]}
    command = [str(part) for part in (PYTHON, root / "examples" / "tinker" / program, *words)]
    return subprocess.Popen(
        command, env=client_environment() | told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _printed(program: subprocess.Popen[str]) -> str:
    out, errors = program.communicate(timeout=450)
    assert program.returncode == 0, errors[-3000:]
    return out


def test_two_loops_at_once(
    tmp_path: Path, started: Callable[..., Service], tiny_model: Path, root: Path
) -> None:
    """The supervised one learns its lines and says one of them, the other one is rewarded; what the page asks
    afterwards is answered."""
    service = started(tmp_path, base=tiny_model, called=None)
    supervised = _begin(service, root, "supervised.py", tiny_model, 60)
    rewarded = _printed(_begin(service, root, "grpo.py", tiny_model, 4))
    learned = _printed(supervised)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", learned)]
    assert len(losses) == 60
    assert losses[-1] < 0.3 < losses[0]
    assert learned.splitlines()[-1] == repr("the log is the only truth\n")
    assert len(re.findall(r"^step \d: reward [\d.]+, loss -?[\d.]+$", rewarded, re.MULTILINE)) == 4
    page = (root / "examples" / "tinker" / "README.md").read_text()
    query = ["sql", "select run from steps where step = 3", "--store", str(service.store)]
    runs = CliRunner().invoke(app, query)
    run = re.findall(r"\S+\.train\.\d+", runs.output)[0]
    asked = re.findall(r"^rollbook (?!service service)(.*)$", page, re.MULTILINE)
    assert len(asked) == 5
    outputs = list[str]()
    for line in asked:
        words = line.replace("RUN", run).replace("--store runs", f"--store {service.store}")
        words = words.replace("curves.png", str(tmp_path / "curves.png"))
        done = CliRunner().invoke(app, _words(words))
        assert done.exit_code == 0, f"{line}\n{done.output}"
        outputs.append(done.output)
    assert "step 3: bit for bit" in outputs[3]


def _words(line: str) -> list[str]:
    """A command's words, of which one may be in quotation marks."""
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line)]
