"""The scripted SGLang's weight routes over real HTTP: the real one's shapes and quirks, and faults."""

from __future__ import annotations

import base64
import hashlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbook.bench.scripted.job import Answer, Options, in_turn
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault, place_in_sglang
from rollbook.testing.asgi import serving

SOURCE = Path(__file__).resolve().parents[2] / "src"
SLOW = Answer(range(100, 160), token_s=0.02)
LAYER = "model.layers.0"


class Peer:
    """A scripted server in a thread, and what asks it."""

    def __init__(self, app: ScriptedSGLang, url: str) -> None:
        self.app, self.client = app, httpx.Client(base_url=url, timeout=20)

    def post(self, path: str, *, status: int = 200, **body: Any) -> Any:
        """A route's answer."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json() if reply.content[:1] in b"{[" else reply.content

    def start(self) -> Callable[[], Any]:
        """Begin a /generate in a thread; calling the result waits for its meta_info."""
        got: list[Any] = []
        body = {"input_ids": [1, 2]}
        thread = threading.Thread(target=lambda: got.append(self.post("/generate", **body)["meta_info"]))
        thread.start()
        while not any(job.made > 2 for job in self.app.running.values()):
            time.sleep(0.002)

        def wait() -> Any:
            thread.join(20)
            return got[0]

        return wait

    def version(self) -> str:
        """What it calls its weights."""
        return str(self.client.get("/model_info").json()["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Of its one rank."""
        (rank,) = self.post("/weights_checker", action="checksum")["ranks"]
        return dict(rank["checksums"])

    def loads(self) -> tuple[int, int]:
        """(running, waiting) requests"""
        (load,) = self.client.get("/v1/loads").json()["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]


Make = Callable[..., Peer]


@pytest.fixture
def peer() -> Iterator[Make]:
    """Makes servers; ends them."""
    with ExitStack() as stack:

        def make(*answers: Any, **options: Any) -> Peer:
            app = ScriptedSGLang(in_turn(answers or [[1, 2]]), Options(log=100, **options))
            return Peer(app, stack.enter_context(serving(app)))

        yield make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two small Qwen3 with an odd vocabulary."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 70, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        config = transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=False)
        folders.append(tmp_path_factory.mktemp(f"scripted-{seed}"))
        transformers.Qwen3ForCausalLM(config).save_pretrained(folders[-1])
    return folders[0], folders[1]


def _expected(model: Path) -> dict[str, str]:
    """SGLang's checksums of a model, by hand."""
    import torch

    from rollbook.engines.weights.digests import read_weights

    held = read_weights(model)
    for layer, merged, parts in (("self_attn", "qkv", "q k v"), ("mlp", "gate_up", "gate up")):
        names = [f"{LAYER}.{layer}.{part}_proj.weight" for part in parts.split()]
        held[f"{LAYER}.{layer}.{merged}_proj.weight"] = torch.cat([held.pop(name) for name in names])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = torch.cat([held[name], torch.zeros(128 - 70, 16)])
    return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for n, t in held.items()}


def _sent(tensors: Any) -> list[str]:
    return [base64.b64encode(pickle.dumps(list(tensors))).decode()]


def _items(model: Path) -> list[tuple[str, Any]]:
    from rollbook.engines.weights.digests import read_weights

    return list(read_weights(model).items())


# Weights ------------------------------------------------------------------------------------------


def test_tensors_are_merged_as_sglang_merges_them() -> None:
    """Projections are merged in order; the experts of a mixture are in two tensors."""
    names = ["self_attn.q_proj.weight", "self_attn.v_proj.bias", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    assert [place_in_sglang(name, 0) for name in names] == [
        ("self_attn.qkv_proj.weight", 0, 3),
        ("self_attn.qkv_proj.bias", 2, 3),
        ("mlp.gate_up_proj.weight", 1, 2),
        ("mlp.down_proj.weight", 0, 1),
    ]
    kinds = [place_in_sglang(f"mlp.experts.3.{kind}_proj.weight", 8) for kind in ("gate", "up", "down")]
    wide = "mlp.experts.w13_weight"
    assert kinds == [(wide, 6, 16), (wide, 7, 16), ("mlp.experts.w2_weight", 3, 8)]


@pytest.mark.torch
def test_checksums_follow_the_weights(peer: Make, models: tuple[Path, Path]) -> None:
    """From disk and in buckets: SGLang's merged and padded tensors; names without a place are no error."""
    server = peer(model_path=str(models[0]), weights="float32")
    assert server.checksums() == _expected(models[0])
    reply = server.post("/update_weights_from_disk", model_path=str(models[1]), weight_version="1")
    assert (reply["success"], reply["num_paused_requests"]) == (True, 0)
    assert "Weight version updated to 1." in reply["message"]
    assert server.checksums() == _expected(models[1]) != _expected(models[0])
    server.post("/begin_weight_update")
    items = [("model.layers.0.mlp.experts.gate_up_proj", _items(models[0])[0][1]), *_items(models[0])]
    for number, item in enumerate(items):
        body = {"serialized_named_tensors": _sent([item]), "weight_version": "2"}
        server.post("/update_weights_from_tensor", **body)
        if item[0].endswith("k_proj.weight") and number < len(items) - 1:
            halves = server.checksums()[f"{LAYER}.self_attn.qkv_proj.weight"]
    server.post("/end_weight_update")
    assert server.checksums() == _expected(models[0])
    whole = [_expected(m)[f"{LAYER}.self_attn.qkv_proj.weight"] for m in models]
    assert halves not in whole
    assert server.version() == "2"


@pytest.mark.torch
def test_a_directory_without_weights(peer: Make, models: tuple[Path, Path], tmp_path: Path) -> None:
    """A 400, and nothing has changed."""
    server = peer(model_path=str(models[0]), weights="float32")
    reply = server.post("/update_weights_from_disk", status=400, model_path=str(tmp_path), weight_version="1")
    assert reply["success"] is False
    assert "holds no safetensors" in reply["message"]
    assert (server.version(), server.checksums()) == ("default", _expected(models[0]))


def test_the_rules_of_a_session(peer: Make) -> None:
    """Tensors only inside, one session at a time; groups cannot be joined."""
    server = peer()
    for kind in ("tensor", "distributed"):
        reply = server.post(f"/update_weights_from_{kind}", status=400)
        assert reply["message"].endswith("must run between begin_weight_update() and end_weight_update()")
    assert "no weight-update session" in server.post("/end_weight_update", status=400)["message"]
    assert server.post("/begin_weight_update") == {"success": True, "message": "Success"}
    assert "already open" in server.post("/begin_weight_update", status=400)["message"]
    server.post("/update_weights_from_tensor", serialized_named_tensors=["AA=="], weight_version="5")
    assert server.post("/update_weights_from_distributed", status=400)["success"] is False
    server.post("/end_weight_update")
    assert server.version() == "5"
    assert server.post("/init_weights_update_group", status=400)["success"] is False
    assert (
        server.post("/weights_checker", status=400, action="snapshot")["message"]
        == "Unsupported action='snapshot'"
    )
    assert server.checksums() == {}


def test_an_update_that_cannot_flush(peer: Make) -> None:
    """In place with requests running: a 400, yet the tokens that follow are the new weights'."""
    server = peer(SLOW, weight_version="1")
    wait = server.start()
    server.post("/pause_generation", mode="in_place")
    assert server.loads() == (1, 0)
    reply = server.post("/update_weights_from_disk", status=400, model_path="m", weight_version="2")
    assert "the cache was not flushed" in reply["message"]
    assert server.version() == "1"
    server.post("/continue_generation")
    meta = wait()
    assert [s["version"] for s in meta["weight_versions"]] == ["1", "2"]
    assert server.version() == "1"
    server.post("/update_weights_from_disk", model_path="m", weight_version="3")
    assert server.version() == "3"


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
def test_an_update_in_mid_generation(peer: Make, mode: str, flush: bool) -> None:
    """Paused, updated, continued: two spans; the queue is what was retracted and what came since."""
    server = peer(SLOW, weight_version="1")
    wait = server.start()
    server.post("/pause_generation", mode=mode)
    assert server.loads() == ((0, 1) if mode == "retract" else (1, 0))
    server.post("/update_weights_from_disk", model_path="m", weight_version="2", flush_cache=flush)
    server.post("/continue_generation")
    assert [s["version"] for s in wait()["weight_versions"]] == ["1", "2"]
    assert (server.version(), server.loads()) == ("2", (0, 0))


def test_an_update_without_a_pause_waits(peer: Make) -> None:
    """Until what runs has ended, or at once where everything is aborted."""
    server = peer(SLOW, weight_version="1")
    wait = server.start()
    server.post("/update_weights_from_disk", model_path="m", weight_version="2")
    assert [s["version"] for s in wait()["weight_versions"]] == ["1"]
    wait = server.start()
    server.post("/update_weights_from_disk", model_path="m", weight_version="3", abort_all_requests=True)
    assert wait()["finish_reason"]["type"] == "abort"


# Faults -------------------------------------------------------------------------------------------


def test_errors_in_the_middle_of_the_buckets(peer: Make) -> None:
    """The third bucket is a 500 and the fourth a broken connection; what follows goes well."""
    server = peer()
    route = "/update_weights_from_tensor"
    server.app.faults.add(Fault(route, "error", after=2))
    server.app.faults.add(Fault(route, "drop", after=3))
    server.post("/begin_weight_update")
    body = {"serialized_named_tensors": ["AA=="]}
    for status in (200, 200, 500):
        assert server.client.post(route, json=body).status_code == status
    with pytest.raises(httpx.RemoteProtocolError):
        server.client.post(route, json=body)
    server.post(route, **body)


def test_a_route_that_hangs(peer: Make) -> None:
    """It answers after so many seconds; others answer at once."""
    server = peer()
    server.post("/scripted/fault", route="/pause_generation", kind="hang", seconds=10)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/pause_generation", json={}, timeout=0.1)
    begun = time.monotonic()
    assert server.version() == "default"
    assert time.monotonic() - begun < 9
    assert server.post("/pause_generation")["status"] == "ok"


@pytest.mark.torch
@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/update_weights_from_tensor"])
def test_a_tensor_that_comes_in_wrong(peer: Make, models: tuple[Path, Path], route: str) -> None:
    """The answer is success, and one checksum is not what was sent."""
    server = peer(model_path=str(models[0]), weights="float32")
    server.app.faults.add(Fault(route, "wrong"))
    server.post("/begin_weight_update")
    body = {"model_path": str(models[1]), "serialized_named_tensors": _sent(_items(models[1]))}
    for wrong in (1, 0):
        assert server.post(route, weight_version="1", **body)["success"]
        checksums, expected = server.checksums(), _expected(models[1])
        assert sum(checksums[name] != expected[name] for name in expected) == wrong


def test_a_process_that_dies() -> None:
    """In the middle of an update: the connection ends and the process is gone."""
    fault = '{"route": "/end_weight_update", "kind": "die"}'
    words = [sys.executable, "-m", "rollbook.bench.scripted.serve", "--fault", fault]
    with subprocess.Popen(
        words, env={"PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.post(f"{url}/begin_weight_update", json={}).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/end_weight_update", json={})
        assert process.wait(60) == 9


def test_no_torch_without_weights(run_python: Callable[..., tuple[int, str, str]]) -> None:
    """A scripted server starts quickly: torch comes only with weights."""
    code = (
        "import sys, rollbook.bench.scripted.sglang as s; s.ScriptedSGLang(); print('torch' in sys.modules)"
    )
    assert run_python(code) == (0, "False\n", "")
