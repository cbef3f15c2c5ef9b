"""What the tests of deploy/ ask of commands, variables and settings, whichever file describes them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.docs.test_readmes import parse

from rollbook.ingest.settings import ServeSettings, parse_settings
from rollbook.store.external_access import allows_bucket, allows_host
from rollbook.store.settings import StoreSettings
from rollbook.train.config.config import TrainConfig, parse_config

OTHERS = {
    *("STORE_ID", "S3_PREFIX", "S3_ENDPOINT"),  # of deploy/begin.py, and of settings that it fills in
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"),  # of AWS's tools
    *("HF_HOME", "RAY_USAGE_STATS_ENABLED"),  # of huggingface_hub, and of Ray
    *("CATALOG_USER", "CATALOG_PASSWORD", "POD_NUMBER"),  # of other variables, and of command lines
}
"""Variables that are no names of Rollbook's own."""


@pytest.fixture(scope="session")
def our_variables() -> frozenset[str]:
    """The variables that the code reads, by its own text."""
    root = Path(__file__).parents[2]
    texts = [p.read_text() for f in ("store", "ingest", "train", "src/rollbook") for p in _files(root / f)]
    return frozenset(name for text in texts for name in re.findall(r'"(ROLLBOOK_[A-Z_]+)"', text))


def _files(folder: Path) -> Iterable[Path]:
    return folder.rglob("*.py")


@pytest.fixture
def known(our_variables: frozenset[str]) -> Callable[[Iterable[str]], list[str]]:
    """Which of some variables nobody reads."""
    return lambda names: sorted(set(names) - our_variables - OTHERS)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], dict[str, Any]]:
    """The parameters of a command line of a container, whose store the image names."""
    monkeypatch.setenv("ROLLBOOK_STORE", "/data/runs")

    def parsed(words: list[str]) -> dict[str, Any]:
        assert words[0] == "rollbook"
        return parse(words[1:])

    return parsed


class Settings:
    """The settings of hosts, read as they are read there."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        text = Template((folder / "store.toml").read_text()).substitute(variables)
        self.store = StoreSettings.model_validate(tomllib.loads(text))
        self.serve: ServeSettings = parse_settings(
            tomllib.loads((folder / "serve.toml").read_text()), "serve.toml"
        )
        self.train: TrainConfig = parse_config(
            tomllib.loads((folder / "train.toml").read_text()), "train.toml"
        )
        assert self.store.medium.url is not None
        self.nats = urlsplit(self.store.medium.url).netloc.split(",")

    def check_allowed(self) -> None:
        """Assert that what they lead to is what ROLLBOOK_ALLOW names, in the environment of now."""
        remote = self.store.remote
        assert all(allows_host(*_place(address)) for address in self.nats)
        assert remote.uri is not None
        assert allows_bucket(urlsplit(remote.uri).netloc)
        assert allows_host(*_place(urlsplit(remote.endpoint or "").netloc))

    def check_agree(self) -> None:
        """Assert that proxies and trainer are of one run and model, and that others reach the proxies."""
        assert (self.serve.run, str(self.serve.model)) == (self.train.run, str(self.train.model))
        assert self.serve.host == "0.0.0.0"
        assert str(self.serve.store) == "/data/runs"
        ports = {urlsplit(url).port for url in self.serve.proxies}
        assert ports == {self.serve.port}


def _place(address: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port
