"""A JSONL file of chats, read twice: once to check and index all of it, then a trajectory at a time."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rollbook.store.digest import digest_json
from rollbook.store.errors import InterchangeError
from rollbook.store.interchange.chats import Chat, Head, read_chat, shown

IDS = uuid.UUID("8d90a791-8574-56dc-942c-dec368db6802")
"""Namespace of the ids of imported trajectories."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """Where a chat stands in the file, and the digest of what it says."""

    number: int
    offset: int
    digest: str


@dataclass(slots=True)
class Entry:
    """A trajectory of the file: its name within the run, and its lines (one, unless it was exported)."""

    name: str
    origin: str | None
    lines: list[Line] = field(default_factory=list)
    trajectory_id: str = ""


class ChatFile:
    """A checked file. In memory are a few hundred bytes for each line, and one trajectory.

    Args:
        advance: called with how many bytes of the file were checked.

    Raises:
        InterchangeError: it cannot be read, or a line is not as it must be; file, line, value and remedy.
    """

    def __init__(self, path: Path, run: str, split: str, advance: Callable[[int], Any]) -> None:
        self.path, self.run, self.split = path, run, split
        self.lines = 0
        self._file = _open(path)
        try:
            self.entries, self.sha256 = self._index(advance)
        except BaseException:
            self._file.close()
            raise

    def chats(self, entry: Entry) -> list[Chat]:
        """The chats of a trajectory.

        Raises:
            InterchangeError: the file is not what it was when it was checked.
        """
        chats = []
        for line in entry.lines:
            self._file.seek(line.offset)
            where = f"{self.path}, line {line.number}"
            chat = read_chat(self._file.readline(), where, self.split)
            if chat.digest != line.digest:
                raise InterchangeError(f"{where}: it changed while it was imported; import the file again")
            chats.append(chat)
        return chats

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> ChatFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _index(self, advance: Callable[[int], Any]) -> tuple[list[Entry], str]:
        entries: dict[str, Entry] = {}
        heads: dict[str, str] = {}
        same: dict[str, int] = {}
        sha256 = hashlib.sha256()
        offset = 0
        for number, raw in enumerate(self._file, 1):
            sha256.update(raw)
            start = offset + (len(BOM) if number == 1 and raw.startswith(BOM) else 0)
            line, offset = raw[start - offset :], offset + len(raw)
            advance(len(raw))
            if not line.strip():
                continue
            self.lines += 1
            where = f"{self.path}, line {number}"
            chat = read_chat(line, where, self.split)
            name = chat.head.name
            if name is None:
                # Equal lines differ by how many of them came before.
                same[chat.digest] = same.get(chat.digest, 0) + 1
                name = f"chat-{chat.digest[:16]}" + (f"-{same[chat.digest]}" if same[chat.digest] > 1 else "")
            entry = entries.setdefault(name, Entry(name, chat.origin))
            if entry.lines:
                _check_same(where, name, entry, chat, heads[name])
            heads[name] = _head_digest(chat.head)
            entry.lines.append(Line(number, start, chat.digest))
        for entry in entries.values():
            said = [self.run, entry.name, [line.digest for line in entry.lines]]
            entry.trajectory_id = str(uuid.uuid5(IDS, digest_json(said)))
        return list(entries.values()), sha256.hexdigest()


def _check_same(where: str, name: str, entry: Entry, chat: Chat, head: str) -> None:
    """Refuse a second line of a name, but for another path of one exported trajectory."""
    first = entry.lines[0].number
    if chat.origin is None or chat.origin != entry.origin:
        raise InterchangeError(
            f"{where}: trajectory {shown(name)} is named at line {first} already; names are unique within a "
            "run: rename one of them, or import an export of one run at a time (export --run)"
        )
    if _head_digest(chat.head) != head:
        raise InterchangeError(
            f"{where}: trajectory {shown(name)} has another group, task, split, status, reward, success or "
            f"labels at line {first}: make its lines agree"
        )


def _head_digest(head: Head) -> str:
    return digest_json([getattr(head, name) for name in Head.__slots__])


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror}; name a JSONL file of chats") from error
