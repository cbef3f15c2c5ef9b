"""Imports a data set: chats with tokens made of their text, and the preferences between them.

The file is read, converted and tokenized whole before the first event is written. Its chats, in a temporary
file, are then imported as any others: all of a trajectory is there after a crash, or nothing, and importing
again adds what is missing.

`FirstLook` is what a file's first chats come to, shown before anything is written.

Turns of text get the ids that a model would have read and sampled.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from rollbook.ingest.datasets.files import rows_of, size_of
from rollbook.ingest.datasets.formats import AUTO, Converted, converted, renamed
from rollbook.ingest.datasets.messages import RowError
from rollbook.ingest.replies.choose import AUTO as BY_TEMPLATE
from rollbook.ingest.replies.choose import choose_family
from rollbook.ingest.replies.written import LEFT_OUT, ReplyWriter, says_nothing
from rollbook.ingest.tokens.chat_template import ChatTokenizer, check_template_kwargs, load_chat_tokenizer
from rollbook.store.digest import digest_json
from rollbook.store.errors import InterchangeError, ReplyError, RequestError
from rollbook.store.events import Event, Json, PreferenceAdded, Record, TokenIds, TurnCompleted, TurnRequested
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.interchange.chats import Chat, read_chat, shown
from rollbook.store.interchange.destination import Progress, no_progress
from rollbook.store.interchange.importing import import_chats, records_of, trajectory_ids
from rollbook.store.open import open_store

SOURCE = "label"
"""Whose word imported preferences are."""
NOBODY = "00000000-0000-0000-0000-000000000000"
"""Id of the trajectory by which a row is tried."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a file are read.

    Attributes:
        shape: the shape that each has to have, of `SHAPES`; `auto`: any.
        keys: name that is known here -> the rows' own.
        show: how many of the first chats `look` is given.
        look: called once, with what was found, before anything is written.
        leave_out: parts of replies, of `LEFT_OUT`, that are left out where the template has no form for them.
        template_kwargs: what the chat template is given, beside what a row says itself.
        imitated: whether all of it will be imitated: what somebody judged to be bad is refused then.
    """

    shape: str = AUTO
    keys: Mapping[str, str] = field(default_factory=dict)
    show: int = 0
    look: Callable[[FirstLook], None] = lambda first: None
    leave_out: Collection[str] = ()
    template_kwargs: Json = field(default_factory=dict)
    imitated: bool = False


@dataclass(slots=True)
class _Read:
    """What a file came to.

    Attributes:
        pairs: (name of the chosen trajectory, name of the rejected one, margin).
        left_out: what was wrong with rows that were left out.
        names: of its trajectories -> where they stand.
        shapes, samples: of a first look.
        parts_left_out: how many replies go without a part.
    """

    rows: int = 0
    pairs: list[tuple[str, str, float | None]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    samples: list[Pieces] = field(default_factory=list)
    parts_left_out: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """The counts that are reported."""
        counts = {"rows": self.rows, "shapes": dict(self.shapes), "parts_left_out": dict(self.parts_left_out)}
        return counts | {"left_out": len(self.left_out), "first_left_out": next(iter(self.left_out), None)}


def import_dataset(
    file: Path,
    store: Path,
    run: str,
    model: Path,
    *,
    lane: str = "import",
    split: str = "teacher",
    skip_bad: bool = False,
    reading: Reading = Reading(),
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Append a file's rows to `run`; what was added, and what was there already.

    Args:
        file: or a folder, or a pattern that files' names have.
        store: made, if nothing is there.
        model: a model folder, whose tokenizer and chat template make the tokens.
        split: train, eval or teacher, for rows that name none.
        skip_bad: leave rows out that cannot be used, instead of refusing the file.

    Raises:
        InterchangeError: the file is not as it must be; file, row and remedy.
        ModelError: the model folder has no tokenizer or chat template that can be used.
        LaneLockedError: another process writes the lane, or imports into the run.
    """
    tokenizer = load_chat_tokenizer(model)
    family = choose_family(BY_TEMPLATE, model, tokenizer.template_source)
    writer = ReplyWriter(tokenizer, family, reading.leave_out)

    def shape(records: list[Record]) -> list[Record]:
        return tokenized(records, writer)

    with tempfile.NamedTemporaryFile(prefix="rollbook-import-", suffix=".jsonl") as chats:
        with progress(f"read {file.name}", size_of(file)) as advance:
            read = _convert(file, chats, split, writer, reading, skip_bad=skip_bad, advance=advance)
        if not read.rows:
            why = f"no row can be used: {read.left_out[0]}" if read.left_out else "holds no row"
            raise InterchangeError(f"{file}: {why}")
        reading.look(FirstLook(read.shapes, read.samples[: reading.show]))
        options: dict[str, Any] = {"lane": lane, "split": split, "progress": progress}
        done = import_chats(Path(chats.name), store, run, **options, shape=shape, origin=file)
    return done | read.summary() | {"preferences": _add_preferences(store, run, lane, read.pairs)}


def _convert(
    file: Path,
    chats: IO[bytes],
    split: str,
    writer: ReplyWriter,
    reading: Reading,
    *,
    skip_bad: bool,
    advance: Callable[[int], Any],
) -> _Read:
    """Write the chats of all rows, each of which was tried.

    Raises:
        InterchangeError: a row cannot be used, and is not to be left out.
    """
    read, same = _Read(), Counter[str]()
    for where, row in rows_of(file):
        try:
            digest = digest_json(row)
            converted_row = converted(renamed(row, reading.keys), same[digest], reading.shape)
            lines = [
                orjson.dumps(_with_kwargs(line, reading.template_kwargs)) for line in converted_row.lines
            ]
            _check_names(converted_row.lines, read.names)
            if reading.imitated:
                _check_good(converted_row, row)
            tried = [_tried(read_chat(line, where, split), writer) for line in lines]
        except (RowError, RequestError, ReplyError, TypeError) as error:
            _leave_out(f"{where}: {error}{_without(error)}", read, skip_bad=skip_bad, cause=error)
            continue
        except InterchangeError as error:
            _leave_out(str(error), read, skip_bad=skip_bad, cause=error)
            continue
        same[digest] += 1
        read.rows += 1
        read.shapes[converted_row.shape] += 1
        read.names |= dict.fromkeys(converted_row.names, where)
        for records in tried:
            read.parts_left_out.update(_parts_left_out(records))
            if len(read.samples) < reading.show:
                read.samples += samples_of(records, writer.tokenizer)
        for line in lines:
            chats.write(line + b"\n")
            advance(len(line))
        if len(converted_row.names) == 2:
            read.pairs.append((*converted_row.names, converted_row.margin))
    chats.flush()
    return read


def _with_kwargs(line: Json, defaults: Json) -> Json:
    """The line with what its chat template is given.

    Raises:
        RowError, RequestError: the row gives it what cannot be given.
    """
    own = line.get("chat_template_kwargs") or {}
    if not isinstance(own, dict):
        raise RowError(f"chat_template_kwargs is {shown(own)}: write an object")
    kwargs = defaults | own
    check_template_kwargs(kwargs)
    return line | {"chat_template_kwargs": kwargs} if kwargs else line


def _check_good(chats: Converted, row: Json) -> None:
    """Refuse an answer that somebody judged to be bad."""
    if len(chats.names) == 2:
        raise RowError(
            "this algorithm imitates all that it is given, also the rejected answer: train on pairs, as dpo "
            "does, or take the chosen alone by --format messages --key messages=chosen, or by --format "
            "prompt-completion --key completion=chosen"
        )
    if row.get("label") is False:
        raise RowError("label is false, and this algorithm imitates all that it is given: leave the row out")


def _check_names(lines: Sequence[Json], names: Mapping[str, str]) -> None:
    """Refuse a name that an earlier row has, but for another path of one exported trajectory."""
    for line in lines:
        earlier = names.get(line["trajectory"])
        if earlier is not None and line.get("trajectory_id") is None:
            named = shown(line["trajectory"])
            raise RowError(f"is named {named}, as {earlier} is: make their ids differ, or leave them out")


def _tried(chat: Chat, writer: ReplyWriter) -> list[Record]:
    return tokenized(records_of(NOBODY, "tried", [chat]), writer)


def _without(error: Exception) -> str:
    """What a reply could go without, for the message of its error."""
    parts = error.parts if isinstance(error, ReplyError) else ()
    known = [part for part in parts if part in LEFT_OUT]
    return f"; train such replies without it: --leave-out {','.join(known)}" if known else ""


def _parts_left_out(records: Sequence[Record]) -> list[str]:
    """The parts that replies go without, once for each."""
    flags = [flag for record in records if isinstance(record, TurnCompleted) for flag in record.flags]
    return [part for part, flag in LEFT_OUT.items() for _ in range(flags.count(flag))]


def _leave_out(what: str, read: _Read, *, skip_bad: bool, cause: Exception) -> None:
    if not skip_bad:
        raise InterchangeError(f"{what}; or leave such rows out with --skip-bad") from cause
    read.left_out.append(what)


def _add_preferences(store: Path, run: str, lane: str, pairs: list[tuple[str, str, float | None]]) -> int:
    """Append those preferences that the run does not have; how many."""
    if not pairs:
        return 0
    log = open_store(store)
    there = {
        (e.record.trajectory_id, e.record.rejected_trajectory_id, e.record.source)
        for e in log.events_of({PreferenceAdded.KIND})
        if e.run == run and isinstance(e.record, PreferenceAdded)
    }
    ids = trajectory_ids(log, run)
    fresh = [
        PreferenceAdded(ids[chosen], ids[rejected], margin, SOURCE)
        for chosen, rejected, margin in pairs
        if (ids[chosen], ids[rejected], SOURCE) not in there
    ]
    with log.writer(lane) as writer:
        for start in range(0, len(fresh), 1000):
            writer.append([Event(record, run) for record in fresh[start : start + 1000]]).result()
    return len(fresh)


Pieces = list[tuple[str, bool]]
"""Texts of a sample's tokens, one behind the other, and whether they are trained."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What was found in a file.

    Attributes:
        shapes: name of a shape -> rows of it.
        samples: of the first chats.
    """

    shapes: Mapping[str, int]
    samples: Sequence[Pieces]


def samples_of(records: Iterable[Record], tokenizer: ChatTokenizer) -> list[Pieces]:
    """The samples that a chat makes: one, unless the template rewrites what it rendered before."""
    samples: list[Pieces] = []
    for record in records:
        if isinstance(record, TurnRequested) and record.parent_turn_id is None:
            samples.append([])
        elif isinstance(record, TurnCompleted):
            for ids, trained in ((record.prompt_ids, False), (record.completion_ids, True)):
                samples[-1].append((tokenizer.decode(ids, special=True), trained))
    return samples


FROM_TEXT = "tokens_from_text"
"""Flag of a turn whose tokens were made of its text: no model sampled them, and they have no logprobs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A turn as it is read on: its request's messages, its whole text, and its whole ids."""

    messages: list[Json]
    text: str
    ids: TokenIds


def tokenized(records: Sequence[Record], writer: ReplyWriter) -> list[Record]:
    """The records of a trajectory of text, its turns with tokens.

    A turn extends its parent where the chat template keeps the parent's text as it was; else it is a root.

    Raises:
        RequestError: the chat template refuses the messages of one of its turns.
        ReplyError: one of its replies says nothing, or what no model of the template samples.
    """
    turns: dict[str, _Turn] = {}
    result: list[Record] = []
    request: tuple[TurnRequested, list[Json]] | None = None
    for record in records:
        if isinstance(record, TurnRequested):
            base = turns[record.base_turn_id].messages if record.base_turn_id else []
            request = (record, [*base[: record.shared_messages], *record.messages])
        elif isinstance(record, TurnCompleted):
            assert request is not None
            result += _with_tokens(*request, record, turns, writer)
        else:
            result.append(record)
    return result


def _with_tokens(
    requested: TurnRequested,
    messages: list[Json],
    done: TurnCompleted,
    turns: dict[str, _Turn],
    writer: ReplyWriter,
) -> tuple[TurnRequested, TurnCompleted]:
    if says_nothing(done.reply):
        raise ReplyError("the reply says nothing: it has no text, no reasoning and no calls", ("text",))
    request = requested.request
    written = writer.write(messages, request.get("tools"), done.reply, request.get("chat_template_kwargs"))
    prompt, encode = written.prompt, writer.tokenizer.encode
    parent = turns.get(requested.parent_turn_id or "")
    if parent is not None and not prompt.startswith(parent.text):
        parent = None
        requested = replace(requested, parent_turn_id=None, root_reason="no_matching_turn")
    begins = encode(prompt[len(parent.text) :] if parent else prompt)
    whole = np.concatenate([parent.ids, begins]) if parent else begins
    turns[done.turn_id] = _Turn(messages, prompt + written.text, np.concatenate([whole, written.ids]))
    return requested, replace(
        done,
        reply=written.reply,
        prompt_ids=begins,
        completion_ids=written.ids,
        prompt_length=len(whole),
        prompt_sha256=prompt_sha256(whole),
        finish_reason="stop",
        logprob_semantics={"kind": "none", "why": "imported"},
        flags=[FROM_TEXT, *(LEFT_OUT[part] for part in written.left_out)],
    )
