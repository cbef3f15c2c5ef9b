"""What a store may lead to outside of its own folder: only what the operator names in `ROLLBOOK_ALLOW`.

A store is a folder that anybody may hand on. So what its files name of the world, a database's host in
`store.toml`, a bucket in a manifest, a folder behind a link, is no more than a wish: credentials of whoever
reads it would go there. It is followed where the environment names it too:

    ROLLBOOK_ALLOW=db.internal,s3://rollouts,minio.internal:9000,/mnt/large

A host with or without a port (without one, every port), a bucket, or a folder with all that is in it.
"""

from __future__ import annotations

import os

VARIABLE = "ROLLBOOK_ALLOW"


def allows_folder(path: str) -> bool:
    """Whether the folder at this absolute path without links, or one above it, is named."""
    folders = [os.path.realpath(entry) for entry in _entries() if entry.startswith("/")]
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def allows_host(host: str, port: int | None = None) -> bool:
    """Whether the host is named, with this port or without any; names of hosts know no case."""
    named = {entry.lower() for entry in _entries() if "/" not in entry}
    return bool({host.lower(), f"{host}:{port}".lower()} & named)


def allows_bucket(bucket: str) -> bool:
    """Whether the bucket of object storage is named."""
    return f"s3://{bucket}" in [entry.rstrip("/") for entry in _entries()]


def remedy(*entries: str) -> str:
    """What to do so that these are allowed."""
    return f"if that is yours, and you trust this store, name it: {VARIABLE}={','.join(entries)}"


def _entries() -> list[str]:
    return [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
