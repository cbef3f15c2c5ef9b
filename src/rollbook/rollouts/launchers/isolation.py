"""How far an agent can be kept from others on this host, the command lines that do it, and agents as another
user of the host.

What works is tried, not guessed: whether namespaces may be made depends on the kernel, on AppArmor and on the
container that all of this runs in. Each level is tried once per process; it takes some 20 ms.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rollbook.rollouts.launchers.launching import Isolation, Level
from rollbook.store.errors import LaunchError
from rollbook.store.events import Json

LEVELS: tuple[Level, ...] = get_args(Level)
"""From the least to the most."""
SYSCTL = Path("/proc/sys")
TRIAL_S = 10.0
"""A trial that takes longer failed."""
_ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "group", "hosts"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "os-release", "passwd"),
    *("pki/ca-trust", "pki/tls/certs", "protocols", "resolv.conf", "services", "ssl/certs"),
    *("ssl/openssl.cnf", "timezone"),
)
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt"),
    *(f"/etc/{name}" for name in _ETC),
)
"""What programs need of a host. Of /etc it is named one by one: /etc/ssl/private holds keys."""


@dataclass(frozen=True, slots=True)
class Files:
    """What agents with files of their own see, beyond the system's programs and this interpreter.

    Where one path lies inside another, the inner one holds.

    Attributes:
        readable: files and folders that they may read.
        hidden: what they must not see where it lies inside what they may: a store, the folders of others.
    """

    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()


NO_FILES = Files()
AS_ANOTHER = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
"""What a keeper that is root needs for an agent that is another user: to become it, and to end it."""
NO_PLACES: Mapping[str, Path] = {}


def chosen(wanted: Isolation, required: Level) -> Level:
    """The level that an agent is kept at.

    Raises:
        LaunchError: what is asked for does not work here, or it is less than what is required.
    """
    if wanted == "auto":
        level = next(level for level in reversed(LEVELS) if missing(level) is None)
    elif (why := missing(wanted)) is not None:
        raise LaunchError(f"isolation {wanted!r} does not work here: {why}; `auto` takes the most that works")
    else:
        level = wanted
    if LEVELS.index(level) >= LEVELS.index(required):
        return level
    if wanted != "auto":
        raise LaunchError(f"isolation {wanted!r} was asked for, but {required!r} is required: ask for `auto`")
    raise LaunchError(
        f"isolation {required!r} is required, but only {level!r} works here: {missing(required)}"
    )


def described(level: Level) -> Json:
    """What a level keeps apart, as the log has it."""
    own = level == "bwrap"
    return {"level": level, "pid_namespace": own, "dies_with_launcher": own, "own_files": own}


def isolation_warning(wanted: Isolation, required: Level, user: str | None) -> str | None:
    """What agents of this user on this host can reach, and the remedy; None: they see files of their own,
    or are another user.

    Raises:
        LaunchError: as `chosen`.
    """
    level = chosen(wanted, required)
    if level == "bwrap" or user is not None:
        return None
    how = (
        f"`auto` took {level!r}, the most that works here" if wanted == "auto" else f"isolation is {level!r}"
    )
    lacks = missing("bwrap") or "it works here: ask for `auto`"
    return (
        f"agents have no files of their own ({how}): they read what this user may, the store and its secret "
        f"too, and write there. Isolation 'bwrap' gives them some ({lacks}); or name another user for them, "
        "agent.user, who cannot read the store"
    )


def wrapped(
    level: Level,
    command: Sequence[str],
    folder: Path,
    files: Files = NO_FILES,
    places: Mapping[str, Path] = NO_PLACES,
    *,
    as_another: bool = False,
    disk_mb: int | None = None,
) -> list[str]:
    """The command line that runs a command at a level, which works here.

    In a namespace the command is process 1: it adopts what loses its parent, all ends with it, and nothing in
    the namespace can end it.

    Args:
        level: as `chosen` gives it.
        command: a program, by its full path, and its arguments.
        folder: the one that it may write to. The command is not started in it.
        files: what it sees of others.
        places: where else it finds parts of its folder.
        as_another: the command makes what it starts another user's.
        disk_mb: of a /tmp of its own.
    """
    if level != "bwrap":
        return list(command)
    keeps = [word for name in AS_ANOTHER if as_another for word in ("--cap-add", name)]
    # Of a folder that is its owner's alone, bwrap makes those above it root's alone.
    above = [path for root in (folder, *map(Path, places)) for path in root.parents if as_another]
    return [*_own_files(folder, files, places, disk_mb, above), *keeps, "--", *command]


def interpreter() -> str:
    """This interpreter's own file: what leads to it may be a link inside a folder that is not visible."""
    return os.path.realpath(sys.executable)


@functools.cache
def missing(level: Level) -> str | None:
    """What a level lacks on this host, and the remedy; None: it works."""
    if level != "bwrap":
        return None
    if shutil.which("bwrap") is None:
        return "there is no 'bwrap': install bubblewrap"
    return _trial(wrapped(level, [interpreter(), "-I", "-S", "-c", "pass"], Path("/tmp")))


def _trial(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}; {_remedy()}"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else f'it ended with {done.returncode}'}; {_remedy()}"


def _remedy() -> str:
    """What most likely keeps this process from making namespaces, and how to allow it."""
    switches = {
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "user.max_user_namespaces": ("0", "10000"),
    }
    for name, (forbids, allows) in switches.items():
        try:
            value = SYSCTL.joinpath(*name.split(".")).read_text().strip()
        except OSError:
            continue
        if value == forbids and os.geteuid() != 0:
            either = ", or give bwrap an AppArmor profile" if "apparmor" in name else ""
            return f"allow user namespaces with `sysctl {name}={allows}`{either}"
    return "in a container, allow it to make namespaces (docker run --cap-add SYS_ADMIN)"


def _own_files(
    folder: Path, files: Files, places: Mapping[str, Path], disk_mb: int | None, above: Sequence[Path]
) -> list[str]:
    """A root of its own by bubblewrap, which is empty but for what is named. The network is the host's, since
    the proxy is reached on loopback."""
    mounts: list[tuple[str, list[str]]] = [
        *((str(path), ["--dir", str(path)]) for path in above if path != path.parent),
        ("/proc", ["--proc", "/proc"]),
        ("/dev", ["--dev", "/dev"]),
        ("/tmp", [*([] if disk_mb is None else ["--size", str(disk_mb << 20)]), "--tmpfs", "/tmp"]),
    ]
    visible = list(_visible(files))
    mounts += [(at, ["--ro-bind", source, at]) for source, at in visible]
    closed = list(_closed(files, visible))
    mounts += [(at, option) for at, option in closed]
    mounts += [(at, ["--bind", str(path), at]) for at, path in {str(folder): folder, **places}.items()]
    # What lies inside comes after what it lies in, and of the same place the last one holds.
    mounts.sort(key=lambda mount: Path(mount[0]).parts)
    sealed = ["/", *(at for at, option in closed if option[0] == "--tmpfs")]
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-ipc", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(word for _, option in mounts for word in option),
        *(word for at in sealed for word in ("--remount-ro", at)),
        *("--chdir", "/"),
    ]


def _visible(files: Files) -> Iterator[tuple[str, str]]:
    """(path on this host, path inside) of all that can be read."""
    wanted = [Path(path) for path in SYSTEM] + [Path(sys.prefix), Path(sys.base_prefix), *files.readable]
    wanted += [Path(interpreter()), Path(__file__).resolve().with_name("reaper.py")]
    # A virtual environment's interpreter is a link, often to others before the file itself.
    step = Path(sys.executable)
    while step.is_symlink():
        wanted.append(step)
        step = step.parent / step.readlink()
    hidden = {Path(os.path.abspath(path)) for path in files.hidden}
    seen: set[Path] = set()
    for path in sorted({Path(os.path.abspath(path)) for path in wanted}, key=lambda path: path.parts):
        outer = next((parent for parent in path.parents if parent in seen or parent in hidden), None)
        if path.exists() and (outer is None or outer in hidden):
            seen.add(path)
            yield str(path.resolve()), str(path)


def _closed(files: Files, visible: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """What covers hidden paths, at each place there where they would be seen."""
    for path in {hidden.resolve() for hidden in files.hidden if hidden.exists()}:
        cover = ["--tmpfs"] if path.is_dir() else ["--ro-bind", "/dev/null"]
        for source, at in visible:
            if path.is_relative_to(source):
                there = str(Path(at) / path.relative_to(source))
                yield there, [*cover, there]


@dataclass(frozen=True, slots=True)
class User:
    """A user by numbers: of itself, its first group, and all of its groups."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def user_of(text: str) -> User:
    """The user of a name of this host, or of numbers, `uid` or `uid:gid`.

    Raises:
        LaunchError: there is none of that name, or this process may not become it.
    """
    if re.fullmatch(r"[0-9]+(:[0-9]+)?", text):
        uid, _, gid = text.partition(":")
        user = User(int(uid), int(gid or uid), (int(gid or uid),))
    else:
        try:
            known = pwd.getpwnam(text)
        except KeyError:
            why = "this host has no such user: make it (useradd), or give a number"
            raise LaunchError(f"agent.user = {text!r}: {why}") from None
        groups = os.getgrouplist(text, known.pw_gid)
        user = User(known.pw_uid, known.pw_gid, tuple(groups))
    if os.geteuid() != 0:
        why = f"this process is user {os.geteuid()}, and only root starts agents as another: be root"
        raise LaunchError(f"agent.user = {text!r}: {why}, or leave it out")
    return user


def hand_over(folder: Path, user: User) -> None:
    """Make a folder and all that is in it the user's; links are not followed."""
    for path in (folder, *_inside(folder)):
        os.lchown(path, user.uid, user.gid)


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        yield from (Path(root) / name for name in (*folders, *files))
