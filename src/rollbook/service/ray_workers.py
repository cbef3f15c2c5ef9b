"""Workers that Ray places on the nodes of a cluster, and starts again where one is lost.

The store's folder has the same path on all nodes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.service.config import ServiceConfig
from rollbook.service.serve import work
from rollbook.store.errors import ConfigError
from rollbook.store.open import open_store
from rollbook.store.ray_connection import connect, imported

LOOK_S = 0.5
"""Between two looks at whether one failed."""


class RayWorker:
    """An actor that trains; Ray makes it anew where its process or its node is lost."""

    def work(self, settings: str, store: str) -> None:
        """Train until it is killed: what it has begun then, another one does."""
        config, forever = ServiceConfig.model_validate_json(settings), threading.Event().wait
        work(config, open_store(Path(store)), lambda: None, forever)


def work_on_ray(
    config: ServiceConfig,
    store: Path,
    count: int,
    ended: Callable[[float], bool],
    announce: Callable[[], None],
) -> None:
    """Have Ray place workers, one for a GPU where the base model is on one, else for a CPU per thread.

    Args:
        ended: waits for so many seconds; whether they are to end.
        announce: called once they are placed or wait for room.

    Raises:
        ConfigError: there are no other processes, or Ray is not installed or does not answer.
        RollbookError: as `work`, of any of them.
    """
    if not config.shared:
        raise ConfigError("workers need shared = true: others accept what they do")
    try:
        leave = connect()
    except ConnectionError as error:
        raise ConfigError(str(error)) from error
    ray = imported()
    gpus = 1 if config.device == "cuda" else 0
    kind = ray.remote(RayWorker).options(
        num_cpus=0 if gpus else config.threads, num_gpus=gpus, max_restarts=-1, max_task_retries=-1
    )
    actors = [kind.remote() for _ in range(count)]
    try:
        working = [actor.work.remote(config.model_dump_json(), str(store.absolute())) for actor in actors]
        announce()
        while not ended(LOOK_S):
            failed, _ = ray.wait(working, timeout=0)
            _raise_of(ray, failed)
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):  # Ray is gone, and they with it
                ray.kill(actor)
        if leave is not None:
            leave()


def _raise_of(ray: Any, failed: list[Any]) -> None:
    try:
        ray.get(failed)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if error.cause is not None else error from None
