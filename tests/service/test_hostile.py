"""A client that sends what it should not is told so, alone; one beside it trains as if nothing were."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import pyarrow as pa
import pytest
from tests.fakes.clients.raw_tinker import RawClient, datum, dense, good, pass_of, sample_of
from tests.service.conftest import BASE, Service, done_by, printed

from rollbook.edge.keys import add_key

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
GROWTH_BYTES = 512 << 20
"""By which the service's memory may grow, at its peak, through everything here."""
QUICKLY = """
from rollbook.service.journal import Journal
Journal.result.__defaults__ = (2.0,)
"""
"""Questions for results are held for two seconds."""
CONTEXT, VOCABULARY = 64, 100
HEALTHY = {"base": BASE, "count": 30}


@dataclass(slots=True, eq=False)
class Stage:
    """A service with two tenants: one that is attacked and trains meanwhile, and one that attacks."""

    service: Service
    victim: RawClient
    attacker: RawClient
    key: str
    before: int

    def peak(self) -> int:
        """The most memory that the service had so far."""
        assert self.service.process is not None
        lines = Path(f"/proc/{self.service.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, started: Callable[..., Service]) -> Iterator[Stage]:
    """Where attacks are made; whatever was sent, the service stays up and says nothing."""
    folder = tmp_path_factory.mktemp("hostile")
    keys = [add_key(folder / "keys.toml", name, "writer", None, "tml-") for name in ("alice", "mallory")]
    service = started(folder, "store", "--keys", str(folder / "keys.toml"), first=QUICKLY)
    victim, attacker = (RawClient(service.url, key) for key in keys)
    stage = Stage(service, victim, attacker, keys[0], 0)
    victim.model()
    stage.before = stage.peak()
    yield stage
    victim.close()
    attacker.close()
    assert service.errors.read_text() == ""
    assert [answer.text for answer in attacker.answers if answer.status_code >= 500] == []
    assert stage.peak() - stage.before < GROWTH_BYTES


@pytest.fixture(scope="module", autouse=True)
def beside(stage: Stage) -> Iterator[None]:
    """A healthy client that trains while all of this happens, and finishes with what it has alone."""
    expected = stage.service.run("train", **HEALTHY, key=stage.key)
    program = stage.service.begin("train", **HEALTHY, key=stage.key)
    yield
    assert printed(program) == expected
    done_by(stage.service)


@pytest.fixture
def attacker(stage: Stage) -> RawClient:
    """Who attacks."""
    return stage.attacker


def zstd(body: bytes) -> bytes:
    """Compressed."""
    return bytes(pa.Codec("zstd").compress(body, asbytes=True))


def nested(depth: int) -> bytes:
    """Metadata of a session, so deep."""
    return b'{"user_metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}"


PROTOBUF = pass_of("m", 1, good())
STEP = b'{"model_id": "m", "seq_id": 1, "adam_params": {}}'
BODIES: dict[str, tuple[str, bytes, str | None, int]] = {
    "bomb of a pass": ("forward_backward", zstd(bytes(300 << 20)), "zstd", 413),
    "bomb of a sample": ("asample", zstd(b"[" * (300 << 20)), "zstd", 413),
    "many lists": ("asample", zstd(b"[" + b"[]," * (5 << 20) + b"0]"), "zstd", 413),
    "no zstd": ("forward_backward", b"nothing", "zstd", 400),
    "half a zstd": ("forward_backward", zstd(PROTOBUF * 99)[:-9], "zstd", 400),
    "another encoding": ("forward_backward", PROTOBUF, "br", 415),
    "another encoding of JSON": ("optim_step", STEP, "gzip", 415),
    "a large body": ("create_session", b" " * ((1 << 20) + 1), None, 413),
    "JSON for protobuf": ("forward_backward", STEP, None, 400),
    "protobuf for JSON": ("optim_step", PROTOBUF, None, 400),
    "nothing": ("optim_step", b"", None, 400),
    "no object": ("optim_step", b"[1]", None, 400),
    "no number": ("create_session", b'{"tags": NaN}', None, 400),
    "no text": ("create_session", b'{"sdk_version": "\xff"}', None, 400),
    "half a character": ("create_session", b'{"sdk_version": "\\ud800"}', None, 400),
    "deep": ("create_session", nested(300), None, 400),
    "deeper": ("create_session", nested(100_000), None, 400),
    "a key twice": ("create_session", b'{"sdk_version": "1", "sdk_version": "2"}', None, 400),
    "many keys": ("create_session", orjson.dumps({str(n): n for n in range(50_000)}), None, 400),
    "an unknown key": ("create_session", b'{"' + b"k" * 500_000 + b'": 1}', None, 400),
    "large metadata": ("create_session", orjson.dumps({"user_metadata": {"a": "x" * 17_000}}), None, 400),
    "many tags": ("create_session", orjson.dumps({"tags": ["t"] * 65}), None, 400),
}


@pytest.mark.parametrize("name", [*BODIES])
def test_bodies_that_are_none(attacker: RawClient, name: str) -> None:
    """Each is refused with a reason that is short."""
    route, body, encoding, status = BODIES[name]
    answer = attacker.send(route, body, **({"content_encoding": encoding} if encoding else {}))
    assert answer.status_code == status, answer.text
    assert 10 < len(answer.json()["detail"]) < 1000


def test_bombs_at_once(stage: Stage) -> None:
    """As many as there are threads: they wait for each other's room."""
    route, body, _, _ = BODIES["bomb of a pass"]

    def send(_: int) -> int:
        return stage.attacker.send(route, body, content_encoding="zstd").status_code

    with ThreadPoolExecutor(16) as pool:
        assert {*pool.map(send, range(32))} == {413}


LARGE = np.float32(3e38)
DATA: dict[str, tuple[Any, str]] = {
    "shape": (good(target_tokens=dense([6] * 3, "<i8")), "target_tokens are int64 [3]"),
    "a lie of a shape": (good(target_tokens=dense([6] * 4, "<i8", (5,))), "has 4 numbers and the shape [5]"),
    "dtype": (good(target_tokens=dense([6.0] * 4, "<f4")), "target_tokens are float32"),
    "lengths": (good(weights=dense([1.0] * 3, "<f4")), "weights are [3], and its targets [4]"),
    "NaN": (good(weights=dense([np.nan] * 4, "<f4")), "send finite numbers"),
    "infinity": (good(weights=dense([np.inf] * 4, "<f4")), "send finite numbers"),
    "overflow": (good(weights=dense([LARGE] * 4, "<f4")), "nothing was added to the gradients"),
    "overflow of squares": (good(weights=dense([1e25] * 4, "<f4")), "nothing was added to the gradients"),
    "vocabulary": (datum([5, VOCABULARY], target_tokens=dense([6, 6], "<i8")), "ids are 0 to 99"),
    "target": (good(target_tokens=dense([VOCABULARY] * 4, "<i8")), "ids are 0 to 99"),
    "negative": (datum([-1, 5], target_tokens=dense([6, 6], "<i8")), "ids are 0 or more"),
    "negative target": (good(target_tokens=dense([-1] * 4, "<i8")), "ids are 0 to 99"),
    "context": (good(CONTEXT + 1), f"give 1 to {CONTEXT}"),
    "no tokens": (good(0), f"give 1 to {CONTEXT}"),
    "no targets": (datum([5, 6]), "has no 'target_tokens'"),
    "many dimensions": (good(target_tokens=dense([6] * 4, "<i8", (1,) * 9)), "give up to 8 sizes"),
    "a huge shape": (good(target_tokens=dense([6] * 4, "<i8", (1 << 40, 1 << 40))), "than 67108864 numbers"),
}


def test_passes_that_cannot_be_done(attacker: RawClient) -> None:
    """Each fails by itself, and the model behind them is as it was."""
    untouched, model_id = attacker.model(), attacker.model()
    for number, (data, told) in enumerate(DATA.values(), 1):
        assert told in attacker.failure("forward_backward", pass_of(model_id, number, good(), data))
    number = len(DATA) + 1
    odd = pass_of(model_id, number, good(), loss="ppo", config={"clip": 1.0})
    assert "has no key 'clip'" in attacker.failure("forward_backward", odd)
    step = {"model_id": model_id, "seq_id": number + 1, "adam_params": {"learning_rate": -1}}
    assert "learning_rate" in attacker.failure("optim_step", step)
    expected = attacker.loss(pass_of(untouched, 1, good()))
    assert attacker.loss(pass_of(model_id, number + 2, good())) == expected
    assert attacker.loss(pass_of(model_id, number + 3, good(CONTEXT))) > 0


NAMES = ("a/b", "../up", "..", ".hidden", "", "a\nb", "a\0b", "a" * 129, "é", "a\u202eb")


def test_names_that_are_none(stage: Stage) -> None:
    """None becomes a part of a path."""
    attacker = stage.attacker
    model_id = attacker.model()
    for number, name in enumerate(NAMES, 1):
        route = "save_weights" if number % 2 else "save_weights_for_sampler"
        told = attacker.failure(route, {"model_id": model_id, "path": name, "seq_id": number})
        assert told.startswith("path: "), told
    metadata = {"user_metadata": {"a": "x" * 17_000}, "path": "first", "seq_id": len(NAMES) + 1}
    assert "give at most 16384" in attacker.failure("save_weights", {"model_id": model_id} | metadata)
    saved = {"model_id": model_id, "path": "first", "seq_id": len(NAMES) + 2}
    assert attacker.result(attacker.told("save_weights", saved)).json()["path"].endswith("/weights/first")
    folders = [path.name for path in stage.service.store.glob("checkpoints/*") if model_id[:8] in path.name]
    assert folders == [model_id.replace(":", ".")]


def test_anothers_things(stage: Stage) -> None:
    """Are not there, whatever is asked of them: as if they never were."""
    victim, attacker = stage.victim, stage.attacker
    model_id, sampler_id = victim.model(), victim.sampler()
    saved = victim.told("save_weights", {"model_id": model_id, "path": "mine", "seq_id": 1})
    path = victim.result(saved).json()["path"]
    named = {"model_id": model_id, "seq_id": 2}
    session = {"session_id": victim.session_id}
    seen = {"request_id": saved["request_id"]}
    own = {"session_id": attacker.session_id, "model_seq_id": 900, "optimizer": True}
    asks: list[tuple[str, Any]] = [
        ("session_heartbeat", session),
        (f"sessions/{victim.session_id}/finish", {}),
        ("create_model", session | {"model_seq_id": 9, "base_model": BASE, "lora_config": {"rank": 1}}),
        ("create_sampling_session", session | {"sampling_session_seq_id": 0}),
        ("create_sampling_session", {"session_id": attacker.session_id} | _sampler_of(path)),
        ("load_weights", session | {"model_seq_id": 9, "path": path, "optimizer": True}),
        ("load_weights", own | {"path": path}),
        ("get_info", {"model_id": model_id}),
        ("forward_backward", pass_of(model_id, 2, good())),
        ("forward_backward", pass_of(model_id, 2, good(0))),
        ("optim_step", named | {"adam_params": {}}),
        ("optim_step", named | {"adam_params": {"eps": -1}}),
        ("save_weights", named | {"path": "mine"}),
        ("save_weights", named | {"path": "../mine"}),
        ("save_weights_for_sampler", named | {"path": "mine"}),
        ("asample", sample_of(sampler_id, 0)),
        ("cancel_future", seen),
        ("retrieve_future", seen),
    ]
    for route, body in asks:
        answer = attacker.send(route, body)
        assert (answer.status_code, route) == (404, route), answer.text
        assert "is not there: it was never made here, or is another's" in answer.json()["detail"]
    assert attacker.send(f"samplers/{sampler_id}", method="GET").status_code == 404
    for odd in ("..%2f..", "%00", "x" * 5000):
        assert attacker.send(f"samplers/{odd}", method="GET").status_code == 404
    assert victim.loss(pass_of(model_id, 2, good())) > 0


def _sampler_of(path: str) -> dict[str, Any]:
    return {"sampling_session_seq_id": 900, "model_path": path}


@pytest.mark.parametrize("key", ["", "tml-other", "tml-" + "x" * 9000, "trajectory:x:" + "0" * 32])
def test_without_a_key(stage: Stage, key: str) -> None:
    """Nobody is let in."""
    answer = stage.attacker.send("create_session", {}, x_api_key=key)
    assert answer.status_code == 401
    assert "no valid API key" in answer.json()["detail"]


def test_a_gap_that_never_fills(attacker: RawClient) -> None:
    """Holds up its own model: which takes 256 operations more, and always the one that is missing."""
    held, other = attacker.model(), attacker.model()

    def step(number: int) -> Any:
        body = {"model_id": held, "seq_id": number, "adam_params": {"learning_rate": 0.0}}
        return attacker.send("optim_step", body)

    waiting = [step(number).json() for number in range(2, 258)]
    refused = step(258)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "wait, with" in refused.json()["detail"]
    assert attacker.send("retrieve_future", {"request_id": waiting[0]["request_id"]}).status_code == 408
    assert attacker.loss(pass_of(other, 1, good())) > 0
    missing = step(1)
    assert missing.status_code == 200
    assert attacker.result(waiting[-1]).json()["metrics"]["pending_gradients:sum"] == 0


def test_clients_that_end_in_the_middle_of_a_body(stage: Stage) -> None:
    """Leave nothing."""
    address = urlsplit(stage.service.url)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: {address.netloc}\r\nx-api-key: {stage.key}\r\n"
    for at in range(50):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"{head}content-length: 5000\r\n\r\n".encode() + PROTOBUF[: at % 40])
    assert stage.attacker.send("healthz", method="GET").json() == {"status": "ok"}


ODD_SAMPLES: dict[str, tuple[Any, str]] = {
    "num_samples": ({"num_samples": 129}, "num_samples"),
    "none": ({"num_samples": 0}, "num_samples"),
    "context": ({"tokens": [5] * CONTEXT}, f"give 1 to {CONTEXT - 1}"),
    "beyond it": ({"tokens": [5] * 100_000}, f"give 1 to {CONTEXT - 1}"),
    "no prompt": ({"tokens": []}, f"give 1 to {CONTEXT - 1}"),
    "vocabulary": ({"tokens": [VOCABULARY]}, "ids are 0 to 99"),
    "negative": ({"tokens": [-1]}, "greater than or equal to 0"),
    "all negative": ({"tokens": [-1] * 1_000_000}, "greater than or equal to 0"),
    "a large seed": ({"seed": 10**25}, "seed"),
    "a large top_k": ({"top_k": 10**18}, "top_k"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a long stop": ({"stop": "x" * 100_000}, "stop"),
    "many stops": ({"stop": [5] * 65}, "stop"),
    "hot": ({"temperature": 1e9}, "temperature"),
    "cold": ({"temperature": -1.0}, "temperature"),
}


@pytest.mark.parametrize("name", [*ODD_SAMPLES])
def test_samples_that_cannot_be_taken(stage: Stage, name: str) -> None:
    """Are refused."""
    changes, told = ODD_SAMPLES[name]
    answer = stage.attacker.send("asample", sample_of(f"{stage.attacker.session_id}:sample:0", 0, **changes))
    assert answer.status_code in (400, 404), answer.text
    sampler_id = stage.attacker.sampler()
    answer = stage.attacker.send("asample", sample_of(sampler_id, 0, **changes))
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["detail"]


def test_samples_at_the_bounds(attacker: RawClient) -> None:
    """Are taken: a prompt that leaves room for one token, and settings that would overflow."""
    sampler_id = attacker.sampler()
    changes: list[dict[str, Any]] = [
        {"tokens": [5] * (CONTEXT - 1), "max_tokens": 100},
        {"temperature": 1e-30},
        {"top_p": 1e-30},
        {"top_k": (1 << 31) - 1, "seed": -(1 << 63)},
    ]
    for number, own in enumerate(changes):
        answer = attacker.result(attacker.told("asample", sample_of(sampler_id, number, **own)))
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text


HUGE = {"learning_rate": 1e6, "weight_decay": 1e6}


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay", "grad_clip_norm"])
def test_steps_beyond_float32(attacker: RawClient, name: str) -> None:
    """Fail by themselves."""
    step = {"model_id": attacker.model(), "seq_id": 1, "adam_params": {name: 1e38}}
    assert attacker.failure("optim_step", step).startswith(f"adam_params.{name}: ")


def test_weights_that_are_no_numbers(stage: Stage) -> None:
    """Sampled from beside those of another, fail alone."""
    attacker, victim = stage.attacker, stage.victim
    plain, model_id = victim.sampler(), attacker.model()
    expected = victim.sampled(sample_of(plain, 0, num_samples=4))
    assert attacker.loss(pass_of(model_id, 1, good())) > 0
    for number in range(2, 9):  # each multiplies weights by -1e12
        step = {"model_id": model_id, "seq_id": number, "adam_params": HUGE}
        assert "metrics" in attacker.result(attacker.told("optim_step", step)).json()
    assert "the loss is nan" in attacker.failure("forward_backward", pass_of(model_id, 9, good()))
    saved = {"model_id": model_id, "path": "odd", "seq_id": 10}
    path = attacker.result(attacker.told("save_weights_for_sampler", saved)).json()["path"]
    sampler_id = attacker.sampler(path)
    asked = [attacker.told("asample", sample_of(sampler_id, number)) for number in range(8)]
    beside = victim.told("asample", sample_of(plain, 1, num_samples=4))
    ended = [attacker.result(one).json() for one in asked]
    assert {one["category"] for one in ended} == {"user"}
    assert "logprobs are not finite" in ended[0]["error"]
    for (tokens, logprobs), (own, of_own) in zip(victim.sequences(beside), expected, strict=True):
        assert tokens.tolist() == own.tolist()
        assert np.abs(logprobs - of_own).max() < 1e-5  # company changes the order of sums


def test_thousands_of_samples_at_once(stage: Stage) -> None:
    """As many as may wait are taken, the others are asked to come again; what was taken ends."""
    sampler_id, local = stage.attacker.sampler(), threading.local()
    address, key = urlsplit(stage.service.url), stage.attacker.http.headers["x-api-key"]

    def send(number: int) -> tuple[int, str | None, bytes]:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        body = orjson.dumps(sample_of(sampler_id, number, num_samples=32))
        local.connection.request("POST", "/api/v1/asample", body, {"x-api-key": key})
        answer = local.connection.getresponse()
        return answer.status, answer.headers["retry-after"], answer.read()

    with ThreadPoolExecutor(32) as pool:
        answers = [*pool.map(send, range(5_000))]
    taken = [orjson.loads(body) for status, _, body in answers if status == 200]
    assert {again[:2] for again in answers if again[0] != 200} == {(429, "1")}
    assert len(taken) >= 4096 // 32
    for one in taken:
        assert stage.attacker.send("cancel_future", {"request_id": one["request_id"]}).status_code == 204
    for one in taken:
        stage.attacker.result(one)


def test_limits_are_the_configurations(service_at: Callable[..., Service]) -> None:
    """Of what waits at once, and of ranks."""
    limits = ("limits.pending=2", "limits.rank=4")
    service = service_at("limited", *(word for limit in limits for word in ("--set", limit)))
    client = RawClient(service.url, "tml-any")
    lora = {
        "session_id": client.session_id,
        "model_seq_id": 9,
        "lora_config": {"rank": 5},
        "base_model": BASE,
    }
    refused = client.send("create_model", lora)
    assert (refused.status_code, "limits.rank" in refused.json()["detail"]) == (400, True)
    model_id = client.model()
    statuses = [client.send("forward_backward", pass_of(model_id, n, good())).status_code for n in (3, 4, 5)]
    assert statuses == [200, 200, 429]
    client.close()
