"""What a file's first chats come to, for people to look at before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.events import Record, TurnCompleted, TurnRequested

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
