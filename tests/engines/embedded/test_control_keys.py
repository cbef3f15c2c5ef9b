"""Who controls the engine: an operator from anywhere, nobody else; and the log says who did what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook.edge.keys import Key, Keys, Role, digest_of
from rollbook.store.errors import EngineError
from rollbook.store.events import EngineControlled, PolicyActivated
from rollbook.store.whose import FOR, ProxyIdentity
from rollbook.train.sync.control import EngineControl

pytestmark = pytest.mark.torch

KEYS = {"ops": Role.operator, "agent": Role.writer, "judge": Role.judge, "board": Role.reader}


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, in_process: Callable[..., InProcess]) -> InProcess:
    """A proxy with keys over an embedded engine."""
    from rollbook.engines.embedded.engine import EmbeddedEngine
    from rollbook.ingest.tokens.chat_template import load_chat_tokenizer

    keys = Keys([Key(name, role, digest_of(f"key-{name}")) for name, role in KEYS.items()])
    return in_process(EmbeddedEngine(tiny_model), load_chat_tokenizer(tiny_model), keys=keys)


def _post(proxy: Any, route: str, key: str | None, peer: str = "127.0.0.1", **body: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(proxy.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {} if key is None else {"authorization": f"Bearer key-{key}"}
            return await client.post(f"/engine/{route}", json=body or None, headers=headers)

    return proxy.run(post())


def _controlled(proxy: Any) -> list[EngineControlled]:
    proxy.settled()
    return [e.record for e in proxy.store.events() if isinstance(e.record, EngineControlled)]


@pytest.mark.parametrize("peer", ["127.0.0.1", "192.0.2.1"])
def test_an_operators_key_and_no_other(keyed: InProcess, peer: str) -> None:
    """From this host as from another: where one is, is no key."""
    for key, status in ((None, 401), ("nobody", 401), ("agent", 403), ("judge", 403), ("board", 403)):
        assert _post(keyed, "pause_generation", key, peer).status_code == status
    assert keyed.engine.gate.open.is_set()
    assert _post(keyed, "pause_generation", "ops", peer, mode="retract").status_code == 200
    assert not keyed.engine.gate.open.is_set()
    assert _post(keyed, "continue_generation", "ops", peer).status_code == 200
    assert keyed.engine.gate.open.is_set()


def test_the_log_says_who_did_what(keyed: InProcess, other_model: Path) -> None:
    """Before the answer goes out; also what was refused, and nothing of what only reads."""
    before = len(_controlled(keyed))
    assert _post(keyed, "weights_checker", "ops", action="checksum").status_code == 200
    wanted = {"max_new_tokens": 1}
    assert _post(keyed, "generate", "ops", input_ids=[1], sampling_params=wanted).status_code == 200
    assert _post(keyed, "end_weight_update", "ops").status_code == 400
    assert _post(keyed, "pause_generation", "ops", mode="odd").status_code == 400
    loaded = {"model_path": str(other_model), "weight_version": "4", "load_format": None, "extra": "x" * 9}
    assert _post(keyed, "update_weights_from_disk", "ops", **loaded).status_code == 200
    assert _post(keyed, "flush_cache", "ops").status_code == 200
    ended, odd, disk, flush = _controlled(keyed)[before:]
    assert [(r.action, r.by, r.engine) for r in (ended, odd, disk, flush)] == [
        ("end_weight_update", "ops", keyed.engine.name),
        ("pause_generation", "ops", keyed.engine.name),
        ("update_weights_from_disk", "ops", keyed.engine.name),
        ("flush_cache", "ops", keyed.engine.name),
    ]
    assert (ended.error or "").startswith("no weight-update session is open")
    assert "mode is 'odd'" in (odd.error or "")
    assert (disk.error, flush.error) == (None, None)
    assert disk.asked == {"model_path": str(other_model), "weight_version": "4"}
    served = [e.record for e in keyed.store.events() if isinstance(e.record, PolicyActivated)]
    assert served[-1].policy_version == 4


def test_without_keys_it_is_this_hosts(served: InProcess) -> None:
    """Nobody is named, and others are refused as before."""
    assert _post(served, "pause_generation", None, "192.0.2.1").status_code == 403
    assert _post(served, "pause_generation", None).status_code == 200
    assert _post(served, "continue_generation", None, "::1").status_code == 200
    controls = [(r.action, r.by, r.asked, r.error) for r in _controlled(served)]
    assert controls == [("pause_generation", None, {}, None), ("continue_generation", None, {}, None)]


def test_it_is_controlled_for_its_own_run(served: InProcess) -> None:
    """A trainer of another one is told both names, before anything was changed; that is recorded too."""
    before = len(_controlled(served))
    own = ProxyIdentity(served.store.store_id, "default")

    def pause(whose: ProxyIdentity) -> httpx.Response:
        return served.post("/engine/pause_generation", json={}, headers={FOR: whose.header})

    refused = pause(ProxyIdentity("elsewhere", "words"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "other_run")
    assert f"of {own}, and not of run 'words' of store elsewhere" in refused.json()["error"]["message"]
    assert pause(own).status_code == 200
    assert [record.error is None for record in _controlled(served)[before:]] == [False, True]
    assert _post(served, "continue_generation", None).status_code == 200


def test_a_control_sends_its_key(keyed: InProcess) -> None:
    """The control that syncs use: with an operator's key it is let in, and without one it is not."""

    def answer(request: httpx.Request) -> httpx.Response:
        async def forward() -> httpx.Response:
            transport = httpx.ASGITransport(keyed.app, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport) as client:
                sent = {"headers": request.headers, "content": request.content}
                return await client.request(request.method, request.url, **sent)  # type: ignore[arg-type]

        answered = keyed.run(forward())
        return httpx.Response(answered.status_code, headers=answered.headers, content=answered.content)

    controls = [EngineControl("http://127.0.0.1/engine", 30.0, key) for key in ("key-ops", None)]
    for control in controls:
        control.close()
        control._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert controls[0].info().kind == "rollbook-embedded"
    controls[0].pause("retract")
    controls[0].resume()
    with pytest.raises(EngineError, match="answers 401"):
        controls[1].pause("retract")


@pytest.mark.more
def test_a_trainer_sends_its_key(serve: Callable[..., Served], tiny_model: Path) -> None:
    """The control that syncs use, over a real server that checks keys."""
    server = serve("--model", str(tiny_model), "--api-key", "operators-key")
    control = EngineControl(f"{server.url}/engine", 30.0, "operators-key")
    try:
        assert control.info().kind == "rollbook-embedded"
        control.pause("retract")
        control.resume()
        with pytest.raises(EngineError, match="answers 401"):
            EngineControl(f"{server.url}/engine", 30.0).pause("retract")
    finally:
        control.close()
