"""The settings of `rollbook serve`: a file, options that overrule it, and what neither may hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.settings import settings_of

from rollbook.ingest.secrets import secrets_of
from rollbook.ingest.serve.serve import recorded_settings
from rollbook.ingest.settings import load_settings, parse_settings
from rollbook.store.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of settings."""

    def write(text: str) -> Path:
        (tmp_path / "serve.toml").write_text(text)
        return tmp_path / "serve.toml"

    return write


def test_options_overrule_the_file(file: Callable[..., Path]) -> None:
    """Key by key; what neither says is the default."""
    path = file('store = "runs"\nport = 9\nredact = ["known"]\nhold_s = 5\n[engine_ask]\nlogprobs = true\n')
    settings = load_settings(path, {"port": 10, "engine_url": ["http://one:1"]})
    assert (settings.store, settings.port, settings.redact) == (Path("runs"), 10, ("known",))
    assert (settings.hold_s, settings.engine_ask, settings.lane) == (5.0, {"logprobs": True}, "serve")
    assert [str(url) for url in settings.engine_url] == ["http://one:1"]


def test_sizes_and_the_share_of_a_worker() -> None:
    """Sizes are used in bytes; each of several workers has its part of what bounds the proxy."""
    settings = settings_of(workers=3, max_body_mb=1, memory_mb=0.1, max_running=4, redact=("known",))
    share = settings.share
    assert (settings.max_body_bytes, settings.memory_bytes) == (2**20, 104857)
    assert (share.max_body_bytes, share.memory_bytes, share.max_bodies_bytes) == (2**20, 34952, 2**29 // 3)
    assert (share.max_running, share.max_consumers, share.max_connections) == (2, 22, None)
    assert settings_of(max_connections=7, workers=2).share.max_connections == 4
    assert share.redact == ("known",)
    assert settings_of().share == settings_of()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "prot: unknown key: did you mean port?"),
        ("max-running = 1", "max-running: unknown key: did you mean max_running?"),
        ("zzz = 1", "zzz: unknown key: a file of settings has abandon_s, "),
        ('engine_key = "k"', "a file of settings holds no secrets: give it as ROLLBOOK_ENGINE_KEY"),
        ('api_key = ["k"]', "a file of settings holds no secrets: name a file of keys"),
        ('engine_url = ["http://me:word@host"]', "engine_url holds a login or a key"),
        ('engine_url = "http://host"', "engine_url: send a list"),
        ('port = "8000"', "port: Input should be a valid integer (got '8000')"),
        ("port = 70000", "port: Input should be less than 65536"),
        ('history = "none"', "history: Input should be 'faithful' or 'preserve'"),
        ("port = ", "not TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused(file: Callable[..., Path], text: str, reason: str) -> None:
    """By its key, with the nearest one; and no secret is repeated."""
    with pytest.raises(ConfigError) as refused:
        load_settings(file(f'store = "runs"\n{text}\n'), {})
    assert reason in str(refused.value)
    assert "word" not in str(refused.value)


def test_all_that_is_wrong_is_named_at_once(file: Callable[..., Path]) -> None:
    """So that one look is enough."""
    with pytest.raises(ConfigError) as refused:
        load_settings(file("prot = 1\nseal = 3\n"), {})
    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]] == [
        "store",
        "seal",
        "prot",
    ]
    assert "give --store DIR, or set ROLLBOOK_STORE" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_settings(tmp_path / "none.toml", {})


GIVEN = {
    **{"store": "runs", "model": "m", "engine": "sglang", "engine_url": ["http://me:word@host:1"]},
    **{"engine_ask": {"logprobs": True}, "script": "s.py:f", "port": 9, "threads": 2, "images": True},
    **{"proxies": ["http://a:1", "http://b:2"], "proxy": 1, "image_host": ["pics"], "history": "preserve"},
    **{"hold_s": 5, "abandon_s": 2, "trajectory_header": ["X-Task", "x-task"], "redact": ["known"]},
    **{"allow_host": ["Far.example"], "allow_origin": ["http://localhost:3000"], "seal": False},
    **{"forwarded_from": ["10.0.0.0/8"], "pass_path": ["POST /v1/rerank"], "on_store_failure": "refuse"},
    **{"max_body_mb": 0.1, "max_bodies_mb": 100, "max_reply_mb": 1.5, "max_connections": 7},
    **{"memory_mb": 0, "admission": False},
}
RECORDED = """\
{"store": "runs", "model": "m", "engine": "sglang", "script": "s.py:f", "host": "127.0.0.1", "port": 9, \
"run": "default", "lane": "serve", "workers": 1, "proxies": ["http://a:1", "http://b:2"], "number": 1, \
"policy": "actor", "device": "cpu", "threads": 2, "seal": false, "engine_urls": ["http://host:1"], \
"engine_key": true, "engine_admin_key": true, "engine_ask": {"logprobs": true}, "images": true, \
"routed_experts": false, "reply_format": "auto", \
"tree": {"reasoning": "restore", "history": "preserve", "unfinished": "root"}, "hold_s": 5.0, \
"forwarded_from": ["10.0.0.0/8"], "pass_paths": ["POST /v1/rerank"], \
"proxy": {"keys": {"api-key-1": "operator"}, "keys_file": null, \
"hosts": ["127.0.0.1", "b", "far.example", "here", "here.example"], "origins": ["http://localhost:3000"], \
"trajectory_headers": ["x-task"], "on_store_failure": "refuse", "max_body_bytes": 104857, \
"max_bodies_bytes": 104857600, "body_timeout_s": 30.0, "max_running": 4096, "max_connections": 7, \
"max_consumers": 64, "max_reply_bytes": 1572864, "memory_bytes": 0, "admission": false, \
"abandoned_s": 2.0, "image_hosts": ["pics"]}}"""
PLAIN = """\
{"store": "runs", "model": null, "engine": "embedded", "script": null, "host": "127.0.0.1", "port": 8000, \
"run": "default", "lane": "serve", "workers": 1, "proxies": [], "number": 0, "policy": "actor", \
"device": "cpu", "threads": null, "seal": true, "engine_urls": [], "engine_key": false, \
"engine_admin_key": false, "engine_ask": null, "images": false, "routed_experts": false, \
"reply_format": "auto", "tree": {"reasoning": "restore", "history": "faithful", "unfinished": "root"}, \
"hold_s": 110.0, "forwarded_from": [], "pass_paths": [], "proxy": {"keys": {}, "keys_file": null, \
"hosts": ["127.0.0.1", "here", "here.example"], "origins": [], "trajectory_headers": [], \
"on_store_failure": "pass", "max_body_bytes": 67108864, "max_bodies_bytes": 536870912, \
"body_timeout_s": 30.0, "max_running": 4096, "max_connections": null, "max_consumers": 64, \
"max_reply_bytes": 67108864, "memory_bytes": 536870912, "admission": true, "abandoned_s": 0.0, \
"image_hosts": []}}"""


@pytest.mark.parametrize(
    ("given", "secrets", "recorded"),
    [
        ({"store": "runs"}, {}, PLAIN),
        (GIVEN, {"engine_key": "k", "engine_admin_key": "a", "api_keys": ("o",)}, RECORDED),
    ],
)
def test_what_a_log_records_of_the_settings(given: Any, secrets: Any, recorded: str) -> None:
    """To the byte, so that runs of different releases can be compared; without a secret."""
    settings = parse_settings(given, "test")
    record = recorded_settings(settings, secrets_of(settings, {}, "Here.example", **secrets))
    assert json.dumps(record) == recorded
