"""Texts that end a sequence, looked for as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.engines.model_files import model_file
from rollbook.store.sql.vocabularies import TOKENIZER, read_tokenizer


class Texts:
    """The texts of a model's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: Path) -> Texts | None:
        """Those of a model directory; None where it has no tokenizer.

        Raises:
            ModelError: its tokenizer cannot be read.
        """
        file = model_file(model, TOKENIZER)
        return None if file is None else cls(read_tokenizer(file))

    def decode(self, ids: Any) -> str:
        """The text of tokens, control tokens included."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


class StopTexts:
    """Looks for any of some texts in tokens that come one by one.

    Attributes:
        count: of the tokens up to the one that completed a text; None: none did.
    """

    def __init__(self, texts: Texts, stop: Sequence[str]) -> None:
        self._texts, self._stop = texts, tuple(stop)
        # Every token behind the first of a text adds a byte of it or more; four may be a part of a character.
        self._window = max(len(text.encode()) for text in stop) + 4
        self._ids: list[int] = []
        self._seen = 0
        self.count: int | None = None

    def add(self, ids: Sequence[int]) -> bool:
        """Whether a text is complete with these tokens."""
        for token in ids:
            if self.count is not None:
                break
            self._ids = [*self._ids[-self._window :], token]
            self._seen += 1
            if any(text in self._texts.decode(self._ids) for text in self._stop):
                self.count = self._seen
        return self.count is not None
