"""Finds out which engines can be reached; a starting engine takes minutes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from rollbook.store.errors import EngineLostError
from rollbook.train.sync.control import EngineControl, EngineInfo

LOOK_S = 2.0
"""Seconds that an engine may take to answer a probe."""
AGAIN_S = 0.5


def looking_at(engines: Sequence[EngineControl]) -> list[EngineControl]:
    """The same engines with a time-out of `LOOK_S`."""
    return [EngineControl(e.url, LOOK_S, e.key, e.login, e.admin_key, e.whose) for e in engines]


def await_one(
    engines: Sequence[EngineControl], seconds: float, given_up: Callable[[], bool] = lambda: False
) -> list[EngineInfo]:
    """Wait until at least one engine can be reached; returns the descriptions of all that can.

    Args:
        given_up: whether nobody wants to wait any more.

    Raises:
        EngineLostError: none could be reached in time; the message gives each engine's reason.
        EngineError: a server that is no engine answered.
    """
    deadline = time.monotonic() + seconds
    announced = False
    with contextlib.ExitStack() as stack:
        looks = looking_at(engines)
        for look in looks:
            stack.callback(look.close)
        while True:
            infos, reasons = _look(looks)
            if infos:
                return infos
            if time.monotonic() >= deadline or given_up():
                raise EngineLostError(
                    f"no engine could be reached within {seconds:g} s: {'; '.join(reasons)}"
                )
            if not announced:
                text = "no engine can be reached: waiting at most %g s for one (%s)"
                logging.getLogger(__name__).warning(text, seconds, "; ".join(reasons))
                announced = True
            time.sleep(AGAIN_S)


def _look(engines: Sequence[EngineControl]) -> tuple[list[EngineInfo], list[str]]:
    """(descriptions of the engines that can be reached, why the others cannot be)"""
    infos: list[EngineInfo] = []
    reasons: list[str] = []
    for engine in engines:
        try:
            infos.append(engine.info())
        except EngineLostError as error:
            reasons.append(str(error))
    return infos, reasons
