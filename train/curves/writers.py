"""Writers of the points of one policy: a TensorBoard file in the folder `RUN/POLICY`, or a run of
Weights & Biases, where `wandb` is installed and was asked for.

The messages are TensorBoard's own (`tensorboard.compat.proto`), but not the writer, which takes
a second to import, ten times as long as they do. A record is a length and the message, each
followed by its checksum: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords
format details".
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import crc32c

from rollbook.store.errors import ConfigError
from rollbook.store.permissions import make_folder, open_file
from rollbook.train.curves.points import Point

FOLDER = "tensorboard"
"""Of a store: the log directory of its trainings."""
_OURS = ".rollbook"
"""How the name of a file ends that we wrote, and may replace."""


def messages() -> Any:
    """The module of TensorBoard's messages.

    Raises:
        ConfigError: TensorBoard is missing.
    """
    try:
        from tensorboard.compat.proto import event_pb2
    except ImportError as error:
        raise ConfigError(
            "curves for TensorBoard need its package: pip install 'rollbook[train]', or tensorboard alone"
        ) from error
    return event_pb2


class EventFile:
    """A new file in a folder, which replaces those that were written there before.

    What a running TensorBoard has open of the earlier ones is replaced: the file begins with a
    session that starts at step 0.
    """

    def __init__(self, folder: Path, points: Iterable[Point]) -> None:
        """Write the points of the past, and then remove the earlier files.

        Raises:
            ConfigError: TensorBoard is missing.
            OSError: the file cannot be written; it is removed, and the earlier ones stay.
        """
        self._proto = messages()
        make_folder(folder)
        earlier = [path for path in folder.iterdir() if path.name.endswith(_OURS)]
        self._path = folder / f"events.out.tfevents.{time.time_ns():020d}.{os.getpid()}{_OURS}"
        self._file: BinaryIO = os.fdopen(open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
        try:
            now = time.time()
            self._put(self._proto.Event(wall_time=now, file_version="brain.Event:2"))
            started = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._put(self._proto.Event(wall_time=now, step=0, session_log=started))
            for point in points:
                self._put(self._event(point))
            self._file.flush()
        except BaseException:
            self._path.unlink()
            self._file.close()
            raise
        for path in earlier:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, point: Point) -> None:
        """Add a point; a TensorBoard sees it at once.

        Raises:
            OSError: the disk is full, or the like.
        """
        self._put(self._event(point))
        self._file.flush()

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: the disk is full, or the like.
        """
        self._file.close()

    def _event(self, point: Point) -> Any:
        event = self._proto.Event(wall_time=point.time, step=point.step)
        for name, value in point.values.items():
            event.summary.value.add(tag=name, simple_value=value)
        return event

    def _put(self, event: Any) -> None:
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        self._file.write(b"".join((size, _checksum(size), data, _checksum(data))))


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of a record's part."""
    plain = crc32c.crc32c(data)
    return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)


VARIABLES = ("WANDB_PROJECT", "WANDB_MODE")
"""Of the environment: one of them asks for it. wandb reads them, its key and the others itself."""


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether trainings are to be shown in Weights & Biases."""
    return any(environment.get(name) for name in VARIABLES) and find_spec("wandb") is not None


class WandbRun:
    """A run that continues where an earlier process ended: its id follows from store, run and
    policy."""

    def __init__(
        self, store_id: str, run: str, policy: str, config: Mapping[str, Any], points: Iterable[Point]
    ) -> None:
        """Begin or resume the run, and send the past points that it does not have.

        Raises:
            Exception: any of wandb's.
        """
        import wandb

        name = f"{run}/{policy}"
        self._run = wandb.init(
            id=hashlib.sha256(f"{store_id}/{name}".encode()).hexdigest()[:16],
            name=name,
            group=run,
            job_type="train",
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._first = int(self._run.starting_step)
        for point in points:
            self.write(point)

    def write(self, point: Point) -> None:
        """Add a point, unless the run is already past it.

        Raises:
            Exception: any of wandb's.
        """
        if point.step >= self._first:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """End it, once everything is sent or on disk.

        Raises:
            Exception: any of wandb's.
        """
        self._run.finish()
