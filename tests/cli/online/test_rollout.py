"""`rollbook rollout` where nothing can be run: what is wrong, and what to do."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollbook.rollouts import proxy
from rollbook.testing.asgi import free_port

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs it on a CONFIG: its exit code, and what it says on standard error."""
    monkeypatch.setattr(proxy, "FIRST_S", 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')

    def run(text: str, *words: str) -> tuple[int, str]:
        from rollbook.cli.app import main

        (tmp_path / "r.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["rollbook", "rollout", "r.toml", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


WHOLE = 'tasks = "tasks.jsonl"\n[agent]\ncommand = ["true"]\n'
CLASS = 'tasks = "tasks.jsonl"\n[agent]\nlauncher = "python"\nrollout = "{}"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[agent]\ncommand = ["true"]\n', "tasks: is missing"),
        ("tasks =", "not TOML"),
        (WHOLE.replace("tasks.jsonl", "none.jsonl"), "'none.jsonl' is no file"),
        (CLASS.format("nowhere:X"), "'nowhere' cannot be imported"),
        (f'{WHOLE}[[score]]\nname = "x"\nfunction = "nowhere:f"\n', "'nowhere' cannot be imported"),
        (CLASS.format("os:sep"), "no class derived from AgenticRollout"),
    ],
)
def test_what_cannot_be_used(rollout: Command, text: str, reason: str) -> None:
    """Nothing is started."""
    code, error = rollout(text)
    assert (code, reason in error) == (2, True), error


def test_a_proxy_that_is_away(rollout: Command) -> None:
    """Its address is named, and what to start."""
    url = f"http://127.0.0.1:{free_port()}"
    code, error = rollout(WHOLE, "--set", f'proxy="{url}"')
    assert code == 75
    assert f"the proxy at {url} does not answer" in error
    assert "is `rollbook serve` up?" in error


def test_two_at_once(rollout: Command, tmp_path: Path) -> None:
    """Of one name, in one folder."""
    (tmp_path / "rollouts").mkdir()
    with (tmp_path / "rollouts/rollouts.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, error = rollout(WHOLE)
    assert code == 2
    assert "another process runs rollouts 'rollouts'" in error
