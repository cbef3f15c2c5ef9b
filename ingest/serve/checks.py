"""What settings cannot mean together, or on this system."""

from __future__ import annotations

import ipaddress
import sys

from rollbook.ingest.recording.redact import Redactor
from rollbook.ingest.settings import ServeSettings
from rollbook.store.errors import ConfigError


def check_settings(settings: ServeSettings) -> None:
    """See that a proxy can run with these settings.

    Raises:
        ConfigError: it cannot.
    """
    Redactor(settings.redact)
    if settings.workers > 1:
        _check_workers(settings)
    if settings.proxies or settings.proxy:
        _check_proxies(settings)
    for address in settings.forwarded_from:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            text = f"--forwarded-from {address!r}: {error}: give an address or a network, such as 10.0.0.0/8"
            raise ConfigError(text) from error


def _check_workers(settings: ServeSettings) -> None:
    """See that there can be several workers.

    Raises:
        ConfigError: there cannot.
    """
    if settings.engine == "embedded":
        text = f"--workers {settings.workers}: the embedded engine holds its weights in one process: "
        raise ConfigError(text + "use --workers 1, or serve the model with SGLang and --engine sglang")
    if sys.platform != "linux":
        text = f"--workers {settings.workers} needs Linux, which hands connections from process to process: "
        raise ConfigError(text + "use --workers 1")


def _check_proxies(settings: ServeSettings) -> None:
    """See that this can be one of several proxies.

    Raises:
        ConfigError: it cannot.
    """
    count = len(settings.proxies)
    if count < 2 or len(set(settings.proxies)) < count:
        raise ConfigError(f"proxies {list(settings.proxies)}: name two or more, each once")
    if settings.proxy >= count:
        raise ConfigError(f"--proxy {settings.proxy}: there are {count} proxies, 0 to {count - 1}")
    if settings.engine == "embedded":
        text = "proxies: the embedded engine holds its weights in one process: serve the model with SGLang"
        raise ConfigError(f"{text} and --engine sglang, or record with one proxy")
    if settings.workers > 1:
        raise ConfigError(f"--workers {settings.workers}: one of several proxies is one process; name more")
