"""Agents as another user of this host: who that is, and what becomes theirs."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.errors import LaunchError


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
