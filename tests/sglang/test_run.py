"""`rollbook run` with an SGLang server of its own, which is killed in the middle: it is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.sglang.server import ENVIRONMENT, OPTIONS, environment, group_of, shared_files

from rollbook import store
from rollbook.demo.processes import rollbook_command
from rollbook.store.events import EvalFinished, PolicyActivated, StepCommitted
from rollbook.testing.asgi import free_port
from rollbook.testing.ledger import fold_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4
CONFIG = """
run = "sums"
store = "runs"
model = {model}

[engines]
addresses = ["127.0.0.1:{engine}"]
command = [{python}, "-m", "sglang.launch_server"]
options = {options}
environment = {environment}
ready_s = 240

[serve]
port = {port}

[train]
steps = {steps}
threads = 1
[train.algorithm]
name = "grpo"
groups = 2
group_size = 2
[train.recipe]
drop_zero_variance = false
max_staleness = 2

[rollout]
tasks = "examples/arithmetic/tasks.jsonl"
limit = 4
concurrency = 4
[rollout.retries]
attempts = 50
pause_s = 1
stop_share = 1.0
[rollout.agent]
command = ["python3", "-S", "examples/arithmetic/agent.py", "{{question}}"]
isolation = "session"
[[rollout.score]]
name = "brief"
function = "examples/arithmetic/sums.py:brief"

[evaluation]
tasks = "examples/arithmetic/tasks.jsonl"
every = {steps}
limit = 2
"""


def test_an_engine_of_the_run_that_dies(models: dict[str, Path], tmp_path: Path) -> None:
    """It is started again and given the weights; all steps are taken, and evaluations are of one version."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    variables = {k: v for k, v in environment(tmp_path).items() if os.environ.get(k) != v}
    toml = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in variables.items())
    engine = free_port()
    written = CONFIG.format(
        model=json.dumps(str(models["dense"])),
        python=json.dumps(str(ENVIRONMENT / "bin" / "python")),
        options=json.dumps(OPTIONS),
        environment=f"{{ {toml} }}",
        engine=engine,
        port=free_port(),
        steps=STEPS,
    )
    (tmp_path / "online.toml").write_text(written)
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(rollbook_command("run", "online.toml"), cwd=tmp_path, stdout=log, stderr=log)
    groups: set[int] = set()
    try:
        log_of = _await_step(tmp_path, run)
        leader = _leader(engine)
        groups.add(leader)
        os.killpg(leader, signal.SIGKILL)
        assert run.wait(300) == 0, (tmp_path / "run.log").read_text()[-3000:]
    finally:
        groups |= {_leader(engine)} - {0}
        run.kill()
        run.wait()
        for group in groups:
            for file in shared_files(group):
                file.unlink(missing_ok=True)
    assert f"engine 127.0.0.1:{engine} was ended by SIGKILL" in (tmp_path / "run.log").read_text()
    assert not any(group_of(group) for group in groups)
    records = [event.record for event in log_of.events()]
    assert [record.policy_version for record in records if isinstance(record, StepCommitted)] == [1, 2, 3, 4]
    evaluated = [record for record in records if isinstance(record, EvalFinished)]
    assert [
        (record.policy_version, record.oldest_version, record.newest_version) for record in evaluated
    ] == [(version, version, version) for version in (0, STEPS)]
    activated = [record.policy_version for record in records if isinstance(record, PolicyActivated)]
    assert len(activated) > len(set(activated)), "one version was given twice: to the new engine too"
    assert not any(fold_ledger(log_of.events()).unaccounted().values())


def _await_step(folder: Path, run: subprocess.Popen[bytes]) -> store.Store:
    """The log, once it has a step."""
    by = time.monotonic() + 300
    while time.monotonic() < by and run.poll() is None:
        if (folder / "runs" / "STORE.json").exists():
            log = store.open(folder / "runs")
            if next(iter(log.events_of({StepCommitted.KIND})), None) is not None:
                return log
        time.sleep(0.2)
    pytest.fail((folder / "run.log").read_text()[-3000:])


def _leader(port: int) -> int:
    """The process group of the server at a port; 0: there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sglang.launch_server" in words and str(port).encode() in words:
            return os.getpgid(int(process.name))
    return 0
