"""The text of single tokens. A token may hold a part of a character; what it holds is shown as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.cli.show.terminal_text import visible
from rollbook.store.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"
_LINE_END = "↵\n"
"""How the end of a line is shown, so that it is seen to be a token's."""


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE spells bytes with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Tokens as text by one tokenizer, safe to print; each id is looked up once. Without one, as numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []
        if tokenizer is not None:
            # A decoder may drop a space at the very beginning; behind another token it drops none.
            first = tokenizer.encode("a", add_special_tokens=False).ids
            self._anchor = first[-1:]
            self._bytes = _byte_alphabet()

    @classmethod
    def load(cls, model: Path) -> TokenText:
        """Of the model directory's tokenizer.json.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        file = model / "tokenizer.json"
        if not file.exists():
            raise ModelError(f"{model}: holds no tokenizer.json; give the directory of a model with --model")
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # tokenizers raises no narrower one
            raise ModelError(f"{file}: cannot be read: {error}; copy the model anew") from error

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id says."""
        listed = [int(i) for i in ids]
        if self._tokenizer is None:
            return [f"{i} " for i in listed]
        missing = sorted({i for i in listed if i not in self._known})
        if missing:
            self._look_up(self._tokenizer, missing)
        return [self._known[i] for i in listed]

    def _look_up(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        named = {i: tokenizer.id_to_token(i) for i in ids if 0 <= i < 1 << 32}
        there = [i for i in ids if named.get(i) is not None]
        behind = [*self._anchor]
        before, *texts = tokenizer.decode_batch(
            [behind, *([*behind, i] for i in there)], skip_special_tokens=False
        )
        self._known |= {i: f"<{i}>" for i in ids}  # an id that the tokenizer does not have
        for i, text in zip(there, texts, strict=True):
            alone = text[len(before) :] if text.startswith(before) else text
            if _BROKEN in alone:
                alone = self._with_bytes(named[i] or "", alone)
            self._known[i] = visible(alone, lines=True).replace("\n", _LINE_END)

    def _with_bytes(self, token: str, text: str) -> str:
        """A token with a part of a character: the bytes of that part as escapes."""
        if match := _BYTE_FALLBACK.fullmatch(token):
            return f"\\x{match[1].lower()}"
        if all(c in self._bytes for c in token):
            return bytes(self._bytes[c] for c in token).decode(errors="backslashreplace")
        return text
