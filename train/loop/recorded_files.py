"""The sources that a step ran, file by file, as its training recorded them when it started."""

from __future__ import annotations

from rollbook.store import Store
from rollbook.store.events import Json, RunOpened
from rollbook.train.loop.source_digests import file_digests


def with_files(log: Store, run: str, recorded: Json, here: Json) -> tuple[Json, Json]:
    """Both fingerprints with a digest per file, so that their differences name files and not rooms alone.

    Args:
        recorded: the fingerprint of a step of this run.
        here: the fingerprint that the step would get here.

    Returns:
        Both as they are, if no start of a training recorded the files of those sources.
    """
    sources = recorded.get("sources")
    for event in log.events_of([RunOpened.KIND]):
        opened = event.record
        if event.run != run or not isinstance(opened, RunOpened) or "files" not in opened.environment:
            continue
        if opened.environment.get("sources") == sources:
            return recorded | {"files": opened.environment["files"]}, here | {"files": file_digests()}
    return recorded, here
