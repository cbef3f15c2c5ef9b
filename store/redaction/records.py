"""Removes secrets from records that quote other sources, such as errors and settings. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollbook.store.events import EngineControlled, Record, RunOpened, StepFailed, SyncFailed, TurnFailed


def cleaned(record: Record, text: Callable[[str], str], fields: Callable[[Any], Any]) -> Record:
    """The record to write, the same one where there is no secret in it.

    Args:
        text: takes secrets out of an error.
        fields: takes them out of settings.
    """
    match record:
        case TurnFailed() | StepFailed() | SyncFailed():
            error = text(record.error)
            return record if error == record.error else replace(record, error=error)
        case EngineControlled():
            said, asked = record.error and text(record.error), fields(record.asked)
            same = said == record.error and asked is record.asked
            return record if same else replace(record, error=said, asked=asked)
        case RunOpened():
            config = fields(record.config)
            return record if config is record.config else replace(record, config=config)
    return record
