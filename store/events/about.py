"""What a kind of event is, for those who handle events of all kinds: stated beside its record, and read here.

Erasure, retention, sealing and the index of rare events ask for nothing else, so that a new kind is known to
all of them by its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MARK: Mapping[str, Any] = {"erased": True}
"""What stands where JSON was erased."""
GONE = "erased"
"""What stands where text was erased."""

Eraser = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class About:
    """What is said of a kind.

    Attributes:
        of: what it is a part of, which retention keeps whole or drops whole: a trajectory, the training of a
            policy, or (`run`) of any policy of its run. None: it goes with the unit that holds it.
        text: field -> what erasure leaves of it, of fields that hold text of a trajectory.
        large: fields whose large parts are stored once, as bodies.
        fat: sealed with tokens and text, apart from what is small.
        lasting: never dropped, since it says that something is no longer there.
    """

    of: Literal["trajectory", "policy", "run"] | None = None
    text: Mapping[str, Eraser] = field(default_factory=dict)
    large: tuple[str, ...] = ()
    fat: bool = False
    lasting: bool = False


# What erasure leaves ------------------------------------------------------------------------------


def marked(_: Any) -> Mapping[str, Any]:
    """`{"erased": true}`."""
    return MARK


def marked_if_any(value: Any) -> Any:
    """`{"erased": true}`, where there was something."""
    return MARK if value else value


def each_marked(values: list[Any]) -> list[Mapping[str, Any]]:
    """A list as long as it was."""
    return [MARK] * len(values)


def said_gone(_: Any) -> str:
    """`erased`."""
    return GONE


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


def only_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """The name of the API key, which is no word of the agent's."""
    return {**MARK, **{name: value for name, value in values.items() if name == "key"}}
