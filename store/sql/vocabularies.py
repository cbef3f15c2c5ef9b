"""Finds the tokenizer of a run, and the text of its tokens.

Nothing is read before the first token is decoded. A token that holds part of a character is shown as escaped
bytes.

The tokenizer of a run is the first of these that can be read:

1. that of the model directory given to `connect`;
2. that of the run's newest checkpoint that is still in the store;
3. that of the directory named by its `run.opened`, if `ROLLBOOK_ALLOW` lists it.

If `run.opened` has the sha256 of the file, only a file with that sha256 is used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.events import RunOpened
from rollbook.store.events.training import CheckpointWritten
from rollbook.store.external_access import allows_folder
from rollbook.store.log.store import Store
from rollbook.store.safe_paths import place_inside, refuse_no_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGEST = 512 << 20
"""Largest size of a tokenizer's file, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The ids of a tokenizer, ascending, and the text of each."""

    ids: npt.NDArray[np.int64]
    texts: pa.StringArray

    def say(self, ids: npt.NDArray[np.int64]) -> pa.StringArray:
        """The texts of these ids; null for one that the tokenizer does not have."""
        places = np.searchsorted(self.ids, ids)
        there = (places < len(self.ids)) & (np.append(self.ids, 0)[places] == ids)
        return self.texts.take(pa.array(places, mask=~there))


_NO_VOCABULARY = Vocabulary(np.empty(0, np.int64), pa.nulls(0, pa.string()))


class Vocabularies:
    """Texts of the tokens of each run of a log.

    Args:
        model: a model directory to take the tokenizer of.

    Raises:
        ModelError: it holds no tokenizer.
    """

    def __init__(self, log: Store, cut: Cut, model: str | os.PathLike[str] | None) -> None:
        self._log, self._cut, self._model = log, cut, None if model is None else Path(model)
        if self._model is not None and not (self._model / TOKENIZER).exists():
            raise ModelError(f"{model}: holds no {TOKENIZER}; give the directory of a model")
        self._seen: tuple[dict[str, RunOpened], dict[str, list[str]]] | None = None
        self._of_runs: dict[str, Vocabulary] = {}
        self._read: dict[str, Vocabulary] = {}
        self._lock = Lock()

    def say(self, runs: pa.ChunkedArray, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """The text of each token; null where the run's tokenizer is not known, or has no such token."""
        numbers = pc.fill_null(ids, -1).to_numpy().astype(np.int64)
        texts = pa.nulls(len(numbers), pa.string())
        for run in pc.unique(runs).drop_null().to_pylist():
            mine = pc.fill_null(pc.equal(runs, run), False).combine_chunks()
            texts = pc.if_else(mine, self._vocabulary(run).say(numbers), texts)
        return pa.chunked_array([texts])

    def _vocabulary(self, run: str) -> Vocabulary:
        with self._lock:  # DuckDB asks from several threads
            if run not in self._of_runs:
                if self._seen is None:
                    self._seen = self._read_runs()
                self._of_runs[run] = self._find(run, *self._seen)
            return self._of_runs[run]

    def _read_runs(self) -> tuple[dict[str, RunOpened], dict[str, list[str]]]:
        """Run -> its newest opening that names a tokenizer; and its checkpoints, the newest first."""
        opened: dict[str, RunOpened] = {}
        written: dict[str, list[str]] = {}
        for event in self._log.events_of([RunOpened.KIND, CheckpointWritten.KIND], self._cut):
            if isinstance(event.record, RunOpened) and event.record.tokenizer_digest:
                opened[event.run] = event.record
            elif isinstance(event.record, CheckpointWritten):
                written.setdefault(event.run, []).insert(0, event.record.path)
        return opened, written

    def _find(self, run: str, opened: dict[str, RunOpened], written: dict[str, list[str]]) -> Vocabulary:
        run_opened = opened.get(run)
        for file in self._files(run_opened, written.get(run, [])):
            try:
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                if run_opened is None or run_opened.tokenizer_digest == digest:
                    if digest not in self._read:
                        self._read[digest] = _vocabulary(file)
                    return self._read[digest]
            except (OSError, ModelError):
                continue  # removed or damaged: try the next candidate
        return _NO_VOCABULARY

    def _files(self, run_opened: RunOpened | None, checkpoints: list[str]) -> Iterator[Path]:
        """Candidate files of a run's tokenizer, in order of preference; each is a plain file."""
        if self._model is not None:
            yield self._model / TOKENIZER
        for path in checkpoints:
            try:
                file = place_inside(self._log.path, path) / TOKENIZER
                refuse_no_plain(file)
                fits = file.stat().st_size <= LARGEST
            except (OutsideError, OSError):  # a checkpoint that was removed
                continue
            if fits:
                yield file
        if run_opened is not None and run_opened.model is not None:
            real = os.path.realpath(Path(run_opened.model) / TOKENIZER)
            if allows_folder(real) and os.path.isfile(real) and os.path.getsize(real) <= LARGEST:
                yield Path(real)


def _vocabulary(file: Path) -> Vocabulary:
    """Read the whole vocabulary of a tokenizer's file.

    Raises:
        ModelError: it cannot be read.
    """
    tokenizer = read_tokenizer(file)
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()))
    try:
        texts = pa.array(token_texts(tokenizer, ids), pa.string())
    except Exception as error:  # tokenizers raises no narrower one
        raise ModelError(f"{file}: its tokens cannot be decoded: {error}; copy the model anew") from error
    return Vocabulary(np.array(ids, np.int64), texts)


TOKENIZER = "tokenizer.json"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        ModelError: it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower one
        raise ModelError(f"{file}: cannot be read: {error}; copy the model anew") from error


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    """The text of each id as it appears inside a longer text; None for an id that the tokenizer does not
    have."""
    tokens = [tokenizer.id_to_token(i) if 0 <= i < 1 << 32 else None for i in ids]
    # A decoder may drop a space at the very beginning; behind another token it drops none.
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    known = [[*anchor, i] for i, token in zip(ids, tokens, strict=True) if token is not None]
    before, *decoded = tokenizer.decode_batch([anchor, *known], skip_special_tokens=False)
    texts = iter(decoded)
    return [None if token is None else _alone(token, next(texts), before) for token in tokens]


def _alone(token: str, text: str, before: str) -> str:
    alone = text[len(before) :] if text.startswith(before) else text
    return _with_bytes(token, alone) if _BROKEN in alone else alone


def _with_bytes(token: str, text: str) -> str:
    """The text of a token that holds part of a character: the bytes of that part as escapes."""
    if match := _BYTE_FALLBACK.fullmatch(token):
        return f"\\x{match[1].lower()}"
    if all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token).decode(errors="backslashreplace")
    return text


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE spells bytes with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
