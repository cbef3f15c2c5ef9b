"""A base install says of every command that needs an extra which one."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollbook.cli.errors import INCLUDED, OF_COMMANDS, OF_MODULES, missing_extra

BASE = """
import contextlib, io, json, shlex, sys
MISSING = set(json.loads(sys.argv[1]))
COMMANDS = json.loads(sys.argv[2])

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from rollbook.cli.app import app
from rollbook.cli.errors import run

for command in COMMANDS:
    sys.argv, said = ["rollbook", *shlex.split(command)], io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            run(app)
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([command, code, said.getvalue()]))
"""
NEEDED = {
    **dict.fromkeys(("train c.toml --store store", "train c.toml --store store --plan"), "train"),
    **dict.fromkeys(("preflight c.toml --store store", "run o.toml --show", "bench bits"), "train"),
    "replay step 0 --store store": "train",
    "replay step 0 --store store --no-model --to losses": "train",
    "replay run --store store": "train",
    "replay weights 1 --store store": "train",
    "replay bisect --store store": "train",
    "replay what-if 0 --store store --set optimizer.lr=1": "train",
    "demo": "demo",
    "plot --store store -o x.png": "plot",
    "plot --store store --tensorboard tb": "train",
    "rollout r.toml": "ray",
    "store publish --store store": "iceberg",
}
"""Command -> its extra."""
BY_THEMSELVES = (
    *("sql 'select 1' --store store", "store info --store store", "samples --store store"),
    *("ledger --store store", "tail --store store --no-follow", "doctor --store store"),
    *("samples --store store --recipe c.toml", "import chats.jsonl --store other --run q"),
)
"""Commands that a base install has."""


@pytest.fixture
def files(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a training, and CONFIGs."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "tests" / "data" / "trained-1", "store")
    Path("m").mkdir()
    Path("c.toml").write_text('model = "m"\nsteps = 1\nrun = "demo"\n[algorithm]\nname = "sft"\n')
    Path("o.toml").write_text(
        'store = "s"\nmodel = "m"\n[train]\nsteps = 1\n[train.algorithm]\nname = "grpo"\n'
    )
    Path("r.toml").write_text('tasks = "range:2"\n[agent]\nlauncher = "ray"\ncommand = ["true"]\n')
    Path("chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n')


def test_each_command_names_its_extra(
    files: None, run_python: Callable[..., tuple[int, str, str]], root: Path
) -> None:
    """In one line, with exit code 2; what needs none works."""
    program = BASE.replace("sys.argv[1]", repr(json.dumps(sorted(OF_MODULES)))).replace(
        "sys.argv[2]", repr(json.dumps([*NEEDED, *BY_THEMSELVES]))
    )
    status, out, err = run_python(program)
    assert status == 0, err
    said: Mapping[str, tuple[int, str]] = {
        command: (code, text) for command, code, text in map(json.loads, out.splitlines())
    }
    for command, extra in NEEDED.items():
        code, text = said[command]
        assert (code, f"pip install 'rollbook[{extra}]'" in text) == (2, True), (command, text)
        assert text.count("\n") == 1, text
    assert {command: said[command] for command in BY_THEMSELVES if said[command][0] not in (0, 1)} == {}


def test_the_extras_are_those_of_the_package(root: Path) -> None:
    """And bring along what is said that they do."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*OF_COMMANDS.values(), *OF_MODULES.values(), *INCLUDED} <= set(extras)
    brought = {"megatron": "megatron-core"}
    for module, extra in OF_MODULES.items():
        assert any(line.startswith(brought.get(module, module)) for line in extras[extra]), module
    for extra, included in INCLUDED.items():
        named = ",".join(line for line in extras[extra] if line.startswith("rollbook["))
        assert any(one in named for one in included), extra


def test_another_module_is_nobodys_extra() -> None:
    """One that is missing is then a fault, of an install or of ours."""
    assert missing_extra("fastapi", ["serve"]) is None
    assert missing_extra(None, []) is None
    assert missing_extra("torch.cuda", ["serve"]) == (
        "`rollbook serve` needs torch.cuda, which is not installed: pip install 'rollbook[engine]'"
    )
