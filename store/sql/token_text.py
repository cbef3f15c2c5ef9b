"""Decodes single tokens to text. A token that holds part of a character is shown as escaped bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.store.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    """A token with a part of a character: the bytes of that part as escapes."""
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
