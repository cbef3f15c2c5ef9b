"""Draws a turn's tokens: prompt tokens dim, sampled tokens coloured by their logprobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from rollbook.cli.show.facts import ERASED, Answer
from rollbook.cli.show.token_text import TokenText
from rollbook.store.events import VersionSpan

BANDS = ((-0.1, "green"), (-1.0, "cyan"), (-3.0, "yellow"), (-8.0, "red"))
"""A token is of the first band whose logprob its own is not below."""
BELOW_ALL = "bold white on red"
NO_LOGPROB = ""
MASKED = "dim"
MARK = "bold magenta"
CONTEXT_TOKENS, SAMPLED_TOKENS = 60, 240
"""So many of a part's tokens are shown unless all are asked for: three quarters from its beginning."""


def legend() -> Text:
    """The legend of the colours."""
    text = Text("logprob  ")
    for least, style in BANDS:
        text.append(f">= {least:g}", style).append("  ")
    text.append(f"below {BANDS[-1][0]:g}", BELOW_ALL).append("  none", NO_LOGPROB)
    return text.append("  context", MASKED).append("  [v2]", MARK).append(" a version takes over")


def style_of(logprob: float | None) -> str:
    """The style of a sampled token; NaN and None have no colour."""
    if logprob is None or logprob != logprob:
        return NO_LOGPROB
    return next((style for least, style in BANDS if logprob >= least), BELOW_ALL)


def context_text(answer: Answer, words: TokenText, *, full: bool) -> Text:
    """The prompt's tokens that are new in a turn."""
    styles = [MASKED] * len(answer.context_ids)
    return _text(answer, answer.context_ids.tolist(), styles, (), words, None if full else CONTEXT_TOKENS)


def sampled_text(answer: Answer, words: TokenText, *, delivered: bool, full: bool) -> Text:
    """A completion's tokens, coloured; also dim if the turn was not delivered and is not trained."""
    count = len(answer.completion_ids)
    logprobs = [None] * count if answer.logprobs is None else answer.logprobs.tolist()
    masked = "" if delivered else f" {MASKED}"
    styles = [(style_of(logprob) + masked).strip() for logprob in logprobs]
    ids = answer.completion_ids.tolist()
    return _text(answer, ids, styles, answer.spans, words, None if full else SAMPLED_TOKENS)


def _text(
    answer: Answer,
    ids: list[int],
    styles: list[str],
    spans: Sequence[VersionSpan],
    words: TokenText,
    most: int | None,
) -> Text:
    if answer.fidelity == ERASED:
        return Text(f"[{len(ids):,} tokens, erased]", MASKED)
    shown = list(range(len(ids)))
    if most is not None and len(ids) > most:
        shown = [*shown[: most * 3 // 4], *shown[-(most // 4) :]]
    # A version that begins where nothing is shown is named where showing goes on.
    starts = {span.start: span.version for span in spans}
    pieces = words.pieces(ids[i] for i in shown)
    runs: list[tuple[str, str]] = []
    version = before = None
    for place, piece in zip(shown, pieces, strict=True):
        first = 0 if before is None else before + 1
        if place > first:
            runs.append((f" ... {place - first:,} tokens more ... ", MASKED))
        begun = [starts[i] for i in range(first, place + 1) if i in starts]
        if begun and begun[-1] != version:
            if version is not None:
                runs.append((f"[v{begun[-1]}]", MARK))
            version = begun[-1]
        runs.append((piece, styles[place]))
        before = place
    text = Text.assemble(*_joined(runs))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _joined(runs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Joins neighbours of one style, because Rich lays out few runs faster than many."""
    joined: list[tuple[list[str], str]] = []
    for piece, style in runs:
        if joined and joined[-1][1] == style:
            joined[-1][0].append(piece)
        else:
            joined.append(([piece], style))
    return [("".join(pieces), style) for pieces, style in joined]
