"""Finds secrets in running text by their context: `password=...`, `https://user:...@host`. Pure.

The time of each search depends on the length of the text alone, whatever it contains.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from urllib.parse import unquote

from rollbook.store.redaction.formats import LONG, may_match
from rollbook.store.redaction.names import PLACEHOLDER, is_secret_name

_P = PLACEHOLDER.pattern
_PIECE = 1 << 16
Replace = Callable[[str], str]
"""A secret -> what stands in its place; of a placeholder, itself."""

_STEMS = (
    r"authori[sz]ation|authentication|auth|bearer|cookie|credential|jwt|key|pwd|passphrase|passw(?:or)?d"
    r"|secret|token"
)
_HINTS = re.compile(rf"{_STEMS}|basic|:/{{2}}|[?&;#][\w.%-]+=|%3d", re.IGNORECASE)
"""Matches every text that one of the other patterns matches."""
_LOGIN = re.compile(rf"(?<=:/{{2}})(?:{_P}|[^\s/?#\"'<>\\])+(?=@)")
_CARRIED = re.compile(rf"\b((?:bearer|basic) {{1,4}})((?:{_P}|[A-Za-z0-9._~+/=-]){{8,}})", re.IGNORECASE)
_PARAMETER = re.compile(r"(?:[?&;#]|%3F|%26)(?P<name>[\w.%-]{1,80}?)(?:=|%3D)", re.IGNORECASE)
_PARAMETER_VALUE = re.compile(rf"(?:{_P}|[^\s&;#\"'<>\\)\]}}%]|%(?!26|23))+")
# name: name= "name": 'name', and with the quotes escaped; what stands before the stem is looked at later.
_ASSIGNED = re.compile(
    rf"{_P}|(?P<name>(?:{_STEMS})[\w.-]{{0,40}})(?P<closed>\\{{0,8}}[\"'])?"
    r"\s{0,4}(?(closed)[:=,]|[:=])\s{0,4}(?:(?P<quote>b?\\{0,8}[\"']))?",
    re.IGNORECASE,
)
_NAME_CHARACTERS = string.ascii_letters + string.digits + "_.-"
_KEY_OF = ("api ", "access ", "secret ", "private ", "auth ")
_BARE = re.compile(
    rf"(?:(?:bearer|basic|token|apikey|digest) {{1,4}})?(?:{_P}|[^\s,;&\"'<>\\{{}}\[\]()])+", re.IGNORECASE
)
_LINE = re.compile(r"[^\n\r\"'\\]+")
_SCHEME = re.compile(r"(bearer|basic|token|apikey|digest|negotiate) +(?=\S)", re.IGNORECASE)
_SIGNED = frozenset(
    {"sig", "signature", "se", "key", "code", "hmac", "awsaccesskeyid", "googleaccessid", "key-pair-id"}
    | {f"x-{who}-{what}" for who in ("amz", "goog") for what in ("signature", "credential", "security-token")}
)
"""Parameters of an address that open what it names, beside those whose name says so."""


def grants_access(parameter: str) -> bool:
    """Whether a URL parameter of this name grants access to what the URL names."""
    return parameter.lower() in _SIGNED or is_secret_name(parameter)


def without_secrets(text: str, replace: Replace) -> str:
    """The text with each secret replaced that its context reveals; doing so twice changes nothing more."""
    if len(text) > 2 * _PIECE:
        return "".join(_without_secrets(piece, replace) for piece in _pieces(text))
    return _without_secrets(text, replace)


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts, cut at line ends: one search holds the interpreter for its whole duration."""
    start = 0
    while start < len(text):
        stop = start + _PIECE
        cut = max(text.find("\n", stop, stop + _PIECE), text.find(" ", stop, stop + _PIECE))
        stop = cut + 1 if cut >= 0 else stop
        yield text[start:stop]
        start = stop


def _without_secrets(text: str, replace: Replace) -> str:
    if not _hints(text):
        return text
    text = _LOGIN.sub(lambda match: replace(match[0]), text)
    text = _without_parameters(text, replace)
    text = _without_assigned(text, replace)
    return _CARRIED.sub(lambda m: m[1] + replace(m[2]) if _looks_random(m[2]) else m[0], text)


def _hints(text: str) -> bool:
    """Whether any of the searches may find something."""
    if len(text) < LONG:
        return _HINTS.search(text) is not None
    return may_match(text, _HINTS.pattern, ignore_case=True)


def replace_credential(value: str, replace: Replace) -> str:
    """The value of a secret's name with its credential replaced; the scheme before it (`Bearer`) stays."""
    scheme, credential = split_scheme(value)
    return scheme + replace(credential) if credential else value


def split_scheme(value: str) -> tuple[str, str]:
    """(`Bearer ` or another scheme's word, or nothing; the credential behind it)"""
    scheme = _SCHEME.match(value)
    start = scheme.end() if scheme else 0
    return value[:start], value[start:].strip()


def _without_parameters(text: str, replace: Replace) -> str:
    parts, done, at = [], 0, 0
    while (match := _PARAMETER.search(text, at)) is not None:
        at = match.end()
        name = unquote(match["name"])
        if not grants_access(name):
            continue
        if (value := _PARAMETER_VALUE.match(text, at)) is not None:
            parts += [text[done:at], replace(unquote(value[0]))]
            done = at = value.end()
    return "".join([*parts, text[done:]])


def _without_assigned(text: str, replace: Replace) -> str:
    parts, done, at = [], 0, 0
    while (match := _ASSIGNED.search(text, at)) is not None:
        at = match.end()
        if match["name"] is None:
            continue  # what was replaced before
        name = _name_before(text[max(done, match.start() - 72) : match.start()]) + match["name"]
        value = _value(text, at, name, match["quote"]) if is_secret_name(name) else None
        if value is None or (name.lower() == "token" and not match["closed"] and not _looks_random(value)):
            continue  # no value, or prose such as "unexpected token: end of file"
        parts += [text[done:at], replace_credential(value, replace)]
        done = at = at + len(value)
    return "".join([*parts, text[done:]])


def _name_before(text: str) -> str:
    """The end of the text, as far as it can be the beginning of a name."""
    rest = text.rstrip(_NAME_CHARACTERS)
    own = text[len(rest) :]
    return own or next((word for word in _KEY_OF if rest.lower().endswith(word)), "")


def _value(text: str, at: int, name: str, quote: str | None) -> str | None:
    """The assigned value: up to the closing quote; of cookies, to the end of the line; otherwise
    one word."""
    if quote is not None:
        closing = quote.removeprefix("b").removeprefix("B")
        stop = text.find(closing, at)
        line = text.find("\n", at, stop if stop >= 0 else len(text))
        stop = line if line >= 0 else stop if stop >= 0 else len(text)
        return text[at:stop] or None
    match = (_LINE if "cookie" in name.lower() else _BARE).match(text, at)
    return None if match is None else match[0]


def _looks_random(value: str) -> bool:
    """Whether it does not look like a word: it contains a digit, or is very long."""
    return len(value) >= 24 or (len(value) >= 8 and any(c.isdigit() for c in value))
