"""Checks of the engines before anything is recorded, so that a setup that cannot work fails at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollbook.ingest.engines.engine import Engine
from rollbook.ingest.engines.fleet import Fleet
from rollbook.ingest.engines.identify import Identity
from rollbook.ingest.engines.model_match import differences


def check_engines(engine: Engine, identity: Identity, model: Path) -> list[str]:
    """Check that an engine can be used, and return notes for its user, a sentence each.

    Args:
        model: the directory whose tokenizer and template make the ids.

    Raises:
        EngineError: no server can be reached, or one is none that can be used.
        VersionError: what is to count as a version is not what the log has bound that version to.
    """
    if not isinstance(engine, Fleet):
        return []
    answers = asyncio.run(engine.look())
    notes = [f"{url} {text}" for url, info in answers for text in differences(model, info)]
    for member in engine.members:
        if (held := member.engine.held()) is not None:
            identity.log.check(*held, f"{model}")
        if (why := member.engine.unverified()) is not None:
            notes.append(f"what {member.url} makes has no policy version and is never trained: {why}")
    return notes
