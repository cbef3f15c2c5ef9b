"""deploy/compose.yaml: variables, commands, settings and ports fit together, and Rollbook takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from tests.deploy.conftest import Settings

VARIABLE = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")


@pytest.fixture(scope="module")
def example(root: Path) -> dict[str, str]:
    """The variables of the example."""
    lines = (root / "deploy" / "compose" / "example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    """The file as it is."""
    return (root / "deploy" / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def services(text: str, example: dict[str, str]) -> dict[str, Any]:
    """Its services, with the example's variables and the defaults of the others."""
    filled = VARIABLE.sub(lambda m: example.get(m[1], m[3] if m[2] == "-" else ""), text)
    services: dict[str, Any] = yaml.safe_load(filled)["services"]
    return services


@pytest.fixture(scope="module")
def hosts(services: dict[str, Any]) -> dict[str, Any]:
    """Those that are Rollbook's."""
    return {name: one for name, one in services.items() if "rollbook" in one["image"]}


def test_its_variables_are_those_of_the_example(text: str, example: dict[str, str]) -> None:
    """What has to be set is there, and nothing that is not asked for."""
    asked = {match[1]: match[2] for match in VARIABLE.finditer(text)}
    needed = {match[1] for match in VARIABLE.finditer(text) if match[2] == "?"}
    assert needed <= set(example) <= set(asked)


def test_commands_and_variables_are_ours(
    hosts: dict[str, Any],
    parsed: Callable[[list[str]], dict[str, Any]],
    known: Callable[[Iterable[str]], list[str]],
) -> None:
    """Each command line has a sub-command, options and values that exist."""
    assert set(hosts) == {"proxy-0", "proxy-1", "viewer", "sealer", "trainer"}
    for name, host in hosts.items():
        params = parsed(host["command"])
        assert known(host["environment"]) == [], name
        if name == "viewer":
            assert f"127.0.0.1:{params['port']}:{params['port']}" in host["ports"]
            assert host["healthcheck"]["test"][2] == str(params["port"])
        if name.startswith("proxy"):
            assert name == f"proxy-{params['proxy']}"


def test_settings_fit(
    root: Path, hosts: dict[str, Any], services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load; hosts that they name are services; what they lead to is allowed; three keep copies."""
    environment = hosts["proxy-0"]["environment"]
    settings = Settings(root / "deploy" / "compose", environment)
    monkeypatch.setenv("ROLLBOOK_ALLOW", environment["ROLLBOOK_ALLOW"])
    settings.check_allowed()
    settings.check_agree()
    nats = [urlsplit(f"//{address}").hostname for address in settings.nats]
    assert nats == ["nats-0", "nats-1", "nats-2"] == [n for n in services if n.startswith("nats")]
    assert all(services[name]["hostname"] == name for name in nats if name)
    configuration = (root / "deploy" / "compose" / "nats.conf").read_text()
    assert re.findall(r"nats-route://([\w-]+):6222", configuration) == nats
    proxies = [urlsplit(url).hostname for url in settings.serve.proxies]
    assert proxies == [name for name in hosts if name.startswith("proxy")]
    assert settings.train.sync is not None
    assert settings.train.sync.address == hosts["trainer"]["hostname"]


def test_each_host_has_a_volume_of_its_own(hosts: dict[str, Any], services: dict[str, Any]) -> None:
    """And is one, by its name, for all processes of that volume; none may write elsewhere."""
    volumes = {name: next(v for v in host["volumes"] if v.endswith(":/data")) for name, host in hosts.items()}
    assert {(volumes[name], host["hostname"]) for name, host in hosts.items()} == {
        ("proxy-0:/data", "proxy-0"),
        ("proxy-1:/data", "proxy-1"),
        ("third:/data", "third"),
    }
    for host in hosts.values():
        assert host["read_only"]
        assert host["cap_drop"] == ["ALL"]
        assert all(":ro" in volume for volume in host["volumes"] if not volume.endswith(":/data"))
    published = [port for one in services.values() for port in one.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
