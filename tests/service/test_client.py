"""The pinned client, unmodified, against the service: it trains, saves, loads, and is told what is wrong."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.raw_tinker import RawClient
from tests.fakes.stories import fabric
from tests.service.conftest import BASE, Service, printed

from rollbook import store as rb
from rollbook.store.events import OperationAccepted, OperationEnded

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]


def _operations(service: Service) -> tuple[list[OperationAccepted], list[OperationEnded]]:
    records = [event.record for event in service.log.events()]
    accepted = [record for record in records if isinstance(record, OperationAccepted)]
    return accepted, [record for record in records if isinstance(record, OperationEnded)]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_a_model_learns(service: Service, loss: str) -> None:
    """Its losses fall, outputs have a number for each target, and every operation ended once, in order."""
    came = service.run("train", base=BASE, loss=loss)
    assert came["losses"][-1] < came["losses"][0]
    assert [len(logprobs) for logprobs in came["logprobs"]] == [5, 2, 7, 1]
    accepted, ended = _operations(service)
    names = ["create_model", *["forward_backward", "optim_step"] * 4, "forward"]
    assert [record.operation for record in sorted(accepted, key=lambda record: record.number)] == names
    assert [record.number for record in ended] == list(range(len(names)))
    assert not [record.error for record in ended if record.error]


def test_the_output_has_factors(service: Service) -> None:
    """As the client asks without a word; alone, too, and the base that others train from stays as it is."""
    first, _, alone, again = (
        service.run("train", base=BASE, **which)
        for which in ({}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}, {})
    )
    assert first == again
    assert alone["losses"][-1] < alone["losses"][0] == first["losses"][0]
    accepted, _ = _operations(service)
    targets = [r.resolved["lora"]["targets"] for r in accepted if r.operation == "create_model"]
    assert [("lm_head" in names, len(names)) for names in targets] == [
        *((True, 8), (False, 7), (True, 1), (True, 8))
    ]


def test_resumed_is_uninterrupted(service: Service) -> None:
    """With its optimizer; without it, it is another training."""
    came = service.run("resume", base=BASE)
    assert came["whole"] == came["warm"] == came["into"] != came["cold"]
    assert came["path"].startswith("tinker://")


def test_two_at_once_are_two_alone(service_at: Callable[..., Service]) -> None:
    """Models of different ranks and matrices, interleaved: each has the bits that it has alone."""
    options: list[dict[str, Any]] = [
        {"rank": 4, "seed": 1, "train_unembed": False},
        {"rank": 8, "seed": 2, "train_mlp": False},
    ]
    alone = [service_at(f"alone-{at}").run("train", base=BASE, **own) for at, own in enumerate(options)]
    for words in ((), ("--set", "models=1")):  # also where each turn drives the other one out of memory
        both = service_at("both-" + "".join(words[1:]), *words)
        programs = [both.begin("train", base=BASE, **own) for own in options]
        assert [printed(program) for program in programs] == alone


def test_what_is_wrong_is_told(service: Service) -> None:
    """By name, with the remedy, and the next operations go on."""
    told = service.run("refused", base=BASE)
    assert "base_model 'other' is not served: use 'tiny'" in told["base"]
    assert "has a token outside of the vocabulary: ids are 0 to 99" in told["vocabulary"]
    assert "loss 'stable_reinforce' is not served: use cross_entropy" in told["loss"]
    assert "weights 'tinker://s:train:0/weights/none' is not there" in told["path"]
    assert re.search(
        r"tinker://\S+/weights/best is there: give another name, or overwrite = true", told["taken"]
    )
    assert told["afterwards"].startswith("[")


def test_a_killed_service_goes_on(service: Service, service_at: Callable[..., Service]) -> None:
    """The client waits and finishes without noticing; its losses are those of a service that lived, and no
    operation ended twice."""
    expected = service.run("train", base=BASE, count=12)
    killed = service_at("killed")
    program, pauses = killed.begin("train", base=BASE, count=12), random.Random(3)
    for _ in range(4):
        time.sleep(1.5 + pauses.random())
        killed.kill()
        killed.start()
    assert printed(program) == expected
    accepted, ended = _operations(killed)
    assert max(Counter(record.request_id for record in [*accepted]).values()) == 1
    assert max(Counter(record.request_id for record in [*ended]).values()) == 1
    with rb.connect(killed.store) as connection:
        [[count]] = connection.execute(
            "select count(*) from events where kind = 'operation.ended'"
        ).fetchall()
    assert count == len(accepted) == 26


def test_two_base_models(service_at: Callable[..., Service]) -> None:
    """Each trained and sampled as by a service of its own; what is of one is not loaded as the other's."""
    alone = {}
    for name, folder in (("tied", fabric.model_folder()), ("untied", fabric.untied_folder())):
        service = service_at(name, base=folder, called=name)
        alone[name] = service.run("sample", base=name), service.run("train", base=name)
        service.stop()
    both = service_at("both", "--set", f'bases.untied.base="{fabric.untied_folder()}"', called="tied")
    for name, (sampled, trained) in alone.items():
        assert both.run("train", base=name) == trained
        came = both.run("sample", base=name)
        first, of_alone = came.pop("first"), sampled.pop("first")
        assert first.pop("id") != of_alone.pop("id")
        assert (came, first) == (sampled, of_alone)
    assert alone["tied"][1] != alone["untied"][1]
    client = RawClient(both.url, "tml-any")
    served = {one["model_name"]: one["sampleable"] for one in base_models(client)}
    assert served == {"tied": True, "untied": True}
    lora = {"session_id": client.session_id, "model_seq_id": 0, "lora_config": {"rank": 2}}
    assert (
        "use 'tied', 'untied'" in client.send("create_model", lora | {"base_model": "third"}).json()["detail"]
    )
    client.result(client.told("create_model", lora | {"base_model": "untied"}))
    saved = {"model_id": f"{client.session_id}:train:0", "seq_id": 1, "path": "a"}
    path = client.result(client.told("save_weights", saved)).json()["path"]
    wrong = {"session_id": client.session_id, "base_model": "tied"}
    for route, named in (
        ("load_weights", {"model_seq_id": 1, "path": path, "optimizer": True}),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "model_path": path}),
    ):
        assert f"{path} is of 'untied'" in client.send(route, wrong | named).json()["detail"]
    client.close()


def base_models(client: RawClient) -> list[dict[str, Any]]:
    """The base models that a client is told of."""
    models: list[dict[str, Any]] = client.send("get_server_capabilities", method="GET").json()[
        "supported_models"
    ]
    return models
