"""The pinned client, unmodified, and weights that it saved: lists, lifetimes, other tenants, copies."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.stories import fabric
from tests.service.conftest import BASE, PYTHON, Service, client_environment

from rollbook import store as rb
from rollbook.store import Event
from rollbook.store.events import OperationEnded, WeightsChanged, WeightsCopied, WeightsFreed
from rollbook.train.tenants.operations import KEPT, run_of

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
KEYS = ("tml-alice", "tml-bob")


@pytest.fixture
def service(service: Service) -> Service:
    """A service of an empty store, and the programs about weights."""
    service.file = "client_weights.py"
    return service


@pytest.fixture
def keyed(service_at: Callable[..., Service]) -> Service:
    """One that checks keys: of api-key-1 and api-key-2."""
    keyed = service_at("keyed", *(word for key in KEYS for word in ("--api-key", key)))
    keyed.file = "client_weights.py"
    return keyed


def _records(service: Service, kind: type[Any]) -> list[Any]:
    return [event.record for event in service.log.events() if isinstance(event.record, kind)]


def _folders(service: Service) -> set[str]:
    """The states that are there."""
    found = (service.store / "checkpoints").glob("*/operation-*")
    return {str(folder.relative_to(service.store)) for folder in found}


def _written(service: Service) -> dict[tuple[str, int], str]:
    """Where operations of models wrote states."""
    ends = _records(service, OperationEnded)
    return {(end.model_id, end.number): end.checkpoint for end in ends if end.checkpoint is not None}


def test_a_tenant_reads_its_own(service: Service) -> None:
    """Models, weights and sessions, by pages, with what the client said of each."""
    named = {"project_id": "p1", "user_metadata": {"who": "me"}}
    came = service.run("lists", base=BASE, session=named)
    first, second = came["models"]
    paths = [f"tinker://{name}" for name in (f"{second}/weights/three", f"{first}/sampler_weights/two")] + [
        f"tinker://{first}/weights/one"
    ]
    assert (came["runs"], came["cursor"]) == ([second], {"offset": 0, "limit": 1, "total_count": 2})
    assert (came["by path"], came["of project"], came["of another"]) == (second, 2, 0)
    run = came["first"]
    told = {name: run[name] for name in ("base_model", "is_lora", "lora_rank", "corrupted", "user_metadata")}
    assert told == {
        "base_model": BASE,
        "is_lora": True,
        "lora_rank": 4,
        "corrupted": False,
        "user_metadata": {"renderer": "plain"},
    }
    assert run["last_checkpoint"] == came["of first"][1]
    assert run["last_sampler_checkpoint"] == came["of first"][0]
    assert [(c["checkpoint_id"], c["checkpoint_type"]) for c in came["of first"]] == [
        ("sampler_weights/two", "sampler"),
        ("weights/one", "training"),
    ]
    two, one = came["of first"]
    assert (one["user_metadata"], two["user_metadata"], one["expires_at"]) == ({"step": "1"}, None, None)
    assert one["size_bytes"] > two["size_bytes"] > 10_000
    assert not one["public"]
    assert came["page"] == paths[1:]
    assert came["page cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    info = came["info"]
    trained = [info[f"train_{part}"] for part in ("attn", "mlp", "unembed")]
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == (BASE, True, 8)
    assert trained == [True, False, False]
    assert came["sessions"] == [came["session"]]
    assert came["own"] == {
        "training_run_ids": [first, second],
        "sampler_ids": [came["session"] + ":sample:0"],
        "user_metadata": {"who": "me"},
        "display_name": None,
    }
    assert "limit" in came["odd"]


def test_sessions_are_searched(service: Service) -> None:
    """By names, words, projects and ends; page by page, the newest first."""
    ended = []
    for at in range(2):
        named = {"display_name": f"Night run {at}", "project_id": f"p{at}"}
        ended.append(service.run("end", base=BASE, session=named | {"user_metadata": {"at": str(at)}}))
    came = service.run("several", base=BASE)
    newest_first = [came["own"], *ended[::-1]]
    assert came["ids"] == {
        "all": newest_first,
        "named": ended[::-1],
        "said": ended[:1],
        "of project": ended[1:],
        "active": [came["own"]],
        "failed": ended[::-1],
        "of bob": [],
    }
    assert came["pages"] == [[session] for session in newest_first] + [[]]
    last = came["last"]
    assert (last["display_name"], last["project_id"], last["owner"]) == ("Night run 0", "p0", "")
    assert (last["checkpoints_count"], last["user_metadata"]) == (0, {"at": "0"})
    assert last["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": None}


def test_weights_are_there_for_as_long_as_was_said(service: Service) -> None:
    """From a save on, or from when it was changed; an hour at least, ten years at most."""
    came = service.run("keep", base=BASE)
    saved = came["saved"]
    lived = [_seconds(saved["time"], came[name]["expires_at"]) for name in ("saved", "longer", "sampler")]
    assert lived[0] == 7200
    assert 86400 <= lived[1] < 86400 + 60
    assert came["for ever"]["expires_at"] is None
    assert _seconds(came["sampler"]["time"], came["sampler"]["expires_at"]) == 3600
    assert "ttl_seconds" in came["too short"]
    assert "ttl_seconds" in came["too long"]
    assert came["afterwards"] == 1
    changes = [(change.change, change.expires_us is None) for change in _records(service, WeightsChanged)]
    assert changes == [(KEPT, False), (KEPT, True)]


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def test_deleted_weights_are_gone_but_for_whom_they_serve(service: Service) -> None:
    """A sampler goes on; files go when nothing refers to them: after a restart where its session is over."""
    came = service.run("delete", base=BASE)
    state, path, _ = came["paths"]
    model_id = path.removeprefix("tinker://").partition("/")[0]
    assert came["after"] == came["before"]
    assert came["left"] == [f"tinker://{model_id}/weights/later"]
    for refused in (came["load"], came["open"], came["again"]):
        assert "404" in refused
        assert "is not there" in refused
    assert state in came["saved"]
    written = _written(service)
    gone = {freed.checkpoint for freed in _records(service, WeightsFreed)}
    assert gone == {written[model_id, 3], written[model_id, 5]}
    assert _folders(service) == set(written.values()) - gone
    service.kill()
    service.start()
    service.run("load", base=BASE, path=state)
    gone = {freed.checkpoint for freed in _records(service, WeightsFreed)}
    assert gone == {written[model_id, number] for number in (3, 4, 5)}
    assert not gone & _folders(service)


def test_published_weights_are_for_all(keyed: Service) -> None:
    """Until they are their owner's alone again; all else of a tenant's is not there for another."""
    alice, bob = ({"base": BASE, "key": key} for key in KEYS)
    came = keyed.run("publish", **alice)
    used = keyed.run("use", path=came["path"], **bob)
    assert (used["tokens"], used["own"]) == (came["tokens"], [used["copy"].strip("'")])
    assert used["load"].startswith("[")
    assert "lora_rank=4" in used["info"]
    for name in ("run", "list", "session"):
        assert "404" in used[name]
        assert "is not there" in used[name]
    for told in keyed.run("change", path=came["path"], **bob).values():
        assert "404" in told
        assert "is not there" in told
    assert keyed.run("unpublish", path=came["path"], **alice) == "None"
    used = keyed.run("use", path=came["path"], **bob)
    for name in ("tokens", "load", "info", "copy"):
        assert "is not there" in used[name]
    changes = [(change.change, change.by) for change in _records(keyed, WeightsChanged)]
    assert changes == [("published", "api-key-1"), ("unpublished", "api-key-1")]


def test_nobody_comes_in_without_a_key(keyed: Service) -> None:
    """Where keys are checked, one that is not known is refused."""
    with pytest.raises(AssertionError, match="no valid API key"):
        keyed.run("read", base=BASE, key="tml-carol")


def test_copies_outlive_what_they_are_copies_of(service: Service) -> None:
    """They are the same files under another path, with a time of their own; a training goes on from them."""
    came = service.run("copy", base=BASE)
    assert came["resumed"] == came["whole"]
    other, copied = came["copies"]
    assert [(one["tinker_path"], one["user_metadata"]) for one in came["listed"]] == [
        (copied, {"step": "2"}),
        (other, {"step": "2"}),
    ]
    lived = [one["expires_at"] and _seconds(one["time"], one["expires_at"]) for one in came["listed"]]
    assert lived[0] is None
    assert 7190 < lived[1] <= 7200
    assert came["runs"] == [path.removeprefix("tinker://").partition("/")[0] for path in (copied, other)]
    assert came["metadata"] == {"renderer": "plain"}
    assert "access token" in came["token"]
    records = _records(service, WeightsCopied)
    assert [(record.source_path, record.path) for record in records] == [
        (came["path"], path) for path in (other, copied)
    ]
    assert not _records(service, WeightsFreed)


def test_files_for_other_programs(service: Service, tmp_path: Path) -> None:
    """They are an adapter that PEFT loads, with the factors of the state; an address is good as it was
    signed, while the weights are there."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "adapter"
    folder.mkdir()
    came = service.run("download", base=BASE, into=str(folder))
    assert came["files"] == ["adapter_config.json", "adapter_model.safetensors", "probe.json"]
    model_id = came["path"].removeprefix("tinker://").partition("/")[0]
    state = service.store / _written(service)[model_id, 5] / "adapter_model.safetensors"
    whole, own = load_file(state), load_file(folder / "adapter_model.safetensors")
    assert whole.keys() == own.keys()
    assert all(torch.equal(whole[name], own[name]) for name in whole)
    model = transformers.AutoModelForCausalLM.from_pretrained(fabric.model_folder())
    loaded = dict(peft.PeftModel.from_pretrained(model, folder).named_parameters())
    name = next(name for name in own if "q_proj.lora_B" in name)
    assert torch.equal(loaded[name.replace(".weight", ".default.weight")], own[name])
    assert (came["odd"], came["deleted"], came["goes on"]) == ([404, 404, 404], 404, 1)
    assert "is not there" in came["later"]


def test_the_clients_own_command_fetches_weights(keyed: Service, tmp_path: Path) -> None:
    """By way of an export, which it deletes again; addresses of files need no key."""
    path = keyed.run("some", base=BASE, key=KEYS[0])["path"]
    words = [
        str(PYTHON.with_name("tinker")),
        "checkpoint",
        "download",
        path,
        "--output",
        str(tmp_path / "to"),
    ]
    own = {"TINKER_BASE_URL": keyed.url, "TINKER_API_KEY": KEYS[0], "HOME": str(tmp_path)}
    done = subprocess.run(words, env=client_environment() | own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "to").rglob("*.safetensors")
    ends = [end for end in _records(keyed, OperationEnded) if end.checkpoint is not None]
    [saved] = [end for end in ends if end.result["path"] == path]
    state, got = load_file(keyed.store / saved.checkpoint / file.name), load_file(file)
    assert state.keys() == got.keys()
    assert all(torch.equal(state[name], got[name]) for name in state)
    listed = [one["checkpoint_type"] for one in keyed.run("read", base=BASE, key=KEYS[0])["checkpoints"]]
    assert listed == ["training", "sampler", "training"]


def test_a_killed_service_knows_all_of_it(service: Service) -> None:
    """What was saved, changed, copied and deleted, as it was told before."""
    before = service.run("some", base=BASE)
    service.kill()
    service.start()
    after = service.run("read", base=BASE)
    assert after == {name: before[name] for name in ("runs", "checkpoints")}
    assert [(one["checkpoint_id"], one["public"]) for one in after["checkpoints"]] == [
        ("weights/state", False),
        ("sampler_weights/best", False),
        ("weights/state", True),
    ]


def test_expired_weights_are_not_there(service: Service) -> None:
    """Neither to be loaded nor to be sampled from; once nothing refers to them, their files go."""
    came = service.run("publish", base=BASE)
    service.kill()
    [state] = _folders(service)
    with rb.open(service.store).writer("service") as writer:
        past = WeightsChanged(came["model"], came["path"], state, KEPT, 1_000_000)
        writer.append([Event(past, run=run_of(came["model"]))]).result()
    service.start()
    told = service.run("load", base=BASE, path=came["path"])
    assert "is not there" in told["load"]
    assert "is not there" in told["open"]
    changes = [change.change for change in _records(service, WeightsChanged)]
    assert changes == ["published", "kept", "expired"]
    assert _folders(service) == {state}  # the model starts there again
