"""A JSONL file of OpenAI-style chats, read and checked line by line.

It is read twice: first to check and index the whole file, then one trajectory at a time.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from rollbook.store.digest import digest_json
from rollbook.store.errors import InterchangeError
from rollbook.store.events import SPLITS, Json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
STATUSES = ("completed", "truncated", "aborted", "failed", "void", "open")
REQUEST_FIELDS = (
    *("model", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    "chat_template_kwargs",
)
"""Keys of a line that belong to the request of each of its turns."""
OF_AN_EXPORT = ("trajectory_id", "run", "turns", "tokens")
"""Keys that mean something of their own in a line that has a `trajectory_id`: one that was exported."""
NAME_LENGTH = 256
MARKS = ("weight", "train", "training", "loss")
"""Keys by which a message says whether it is trained: a number, 0 or 1, or true and false."""
AFTER = "messages_after"
"""Label of the messages behind the last reply that counts: no turn has read them."""
_WRAPPED = 6
"""Levels of nesting that an event may put around a chat."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a line states about its trajectory. `name` is None if it states none."""

    name: str | None
    group: str | None
    task: str | None
    split: str
    status: str
    labels: Json
    reward: float | None
    success: bool | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation up to its last reply that counts.

    `origin` is the trajectory that an exported line is a path of. `marks` maps an exported
    reply's place in `messages` to its turn and reward. Replies among the first `context`
    messages are no turns, nor are those in `untrained`: other turns read them, but they are not
    trained.
    """

    messages: list[Json]
    request: Json
    head: Head
    origin: str | None
    marks: dict[int, tuple[str, float | None]]
    digest: str
    context: int = 0
    untrained: frozenset[int] = frozenset()

    def replies(self) -> list[int]:
        """The places of the replies that count."""
        return _replies(self.messages, self.context, self.untrained)


class _Refusal(Exception):
    """What is wrong with a line, and what to do; the caller says which line it is."""


def read_chat(line: bytes, where: str, split: str) -> Chat:
    """The chat of a line.

    Args:
        where: file and line, for the message of an error.
        split: of a line that names none.

    Raises:
        InterchangeError: the format does not allow the line.
    """
    try:
        return _chat(_object(line), split)
    except _Refusal as error:
        raise InterchangeError(f"{where}: {error}") from error


def shown(value: Any) -> str:
    """A value as truncated JSON, for an error's message."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(line: bytes) -> Json:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        excerpt = line[:60].decode(errors="replace")
        raise _Refusal(f"no JSON ({error}): {excerpt!r}; write one object per line, in UTF-8") from error
    if not isinstance(value, dict):
        raise _Refusal(f'{shown(value)} is no object: write {{"messages": [...]}}')
    return value


def _chat(value: Json, split: str) -> Chat:
    origin = _text(value, "trajectory_id")
    conversation = _messages(value.get("messages"))
    marks = {} if origin is None else _marks(value.get("turns"), conversation)
    context, untrained = _context(value.get("context"), conversation), _untrained(conversation, marks)
    messages = conversation[: _end(conversation, context, untrained)]
    request = {name: value[name] for name in REQUEST_FIELDS if value.get(name) is not None}
    tools = request.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise _Refusal(f"tools is {shown(tools)}: write a list of objects, or leave it out")
    kwargs = request.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise _Refusal(f"chat_template_kwargs is {shown(kwargs)}: write an object, or leave it out")
    head = _head(value, split, origin, conversation[len(messages) :])
    left_out = sorted(place for place in untrained if place < len(messages))
    whole: Any = [
        messages,
        request,
        [getattr(head, name) for name in Head.__slots__],
        origin,
        list(marks.items()),
        *([context] if context or left_out else []),
        *([left_out] if left_out else []),
    ]
    for _ in range(_WRAPPED):
        whole = [whole]
    try:
        digest = digest_json(whole)
    except TypeError as error:
        raise _Refusal(f"it cannot be stored as JSON ({error}): nest it less deep") from error
    return Chat(messages, request, head, origin, marks, digest, context, frozenset(left_out))


def _messages(messages: Any) -> list[Json]:
    if not isinstance(messages, list) or not messages:
        remedy = "write a list of chat messages; other shapes need --model"
        raise _Refusal(f"messages is {shown(messages)}: {remedy}")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            roles = ", ".join(ROLES)
            raise _Refusal(f"messages[{index}] is {shown(message)}: write an object with a role of {roles}")
        _check_calls(index, message.get("tool_calls"))
    return messages


def _untrained(messages: list[Json], turns: Collection[int]) -> frozenset[int]:
    """The places of the assistant's messages that are marked as untrained.

    Args:
        turns: places of the replies of an exported line that were turns; others it was only
            given.
    """
    left_out = {i for i, message in enumerate(messages) if not _is_trained(f"messages[{i}]", message)}
    if turns:
        left_out |= {i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in turns}
    return frozenset(left_out)


def _is_trained(where: str, message: Json) -> bool:
    """Whether a message's marks let it be trained; without marks, the assistant's messages are."""
    marks = {}
    for key in MARKS:
        mark = message.get(key)
        if mark is None:
            continue
        if not (mark in (0, 1) if key == "weight" else isinstance(mark, bool)):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise _Refusal(f"{where}.{key} is {shown(mark)}: write {allowed}, or leave it out")
        marks[key] = bool(mark)
    if message["role"] != "assistant":
        wanted = next((key for key, trained in marks.items() if trained), None)
        if wanted is not None:
            raise _Refusal(
                f"{where}.{wanted} is {shown(message[wanted])} of a message of role {message['role']}: the "
                "assistant's alone are trained; leave it out"
            )
        return True
    if len(set(marks.values())) > 1:
        raise _Refusal(f"{where}: {' and '.join(marks)} say two different things: leave one of them out")
    return all(marks.values())


def _replies(messages: list[Json], context: int, untrained: frozenset[int]) -> list[int]:
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and i >= context and i not in untrained
    ]


def _end(messages: list[Json], context: int, untrained: frozenset[int]) -> int:
    """How many messages there are up to the last reply that counts."""
    replies = _replies(messages, context, untrained)
    if not replies:
        why = f"its last message is {shown(messages[-1])}, and no message of the assistant counts"
        raise _Refusal(f"{why}: add a reply, or leave the chat out")
    return replies[-1] + 1


def _context(value: Any, messages: list[Json]) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(messages):
        raise _Refusal(
            f"context is {shown(value)}: write how many of the {len(messages)} messages come before the "
            "first reply that counts, or leave it out"
        )
    return value


def _check_calls(index: int, calls: Any) -> None:
    sound = calls is None or (
        isinstance(calls, list)
        and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
    )
    if not sound:
        raise _Refusal(
            f"messages[{index}].tool_calls is {shown(calls)}: write a list of objects with a function"
        )


def _head(value: Json, split: str, origin: str | None, after: list[Json]) -> Head:
    status = value.get("status")
    if status is not None and status not in STATUSES:
        raise _Refusal(f"status is {shown(status)}: use one of {', '.join(STATUSES)}")
    success = value.get("success")
    if success is not None and not isinstance(success, bool):
        raise _Refusal(f"success is {shown(success)}: write true, false or null")
    own = value.get("split")
    if own is not None and own not in SPLITS:
        raise _Refusal(f"split is {shown(own)}: use one of {', '.join(SPLITS)}")
    return Head(
        name=_name(value) or origin,
        group=_text(value, "group"),
        task=_text(value, "task"),
        split=split if own is None else own,
        status=status or "completed",
        labels=_labels(value, origin is not None, after),
        reward=_number("reward", value.get("reward")),
        success=success,
    )


def _name(value: Json) -> str | None:
    key = "trajectory" if value.get("trajectory") is not None else "id"
    name = value.get(key)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= NAME_LENGTH):
        raise _Refusal(
            f"{key} is {shown(name)}: write a text of 1 to {NAME_LENGTH} characters, or leave it out"
        )
    return name


def _labels(value: Json, exported: bool, after: list[Json]) -> Json:
    """The line's labels, and every key without another meaning: nothing of a line is lost."""
    labels = value.get("labels")
    if labels is not None and not isinstance(labels, dict):
        raise _Refusal(f"labels is {shown(labels)}: write an object")
    known = {"messages", "trajectory", *REQUEST_FIELDS, *(OF_AN_EXPORT if exported else ())}
    known |= {"group", "task", "split", "status", "labels", "reward", "success", "context"}
    if value.get("trajectory") is None:
        known.add("id")
    rest = {key: entry for key, entry in value.items() if key not in known}
    rest |= {AFTER: after} if after else {}
    twice = sorted(rest.keys() & (labels or {}).keys())
    if twice:
        raise _Refusal(f"{twice[0]!r} is a key of the line and of its labels: keep one of them")
    return {**rest, **(labels or {})}


def _text(value: Json, name: str) -> str | None:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise _Refusal(f"{name} is {shown(text)}: write a text, or leave it out")
    return text


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Refusal(f"{name} is {shown(value)}: write a finite number, or leave it out")
    return float(value)


def _marks(turns: Any, messages: list[Json]) -> dict[int, tuple[str, float | None]]:
    """Of an exported line's turns: place of the reply -> (turn id, reward)."""
    marks: dict[int, tuple[str, float | None]] = {}
    replies = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        turn = turn if isinstance(turn, dict) else {}
        place, turn_id = turn.get("message"), turn.get("turn_id")
        if not isinstance(place, int) or not isinstance(turn_id, str) or place not in replies:
            raise _Refusal(
                f"turns[{index}] is {shown(turn)}: write a turn_id, and as message the place of its reply in "
                "messages, or leave turns out"
            )
        marks[place] = (turn_id, _number(f"turns[{index}].reward", turn.get("reward")))
    return marks


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


class ChatFile(AbstractContextManager["ChatFile"]):
    """A checked file. In memory are a few hundred bytes for each line, and one trajectory.

    Args:
        advance: called with how many bytes of the file were checked.

    Raises:
        InterchangeError: it cannot be read, or a line is invalid; with file, line, value and
            remedy.
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
            InterchangeError: the file has changed since it was checked.
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
            identity = [self.run, entry.name, [line.digest for line in entry.lines]]
            entry.trajectory_id = str(uuid.uuid5(IDS, digest_json(identity)))
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
