"""The CONFIG of a whole run: what each of its parts reads out of it, and what is wrong with it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rollbook.ingest.settings import load_settings
from rollbook.online.config import load_whole
from rollbook.online.parts import specs_of
from rollbook.rollouts.config import load_rollouts
from rollbook.store.errors import ConfigError
from rollbook.train.config.files import load_config

WHOLE = """
run = "sums"
store = "runs"
model = "my-model"

[serve]
port = 8123

[train]
steps = 4
[train.algorithm]
name = "grpo"
groups = 2
group_size = 3

[rollout]
tasks = "tasks.jsonl"
[rollout.agent]
command = ["python3", "agent.py"]
"""
ENGINES = """
[engines]
addresses = ["127.0.0.1:30000", "127.0.0.1:30010"]
options = ["--tp-size", "2"]
gpus = ["0,1", "2,3"]
[engines.environment]
NCCL_DEBUG = "WARN"
"""
EVALUATION = """
[evaluation]
tasks = "held-out.jsonl"
every = 10
samples = 2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a CONFIG, in the folder from which it is read."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        (tmp_path / "online.toml").write_text(text)
        return Path("online.toml")

    return write


def test_each_command_reads_its_part(file: Callable[..., Path]) -> None:
    """What they share is said once; a group is as large as the algorithm's."""
    path = file(WHOLE)
    serve, trained, rollouts = load_settings(path, {}), load_config(path, []), load_rollouts(path)
    assert (serve.run, serve.store, serve.model, serve.port) == ("sums", Path("runs"), Path("my-model"), 8123)
    assert (trained.run, trained.model, trained.steps) == ("sums", Path("my-model"), 4)
    assert trained.sync is not None
    assert [str(engine) for engine in trained.sync.engines] == ["http://127.0.0.1:8123/engine"]
    assert (rollouts.proxy, rollouts.samples, rollouts.tasks) == ("http://127.0.0.1:8123", 3, "tasks.jsonl")
    assert trained.evaluation is None
    assert rollouts.evaluation is None


def test_engines_of_the_run(file: Callable[..., Path]) -> None:
    """The proxy asks them, and the training gives them weights."""
    path = file(WHOLE + ENGINES)
    serve, trained = load_settings(path, {}), load_config(path, [])
    urls = ["http://127.0.0.1:30000", "http://127.0.0.1:30010"]
    assert (serve.engine, [str(url) for url in serve.engine_url]) == ("sglang", urls)
    assert trained.sync is not None
    assert [str(engine) for engine in trained.sync.engines] == urls


def test_an_evaluation_is_of_both(file: Callable[..., Path]) -> None:
    """The training waits for it, and the rollouts run it: on their own tasks, under the version's name."""
    path = file(WHOLE + EVALUATION)
    trained, rollouts = load_config(path, []), load_rollouts(path)
    assert trained.evaluation is not None
    assert (trained.evaluation.every, trained.evaluation.wait_s) == (10, 1800.0)
    assert rollouts.evaluation is not None
    derived = rollouts.evaluation.config(rollouts, 40)
    assert (derived.name, derived.split, derived.tasks) == ("rollouts.eval.40", "eval", "held-out.jsonl")
    assert (derived.samples, derived.concurrency, derived.evaluation) == (2, rollouts.concurrency, None)


def test_a_part_may_overrule_what_follows(file: Callable[..., Path]) -> None:
    """What a table says itself comes first; a scripted engine is given no weights."""
    own = WHOLE.replace("port = 8123", 'engine = "scripted"\nscript = "x.jsonl"\nrun = "other"')
    path = file(own.replace('tasks = "tasks.jsonl"', 'tasks = "tasks.jsonl"\nsamples = 1'))
    assert load_settings(path, {}).run == "other"
    assert load_config(path, []).sync is None
    assert load_rollouts(path).samples == 1


def test_what_is_started(file: Callable[..., Path]) -> None:
    """Engines first, each with its GPUs; then the proxy, the trainer and the rollouts."""
    config = load_whole(file(WHOLE + ENGINES))
    engines, [proxy], [trainer], [rollouts] = specs_of(config)
    assert [spec.name for spec in engines] == ["engine 127.0.0.1:30000", "engine 127.0.0.1:30010"]
    assert engines[1].command == (
        *("python", "-m", "sglang.launch_server", "--model-path", "my-model"),
        *("--host", "127.0.0.1", "--port", "30010", "--tp-size", "2"),
    )
    assert engines[1].environment == {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert engines[1].health == "http://127.0.0.1:30010/health"
    assert proxy.command[-2:] == ("serve", "online.toml")
    assert trainer.command[-6:] == ("train", "online.toml", "--store", "runs", "--source", "tail")
    assert rollouts.command[-3:] == ("rollout", "online.toml", "--follow")
    assert [spec.ends for spec in (*engines, proxy, trainer, rollouts)] == [False] * 3 + [True] * 2


def test_parts_on_several_machines(file: Callable[..., Path]) -> None:
    """What listens at another machine's address is not started here; --only starts some."""
    elsewhere = ENGINES.replace('"127.0.0.1:30010"', '"192.0.2.7:30000"').replace('"0,1", "2,3"', '"0"')
    config = load_whole(file(WHOLE + elsewhere))
    assert [spec.name for stage in specs_of(config) for spec in stage] == [
        *("engine 127.0.0.1:30000", "proxy", "trainer", "rollouts")
    ]
    assert [[spec.name for spec in stage] for stage in specs_of(config, ["rollouts"])] == [["rollouts"]]
    with pytest.raises(ConfigError, match="--only engines: it has no such table"):
        specs_of(load_whole(file(WHOLE)), ["engines"])
    away = WHOLE.replace("port = 8123", 'host = "192.0.2.8"')
    with pytest.raises(ConfigError, match="--only proxy: its address is another host's"):
        specs_of(load_whole(file(away)), ["proxy"])


def test_what_is_overruled_reaches_every_part(file: Callable[..., Path]) -> None:
    """Through a file of their own; a recipe's file is still found beside the CONFIG."""
    text = WHOLE.replace("[train.algorithm]", 'recipe = "best.toml"\n[train.algorithm]')
    path = file(text)
    Path("best.toml").write_text("max_staleness = 3\n")
    config = load_whole(path, ["serve.port=9001", "train.steps=6", 'run="again"'])
    assert config.path == Path("logs/online.json")
    assert load_settings(config.path, {}).port == 9001
    trained = load_config(config.path, [])
    assert (trained.steps, trained.run, trained.recipe.max_staleness) == (6, "again", 3)
    assert load_rollouts(config.path).proxy == "http://127.0.0.1:9001"
    assert load_whole(path).path == path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('tasks = "x"\n', "a run has at least one of the tables"),
        (WHOLE.replace('run = "sums"', 'runn = "sums"'), "runn: unknown key: did you mean run?"),
        (WHOLE.replace('store = "runs"\n', ""), "store: is missing"),
        (WHOLE.replace("steps = 4\n", 'steps = "4"\n'), "\n  train.steps: Input should be a valid integer"),
        (WHOLE.replace("steps = 4\n", "stepz = 4\n"), "\n  train.stepz: unknown key: did you mean steps?"),
        (
            WHOLE.replace('"grpo"', '"gpro"'),
            "\n  train.algorithm.name: there is no 'gpro': did you mean grpo?",
        ),
        (WHOLE.replace("port = 8123", "prot = 1"), "\n  serve.prot: unknown key: did you mean port?"),
        (WHOLE.replace('tasks = "tasks.jsonl"\n', ""), "\n  rollout.tasks: is missing"),
        (f"{WHOLE}[engines]\nport = 3\n", "\n  engines.port: unknown key: there are"),
        (f"{WHOLE}[engines.placed]\nprot = 3\n", "\n  engines.placed.prot: unknown key: did you mean port?"),
        (f"{WHOLE}[evaluation]\nevry = 3\n", "\n  evaluation.tasks: is missing\n  evaluation.evry: unknown"),
        (WHOLE.replace('"runs"', "3"), "store: Input should be a valid string"),
        (f'{WHOLE}[engines]\naddresses = ["here"]\n', "'here' is no host:port"),
        (f'{WHOLE}[engines]\ngpus = ["0", "1"]\n', "2 entries for 1 engines"),
        (f"{WHOLE}[train.evaluation]\nwait_s = 5\n", r"add \[evaluation\] tasks"),
        (f"engines = 3\n{WHOLE}", "engines is to be a table"),
    ],
)
def test_what_cannot_be_run(file: Callable[..., Path], text: str, reason: str) -> None:
    """Each error names the file and the key, and nothing was started."""
    with pytest.raises(ConfigError, match=reason) as caught:
        load_whole(file(text))
    assert str(caught.value).startswith("online.toml")


def test_a_command_without_its_table(file: Callable[..., Path]) -> None:
    """It says which it needs."""
    path = file(WHOLE.partition("[rollout]")[0])
    with pytest.raises(ConfigError, match=r"it has no table \[rollout\]"):
        load_rollouts(path)
    assert load_whole(path).rollout is None


def test_this_hosts_own_name_is_here(file: Callable[..., Path]) -> None:
    """Whatever address of this host it is."""
    name = socket.gethostname()
    config = load_whole(file(WHOLE.replace("port = 8123", f'port = 8123\nhost = "{name}"')))
    assert config.here
    assert config.proxy == f"http://{name}:8123"
