"""Records as HTML: the templates, and how they print what the log holds.

Recorded text is not to be trusted. Templates escape every value; `visible` shows what a reader's eye would
be led by, control characters and marks of direction, as their escapes; and a page's policy (`app`) lets no
script run but the viewer's own.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rollbook.store.cut import Cut, format_cut
from rollbook.transcript.text import visible

DASH = "–"
"""Printed where there is no value."""
JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
"""How records are written as JSON."""
SPARK_WIDTH, SPARK_HEIGHT, SPARK_POINTS = 120, 24, 60


class Templates:
    """Draws records as HTML.

    Args:
        prefix: what the viewer's addresses begin with, such as /view.
    """

    def __init__(self, prefix: str) -> None:
        self.environment = Environment(
            loader=PackageLoader("rollbook.viewer"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.filters |= {
            "ago": ago,
            "brief": brief,
            "json": as_json,
            "moment": moment,
            "count": count,
            "line": line,
            "number": number,
            "percent": percent,
            "shell": shlex.quote,
            "spark": spark,
            "tokens": tokens,
            "value": value,
            "visible": partial(visible, lines=True),
        }
        address = partial(link, prefix)
        embed = partial(embedded, address)
        self.environment.globals |= {"link": address, "embedded": embed, "prefix": prefix}

    def draw(
        self, template: str, record: Any, cut: Cut | None = None, *, layout: str = "base.html", **more: Any
    ) -> str:
        """A record as HTML, by a template that calls it `page`.

        Args:
            layout: what surrounds it; more: what that needs.
        """
        cut_text = None if cut is None else format_cut(cut)
        drawn = self.environment.get_template(template)
        return drawn.render(page=record, cut=cut_text, layout=layout, **more)


_SPECIAL = re.compile(r"[~%/\x00-\x1f]|\A\Z|\.(?=\.*$)|\.(?=json$)")
"""In a name what would mean something else in an address: servers take %2F for a slash, browsers %2E for .,
and some of either decode twice."""
_ESCAPED = re.compile(r"~([0-9A-F]{2}|)")


def part(name: str) -> str:
    """A name as a part of an address; `name_of` has it back."""
    escaped = _SPECIAL.sub(lambda found: f"~{found[0].encode().hex().upper()}", name)
    return quote(escaped, safe="~")


def name_of(text: str) -> str:
    """The name that a part of an address stands for, which is no longer quoted."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1]).decode(errors="replace"), text)


def link(prefix: str, *parts: Any, **query: Any) -> str:
    """The address of a page: its parts quoted, then what is given behind a question mark."""
    path = "/".join(part(str(name)) for name in parts)
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{prefix}/{path}{'?' if given else ''}{urlencode(given)}"


def embedded(
    address: Callable[..., str], *parts: Any, trigger: str = "load", id: str = "", **query: Any
) -> Markup:
    """A place in a page where another one comes, by itself."""
    place = '<div hx-get="{}" hx-trigger="{}"{}><p class="dim">…</p></div>'
    named = Markup(' id="{}"').format(id) if id else ""
    return Markup(place).format(address(*parts, **query), trigger, named)


NAME = 200
"""Characters of a name, or of another short text, that a page shows."""


def line(text: str) -> str:
    """A short text; of one that is none its beginning, and how long it is; of a blank one its quotes."""
    if not text.strip():
        return f"\u201c{visible(text)}\u201d"
    return visible(text if len(text) <= NAME else f"{text[:NAME]}… ({len(text):,} characters)")


def value(text: str) -> Markup:
    """A text for a field of a form, which gives it back as it is."""
    return Markup("".join(str(escape(c)) if c.isprintable() else f"&#{ord(c)};" for c in text))


def shown(value: Any) -> Any:
    """What a template prints of a value: no text of a page drives a terminal or leads the eye."""
    return visible(value, lines=True) if type(value) is str else value


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; whole ones with all theirs."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}g}" if not 10**digits <= abs(value) < 1e15 else f"{value:,.0f}"


def count(things: int, singular: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`."""
    return f"{things:,} {singular if things == 1 else plural or singular + 's'}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return DASH if share is None else f"{100 * share:.1f} %"


def ago(time: datetime | None) -> Markup:
    """How long a time, of UTC, is ago; the time itself is its tooltip."""
    if time is None:
        return Markup(DASH)
    seconds = (datetime.now(UTC).replace(tzinfo=None) - time).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            words = f"{seconds / length:.0f} {unit} ago"
            break
    else:
        words = f"{max(seconds, 0):.0f} s ago"
    exact = time.isoformat(" ", "milliseconds")
    return Markup('<time datetime="{0}Z" title="{0} UTC">{1}</time>').format(exact, words)


def moment(time_us: int) -> Markup:
    """How long a time of a writer's clock is ago."""
    return ago(datetime.fromtimestamp(time_us / 1e6, UTC).replace(tzinfo=None))


LONG, BRIEF = 6000, 2000
"""A text of more characters is shown by so many of its first and last."""


def brief(text: str) -> str:
    """A text; of a long one its beginning and end, and how much is between."""
    if len(text) <= LONG:
        return text
    return f"{text[:BRIEF]}\n… {len(text) - 2 * BRIEF:,} characters more: see the raw turn …\n{text[-BRIEF:]}"


CHARACTERS, ITEMS = 50_000, 1_000
"""Of a text and of a list that is shown as JSON."""


def as_json(value: Any) -> str:
    """A value as indented JSON, safe to show; of long texts and lists their beginnings."""
    text = orjson.dumps(_abridged(value), default=str, option=JSON | orjson.OPT_INDENT_2).decode()
    return visible(text, lines=True)


def _abridged(value: Any) -> Any:
    match value:
        case str() if len(value) > CHARACTERS:
            return (
                f"{value[:CHARACTERS]} … {len(value) - CHARACTERS:,} characters more: see this page's JSON …"
            )
        case dict():
            return {key: _abridged(inner) for key, inner in value.items()}
        case list():
            more = [f"… {len(value) - ITEMS:,} more: see this page's JSON …"] if len(value) > ITEMS else []
            return [*map(_abridged, value[:ITEMS]), *more]
    return value


def spark(values: Sequence[float | None], label: str) -> Markup:
    """A curve in a word's space; beyond so many points each is the mean of several."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    each = math.ceil(len(finite) / SPARK_POINTS)
    means = [sum(part) / len(part) for at in range(0, len(finite), each) if (part := finite[at : at + each])]
    low, high = min(means), max(means)
    if not math.isfinite(high - low):
        return Markup("")
    span = (high - low) or 1.0
    points = " ".join(
        f"{1 + at * (SPARK_WIDTH - 2) / max(len(means) - 1, 1):.1f},"
        f"{1 + (high - value) * (SPARK_HEIGHT - 2) / span:.1f}"
        for at, value in enumerate(means)
    )
    return Markup(
        '<svg class="spark" role="img" aria-label="{}" width="{}" height="{}"><polyline points="{}"/></svg>'
    ).format(f"{label}: {number(finite[0])} to {number(finite[-1])}", SPARK_WIDTH, SPARK_HEIGHT, points)


EMPTY = "\u2205"
"""Shown for a token without text."""
CHUNK = 512
"""Tokens that are painted together, once they are near what is seen."""


def tokens(ids: Sequence[int], texts: Sequence[str | None], classes: str) -> Markup:
    """Tokens, each an element of the class of its colour, in chunks that are painted when they come near.

    Args:
        classes: a character for each; empty: none has a colour.
    """
    shown: dict[tuple[int, str | None], str] = {}
    elements = []
    for place, (token, text) in enumerate(zip(ids, texts, strict=True)):
        if (escaped := shown.get((token, text))) is None:
            escaped = shown[token, text] = _token(token, text)
        colour = classes[place] if classes else "."
        elements.append(f"<i>{escaped}" if colour == "." else f"<i class=c{colour}>{escaped}")
    chunks = ("".join(elements[at : at + CHUNK]) for at in range(0, len(elements), CHUNK))
    begin = "<p class=far>" if len(elements) > CHUNK else "<p>"
    return Markup("".join(f"{begin}{chunk}</p>" for chunk in chunks))


def _token(token: int, text: str | None) -> str:
    """A token's text, escaped; its id where there is no text. What is not to be seen is shown by a sign."""
    if text is None:
        return f"[{token}]</i>"
    safe = visible(text.replace("\n", "\u21b5\n").replace("\t", "\u21e5"), lines=True)
    return f"{escape(safe or EMPTY)}</i>"
