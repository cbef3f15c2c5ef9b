"""What engines hold of a version is compared with its weights alone: whoever sent or verified them is not
believed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from tests.fakes.engines.parallel import spread
from tests.fakes.models.golden_weights import golden_weights
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.embedded.engine import EmbeddedEngine, control_routes
from rollbook.engines.weights.compare import Expected
from rollbook.engines.weights.digests import digest_stream, digest_tensors, stream_files
from rollbook.replay.claims.activations import activations
from rollbook.replay.claims.sent import Sent, sent_differences
from rollbook.store import Event, Store
from rollbook.store.errors import FormatError
from rollbook.store.events import CheckpointWritten, PolicyActivated
from rollbook.testing.asgi import serving

NAME = "model.layers.1.mlp.down_proj.weight"
KV_HEADS = 2


@contextmanager
def _embedded(model: Path) -> Iterator[str]:
    """An embedded engine's control routes, on loopback; its address."""
    engine, app = EmbeddedEngine(model), FastAPI()
    app.include_router(control_routes(engine), prefix="/engine")

    async def noted(*told: object) -> None:
        pass

    app.state.controlled = noted

    async def started(scope: Any, receive: Any, send: Any) -> None:
        if "start" in engine.gate.shut_for:
            await engine.start(noted)
        await app(scope, receive, send)

    with serving(started) as url:
        yield f"{url}/engine"
    asyncio.run(engine.close())


def _sglang(stack: ExitStack, model: Path, dtype: str, size: int) -> tuple[str, Any]:
    app = ScriptedSGLang(None, Options(model_path=str(model), weights=dtype))
    ranks = spread(app, size, KV_HEADS)
    return stack.enter_context(serving(app)), ranks


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, dict[str, str]]]:
    """A store of two bfloat16 steps, each given to three engines: what they are -> address."""
    model = fabric.model_folder()
    with ExitStack() as stack:
        urls = {
            "embedded": stack.enter_context(_embedded(model)),
            "one": _sglang(stack, model, "float32", 1)[0],
            "two": _sglang(stack, model, "bfloat16", 2)[0],
        }
        log = fabric.record_store(tmp_path_factory.mktemp("sent") / "store")
        sync = {"engines": list(urls.values()), "transport": "tensor"}
        fabric.train(log, fabric.config(fabric.SFT, steps=2, checkpoint_every=1, dtype="bfloat16", sync=sync))
        yield log, urls


def _weights(log: Store, version: int) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The weights of a version's checkpoint, again and again."""
    records = [e.record for e in log.events_of([CheckpointWritten.KIND])]
    [path] = {r.path for r in records if isinstance(r, CheckpointWritten) and r.policy_version == version}
    return partial(stream_files, log.path / path)


def _compared(log: Store, version: int, stream: Any) -> dict[str, Sent]:
    results = sent_differences(
        activations(log, fabric.RUN, "actor").get(version, ()), digest_stream(stream(), tree=True), stream
    )
    return {sent.engine: sent for sent in results}


@pytest.mark.more_but("1")
@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_engine_holds_the_version(given: tuple[Store, dict[str, str]], version: int) -> None:
    """Of one rank and of two, in either type, and the embedded one: their checksums are computed again from
    the checkpoint's weights."""
    log, urls = given
    sent = _compared(log, version, _weights(log, version))
    assert set(sent) == set(urls.values())
    assert {entry.verdict for entry in sent.values()} == {"equal"}
    assert all(len(entry.found_checksums or "") == 64 for entry in sent.values())
    assert len({entry.recorded_checksums for entry in sent.values()}) == 3
    held = {
        e.record.engine: e.record.held
        for e in log.events_of([PolicyActivated.KIND])
        if isinstance(e.record, PolicyActivated) and e.record.policy_version == version
    }
    dtypes = {
        url: (entry["dtype"], entry["padded"], entry["tp_size"], entry["merged"])
        for url, entry in held.items()
    }
    merged = ["gate_up_proj", "qkv_proj"]
    assert dtypes == {
        urls["embedded"]: ("float32", False, 1, []),
        urls["one"]: ("float32", True, 1, merged),
        urls["two"]: ("bfloat16", True, 2, merged),
    }


def test_the_weights_are_read_once_for_each_way_of_holding_them(given: tuple[Store, dict[str, str]]) -> None:
    """Three ways; not once for each engine and event."""
    log, _ = given
    stream, read = _weights(log, 1), []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        read.append(1)
        return stream()

    digest = digest_stream(stream(), tree=True)
    assert len(sent_differences(activations(log, fabric.RUN, "actor").get(1, ()), digest, counted)) == 3
    assert len(read) == 3
    assert sent_differences(activations(log, fabric.RUN, "actor").get(7, ()), digest, counted) == []
    assert sent_differences(activations(log, "other", "actor").get(1, ()), digest, counted) == []
    assert sent_differences(activations(log, fabric.RUN, "critic").get(1, ()), digest, counted) == []
    assert len(read) == 3


def test_one_ulp(given: tuple[Store, dict[str, str]]) -> None:
    """Of one tensor: every engine's checksums are others, whatever the digest of the weights says."""
    log, _ = given

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _weights(log, 1)():
            if name == NAME:
                tensor.view(-1).view(torch.int16)[3] += 1
            yield name, tensor

    sent = _compared(log, 1, stream)
    assert {result.verdict for result in sent.values()} == {"differs"}
    assert all(result.found_weights != result.recorded_weights for result in sent.values())
    claimed = digest_stream(_weights(log, 1)(), tree=True)
    results = sent_differences(activations(log, fabric.RUN, "actor").get(1, ()), claimed, stream)
    assert [result.verdict for result in results] == ["differs"] * 3
    assert all(result.found_weights == result.recorded_weights for result in results)
    assert all(result.found_checksums != result.recorded_checksums for result in results)


def test_a_tensor_is_skipped_and_the_verification_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that skipped it is named, and the other is not; until a whole sync brings the tensor."""
    model = fabric.model_folder()
    with ExitStack() as stack:
        good, _ = _sglang(stack, model, "float32", 1)
        bad, ranks = _sglang(stack, model, "float32", 2)
        log = fabric.record_store(tmp_path / "store")
        sync = {"engines": [good, bad], "transport": "tensor"}
        ranks.ranks[1].skipped = NAME
        with monkeypatch.context() as patched:
            patched.setattr(Expected, "check", lambda *_: None)
            fabric.train(log, fabric.config(fabric.SFT, steps=1, sync=sync))
        ranks.ranks[1].skipped = ""
        fabric.train(log, fabric.config(fabric.SFT, steps=2, sync=sync))

    def verdicts(version: int, url: str) -> list[str]:
        stream = _weights(log, version)
        results = sent_differences(
            activations(log, fabric.RUN, "actor").get(version, ()), digest_stream(stream(), tree=True), stream
        )
        return [result.verdict for result in results if result.engine == url]

    # What it has of version 0 it was started with; the second training gives version 1 again, whole.
    assert [verdicts(version, bad) for version in (0, 1, 2)] == [["equal"], ["differs", "equal"], ["equal"]]
    assert [verdicts(version, good) for version in (0, 1, 2)] == [["equal"], ["equal"] * 2, ["equal"]]


# What was recorded otherwise ----------------------------------------------------------------------


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store of engines."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-held", tmp_path / "golden"))


def _of_golden(log: Store, weights: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    stream = weights.items
    results = sent_differences(
        activations(log, "golden", "actor").get(1, ()), digest_tensors(weights), stream
    )
    return [(result.engine, result.verdict) for result in results]


def test_what_an_earlier_release_recorded(golden: Store) -> None:
    """Its words mean what they meant. An engine in the process itself, and one of which it is not known how
    it holds them, are compared by the digest alone."""
    weights = golden_weights()
    assert _of_golden(golden, weights) == [
        ("embedded", "not recorded"),
        ("http://two", "equal"),
        ("http://one", "equal"),
        ("http://gpu", "equal"),
        ("http://older", "not recorded"),
    ]
    weights["model.norm.weight"][2] += 1
    assert {verdict for _, verdict in _of_golden(golden, weights)} == {"differs"}


def test_what_a_later_release_recorded(golden: Store) -> None:
    """It is refused with the event that says it."""
    held = {"checksum": "blake3"}
    record = PolicyActivated("actor", 1, "http://e", "w", "", "name", "c", held)
    with golden.writer("later") as writer:
        writer.append([Event(record, "golden", "later-1")]).result()
    with pytest.raises(FormatError, match=r"event later-1, policy\.activated: .*blake3.* does not know"):
        _of_golden(golden, golden_weights())
