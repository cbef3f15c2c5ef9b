"""Claims that hold between hosts: who does what, of which there is to be one.

A claim is a register of its holders, each a session. Who takes one removes the holders whose sessions have
ended, and ends those that are silent for their lease.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollbook.store.errors import LaneLockedError, MediumError
from rollbook.store.hosts.session import Session, Witness
from rollbook.store.ids import now_us
from rollbook.store.medium.medium import Medium, claim_sequence
from rollbook.store.medium.register import Register

LOOK_S = 0.25
"""Between two looks at a claim that another host holds."""

Holder = dict[str, Any]


@contextlib.contextmanager
def held_claim(
    medium: Medium,
    session: Session,
    witness: Witness,
    what: str,
    remedy: str,
    patience_s: float,
    *,
    shared: bool,
    at_once: bool,
    on_gone: Callable[[str], None],
) -> Iterator[None]:
    """Hold a claim among hosts; the caller is the only process of this one that does.

    Args:
        at_once: say that it is held also where it is not known yet whether its holder still runs.
        on_gone: called with each session that held it and has ended, before the claim is held.

    Raises:
        LaneLockedError: a process of another host holds it.
        MediumError: the medium does not answer.
    """
    register = Register(medium, claim_sequence(what))
    own: Holder = {"session": session.name, "process": os.getpid(), "shared": shared, "since_us": now_us()}
    until = time.monotonic() + patience_s
    while True:
        holders = _holders(register)
        gone = [holder for holder in holders if witness.gone(holder["session"])]
        for holder in gone:
            on_gone(holder["session"])
        left = [holder for holder in holders if holder not in gone]
        other = next((h for h in left if not (shared and h["shared"])), None)
        if other is None:
            if _put(register, [*left, own], session, own):
                break
        elif time.monotonic() >= until and (at_once or witness.runs(other["session"])):
            raise LaneLockedError(
                f"{what} is being done by {witness.described(other['session'])}: stop that process, or "
                f"{remedy}"
            )
        else:
            time.sleep(LOOK_S)
    try:
        yield
    finally:
        try:
            _release(register, own)
        except MediumError:
            _release_later(register, session, own)


def _holders(register: Register) -> list[Holder]:
    return register.read() or []


def _put(register: Register, holders: list[Holder], session: Session, own: Holder) -> bool:
    try:
        return register.replace(holders)
    except MediumError:
        _release_later(register, session, own)  # it may be there
        raise


def _release_later(register: Register, session: Session, own: Holder) -> None:
    """Give it back once the medium answers; with the session it ends in any case."""
    session.later(lambda: _release(register, own))


def _release(register: Register, own: Holder) -> None:
    while own in (holders := _holders(register)):
        if register.replace([holder for holder in holders if holder != own]):
            return
