"""The most that works is taken, less than what is required is refused, and each refusal says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.rollouts.launchers import isolation
from rollbook.rollouts.launchers.launching import Isolation, Level
from rollbook.store.errors import LaunchError


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    isolation.missing.cache_clear()
    yield
    isolation.missing.cache_clear()


def _only(monkeypatch: pytest.MonkeyPatch, *working: Level) -> None:
    monkeypatch.setattr(isolation, "missing", lambda level: None if level in working else f"no {level} here")


def test_auto_takes_the_most_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """From bwrap down to none, which always works."""
    for count in range(1, 4):
        _only(monkeypatch, *isolation.LEVELS[:count])
        assert isolation.chosen("auto", "none") == isolation.LEVELS[count - 1]
    assert isolation.chosen("session", "none") == "session"


@pytest.mark.parametrize(
    ("asked", "required", "message"),
    [
        ("auto", "bwrap", "isolation 'bwrap' is required, but only 'session' works here: no bwrap here"),
        ("bwrap", "none", "isolation 'bwrap' does not work here: no bwrap here; `auto` takes the most"),
        ("none", "session", "isolation 'none' was asked for, but 'session' is required: ask for `auto`"),
    ],
)
def test_less_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: Isolation, required: Level, message: str
) -> None:
    """What is required, and a level that is asked for by its name, are had or the launch is refused."""
    _only(monkeypatch, "none", "session")
    with pytest.raises(LaunchError) as refused:
        isolation.chosen(asked, required)
    assert str(refused.value).startswith(message)


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the package that has it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isolation.missing("bwrap") == "there is no 'bwrap': install bubblewrap"
    assert isolation.missing("session") is None


@pytest.mark.parametrize(
    ("user", "switches", "remedy"),
    [
        (
            1000,
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            "_userns=0`, or give bwrap an AppArmor",
        ),
        (1000, {"user/max_user_namespaces": "0"}, "allow user namespaces with `sysctl user.max_user_nam"),
        (0, {"user/max_user_namespaces": "0"}, "in a container, allow it to make namespaces"),
    ],
)
def test_what_forbids_namespaces_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, switches: dict[str, str], remedy: str
) -> None:
    """A program that is there may not be allowed to do its work: its own words are told, and the remedy."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    for name, value in switches.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(isolation, "SYSCTL", tmp_path)
    monkeypatch.setattr(isolation.os, "geteuid", lambda: user)
    why = isolation.missing("bwrap")
    assert why is not None
    assert why.startswith("bwrap: setting up uid map: Permission denied; ")
    assert remedy in why


def test_a_level_is_told_as_json() -> None:
    """What the log has of it."""
    levels = [isolation.described(level) for level in isolation.LEVELS]
    assert [entry["level"] for entry in levels] == ["none", "session", "bwrap"]
    assert levels[-1] == {
        "level": "bwrap",
        "pid_namespace": True,
        "dies_with_launcher": True,
        "own_files": True,
    }
    assert [entry["pid_namespace"] for entry in levels] == [False, False, True]
    assert [entry["own_files"] for entry in levels] == [False, False, True]


def test_the_inner_path_holds(tmp_path: Path) -> None:
    """What is hidden covers the readable folder that it is in, and what is readable or the agent's own in it
    shows again; what is hidden where nothing is seen needs no cover. The rest of the host is not there."""
    for name in ("project/store/public", "project/store/launches/one", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    project, store = tmp_path / "project", tmp_path / "project/store"
    (project / "key").touch()
    files = isolation.Files((project, store / "public"), (store, project / "key", tmp_path / "elsewhere"))
    line = " ".join(isolation.wrapped("bwrap", ["true"], store / "launches/one", files))
    own = f"--bind {store}/launches/one {store}/launches/one"
    places = [
        line.index(part)
        for part in (
            f"--ro-bind {project} {project}",
            f"--tmpfs {store}",
            own,
            f"--ro-bind {store}/public {store}/public",
            "--remount-ro / ",
        )
    ]
    assert places == sorted(places)
    assert f"--ro-bind /dev/null {project}/key" in line
    assert f"--remount-ro {store} " in line
    assert "elsewhere" not in line
    assert not {"/root", "/home", "/var", "/etc", "/", "/etc/shadow"} & set(
        line.split(" --remount-ro ")[0].split()
    )


def test_what_is_hidden_is_so_under_each_name(tmp_path: Path) -> None:
    """A readable folder that is a link shows the same files a second time."""
    (tmp_path / "real/secret").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files = isolation.Files((tmp_path / "link",), (tmp_path / "real/secret",))
    line = " ".join(isolation.wrapped("bwrap", ["true"], tmp_path, files))
    assert f"--tmpfs {tmp_path}/link/secret" in line


def test_what_agents_are_not_kept_from_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` took, what that lets agents do, and what would keep them from it; of bwrap nothing."""
    _only(monkeypatch, "none", "session")
    warning = isolation.isolation_warning("auto", "none", None)
    assert warning is not None
    for part in ("`auto` took 'session'", "the store and its secret too", "(no bwrap here)", "agent.user"):
        assert part in warning
    assert isolation.isolation_warning("auto", "none", "agents") is None
    _only(monkeypatch, *isolation.LEVELS)
    assert isolation.isolation_warning("auto", "none", None) is None
    explicit = isolation.isolation_warning("session", "none", None)
    assert explicit is not None
    assert "isolation is 'session'" in explicit
    assert "it works here: ask for `auto`" in explicit
