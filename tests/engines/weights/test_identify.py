"""Which version an engine holds is what its checksums say, and the log says so first; else it holds none."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.processes.warm import TORCH, WarmProcess

from rollbook import store
from rollbook.bench.scripted.job import Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines.address import EngineAddress
from rollbook.engines.engine import Prompt, Sampling
from rollbook.engines.fleet import Fleet
from rollbook.engines.sglang.client import SglangEngine
from rollbook.engines.sglang.http import Keys
from rollbook.engines.weights import identify
from rollbook.engines.weights.compare import Held, answer, compare, expected_ranks_digest
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.engines.weights.identify import Identity
from rollbook.engines.weights.log import WeightLog
from rollbook.engines.weights.name import weight_name
from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest, read_ranks
from rollbook.store import Event
from rollbook.store.errors import EngineError, ModelError, VersionError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyActivated,
    Record,
    SyncFinished,
    SyncStarted,
    token_ids,
)
from rollbook.store.log.tail import Tail
from rollbook.testing.asgi import serving

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (70, 8),
    f"{LAYER}.self_attn.q_proj.weight": (16, 8),
    f"{LAYER}.self_attn.k_proj.weight": (8, 8),
    f"{LAYER}.self_attn.v_proj.weight": (8, 8),
    f"{LAYER}.self_attn.o_proj.weight": (8, 16),
    f"{LAYER}.mlp.gate_proj.weight": (12, 8),
    f"{LAYER}.mlp.up_proj.weight": (12, 8),
    f"{LAYER}.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}
CONFIG = {"hidden_size": 8, "num_attention_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
HELD = {
    **{"checksum": "sha256", "dtype": "float32", "head_dim": 8, "padded": True},
    **{"tp_size": 1, "tp_ranks": [0], "merged": ["gate_up_proj", "qkv_proj"]},
}
SAMPLING = Sampling(4, 1.0, 0)


def make_model(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A model directory."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    held = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def exported(folder: Path, seed: int, run: str = "run", version: int = 3) -> tuple[Path, str]:
    """A model that some store exported as a version of a run; and its digest."""
    path = make_model(folder, seed)
    digest = digest_tensors(read_weights(path), tree=True)
    origin = {"run": run, "policy": "actor", "policy_version": version, "weights_digest": digest}
    (path / "rollbook.json").write_text(json.dumps(origin))
    return path, digest


class World:
    """A run's log, a model that it starts from, and servers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.log = store.open(folder / "store", create=True)
        self.writer = stack.enter_context(self.log.writer("serve"))
        self.model = make_model(folder / "model", 0)

    def server(self, model: Path | None = None, name: str = "default") -> tuple[ScriptedSGLang, str]:
        """A server that was started with a model; (it, its address)."""
        path = str(model or self.model)
        app = ScriptedSGLang(None, Options(model_path=path, weights="float32", weight_version=name, log=9))
        return app, self._stack.enter_context(serving(app))

    def identity(self, model: Path | None = None, run: str = "run") -> Identity:
        """A proxy's, that starts now."""

        async def write(*records: Record) -> None:
            await asyncio.wrap_future(self.writer.append([Event(record, run) for record in records]))

        return Identity(WeightLog(self.log, run, "actor"), write, model)

    def tells(self, *records: Record) -> None:
        """A trainer says so."""
        self.writer.append([Event(record, "run") for record in records]).result()

    def records(self, *kinds: type) -> list[Any]:
        """Records of the log."""
        return [event.record for event in self.log.events() if isinstance(event.record, kinds)]


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared elsewhere is compared in a thread: a process takes seconds to import torch."""

    async def compared(query: Any) -> Any:
        return await asyncio.to_thread(answer, orjson.loads(orjson.dumps(query)))

    if "elsewhere" not in request.node.name:
        monkeypatch.setattr(identify, "compare_elsewhere", compared)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A run that has not begun."""
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario on a loop of its own."""

    async def whole() -> Any:
        async with asyncio.timeout(60):
            return await scenario()

    return asyncio.run(whole())


async def activated(*_: Any) -> None:
    """Whoever is told holds weights itself."""


async def asked(engine: Any, name: str) -> Any:
    """A completion's versions."""
    generation = await engine.generate(Prompt(token_ids([1, 2]), (), None, name), SAMPLING)
    return [span.version for span in generation.version_spans]


# Comparing ----------------------------------------------------------------------------------------


def held_by(
    world: World, dtype: str = "float32", reported: str | None = None, path: Path | None = None
) -> Held:
    """What a server of the world's model holds."""
    app = ScriptedSGLang(None, Options(model_path=str(path or world.model), weights=dtype))
    checksums = {} if app.weights.held is None else app.weights.held.checksums
    return Held("http://e", [RankChecksums(0, 1, dict(checksums))], "cpu", reported or dtype)


def test_the_runs_own_weights(world: World) -> None:
    """By the digest that a trainer or the embedded engine would give it."""
    digest = digest_tensors(read_weights(world.model), tree=True)
    assert compare(world.model, held_by(world)) == (digest, HELD)


@pytest.mark.parametrize("name", [*SHAPES])
def test_one_value_of_one_tensor(world: World, name: str) -> None:
    """Whichever it is in, and however small."""
    other = world.folder / "other"
    shutil.copytree(world.model, other)
    held = load_file(other / "model.safetensors")
    held[name].view(-1)[-1] += 2**-20
    save_file(held, other / "model.safetensors")
    with pytest.raises(EngineError, match="holds another"):
        compare(other, held_by(world))


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_weights_in_the_type_of_the_files(world: World, dtype: str) -> None:
    """Nothing is rounded, so an engine in half precision holds just those; the digest is of float32."""
    model = make_model(world.folder / "half", 3, torch.bfloat16)
    wide = {name: tensor.float() for name, tensor in read_weights(model).items()}
    expected = (digest_tensors(wide, tree=True), HELD | {"dtype": "bfloat16"})
    assert compare(model, held_by(world, "bfloat16", dtype, model)) == expected


def test_weights_that_were_rounded(world: World) -> None:
    """Another policy: the remedy is said."""
    with pytest.raises(
        EngineError, match=r"bfloat16, to which .* was rounded: start it with --dtype float32"
    ):
        compare(world.model, held_by(world, "bfloat16"))


def test_another_models_tensors(world: World) -> None:
    """Names that have no place, and places that nothing goes to."""
    held = held_by(world)
    held.ranks[0].tensors["model.layers.1.input_layernorm.weight"] = "0" * 16
    with pytest.raises(
        EngineError, match=r"holds model\.layers\.1\.input_layernorm\.weight, which the model"
    ):
        compare(world.model, held)
    with pytest.raises(EngineError, match=r"no tensor that .*down_proj\.weight goes into \(8 of 9 have no"):
        compare(
            world.model,
            Held(
                "http://e", [RankChecksums(0, 1, {"model.embed_tokens.weight": "0" * 16})], "cpu", "float32"
            ),
        )


def test_files_that_cannot_be_read(world: World) -> None:
    """No weights at all, as of a directory that holds a tokenizer; damaged ones."""
    empty = world.folder / "tokenizer"
    empty.mkdir()
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        compare(empty, held_by(world))
    (world.model / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="its weights cannot be read"):
        compare(world.model, held_by(world, path=make_model(world.folder / "well", 0)))


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "num_attention_heads": 0}, {"head_dim": "wide"}])
def test_a_configuration_without_sizes(world: World, config: Any) -> None:
    """It says which file lacks what."""
    held = held_by(world)
    (world.model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(
        ModelError, match=r"model/config.json does not say how large a head is: give head_dim"
    ):
        compare(world.model, held)


def test_a_digest_of_all_ranks() -> None:
    """The same for the same tensors in the same cut, whatever the order; data-parallel copies count once."""
    first, second = RankChecksums(0, 2, {"a": "1", "b": "2"}), RankChecksums(1, 2, {"a": "3"})
    again = RankChecksums(0, 2, {"b": "2", "a": "1"})
    assert ranks_digest([first, second]) == ranks_digest([second, again, first])
    others = [
        [first],
        [first, RankChecksums(1, 2, {"a": "4"})],
        [RankChecksums(0, 1, {"a": "1", "b": "2"})],
        [first, second, RankChecksums(1, 2, {"a": "4"})],
    ]
    assert len({ranks_digest(ranks) for ranks in others} | {ranks_digest([first, second])}) == 5


@pytest.mark.parametrize("answer", [{}, {"ranks": []}, {"ranks": [{"checksums": {}}]}, None, {"ranks": [3]}])
def test_an_answer_without_checksums_is_refused(answer: Any) -> None:
    """What names no tensor proves nothing."""
    with pytest.raises(EngineError, match="/weights_checker"):
        read_ranks(answer, "http://e")


def test_comparing_elsewhere(world: World) -> None:
    """A process of its own finds the one of several directories, and says why it is none of the others."""
    other = make_model(world.folder / "other", 1)
    held = held_by(world)
    query = {"url": held.url, "device": "cpu", "dtype": "float32", "trees": True}
    query |= {"ranks": [asdict(held.ranks[0])]}
    reply = run(lambda: identify.compare_elsewhere(query | {"models": [str(other), str(world.model)]}))
    digest = digest_tensors(read_weights(world.model), tree=True)
    assert reply["found"] == {"path": str(world.model), "digest": digest, "held": HELD}
    assert list(reply["reasons"]) == [str(other)]


class Forked:
    """What is awaited of a process, of one that is a fork."""

    def __init__(self, words: tuple[str, ...], **options: Any) -> None:
        self._process = WarmProcess(words, modules=TORCH, **options)
        self.kill = self._process.kill

    async def communicate(self, sent: bytes) -> tuple[bytes, bytes]:
        """Its output and its errors."""
        said: tuple[bytes, bytes] = await asyncio.to_thread(self._process.communicate, sent)
        return said

    @property
    def returncode(self) -> int | None:
        """How it ended."""
        return self._process.returncode


def test_a_failure_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last line of what the process said, with the remedy."""

    async def start(*words: str, **options: Any) -> Forked:
        return Forked(words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(
        EngineError, match="could not be compared: KeyError: 'ranks': let the trainer sync it"
    ):
        run(lambda: identify.compare_elsewhere({"url": "http://e"}))


# Binding ------------------------------------------------------------------------------------------


def test_a_server_of_the_runs_model(world: World) -> None:
    """It is compared once, and named; the next proxy knows the name, and asks for no checksums."""
    app, url = world.server()
    checked = []
    route = app.weights.routes["/weights_checker"]
    app.weights.routes["/weights_checker"] = lambda body: checked.append(body) or route(body)  # type: ignore[func-returns-value]

    async def scenario() -> None:
        for _ in range(2):
            engine = SglangEngine(url, world.identity(world.model))
            await engine.start(activated)
            assert (engine.policy_version(), engine.unverified()) == (0, None)
            assert await asked(engine, f"r{len(checked)}") == [0]
            await engine.close()

    run(scenario)
    [bound] = world.records(PolicyActivated)
    assert bound.weight_name == app.weight_version
    assert (bound.policy_version, bound.engine, bound.path) == (0, url, str(world.model))
    assert bound.weights_digest == digest_tensors(read_weights(world.model), tree=True)
    assert bound.held == HELD
    assert bound.checksums == expected_ranks_digest(read_weights(world.model).items(), HELD)
    assert checked == [{"action": "checksum", "selector": "target"}]


@pytest.mark.parametrize("trees", [True, False])
def test_versions_of_a_run_have_digests_of_one_kind(world: World, trees: bool) -> None:
    """Those of one that an earlier release began are of bytes; whichever kind the folder's manifest has."""
    weights, made = read_weights(world.model), {"run": "another", "policy": "actor", "policy_version": 5}
    other = made | {"weights_digest": digest_tensors(weights, tree=not trees)}
    (world.model / "rollbook.json").write_text(json.dumps(other))
    digest = digest_tensors(weights, tree=trees)
    world.tells(CheckpointWritten("actor", 0, "checkpoints/run/actor/v00000000", digest, None, None, 1))
    _, url = world.server()

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        assert (engine.policy_version(), engine.unverified()) == (0, None)
        await engine.close()

    run(scenario)
    assert [bound.weights_digest for bound in world.records(PolicyActivated)] == [digest]


def test_a_server_of_other_weights(world: World) -> None:
    """Of the same shape, under the first name: it is no version, whatever else it says."""
    app, url = world.server(make_model(world.folder / "other", 1))

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        assert engine.policy_version() is None
        assert "holds no version that is known here" in str(engine.unverified())
        assert "let the trainer sync it" in str(engine.unverified())
        assert await asked(engine, "r0") == []
        await engine.close()

    run(scenario)
    assert world.records(PolicyActivated) == []
    assert app.weight_version == "default"


@pytest.mark.parametrize("name", ["run/actor/0/mark", "0", "default"])
def test_a_name_proves_nothing(world: World, name: str) -> None:
    """Also one that says run, policy and version."""
    _, url = world.server(make_model(world.folder / "other", 1), name)

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        assert (engine.policy_version(), await asked(engine, "r0")) == (None, [])
        await engine.close()

    run(scenario)


def test_nothing_to_compare_with(world: World) -> None:
    """Where --model has only a tokenizer the remedy is said: a sync helps, also later proxies."""
    app, url = world.server()
    bare = world.folder / "bare"
    bare.mkdir()

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(bare))
        await engine.start(activated)
        assert "holds no safetensors weights" in str(engine.unverified())
        app.weight_version = name = weight_name("run", "actor", 4)
        checksums = ranks_digest(await engine.servers.first.checksums())
        record = PolicyActivated("actor", 4, url, "digest of 4", "", name, checksums, HELD)
        await asyncio.to_thread(world.tells, record)
        assert await asked(engine, "r0") == [4], "a trainer has bound the name, and the log is read for it"
        assert (engine.policy_version(), engine.unverified()) == (4, None)
        await engine.close()
        app.weight_version = "default"  # it was started anew, with the same weights
        engine = SglangEngine(url, world.identity())
        await engine.start(activated)
        assert await asked(engine, "r1") == [4]
        await engine.close()

    run(scenario)
    assert [(r.policy_version, r.held) for r in world.records(PolicyActivated)] == [(4, HELD), (4, HELD)]


def test_a_server_started_from_a_checkpoint(world: World) -> None:
    """It is the version whose files it holds, though no engine was seen to hold them before."""
    path, digest = exported(world.log.path / "checkpoints" / "run" / "actor" / "v00000003", 3)
    relative = str(path.relative_to(world.log.path))
    world.tells(CheckpointWritten("actor", 3, relative, digest, None, None, 1))
    _, url = world.server(path)

    async def scenario() -> Any:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        versions = await asked(engine, "r0")
        await engine.close()
        return versions

    assert run(scenario) == [3]


@pytest.mark.parametrize("of", ["another run", "the run of another store", "this run"])
def test_a_server_of_an_exported_model(world: World, of: str) -> None:
    """It is version 0 of the run that begins with it, unless it is that run's own version by its digest."""
    path, digest = exported(world.folder / "exported", 3, "other" if of == "another run" else "run")
    recorded = digest if of == "this run" else "tree-another"
    world.tells(CheckpointWritten("actor", 3, "checkpoints/run/actor/v3", recorded, None, None, 1))
    _, url = world.server(path)

    async def scenario() -> Any:
        engine = SglangEngine(url, world.identity(path))
        await engine.start(activated)
        versions = await asked(engine, "r0")
        await engine.close()
        return versions

    wanted = 3 if of == "this run" else 0
    assert run(scenario) == [wanted]
    [bound] = world.records(PolicyActivated)
    assert (bound.policy_version, bound.weights_digest) == (wanted, digest)


def test_an_exported_model_that_was_changed(world: World) -> None:
    """It is no version, though the server holds just it: both digests are named."""
    path, digest = exported(world.folder / "exported", 3)
    held = load_file(path / "model.safetensors")
    held["model.norm.weight"] += 1
    save_file(held, path / "model.safetensors")
    changed = digest_tensors(read_weights(path), tree=True)
    _, url = world.server(path)

    async def scenario() -> str:
        engine = SglangEngine(url, world.identity(path))
        await engine.start(activated)
        why = str(engine.unverified())
        await engine.close()
        return why

    assert f"their digest is {changed[:16]}, and its rollbook.json names {digest[:16]}" in run(scenario)
    assert world.records(PolicyActivated) == []


def test_another_model_in_a_run_that_has_a_version_0(world: World) -> None:
    """One version, one digest: refused where it would be named, with the remedy."""
    _, first = world.server()
    other = make_model(world.folder / "other", 1)
    app, second = world.server(other)

    async def scenario() -> None:
        engine = SglangEngine(first, world.identity(world.model))
        await engine.start(activated)
        await engine.close()
        engine = SglangEngine(second, world.identity(other))
        with pytest.raises(VersionError, match=r"is not version 0 .*\n?.*Use another --run, or the weights"):
            await engine.start(activated)
        elsewhere = SglangEngine(second, world.identity(other, "another"))
        await elsewhere.start(activated)
        assert elsewhere.policy_version() == 0
        await elsewhere.close()

    run(scenario)
    assert len(world.records(PolicyActivated)) == 2
    assert app.weight_version.startswith("another/actor/0/")


def test_two_that_bind_one_version_at_once(world: World) -> None:
    """Each with weights of its own: the log decides, and the later one is refused."""
    others = [make_model(world.folder / f"other-{seed}", seed) for seed in (1, 2)]
    urls = [world.server(other)[1] for other in others]

    async def scenario() -> list[Any]:
        engines = [SglangEngine(url, world.identity(m)) for url, m in zip(urls, others, strict=True)]
        outcomes = await asyncio.gather(*(e.start(activated) for e in engines), return_exceptions=True)
        for engine in engines:
            await engine.close()
        return outcomes

    outcomes = run(scenario)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "VersionError"]
    assert len(world.records(PolicyActivated)) == 1


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_sync_is_not_named_over(world: World, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Weights that move while they are compared get no version here: the sync gives them theirs."""
    _, url = world.server()
    began = SyncStarted("actor", 1, "s1", url, "tensor")
    if moment == "before":
        world.tells(began)

    async def scenario() -> None:
        identity = world.identity(world.model)
        engine = SglangEngine(url, identity)
        if moment == "meanwhile":
            compared = identity._compared

            async def slowly(*arguments: Any) -> Any:
                monkeypatch.setattr(identity, "_compared", compared)
                await asyncio.to_thread(world.tells, began)
                return await compared(*arguments)

            monkeypatch.setattr(identity, "_compared", slowly)
        await engine.start(activated)
        assert "sync" in str(engine.unverified())
        assert await asked(engine, "r0") == []
        assert world.records(PolicyActivated) == []
        await asyncio.to_thread(world.tells, SyncFinished("actor", 1, "s1", url, 1, 0.1))
        await engine.verify()
        assert engine.policy_version() == 0, "it is looked at again, since nothing was found out"
        await engine.close()

    run(scenario)


# Servers that are started anew --------------------------------------------------------------------


def test_a_server_that_is_started_anew_behind_an_idle_proxy(world: World) -> None:
    """From other weights, under the first name: the first answer has no version, nor has any other."""
    app, url = world.server()
    other = make_model(world.folder / "later", 7)

    async def scenario() -> None:
        fleet = Fleet({url: SglangEngine(url, world.identity(world.model))})
        await fleet.start(activated)
        assert await asked(fleet, "r0") == [0]
        anew = ScriptedSGLang(None, Options(model_path=str(other), weights="float32"))
        app.weights, app.weight_version, app._started = anew.weights, "default", anew._started
        assert await asked(fleet, "r1") == []
        while not fleet.members[0].usable:
            await asyncio.sleep(0.01)
        (state,) = fleet.states()
        assert (state["policy_version"], state["state"]) == (None, "usable")
        assert "holds no version that is known here" in state["unverified"]
        assert await asked(fleet, "r2") == []
        assert fleet.policy_version() is None
        await fleet.close()

    run(scenario)
    assert len(world.records(PolicyActivated)) == 1


def test_a_server_that_is_started_anew_with_the_same_weights(world: World) -> None:
    """The first answer has no version; by the second it has been compared, and has one again."""
    app, url = world.server()

    async def scenario() -> None:
        fleet = Fleet({url: SglangEngine(url, world.identity(world.model))})
        await fleet.start(activated)
        app.weight_version, app._started = "default", -1.0
        assert await asked(fleet, "r0") == []
        while not fleet.members[0].usable:
            await asyncio.sleep(0.01)
        assert await asked(fleet, "r1") == [0]
        await fleet.close()

    run(scenario)
    assert len({record.weight_name for record in world.records(PolicyActivated)}) == 2


def test_weights_of_no_version_are_not_compared_again_and_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while nothing has changed: neither the server's start nor what it could be compared with."""
    app, url = world.server(make_model(world.folder / "other", 1))
    asked_for = []
    elsewhere = identify.compare_elsewhere

    async def counted(question: Any) -> Any:
        asked_for.append(question)
        return await elsewhere(question)

    monkeypatch.setattr(identify, "compare_elsewhere", counted)

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        for _ in range(3):
            await engine.verify()
        assert len(asked_for) == 1
        app._started = -1.0
        await engine.verify()
        assert len(asked_for) == 2
        await engine.close()

    run(scenario)


def test_a_name_that_another_store_gave(world: World) -> None:
    """A proxy that starts takes a server over; one that runs does not take it back."""
    app, url = world.server()

    async def scenario() -> None:
        ours = SglangEngine(url, world.identity(world.model))
        await ours.start(activated)
        app.weight_version = "theirs/actor/3/mark"
        assert await asked(ours, "r0") == []
        await ours.verify()
        assert "another store's proxy or trainer has named them" in str(ours.unverified())
        assert app.weight_version == "theirs/actor/3/mark"
        await ours.close()
        ours = SglangEngine(url, world.identity(world.model))
        await ours.start(activated)
        assert await asked(ours, "r1") == [0]
        await ours.close()

    run(scenario)


def test_a_log_that_cannot_be_read_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply comes all the same; its tokens have no version, since nobody could look up the name."""
    app, url = world.server()

    def scarce(_: Any, limit: int | None = None) -> list[Event]:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        engine = SglangEngine(url, world.identity(world.model))
        await engine.start(activated)
        name, app.weight_version = app.weight_version, "default"
        with monkeypatch.context() as want:
            want.setattr(Tail, "poll", scarce)
            assert await asked(engine, "r0") == []
            await engine.verify()
            assert "the log cannot be read" in str(engine.unverified())
        app.weight_version = name
        assert await asked(engine, "r1") == [0]
        await engine.close()

    run(scenario)


def test_control_routes_have_a_key_of_their_own() -> None:
    """Routes that control a server have a key of their own, where there is one."""
    address = EngineAddress.of("http://e")
    sent = [
        [keys.headers(control=control).get("authorization") for control in (False, True)]
        for keys in (Keys(address), Keys(address, "a"), Keys(address, "a", "b"), Keys(address, None, "b"))
    ]
    assert sent == [[None] * 2, ["Bearer a"] * 2, ["Bearer a", "Bearer b"], [None, "Bearer b"]]
