"""Decodes single tokens for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.cli.show.terminal_text import visible
from rollbook.store.errors import ModelError
from rollbook.store.sql.token_text import TOKENIZER, read_tokenizer, token_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LINE_END = "↵\n"
"""How the end of a line is shown, so that it is seen to be a token's."""


class TokenText:
    """Tokens as text by one tokenizer, safe to print; each id is looked up once. Without one, as numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @classmethod
    def load(cls, model: Path) -> TokenText:
        """Read the tokenizer.json of a model directory.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        file = model / TOKENIZER
        if not file.exists():
            raise ModelError(f"{model}: holds no tokenizer.json; give the directory of a model with --model")
        return cls(read_tokenizer(file))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id."""
        listed = [int(i) for i in ids]
        if self._tokenizer is None:
            return [f"{i} " for i in listed]
        missing = sorted({i for i in listed if i not in self._known})
        for i, text in zip(missing, token_texts(self._tokenizer, missing), strict=True):
            shown = f"<{i}>" if text is None else visible(text, lines=True)
            self._known[i] = shown.replace("\n", _LINE_END)
        return [self._known[i] for i in listed]
