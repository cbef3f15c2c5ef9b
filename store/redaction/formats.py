"""API key formats with a recognizable prefix, and whether a long text is worth searching for them.
Pure.

For long texts RE2 decides that: it is fast, and runs outside the interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """One provider's keys.

    Attributes:
        literals: one of these is in every such key.
        pattern: of a whole key, in the syntax that `re` and RE2 share.
    """

    literals: tuple[str, ...]
    pattern: str


FORMATS: Mapping[str, KeyFormat] = {
    "anthropic": KeyFormat(("sk-ant-",), r"sk-ant-[A-Za-z0-9_-]{20,}"),
    # Also those of others that took the prefix over: OpenRouter, DeepSeek, LiteLLM, Langfuse.
    "openai": KeyFormat(("sk-",), r"sk-[A-Za-z0-9][A-Za-z0-9_-]{18,}[A-Za-z0-9]"),
    "aws": KeyFormat(("AKIA", "ASIA"), r"A[KS]IA[A-Z0-9]{16}"),
    "github": KeyFormat(
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"(?:gh[opusr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    ),
    "gitlab": KeyFormat(("glpat-",), r"glpat-[A-Za-z0-9_-]{20,}"),
    "google": KeyFormat(("AIza",), r"AIza[A-Za-z0-9_-]{35}"),
    "huggingface": KeyFormat(("hf_",), r"hf_[A-Za-z0-9]{30,}"),
    "npm": KeyFormat(("npm_",), r"npm_[A-Za-z0-9]{36}"),
    "pypi": KeyFormat(("pypi-",), r"pypi-[A-Za-z0-9_-]{50,}"),
    "slack": KeyFormat(("xox", "xapp-"), r"(?:xox[abeoprs]-|xapp-)[A-Za-z0-9-]{10,}"),
    "stripe": KeyFormat(("k_live_",), r"[rs]k_live_[A-Za-z0-9]{16,}"),
    "jwt": KeyFormat(("eyJ",), r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"),
    # Its lines may be escaped, as in JSON text inside text. Of one that was cut off the end is missing.
    "private_key": KeyFormat(
        ("-----BEGIN",),
        r"-----BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\\nr]+[A-Za-z0-9-]{1,20}: [^\n\\]{1,80}){0,4}[A-Za-z0-9+/=\\\s]{40,}"
        r"(?:-----END [A-Z0-9 ]{0,20}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
}
"""Format -> what its keys look like. Earlier ones count where two fit."""

_LITERALS = tuple(dict.fromkeys(literal for f in FORMATS.values() for literal in f.literals))
ANY_KEY = "|".join(f.pattern for f in FORMATS.values())
"""Fits wherever there is a key, and sometimes more; for RE2 too, which takes time by the length alone."""
_KEYS = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:"
    + "|".join(f"(?P<{name}>{f.pattern})" for name, f in FORMATS.items())
    + r")(?![A-Za-z0-9])"
)
_RANDOM = re.compile(r"[A-Z0-9]")


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """A key in a text: its format, and its place."""

    format: str
    start: int
    stop: int


def may_hold_keys(text: str) -> bool:
    """Whether the text may hold a key. False is certain, true is not."""
    if len(text) < LONG:
        for literal in _LITERALS:  # noqa: SIM110  (any() takes twice as long, for every text that is recorded)
            if literal in text:
                return True
        return False
    return may_match(text, ANY_KEY)


def find_keys(text: str) -> list[KeyMatch]:
    """The keys in a text, in order. Words that begin like one (`sk-toggleable__content`) are none."""
    if not may_hold_keys(text):
        return []
    return [
        KeyMatch(str(match.lastgroup), match.start(), match.end())
        for match in _KEYS.finditer(text)
        if _RANDOM.search(match[0], 3)
    ]


LONG = 8192
"""From so many characters on RE2 is faster: it takes 0.15 ms to begin with, and 1.7 ms for a megabyte."""


def may_match(text: str, pattern: str, *, ignore_case: bool = False) -> bool:
    """Whether the pattern, in the syntax that `re` and RE2 share, may match somewhere in the text."""
    try:
        texts = pa.array([text], pa.large_string())
    except UnicodeEncodeError:  # half of a surrogate pair
        return True
    return bool(pc.match_substring_regex(texts, pattern, ignore_case=ignore_case)[0].as_py())
