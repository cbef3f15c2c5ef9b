"""Text to ids. `tokenizers` is right; `fastokens` is asked where it gives the same, in a third of the time.

That it does is tried, not assumed: with texts of every kind when a model is read, and with a text of the
traffic now and then. Where the two differ, or `fastokens` cannot read a tokenizer, the ids are those of
`tokenizers` alone, from then on.

`tokenizers` takes about 500 bytes a token while it encodes, so that a text of megabytes would take hundreds.
So it is given long texts piece by piece, with the ids that the whole has. A text is cut only where a word
begins, as the tokenizer itself splits it, well before the end of what it was shown, and only where what
follows has the same ids with and without what stands before. Words are encoded by themselves, and the letters
around them decide where they end: so the ids are those of the whole. Where no such place is found, the whole
is encoded at once.

Text that is far longer than the model's context is refused before ids are made of it.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fastokens
import numpy as np
from tokenizers import Encoding, Tokenizer

from rollbook.store.errors import LimitError, ModelError, RollbookError
from rollbook.store.events import TokenIds

LONG = 1 << 19
"""Characters from which on a text is taken apart."""
PIECE, MARGIN = 1 << 16, 1 << 10
"""Characters of a piece at most, and of what it is seen with behind it."""
TRIES = 32
"""Places that are tried in a piece."""
LETTERS_A_TOKEN = 16
"""More than tokens hold on average in any text that people or programs write."""
COMPARED_EVERY = 1024
"""One text of so many is encoded by both."""
SEGMENTS_BYTES = 32 << 20
"""Most memory for the ids of texts between control tokens, such as a system message that many share."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TextEncoder:
    """Encodes with one tokenizer, without special tokens that a text does not hold.

    Attributes:
        tokenizer: whose ids are right.
    """

    tokenizer: Tokenizer
    _quick: fastokens.Tokenizer | None = None
    _count: int = 0
    """Texts that were encoded quickly."""

    @classmethod
    def tried(cls, tokenizer: Tokenizer, quick: fastokens.Tokenizer | None) -> TextEncoder:
        """An encoder that is quick if that gives the same ids for texts of every kind.

        Args:
            quick: of the same file, as `read_quick` gives it.
        """
        encoder = cls(tokenizer)
        if quick is not None and tokenizer.truncation is None:
            pairs = ((_quick_ids(quick, text), encoder._reference_ids(text)) for text in trial_texts())
            encoder._quick = quick if all(np.array_equal(*pair) for pair in pairs) else None
        return encoder

    def encode(self, text: str, context_length: int = 0) -> TokenIds:
        """TokenIds of a text, int32.

        Args:
            context_length: the model's, in tokens; 0 where it is unknown.

        Raises:
            UnicodeEncodeError, TypeError: it holds half of a surrogate pair.
            LimitError: 400, it is far longer than the context.
        """
        self._check_length(text, context_length)
        if self._quick is None:
            return self._reference_ids(text)
        ids = _quick_ids(self._quick, text)
        self._count += 1
        if self._count % COMPARED_EVERY == 0 or self._count & (self._count - 1) == 0:
            right = self._reference_ids(text)
            if not np.array_equal(ids, right):
                logger.warning("fastokens gave a text other ids than tokenizers; it is not asked any more")
                self._quick = None
            return right
        return ids

    def _reference_ids(self, text: str) -> TokenIds:
        if len(text) < LONG or self.tokenizer.truncation is not None:
            return _whole(self.tokenizer, text)
        parts = list(_pieces(self.tokenizer, text))
        if parts[-1] is None:
            return _whole(self.tokenizer, text)
        return np.concatenate([part for part in parts if part is not None])

    def _check_length(self, text: str, context_length: int) -> None:
        """Refuse text that cannot fit by far, as its beginning shows: its ids take a hundred times as much.

        Raises:
            LimitError: 400.
        """
        part = LETTERS_A_TOKEN * context_length
        while 0 < part < len(text):
            begun = _whole(self.tokenizer, text[:part])
            # Where it is cut changes a few of the last tokens; twice as many as fit are no doubt too many.
            if len(begun) > 2 * context_length:
                shown = f"the text holds {len(text)} characters, far more than the model's context"
                fits = f"{shown} of {context_length} tokens: send less"
                raise LimitError(400, "context_length_exceeded", fits)
            part *= 4


@contextlib.contextmanager
def panics_as(kind: type[RollbookError], what: str) -> Iterator[None]:
    """Raise a panic of the tokenizers' Rust, which is no Exception, as an error of ours."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}; copy the model anew") from error


def read_quick(file: Path) -> fastokens.Tokenizer | None:
    """A `tokenizer.json` for `fastokens`; None where that cannot read it. Other threads go on meanwhile."""
    try:
        with panics_as(ModelError, f"{file}: cannot be read"):
            quick = fastokens.Tokenizer.from_file(str(file))
    except Exception as error:  # fastokens raises no narrower one
        logger.debug("fastokens cannot read %s: %r", file, error)
        return None
    quick.enable_segment_cache(SEGMENTS_BYTES)
    return quick


_SCRIPTS = [
    "The quick brown fox doesn't jump; it's 3.14159 or 1,000,000 (e.g. 2026-11-30).",
    'def f(x: int) -> str:\n\treturn f"{x!r:>10}"  # ok\n\n\n    pass\r\n',
    '{"path": "src/a_b.py", "lines": [1, 20, 300], "ok": true, "note": null}',
    "Größe, naïve café, e\u0301a\u0308 \u212b \ufb01 \u01c6 İstanbul ẞ",
    "漢字かな交じり文。한국어 텍스트 ภาษาไทย हिन्दी العربية עברית Ελληνικά Русский",
    "🙂👩\u200d👩\u200d👧🇫🇷 \u200b\u00a0\u2003\u3000\u2028\ufeff\ufffc\ufffd\x00\x07\x1b[0m\x7f\x85",
    "<|im_start|>user\n<|im_end|><tool_call></tool_call><think> </think><s></s><pad>▁_ĠĊ",
    "I'LL we'Ve 'tis ''s 's'S don\u2019t ... --- === #### $$$ %%% &&& ~~~ \\\\ ``` |||",
]


def trial_texts() -> Iterator[str]:
    """Texts of every kind: many scripts, programs, control tokens, all sorts of blanks; and chance."""
    yield from ("", " ", "  ", "\n", "\t", " \n ", "a", "aa" * 3000, " " * 3000, "\n" * 500, "1" * 500)
    yield from _SCRIPTS
    rng = random.Random(0)
    pieces = [piece for text in _SCRIPTS for piece in (*text, *text.split(" "))]
    for length in (2, 5, 20, 100, 500):
        for _ in range(40):
            yield "".join(rng.choices(pieces, k=length))
            yield " ".join(rng.choices(pieces, k=length))


def _quick_ids(quick: fastokens.Tokenizer, text: str) -> TokenIds:
    ids, _ = quick.encode_batch_flat([text])
    return np.frombuffer(ids, "<i4")


def _whole(tokenizer: Tokenizer, text: str) -> TokenIds:
    # The "fast" one leaves out offsets, which are not needed: a fifth less time, the same ids.
    [encoded] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.asarray(encoded.ids, np.int32)


def _pieces(tokenizer: Tokenizer, text: str) -> Iterator[TokenIds | None]:
    """The ids of one piece after the other; None at last where one has no place to be cut."""
    begin = 0
    while len(text) - begin > PIECE + MARGIN:
        shown = text[begin : begin + PIECE + MARGIN]
        [encoded] = tokenizer.encode_batch([shown], add_special_tokens=False)  # a batch lets others run
        place = _place(tokenizer, shown, encoded)
        if place is None:
            yield None
            return
        count, cut = place
        yield np.asarray(encoded.ids[:count], np.int32)
        begin += cut
    yield _whole(tokenizer, text[begin:])


def _place(tokenizer: Tokenizer, shown: str, encoded: Encoding) -> tuple[int, int] | None:
    """(how many ids stand before a place where the text may be cut, the place)"""
    ids, words, offsets = encoded.ids, encoded.word_ids, encoded.offsets
    tried = 0
    for count in range(len(ids) - 1, 0, -1):
        # By the end of the word before: where a word begins some tokenizers leave out its space.
        cut = offsets[count - 1][1]
        if cut > PIECE or words[count] is None or words[count] == words[count - 1]:
            continue
        if tried == TRIES or not cut:
            break
        tried += 1
        [after] = tokenizer.encode_batch_fast([shown[cut:]], add_special_tokens=False)
        if after.ids == ids[count:]:
            return count, cut
    return None
