"""What `rollbook serve` needs beside its settings: its engine's keys, its own keys, and its own names."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rollbook.edge.keys import Keys, keys_of
from rollbook.edge.web_pages import AllowedHosts, allowed_hosts
from rollbook.ingest.settings import ServeSettings
from rollbook.store.errors import ConfigError

KEY_VARIABLE, ADMIN_KEY_VARIABLE = "ROLLBOOK_ENGINE_KEY", "ROLLBOOK_ENGINE_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class ProxySecrets:
    """What opens the engine and the proxy.

    Attributes:
        engine_admin_key: of SGLang's control routes, where they have one of their own.
        keys: the proxy's keys, each with a role; without any, everybody may do everything.
        own: hosts and origins of our own; web pages of others are refused.
    """

    engine_key: str | None = field(default=None, repr=False)
    engine_admin_key: str | None = field(default=None, repr=False)
    keys: Keys = field(default_factory=Keys)
    own: AllowedHosts = field(default_factory=AllowedHosts)


def secrets_of(
    settings: ServeSettings,
    environment: MutableMapping[str, str],
    machine: str,
    *,
    engine_key: str | None = None,
    engine_admin_key: str | None = None,
    api_keys: Sequence[str] = (),
) -> ProxySecrets:
    """The secrets, as options or the environment gave them. They are taken out of the environment.

    Args:
        machine: this machine's name.
        api_keys: operators' keys.

    Raises:
        ConfigError: one of them, or a host or origin of the settings, cannot be used.
    """
    names = [urlsplit(url).netloc for url in settings.proxies[settings.proxy :][:1]]
    return ProxySecrets(
        engine_key=engine_key_of(engine_key, environment),
        engine_admin_key=engine_key_of(engine_admin_key, environment, admin=True),
        keys=keys_of(api_keys, settings.keys, environment),
        own=allowed_hosts(settings.host, machine, [*settings.allow_host, *names], settings.allow_origin),
    )


def engine_key_of(
    key: str | None, environment: MutableMapping[str, str], *, admin: bool = False
) -> str | None:
    """An engine's key, if there is one; our children's environment does not hold it.

    Args:
        admin: that of its control routes, which may have one of their own.

    Raises:
        ConfigError: it is empty: then requests would pass with their agents' own keys, wherever they go.
    """
    option, variable = ("--engine-admin-key", ADMIN_KEY_VARIABLE) if admin else ("--engine-key", KEY_VARIABLE)
    empty = key is None and environment.get(variable, "unset").strip() == ""
    if empty or (key is not None and not key.strip()):
        raise ConfigError(f"{option} or {variable} is set and empty: unset it, or give it the key")
    environment.pop(variable, None)
    return key
