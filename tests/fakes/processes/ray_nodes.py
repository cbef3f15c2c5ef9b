"""A Ray cluster of several nodes on this host, which ends with whoever asked for it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def add_node(cluster: Any, **node: Any) -> None:
    """One more node, with what this says; in the main thread."""
    cluster.added.append(cluster.add_node(**SMALL, **node))


@contextmanager
def ray_nodes(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A head, and nodes with what these say; this process is connected to it, and so are its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
        patch.delenv("RAY_ADDRESS", raising=False)
        folder = tempfile.mkdtemp(prefix="ray-")  # a short path: sockets are in it
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        import ray
        from ray.cluster_utils import Cluster

        handler = signal.getsignal(signal.SIGTERM)
        cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"include_dashboard": False})
        cluster.added = []
        try:
            for node in nodes:
                add_node(cluster, **node)
            patch.setenv("RAY_ADDRESS", cluster.address)
            ray.init(cluster.address, namespace="rollbook", log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)
            shutil.rmtree(folder, ignore_errors=True)
