"""Fixtures of the replay tests: copies of a trained store, and ways to tamper with them unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from rollbook.engines.weights.digests import digest_like
from rollbook.store import Event, Store
from rollbook.store.events import RunOpened, StepPlanned
from rollbook.store.events.batches import encode, to_batch
from rollbook.store.events.codec import decode
from rollbook.store.events.schema import LOG_SCHEMA, row_of
from rollbook.store.wal.files import Watermark, lane_folder, read_watermark, segment_numbers, segment_path
from rollbook.store.wal.frame import (
    EMPTY_CHAIN,
    HEADER_FRAME,
    ROW_FRAME,
    decode_rows,
    encode_frame,
    encode_rows,
    scan,
)

# Tampering ----------------------------------------------------------------------------------------


def _rewrite(log: Store, lane: str, change: Callable[[Event], Any]) -> int:
    """Write a lane's files anew with changed records and valid checksums; how many were changed.

    `change` gives an event's new record, or None to leave it. Every frame keeps its events; their crc,
    the chain through the segments, and the watermark are what a writer would have made them.
    """
    folder = lane_folder(log.path, lane)
    chain, changed, offset, number = EMPTY_CHAIN, 0, 0, 0
    for number in segment_numbers(folder):
        path = segment_path(folder, number)
        data = path.read_bytes()
        buffers: list[bytes] = []
        for frame in scan(memoryview(data), 0, len(data)):
            payload: Any = bytes(frame.payload)
            if frame.kind != HEADER_FRAME:
                if frame.kind == ROW_FRAME:
                    batch = to_batch(decode_rows(frame.payload, frame.count), frame.first_seq)
                else:
                    batch = pa.ipc.read_record_batch(pa.py_buffer(payload), LOG_SCHEMA)
                events = list(decode(batch, lane))
                records = [change(event) for event in events]
                changed += sum(record is not None for record in records)
                updated = [
                    event if record is None else replace(event, record=record)
                    for event, record in zip(events, records, strict=True)
                ]
                if frame.kind == ROW_FRAME:
                    payload = encode_rows([row_of(event) for event in updated])
                else:
                    payload = encode(updated, frame.first_seq).serialize()
            parts, chain = encode_frame(frame.kind, payload, frame.first_seq, frame.count, chain)
            buffers += [bytes(part) for part in parts]
        path.write_bytes(b"".join(buffers))
        offset = path.stat().st_size
    mark = read_watermark(folder)
    (folder / "WATERMARK").write_bytes(Watermark(number, offset, mark.next_seq).pack())
    return changed


def _edit_event(log: Store, kind: str, change: Callable[[Any], Any], **where: Any) -> None:
    """Change the one record of this kind whose attributes are these, and nothing else."""

    def edit(event: Event) -> Any:
        matches = event.kind == kind and all(getattr(event.record, k) == v for k, v in where.items())
        return change(event.record) if matches else None

    changed = {lane: _rewrite(log, lane, edit) for lane in log.lanes()}
    assert sum(changed.values()) == 1, f"{kind} {where}: {changed}"


def _edit_environment(log: Store, **changes: Any) -> None:
    """Have all trainings and their steps recorded in another environment."""

    def edit(event: Event) -> Any:
        record = event.record
        if not isinstance(record, RunOpened | StepPlanned):
            return None
        return replace(record, environment=record.environment | changes)

    assert sum(_rewrite(log, lane, edit) for lane in log.lanes())


def _edit_checkpoint(log: Store, version: int, what: str) -> None:
    """Change one number of a checkpoint's weights or optimizer, and its manifest to fit."""
    folder = log.path / f"checkpoints/demo/actor/v{version:08d}"
    file = folder / ("model.safetensors" if what == "weights" else "optimizer.safetensors")
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if tensors[n].dim() == 2 and "embed" not in n)
    tensors[name].view(-1)[5] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    manifest = orjson.loads((folder / "rollbook.json").read_bytes())
    manifest[f"{what}_digest"] = digest_like(tensors, manifest[f"{what}_digest"])
    (folder / "rollbook.json").write_bytes(orjson.dumps(manifest))


class Tamper:
    """Ways to change a store so that every checksum still holds."""

    rewrite = staticmethod(_rewrite)
    event = staticmethod(_edit_event)
    environment = staticmethod(_edit_environment)
    checkpoint = staticmethod(_edit_checkpoint)


@pytest.fixture(scope="session")
def tamper() -> Tamper:
    """Ways to change a store so that every checksum still holds."""
    return Tamper()
