"""Roles of callers, and rules that say which roles may use which routes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.routing import compile_path

from rollbook.ingest.http.trajectory_keys import key_name
from rollbook.store.errors import RequestError


class Role(StrEnum):
    """What a key is for. `trajectory` is that of a trajectory's own key, which no file can name."""

    operator = "operator"
    writer = "writer"
    judge = "judge"
    reader = "reader"
    trajectory = "trajectory"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from.

    Attributes:
        name: the key's name, as the log has it; None: no keys are checked.
        role: what it may do.
        key: the key as sent, where it names a trajectory.
    """

    name: str | None
    role: Role
    key: str | None = field(default=None, repr=False)

    @property
    def trajectory(self) -> str | None:
        """The trajectory that the caller's key names."""
        return key_name(self.key)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use a route.

    Attributes:
        path: as the application writes it; the first rule that fits a path counts.
        open: it answers without a key too.
        local: without keys it is for this host alone.
    """

    method: str
    path: str
    roles: frozenset[Role]
    open: bool = False
    local: bool = False


ANY = "*"
"""Any method."""


def _head(path: str) -> str:
    """A path's first part."""
    return path[1:].partition("/")[0]


class Rules:
    """The rules of an application, by path and method.

    Args:
        rules: the first one that fits a path counts.
        otherwise: the rule for paths that no other fits, such as routes that do not exist.
    """

    def __init__(self, rules: Iterable[Rule], otherwise: Rule) -> None:
        self._otherwise = otherwise
        self._compiled: dict[str, list[tuple[re.Pattern[str], Rule]]] = {}
        for rule in rules:
            self._compiled.setdefault(_head(rule.path), []).append((compile_path(rule.path)[0], rule))

    def of(self, method: str, path: str) -> Rule:
        """The rule of a request.

        Args:
            path: decoded, as routes are matched.
        """
        method = "GET" if method == "HEAD" else method
        for pattern, rule in self._compiled.get(_head(path), ()):
            if rule.method in (ANY, method) and pattern.match(path):
                return rule
        return self._otherwise


def check_role(caller: Caller, rule: Rule, method: str, path: str) -> None:
    """Refuse a request that the caller's role does not allow.

    Raises:
        RequestError: 403, it names who may.
    """
    if caller.role in rule.roles:
        return
    who = ", ".join(role.value for role in Role if role in rule.roles and role is not Role.trajectory)
    if caller.role is Role.trajectory:
        text = f"this API key is of one trajectory alone, and {method} {path[:200]} is for: {who}"
        raise RequestError(403, "other_trajectory", text)
    text = f"the key {caller.name!r} is a {caller.role.value}'s, and {method} {path[:200]} is for: {who}"
    raise RequestError(403, "not_permitted", text)
