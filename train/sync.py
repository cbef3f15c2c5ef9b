"""Gives an engine new weights, over SGLang's control routes, and checks that it has them."""

from __future__ import annotations

from pathlib import Path

import httpx

from rollbook.store.errors import EngineError
from rollbook.train.config import SyncConfig


def sync_weights(sync: SyncConfig, checkpoint: Path, version: int, digest: str) -> None:
    """Have the engine load a checkpoint as a policy version.

    Raises:
        EngineError: it cannot be reached, refuses, or ends up with other weights.
    """
    body = {"model_path": str(checkpoint), "weight_version": str(version)}
    url = f"{sync.engine.rstrip('/')}/update_weights_from_disk"
    try:
        reply = httpx.post(url, json=body, timeout=sync.timeout_s)
    except httpx.HTTPError as error:
        raise EngineError(f"engine {sync.engine}: {error!r}; is `rollbook serve` running?") from error
    if reply.status_code != 200 or not reply.json().get("success"):
        raise EngineError(f"engine {sync.engine} refused version {version}: {reply.text}")
    loaded = reply.json().get("digest")
    if loaded != digest:
        raise EngineError(f"engine {sync.engine} holds weights {loaded} as version {version}, not {digest}")
