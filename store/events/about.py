"""The base of every event kind: a record with a name, a version, and the properties that generic
code needs.

Erasure, retention, sealing and the index of rare events use only these properties, so a new kind
needs no change in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

MARK: Mapping[str, Any] = {"erased": True}
"""The value that replaces erased JSON."""
GONE = "erased"
"""The value that replaces erased text."""

Eraser = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class About:
    """The properties of an event kind.

    Attributes:
        of: what the event is part of, which retention keeps or drops as a whole: a trajectory,
            the training of a policy, or (`run`) the training of every policy of its run. None:
            retention drops it with its unit.
        text: field that holds text of a trajectory -> function that gives its value after
            erasure.
        counted: the same for names that clients choose and recipes count by: they are erased
            with the tokens, and kept if the tokens are, since training on those goes on.
        large: fields whose large parts are stored once, as bodies.
        fat: whether it is sealed into `turns.parquet`, with tokens and text, instead of
            `marks.parquet`.
        lasting: whether retention never drops it: it records a removal, or a service goes on from it.
    """

    of: Literal["trajectory", "policy", "run"] | None = None
    text: Mapping[str, Eraser] = field(default_factory=dict)
    counted: Mapping[str, Eraser] = field(default_factory=dict)
    large: tuple[str, ...] = ()
    fat: bool = False
    lasting: bool = False


NO_PROPERTIES = About()

RECORDS: dict[str, type[Record]] = {}
"""Kind -> record type, of every kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The payload of an event. Every kind is a frozen dataclass derived from it, which subclassing alone
    registers under its `kind`; `slots` makes each class a second time, from what the first one has."""

    KIND: ClassVar[str]
    ABOUT: ClassVar[About]

    def __init_subclass__(cls, kind: str = "", about: About = NO_PROPERTIES) -> None:
        if kind:
            cls.KIND, cls.ABOUT = kind, about
        RECORDS[cls.KIND] = cls


# What erasure leaves ------------------------------------------------------------------------------


def marked(_: Any) -> Mapping[str, Any]:
    """`{"erased": true}`."""
    return MARK


def marked_if_any(value: Any) -> Any:
    """`{"erased": true}` for a value that is not empty; an empty value unchanged."""
    return MARK if value else value


def each_marked(values: list[Any]) -> list[Mapping[str, Any]]:
    """`{"erased": true}` for each element: the list keeps its length."""
    return [MARK] * len(values)


def erased_text(_: Any) -> str:
    """`erased`."""
    return GONE


def gone_if_any(text: str | None) -> str | None:
    """`erased` for a text; null unchanged."""
    return None if text is None else GONE


def nothing(_: Any) -> None:
    """Null."""
    return None


def no_text(_: Any) -> str:
    """The empty text."""
    return ""


def no_keys(_: Any) -> dict[str, Any]:
    """An empty object."""
    return {}


def only_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and nulls of an object."""
    return {name: value for name, value in values.items() if isinstance(value, int | float | None)}


def unnamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """An object's entries under their places ("0", "1", ...) instead of their names. Of an entry
    that is an object its numbers and nulls stay; numbers and nulls stay; anything else becomes
    `{"erased": true}`."""
    return {str(place): _numbers_of(value) for place, value in enumerate(values.values())}


def _numbers_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return only_numbers(value) or MARK
    return value if isinstance(value, int | float | None) else MARK


def gone_unless(*kept: str) -> Eraser:
    """`erased` for any text except those in `kept`, which are Rollbook's own words."""
    return lambda text: text if text in kept else GONE


def only_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"erased": true}` and the name of the API key, which is not agent text."""
    return {**MARK, **{name: value for name, value in values.items() if name == "key"}}
