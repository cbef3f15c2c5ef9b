"""Whole folders between hosts, such as checkpoints: each file as an object, and a manifest of their hashes.

The manifest is put last and removed first, so what it names is there. Who fetches a folder checks every file
against it, and has the folder under its name once all of it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import obstore
import orjson

from rollbook.store.errors import CorruptionError
from rollbook.store.ids import new_id
from rollbook.store.medium.objects import explained, opened_objects
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.safe_paths import fsync_file, fsync_folder

MANIFEST = "FOLDER.json"
_AT_ONCE = 8 << 20


class SharedFolders:
    """Folders below an address of object storage, such as s3://bucket/prefix/STORE-ID.

    Args:
        endpoint: URL of an S3-compatible service that is not AWS.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: str, endpoint: str | None = None) -> None:
        self.address = address.rstrip("/")
        self._objects: Any = opened_objects(self.address, endpoint)

    def share(self, folder: Path, named: str) -> None:
        """Copy a folder there, under a name such as `checkpoints/run/actor/v3`.

        Raises:
            MediumError: no answer, or a refusal; nobody fetches what is there in part.
        """
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = []
        with self._explained(named):
            for path in files:
                name = path.relative_to(folder).as_posix()
                obstore.put(self._objects, f"{named}/{name}", path)
                entries.append({"name": name, "bytes": path.stat().st_size, "sha256": _sha256(path)})
            obstore.put(self._objects, f"{named}/{MANIFEST}", orjson.dumps({"files": entries}))

    def fetch(self, named: str, folder: Path) -> bool:
        """Make a folder of what is there; False where nothing is.

        Raises:
            MediumError: no answer, or a refusal; nothing of it is here.
            CorruptionError: a file is not what was shared.
        """
        with self._explained(named):
            try:
                manifest = bytes(obstore.get(self._objects, f"{named}/{MANIFEST}").bytes())
            except FileNotFoundError:
                return False
            make_folder(folder.parent)
            building = folder.with_name(f".{folder.name}.{new_id()}")
            try:
                for entry in orjson.loads(manifest)["files"]:
                    self._fetch(f"{named}/{entry['name']}", building / entry["name"], entry)
                with contextlib.suppress(OSError):  # another process was first
                    building.rename(folder)
                fsync_folder(folder.parent)
            finally:
                shutil.rmtree(building, ignore_errors=True)
        return True

    def _fetch(self, source: str, target: Path, entry: dict[str, Any]) -> None:
        make_folder(target.parent)
        hashed = hashlib.sha256()
        with make_empty(target).open("wb") as file:
            for part in obstore.get(self._objects, source).stream(min_chunk_size=_AT_ONCE):
                file.write(part)
                hashed.update(part)
        if hashed.hexdigest() != entry["sha256"]:
            raise CorruptionError(
                f"{self.address}/{source} is not what was shared: remove it, and share it again"
            )
        fsync_file(target)

    def remove(self, named: str) -> None:
        """Remove what is there of a folder.

        Raises:
            MediumError: no answer, or a refusal; some may be left, and nobody fetches it.
        """
        with self._explained(named):
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._objects, f"{named}/{MANIFEST}")
            for page in obstore.list(self._objects, f"{named}/", chunk_size=1000):
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._objects, [found["path"] for found in page])

    def _explained(self, named: str) -> contextlib.AbstractContextManager[None]:
        return explained(f"{self.address}/{named}")


def _sha256(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(file, "sha256").hexdigest()
