"""Connects to Ray: to a user's cluster, or to one started here for this process and its children.

Whoever reaches Ray's ports can run code in the cluster. So a cluster started here listens on
loopback only and requires a token of its own, which only this user can read.

Ray would install its own SIGTERM handler; this process keeps its handler.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollbook.store.errors import ConfigError

ADDRESS = "RAY_ADDRESS"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ONE_HOST = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where this is 0, Ray takes the loopback for the node's address, and listens nowhere else: what it does by
default where a firewall would ask the user."""
CURRENT = "ray_current_cluster"
"""Where `ray start` notes the address of its cluster."""


def imported() -> Any:
    """The module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed: pip install 'rollbook[ray]'") from error


def connect(namespace: str | None = None) -> Callable[[], None] | None:
    """Connect this process to Ray, if it is not: to the cluster of RAY_ADDRESS, or to this user's one of this
    host; where there is none, to one that is started. What leaves it again; None where others are in it.

    Raises:
        ConfigError: Ray is not installed, or cannot protect a cluster.
        ConnectionError: it does not answer, or refuses; it says why.
    """
    ray = imported()
    _keep_quiet()
    if ray.is_initialized():
        return None
    try:
        leave = _joined(ray, namespace)
    except ConfigError:
        raise
    except Exception as error:  # so Ray says that a node did not start in time
        lines = [f"  {line.strip()}" for line in str(error).splitlines() if line.strip()]
        raise ConnectionError("Ray cannot be reached or started:\n" + "\n".join(lines)) from error
    atexit.register(leave)
    return leave


def _joined(ray: Any, namespace: str | None) -> Callable[[], None]:
    how = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as undo:
        if os.environ.get(ADDRESS) or _started_by_user():
            with kept_sigterm():
                ray.init(**how)
        else:
            folder = undo.enter_context(_folder())
            undo.enter_context(_protected(folder))
            with kept_sigterm():
                ray.init("local", include_dashboard=False, _temp_dir=str(folder / "ray"), **how)
            os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
        undo.callback(ray.shutdown)
        return undo.pop_all().close


def _keep_quiet() -> None:
    """Have Ray print nothing: what befalls its nodes it says on standard output, where commands print."""
    if worker := sys.modules.get("ray._private.worker"):
        vars(worker)["_worker_logs_enabled"] = False


def _started_by_user() -> bool:
    """Whether this user, or root, started a cluster on this host by `ray start`. Another user's may
    be a trap: a process that connects to a cluster runs what the cluster says."""
    noted = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / CURRENT
    try:
        return noted.stat().st_uid in (0, os.geteuid())
    except OSError:
        return False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Context: a folder that only this user may enter, since Ray lets everybody write into its own.
    Its path is short, because Ray's sockets are in it."""
    path = Path(tempfile.mkdtemp(prefix="rollbook-ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp")))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _protected(folder: Path) -> Iterator[None]:
    """Context: variables that make Ray listen on loopback and require a new token."""
    token = folder / "token"
    with open(token, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))
    wanted = {MODE: "token", TOKEN: None, TOKEN_PATH: str(token), ONE_HOST: "0", ADDRESS: None}
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        _read_again()
        yield
    finally:
        _set(before)
        _read_again()


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _read_again() -> None:
    """Have Ray read its variables, some of which it read as it was imported.

    Raises:
        ConfigError: this Ray has no tokens.
    """
    constants, inner = map(importlib.import_module, ("ray._private.ray_constants", "ray._raylet"))
    if not hasattr(inner, "AuthenticationTokenLoader"):
        raise ConfigError(
            "Ray cannot ask for a token, and whoever reaches it could run code: pip install 'ray>=2.52'"
        )
    vars(constants)["ENABLE_RAY_CLUSTER"] = os.environ.get(ONE_HOST) != "0" and sys.platform == "linux"
    inner.Config.initialize("")
    inner.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Context: restores the SIGTERM handler afterwards, whatever a library does to it meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
