"""Routed experts of a real server are those that transformers chooses; and names that it does not know."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sglang.conftest import PROMPT, ROUTING, Client, Reference, Weights, amid
from tests.sglang.server import ENVIRONMENT, SHARED_MEMORY, SglangServer, environment

from rollbook.engines.engine import Sampling
from rollbook.engines.sglang import client as sglang
from rollbook.engines.sglang.client import routing_of
from rollbook.store.errors import EngineError
from rollbook.store.events.routed_experts import unpack

PLAIN = Sampling(40, 1.0, 7)
SEND = Path(__file__).parent / "programs" / "send_experts.py"


def _check(generation: Any, prompt: Any, start: int, path: Path, reference: Any) -> None:
    """As sets: the order among the chosen means nothing."""
    whole = [*prompt, *generation.completion_ids.tolist()]
    experts = unpack(generation.routed_experts)
    assert generation.routed_experts["start"] == start
    assert experts.shape == (len(whole) - 1 - start, ROUTING.layers, ROUTING.topk)
    wanted = reference.experts(path, whole)[start:-1]
    assert np.array_equal(np.sort(experts, -1), np.sort(wanted, -1))


def test_experts_are_those_of_transformers(
    moe: SglangServer, client: Callable[..., Client], reference: Reference
) -> None:
    """Of every position and layer, whether its keys and values came out of the cache or not."""
    session = client(moe, routed_experts=ROUTING)
    heard: list[int] = []
    for _ in range(2):
        generation = session.generate(PLAIN, lambda ids, _: heard.extend(ids))
        _check(generation, PROMPT, 0, moe.model, reference)
    assert generation.timings["cached_tokens"] == len(PROMPT) - 1
    assert len(set(unpack(generation.routed_experts).reshape(-1).tolist())) > 2


def test_a_child_has_only_what_its_parent_has_not(
    moe: SglangServer, client: Callable[..., Client], reference: Reference
) -> None:
    """From the parent's last token on, which passes through the model only now."""
    session = client(moe, routed_experts=ROUTING)
    first = session.generate(PLAIN)
    prompt = [*PROMPT, *first.completion_ids.tolist(), 8, 9]
    known = len(prompt) - 2
    second = session.generate(PLAIN, ids=prompt, known_tokens=known)
    _check(second, prompt, known - 1, moe.model, reference)
    positions = len(unpack(first.routed_experts)) + len(unpack(second.routed_experts))
    assert positions == len(prompt) + len(second.completion_ids) - 1


def _paused(moe: Any, client: Any, changing: Any, mode: str) -> Any:
    """A completion that began under the server's own weights and ended under others."""

    def act() -> None:
        moe.post("/pause_generation", {"mode": mode})
        changing.load(changing.next_model())
        moe.post("/continue_generation")

    session = client(moe, routed_experts=ROUTING)

    def attempt() -> Any:
        changing.load(moe.model)
        return session.meanwhile(Sampling(720, 1.0, 3), act)

    generation, _ = amid(attempt)
    assert len(generation.version_spans) == 2
    return generation


def test_experts_of_new_weights_are_not_those_of_old_tokens(
    moe: SglangServer,
    client: Callable[..., Client],
    weights: Callable[[SglangServer], Weights],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After `retract` the server tells only what the new weights chose, so a turn has none.

    Not so after `abort`.
    """
    answers: list[Any] = []
    real = sglang.part

    def heard(answer: Any, *rest: Any) -> Any:
        answers.append(answer)
        return real(answer, *rest)

    monkeypatch.setattr(sglang, "part", heard)
    changing = weights(moe)
    generation = _paused(moe, client, changing, "retract")
    assert (generation.routed_experts, generation.timings["num_retractions"]) == ({}, 1)
    whole = [*PROMPT, *generation.completion_ids.tolist()]
    routed = np.frombuffer(base64.b64decode(answers[0]["meta_info"]["routed_experts"]), "<i4")
    experts = np.sort(routed.reshape(-1, ROUTING.layers, ROUTING.topk), -1)
    paths = (moe.model, changing.next_model())
    old, new = (np.sort(reference.experts(path, whole)[:-1], -1) for path in paths)
    assert np.array_equal(experts, new)
    before = len(PROMPT) + generation.version_spans[0].end - 1
    assert not np.array_equal(experts[:before], old[:before])
    generation = _paused(moe, client, changing, "abort")
    assert len(unpack(generation.routed_experts)) == len(PROMPT) + len(generation.completion_ids) - 1


def test_nobody_is_told_who_did_not_ask(
    moe: SglangServer, dense: SglangServer, client: Callable[..., Client], models: dict[str, Path]
) -> None:
    """None by default; a server that was not started so is refused at the start."""
    assert client(moe).generate(PLAIN).routed_experts == {}
    assert routing_of(models["moe"]) == ROUTING
    assert routing_of(models["dense"]) is None
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        Client(dense.url, routed_experts=ROUTING)


def _checksums(server: Any) -> dict[str, str]:
    [rank] = server.post("/weights_checker", {"action": "checksum"})["ranks"]
    checksums: dict[str, str] = rank["checksums"]
    return checksums


def _send(server: Any, path: Path, version: int, form: str) -> Any:
    with (
        server.process.log.open("ab") as log,
        subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", SEND, server.url, path, str(version), form],
            env=environment(server.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as sender,
    ):
        assert sender.stdout is not None
        line = sender.stdout.readline()  # not to its end: what tends the shared files holds it open
        status = sender.wait(120)
    for file in SHARED_MEMORY.glob(f"torch_{sender.pid}_*"):
        file.unlink(missing_ok=True)
    assert status == 0, server.process.tail()
    return json.loads(line)


def test_names_that_a_server_does_not_know_are_passed_over(
    moe: SglangServer,
    weights: Callable[[SglangServer], Weights],
    client: Callable[..., Client],
    reference: Reference,
) -> None:
    """Experts sent fused, as transformers names them: success, a new version, and the old weights.

    Sent one by one they are taken. So only checksums tell what is served.
    """
    changing = weights(moe)
    before, old = _checksums(moe), changing.rename()
    assert _send(moe, changing.next_model(), old + 1000, "fused")["success"] is True
    assert moe.get("/model_info")["weight_version"] == str(old + 1000)
    assert _checksums(moe) == before
    _check(client(moe, routed_experts=ROUTING).generate(PLAIN), PROMPT, 0, moe.model, reference)
    assert _send(moe, changing.next_model(), old + 1001, "each")["success"] is True
    after = _checksums(moe)
    assert {name for name in before if after[name] != before[name]} == {n for n in before if ".experts." in n}
