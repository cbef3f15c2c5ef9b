"""How far rollouts are, for whoever looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollbook.ingest.rollouts.outcome import Status


@dataclass(frozen=True, slots=True)
class Progress:
    """How far rollouts are.

    Attributes:
        total: places, None if they come until somebody stops.
        done: those of which nothing is left to do, with those of earlier processes.
        running: launches now.
        by_status: launches of this process that ended.
        reward, rewarded: the mean reward of those that have one, and how many have.
        again: launches that failed because the proxy was away; each is tried again.
        given_up: places whose every attempt failed by its infrastructure.
        leaked: processes that launches left behind.
        infra_failed_rate: the share of launches of this process that failed by their infrastructure.
    """

    total: int | None
    done: int = 0
    running: int = 0
    by_status: Mapping[Status, int] = field(default_factory=dict)
    reward: float | None = None
    rewarded: int = 0
    again: int = 0
    given_up: int = 0
    leaked: int = 0
    infra_failed_rate: float | None = None
