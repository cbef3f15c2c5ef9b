"""Weights given to real servers: over every transport, in the middle of requests, and when it goes wrong."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.sglang import model
from tests.sglang.conftest import PROMPT, TOLERANCE, Client, Reference, Weights, amid
from tests.sglang.server import SglangServer

from rollbook.engines.engine import Sampling
from rollbook.engines.weights.compare import expected_ranks_digest
from rollbook.engines.weights.digests import read_weights
from rollbook.engines.weights.name import version_in
from rollbook.store.errors import EngineError
from rollbook.store.events import PolicyActivated, Record
from rollbook.train.sync.control import UNVERIFIED

BUCKET = 1 << 16
TIMEOUT_S = 30.0
TRANSPORTS = ("disk", "tensor", "distributed")
VERSIONS = itertools.count(10_000)
LENGTH = 64


@pytest.fixture(scope="module")
def untied(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A server of a dense model whose head is not its embedding, which takes a step after the other."""
    folder = tmp_path_factory.mktemp("untied")
    path = model.make(folder / "model", "dense", 5, tied=False, like=models["dense"])
    started = SglangServer(path, folder, "--disable-overlap-schedule")
    started.start()
    try:
        started.ready()
        yield started
    finally:
        started.stop()


@dataclass(slots=True, eq=False)
class Trainer:
    """Makes versions of weights and gives them to servers."""

    folder: Path
    servers: list[SglangServer]
    records: list[Record] = field(default_factory=list)
    path: Path = Path()
    _syncer: Any = None
    _transport: Any = None

    def connect(self, transport: str, pause: str = "retract") -> None:
        """Use these from now on."""
        from rollbook.train.sync.control import EngineControl
        from rollbook.train.sync.session import Syncer, SyncOptions
        from rollbook.train.sync.transports import ByBroadcast, FromDisk, FromTensors

        self.close()
        built: Any = {
            "disk": lambda: FromDisk(Path()),
            "tensor": lambda: FromTensors(BUCKET),
            "distributed": lambda: ByBroadcast(BUCKET, "127.0.0.1", TIMEOUT_S),
        }[transport]()
        self._transport = built
        engines = [EngineControl(server.url, TIMEOUT_S) for server in self.servers]
        self._syncer = Syncer(
            engines, built, lambda *records: self.records.extend(records), SyncOptions(pause)
        )

    def make(self) -> int:
        """New weights, all of them, as a directory; their version."""
        import torch
        from safetensors.torch import save_file

        version = next(VERSIONS)
        torch.manual_seed(version)
        like = self.servers[0].model
        held = {name: t + 0.05 * torch.randn_like(t) for name, t in read_weights(like).items()}
        self.path = self.folder / f"v{version}"
        shutil.copytree(like, self.path)
        save_file(held, self.path / "model.safetensors", metadata={"format": "pt"})
        return version

    def sync(self, version: int, tensors: Any = None, names: Iterable[str] = ()) -> list[str]:
        """Give the engines what `make` made, or something else; `names` are those of the model's tensors."""
        from rollbook.train.sync.session import Release

        if hasattr(self._transport, "path"):
            self._transport.path = self.path
        head_dim = json.loads((self.path / "config.json").read_bytes())["head_dim"]
        weights = tensors or (lambda: iter(read_weights(self.path).items()))
        release = Release("actor", version, "w", "", head_dim, "run", tuple(names))
        urls: list[str] = self._syncer.sync(release, weights)
        return urls

    def said(self) -> list[str]:
        """Kinds of what was written since this was last asked."""
        kinds = [record.KIND for record in self.records]
        self.records.clear()
        return kinds

    def close(self) -> None:
        """Let go of the engines."""
        if self._syncer is not None:
            self._syncer.close()


@pytest.fixture
def trainer(tmp_path: Path, weights: Callable[[SglangServer], Weights]) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers of servers, which afterwards have what they were started with."""
    trainers: list[Trainer] = []

    def make(*servers: SglangServer) -> Trainer:
        for server in servers:
            if server.model.name in ("dense", "moe"):
                weights(server)
        trainers.append(Trainer(tmp_path, list(servers)))
        return trainers[-1]

    yield make
    for item in trainers:
        item.close()


def _generated(server: SglangServer) -> tuple[list[int], list[float], list[Any]]:
    """(ids, logprobs, version spans) of a completion."""
    params = {"max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}
    reply = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    meta = reply["meta_info"]
    logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    return reply["output_ids"], logprobs, meta["weight_versions"]


def _check(server: SglangServer, path: Path, version: int, reference: Any) -> None:
    """What the server makes has the logprobs of the weights at `path`, and their version."""
    ids, logprobs, spans = _generated(server)
    [span] = spans
    assert (version_in(span["version"]), span["start"], span["end"]) == (version, 0, LENGTH)
    wanted = reference.logprobs(path, PROMPT, ids, 1.0)
    assert max(abs(a - b) for a, b in zip(logprobs, wanted, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["dense", "untied", "moe"])
def test_every_transport(
    request: pytest.FixtureRequest,
    trainer: Callable[..., Trainer],
    reference: Reference,
    kind: str,
    transport: str,
) -> None:
    """Two versions one after the other: verified by the engine's checksums, and served as they are. These
    checksums follow from what is recorded and the weights of the files alone."""
    server = request.getfixturevalue(kind)
    ours = trainer(server)
    ours.connect(transport)
    merged = ["qkv_proj", "w13_weight", "w2_weight"] if kind == "moe" else ["gate_up_proj", "qkv_proj"]
    for _ in range(2):
        version = ours.make()
        held = read_weights(ours.path)
        assert ours.sync(version, names=held) == [server.url]
        [record] = [entry for entry in ours.records if isinstance(entry, PolicyActivated)]
        assert ours.said() == ["sync.started", "policy.activated", "sync.finished"]
        assert record.held is not None
        assert (record.held["checksum"], record.held["tp_ranks"]) == ("sha256", [0])
        assert (record.held["padded"], record.held["merged"]) == (True, merged)
        assert expected_ranks_digest(held.items(), record.held) == record.checksums
        held["model.norm.weight"] = held["model.norm.weight"] * (1 + 2**-20)
        assert expected_ranks_digest(held.items(), record.held) != record.checksums
        _check(server, ours.path, version, reference)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_servers_at_once(
    dense: SglangServer,
    servers: dict[str, SglangServer],
    trainer: Callable[..., Trainer],
    reference: Reference,
    transport: str,
) -> None:
    """Both get the same weights from one sync."""
    both = [dense, servers["second"]]
    ours = trainer(*both)
    ours.connect(transport)
    version = ours.make()
    assert ours.sync(version) == [server.url for server in both]
    for server in both:
        _check(server, ours.path, version, reference)


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_fused_experts_are_caught(
    moe: SglangServer, trainer: Callable[..., Trainer], reference: Reference, transport: str
) -> None:
    """SGLang skips transformers' own names of experts in silence: it stays paused until a right sync."""
    import torch
    from transformers import AutoModelForCausalLM

    ours = trainer(moe)
    ours.connect(transport)
    version = ours.make()
    fused = AutoModelForCausalLM.from_pretrained(ours.path, dtype=torch.float32)
    with pytest.raises(EngineError, match=r"mlp\.experts\.gate_up_proj .*skip it silently"):
        ours.sync(version, lambda: iter([(n, p.detach()) for n, p in fused.named_parameters()]))
    assert ours.said() == ["sync.started", "sync.failed"]
    assert moe.get("/model_info")["weight_version"] == UNVERIFIED
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{moe.url}/generate", json=body, timeout=3)
    assert ours.sync(version) == [moe.url]
    _check(moe, ours.path, version, reference)


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_server_is_killed_in_the_middle(
    dense: SglangServer,
    trainer: Callable[..., Trainer],
    reference: Reference,
    models: dict[str, Path],
    tmp_path: Path,
    transport: str,
) -> None:
    """The trainer goes on with the other."""
    victim = SglangServer(models["dense-next"], tmp_path / "victim")
    victim.start()
    try:
        victim.ready()
        ours = trainer(victim, dense)
        ours.connect(transport)
        version = ours.make()

        def weights() -> Iterator[Any]:
            for number, named in enumerate(read_weights(ours.path).items()):
                if number == 9:
                    victim.process.stop()
                yield named

        assert ours.sync(version, weights) == [dense.url]
        assert ours.said().count("sync.failed") == 1
        _check(dense, ours.path, version, reference)
        version = ours.make()
        assert ours.sync(version) == [dense.url]
        _check(dense, ours.path, version, reference)
    finally:
        victim.stop()


def test_in_place_needs_one_step_after_the_other(
    dense: SglangServer, trainer: Callable[..., Trainer]
) -> None:
    """Where steps overlap, SGLang counts a token of the old weights to the new ones: refused."""
    ours = trainer(dense)
    ours.connect("tensor", "in_place")
    with pytest.raises(EngineError, match="start it with --disable-overlap-schedule, or pause by retract"):
        ours.sync(ours.make())
    assert ours.said() == ["sync.started", "sync.failed"]
    assert dense.get("/model_info")["weight_version"] != str(next(VERSIONS) - 1)


def _in_place(old: Path, new: Path, ids: list[int], cut: int) -> list[float]:
    """Logprobs of the ids from `cut` on under new weights, over keys and values that the old ones made."""
    import torch
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    with torch.no_grad():
        # The last token before the cut was sampled by the old weights, and passes through the new ones.
        held = before(torch.tensor([[*PROMPT, *ids[: cut - 1]]]), use_cache=True).past_key_values
        logits = after(torch.tensor([ids[cut - 1 : -1]]), past_key_values=held).logits[0]
    logprobs: list[float] = torch.log_softmax(logits, -1)[range(len(ids) - cut), ids[cut:]].tolist()
    return logprobs


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_in_the_middle_of_a_request(
    request: pytest.FixtureRequest,
    trainer: Callable[..., Trainer],
    client: Callable[..., Client],
    reference: Reference,
    pause: str,
    transport: str,
) -> None:
    """The spans say exactly which version made which token, as the tokens' logprobs prove."""
    server = request.getfixturevalue("untied" if pause == "in_place" else "dense")
    ours = trainer(server)
    ours.connect(transport, pause)
    versions, paths = [ours.make()], list[Path]()
    ours.sync(versions[0])

    def attempt() -> tuple[Any, list[int]]:
        httpx.post(f"{server.url}/flush_cache")  # in place, prefixes of earlier weights stay: none is wanted
        paths.append(ours.path)
        versions.append(ours.make())
        return client(server).meanwhile(Sampling(720, 1.0, 3), partial(ours.sync, versions[-1]))

    generation, heard = amid(attempt)
    (first, second), old = versions[-2:], paths[-1]
    ids = generation.completion_ids.tolist()
    assert heard == ids
    assert len(ids) == 720
    before, after = generation.version_spans
    assert (before.version, before.start, before.end) == (first, 0, after.start)
    assert (after.version, after.end) == (second, 720)
    cut = before.end
    assert 60 <= cut < 720
    logprobs = generation.logprobs.tolist()
    wanted = reference.logprobs(old, PROMPT, ids[:cut], 1.0).tolist()
    if pause == "in_place":
        wanted += _in_place(old, ours.path, ids, cut)
    else:
        wanted += reference.logprobs(ours.path, [*PROMPT, *ids[:cut]], ids[cut:], 1.0).tolist()
    assert max(abs(a - b) for a, b in zip(logprobs, wanted, strict=True)) <= TOLERANCE


def test_a_grammar_that_is_compiled(
    dense: SglangServer, trainer: Callable[..., Trainer], reference: Reference
) -> None:
    """For its request SGLang flushes nothing, not even paused: it goes on until the grammar is there."""
    ours, replies = trainer(dense), []
    ours.connect("tensor")
    ours.sync(first := ours.make())
    second = ours.make()
    string = {"type": "string", "pattern": "^[a-z]{1,90}(foo|bar){0,60}$"}
    fields = {f"k{number}": string for number in range(60)}
    schema = json.dumps({"type": "object", "properties": fields, "required": list(fields)})
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "json_schema": schema}}
    asking = threading.Thread(target=lambda: replies.append(dense.post("/generate", body)))
    asking.start()
    while httpx.post(f"{dense.url}/flush_cache", timeout=30).status_code == 200:
        time.sleep(0.01)
    dense.post("/pause_generation", {"mode": "retract"})
    assert ours.sync(second) == [dense.url]
    asking.join(TIMEOUT_S)
    spans = replies[0]["meta_info"]["weight_versions"]
    assert {version_in(span["version"]) for span in spans} <= {first, second}
    _check(dense, ours.path, second, reference)
