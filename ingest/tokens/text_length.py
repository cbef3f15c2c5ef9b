"""Refuses text that is far longer than a model's context before ids are made of it. Pure."""

from __future__ import annotations

from tokenizers import Tokenizer

from rollbook.store.errors import LimitError

LETTERS_A_TOKEN = 16
"""More than tokens hold on average in any text that people or programs write."""


def check_text_length(tokenizer: Tokenizer, text: str, context_length: int) -> None:
    """Refuse text that cannot fit by far, as its beginning shows: its ids would take a hundred times as much.

    Args:
        context_length: the model's, in tokens; 0 where it is unknown.

    Raises:
        LimitError: 400.
    """
    part = LETTERS_A_TOKEN * context_length
    while 0 < part < len(text):
        [begun] = tokenizer.encode_batch_fast([text[:part]], add_special_tokens=False)
        # Where the text is cut changes a few of the last tokens; twice as many as fit are no doubt too many.
        if len(begun.ids) > 2 * context_length:
            shown = f"the text holds {len(text)} characters, far more than the model's context"
            raise LimitError(400, "context_length_exceeded", f"{shown} of {context_length} tokens: send less")
        part *= 4
