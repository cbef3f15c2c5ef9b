"""Which outside resources a store may refer to: only those that the operator lists in `ROLLBOOK_ALLOW`.

A store is a folder that anybody may copy and pass on. Its files can name outside resources: a database host
in `store.toml`, a bucket in a manifest, a folder behind a link. Following such a name could send the reader's
credentials there. It is followed only if the environment lists it too:

    ROLLBOOK_ALLOW=db.internal,s3://rollouts,minio.internal:9000,/mnt/large

A host with or without a port (without one, every port), a bucket, or a folder with all that is in it.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

VARIABLE = "ROLLBOOK_ALLOW"


def allows_folder(path: str) -> bool:
    """Whether the folder at this absolute path without links, or one above it, is named."""
    folders = [os.path.realpath(entry) for entry in _entries() if entry.startswith("/")]
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def allows_host(host: str, port: int | None = None) -> bool:
    """Whether the host is listed, with this port or without a port. Host names are compared
    case-insensitively."""
    named = {entry.lower() for entry in _entries() if "/" not in entry}
    return bool({host.lower(), f"{host}:{port}".lower()} & named)


def allows_bucket(bucket: str, scheme: str = "s3") -> bool:
    """Whether the bucket of object storage is named."""
    return f"{scheme}://{bucket}" in [entry.rstrip("/") for entry in _entries()]


def not_allowed(scheme: str, bucket: str, endpoint: str | None) -> list[str]:
    """The bucket, and the service that has it, as far as they are not named.

    Args:
        endpoint: URL of the service; None: the scheme's own.
    """
    service = urlsplit(endpoint or "")
    missing = [] if allows_bucket(bucket, scheme) else [f"{scheme}://{bucket}"]
    if service.hostname is not None and not allows_host(service.hostname, service.port):
        missing.append(service.netloc.rpartition("@")[2])
    return missing


def remedy(*entries: str) -> str:
    """The instruction, for an error message, that allows these."""
    return f"if that is yours, and you trust this store, name it: {VARIABLE}={','.join(entries)}"


def _entries() -> list[str]:
    return [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
