"""Whole models of the pinned client's: trained, saved, loaded, sampled and replayed as adapters are."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.clients.raw_tinker import RawClient, good, pass_of, sample_of
from tests.fakes.stories import fabric
from tests.service.conftest import BASE, PYTHON, Service, client_environment, done_by, printed

from rollbook import store as rb
from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store.events import OperationAccepted, OperationEnded, PolicyPublished, StepPlanned

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
FULL = ("--set", "full=1")
WHOLE = {"rank": 0}
WORDS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27], [30, 31]]


@pytest.fixture
def full(service_at: Callable[..., Service]) -> Service:
    """A service that trains whole models."""
    return service_at("full", *FULL)


def _records(service: Service, kind: type) -> list[Any]:
    return [event.record for event in service.log.events() if isinstance(event.record, kind)]


def test_a_curve_is_transformers_under_adamw(full: Service) -> None:
    """Losses of eight steps, and the logprobs behind them; the manifests name no factors."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    came = full.run("train", base=BASE, count=8, **WHOLE)
    peer = transformers.AutoModelForCausalLM.from_pretrained(fabric.model_folder(), dtype=torch.float32)
    adam = torch.optim.AdamW(peer.parameters(), betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)

    def logprobs(words: list[int]) -> Any:
        distributions = peer(torch.tensor([words[:-1]])).logits[0].log_softmax(-1)
        return distributions.gather(-1, torch.tensor(words[1:])[:, None])[:, 0]

    losses = []
    for at in range(8):
        adam.param_groups[0]["lr"] = 1e-2 / (at + 1)
        adam.zero_grad()
        loss = -torch.cat([logprobs(words) for words in WORDS]).sum()
        loss.backward()
        losses.append(float(loss))
        adam.step()
    assert came["losses"] == pytest.approx(losses, rel=1e-5)
    assert came["losses"][-1] < came["losses"][0] / 2
    for words, own in zip(WORDS, came["logprobs"], strict=True):
        assert np.abs(logprobs(words).detach().numpy() - own).max() < 1e-4
    assert [plan.lora for plan in _records(full, StepPlanned)] == [None] * 8
    [made, *_] = _records(full, OperationAccepted)
    assert made.resolved["lora"] is None


def test_resumed_is_uninterrupted(full: Service) -> None:
    """With its optimizer; without it, it is another training."""
    came = full.run("resume", base=BASE, **WHOLE)
    assert came["whole"] == came["warm"] == came["into"] != came["cold"]


def test_together_each_has_what_it_has_alone(service_at: Callable[..., Service]) -> None:
    """Whole models and adapters, interleaved: one whole model at a time in memory, and two at once."""
    options: list[dict[str, Any]] = [WHOLE, WHOLE | {"loss": "ppo"}, {"rank": 4}]
    alone, done = [], list[Any]()
    for at, own in enumerate(options):
        service = service_at(f"alone-{at}", *FULL)
        alone.append(service.run("train", base=BASE, **own))
        done += [str(models) for models in done_by(service)[""]]
    for most in (1, 2):
        both = service_at(f"both-{most}", "--set", f"full={most}", "--set", "models=1")
        programs = [both.begin("train", base=BASE, **own) for own in options]
        assert [printed(program) for program in programs] == alone
        assert sorted(map(str, done_by(both)[""])) == sorted(done)


def test_a_client_does_not_notice_kills(full: Service, service_at: Callable[..., Service]) -> None:
    """Its curve, samples and digests are those of a service that lived."""
    expected = full.run("everything", base=BASE, count=4, **WHOLE)
    killed = service_at("killed", *FULL)
    program, chance = killed.begin("everything", base=BASE, count=4, **WHOLE), random.Random(5)
    for _ in range(5):
        time.sleep(1 + 1.5 * chance.random())
        killed.kill()
        killed.start()
    assert printed(program) == expected
    assert done_by(killed) == done_by(full)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_state_is_written_every_so_many_steps(service_at: Callable[..., Service], rank: int) -> None:
    """From the last of them on, steps run again after a kill; a step replays from there bit for bit."""
    first = "import rollbook.service.worker; rollbook.service.worker.STEPS_BETWEEN = 3"
    service = service_at("often", *FULL, first=first)
    before = service.run("train", base=BASE, count=8, rank=rank)
    written = [end.checkpoint for end in _records(service, OperationEnded) if end.checkpoint]
    assert [name.split("-")[-2] for name in written] == ["00000006", "00000012"]
    shutil.rmtree(service.store / written[0])  # it is not needed any more
    service.kill()
    service.start()
    model_id = _records(service, OperationAccepted)[0].model_id
    assert RawClient(service.url, "tml-any").loss(pass_of(model_id, 18, good())) > 0
    assert "Traceback" not in service.errors.read_text()
    replay = replay_step(rb.open(service.store), 7, model_id.replace(":", "."))
    assert replay.bit_for_bit
    assert replay.reran == [6, 7]
    assert len(before["losses"]) == 8


def test_a_step_replays_bit_for_bit(full: Service) -> None:
    """From the log and the base model."""
    full.run("train", base=BASE, count=3, **WHOLE)
    full.stop()
    [run] = {event.run for event in full.log.events() if isinstance(event.record, StepPlanned)}
    replay = replay_step(rb.open(full.store), 2, run)
    assert replay.bit_for_bit
    assert replay.reran == [0, 1, 2]
    assert [*replay.stages][-2:] == ["weights", "metrics"]


def test_what_is_sampled_is_what_was_saved(full: Service) -> None:
    """Whatever is trained later, with the trainer's logprobs; versions take turns in one engine."""
    came = full.run("sample", base=BASE, **WHOLE)
    assert came["base"] == came["fresh"]
    assert came["third"] == came["again"] == came["third later"]
    assert len({str(came[name]) for name in ("fresh", "third", "sixth")}) == 3
    assert np.abs(np.array(came["scores"][1:]) - came["trainer"]).max() < 1e-5
    for record in _records(full, PolicyPublished):
        assert digest_tensors(read_weights(full.store / record.path)) == record.weights_digest


def test_versions_that_are_sampled_at_once(full: Service) -> None:
    """Requests for two versions and for the base, all at once: each has the tokens that it has alone."""
    client = RawClient(full.url, "tml-any")
    model = client.model(0)
    paths = []
    for at in range(2):
        client.told("forward_backward", pass_of(model, 3 * at + 1, good(6)))
        client.told("optim_step", _step(model, 3 * at + 2))
        saving = {"model_id": model, "seq_id": 3 * at + 3, "path": f"v{at}"}
        saved = client.result(client.told("save_weights_for_sampler", saving))
        paths.append(saved.json()["path"])
    samplers = [client.sampler(path) for path in (*paths, None)]
    wanted = {"max_tokens": 8, "num_samples": 3}
    alone = [client.sampled(sample_of(s, 0, **wanted)) for s in samplers]
    asked = [client.told("asample", sample_of(s, at, **wanted)) for at in range(1, 5) for s in samplers]
    for at, accepted in enumerate(asked):
        came = client.sequences(accepted)
        for (tokens, logprobs), (own, of_own) in zip(came, alone[at % 3], strict=True):
            assert (tokens == own).all()
            assert np.abs(logprobs - of_own).max() < 1e-5
    assert len({str(one) for one in alone}) == 3
    cancelled = client.told("asample", sample_of(samplers[0], 9, max_tokens=40, num_samples=2))
    client.send("cancel_future", {"request_id": cancelled["request_id"]})
    client.result(cancelled)
    client.close()


def _step(model: str, number: int) -> Any:
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.01}}


def test_what_is_told_of_a_whole_model(full: Service, tmp_path: Path) -> None:
    """In all lists it is no adapter; its files are a model that transformers loads, by the client's own
    command, too; deleted, they go."""
    transformers = pytest.importorskip("transformers")
    client = RawClient(full.url, "tml-any")
    model = client.model(0)
    client.told("forward_backward", pass_of(model, 1, good(6)))
    client.told("optim_step", _step(model, 2))
    saved = client.result(client.told("save_weights", {"model_id": model, "seq_id": 3, "path": "state"}))
    path = saved.json()["path"]
    info = client.told("get_info", {"model_id": model})
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    told = client.told("weights_info", {"tinker_path": path})
    assert told == {"base_model": BASE, "is_lora": False}
    run = client.send(f"training_runs/{model}", method="GET").json()
    assert (run["is_lora"], run["lora_rank"]) == (False, None)
    words = [
        str(PYTHON.with_name("tinker")),
        "checkpoint",
        "download",
        path,
        "--output",
        str(tmp_path / "to"),
    ]
    own = {"TINKER_BASE_URL": full.url, "TINKER_API_KEY": "tml-any", "HOME": str(tmp_path / "home")}
    done = subprocess.run(words, env=client_environment() | own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "to").rglob("model.safetensors")
    ended = next(end for end in _records(full, OperationEnded) if (end.result or {}).get("path") == path)
    assert digest_tensors(read_weights(file.parent)) == ended.digests["weights"]
    assert transformers.AutoModelForCausalLM.from_pretrained(file.parent)
    saving = {"model_id": model, "seq_id": 4, "path": "loose"}
    assert "error" not in client.result(client.told("save_weights_for_sampler", saving)).json()
    [loose] = (full.store / "checkpoints" / model.replace(":", ".")).glob("operation-00000004-*")
    assert (loose / "model.safetensors").stat().st_mode & 0o777 == 0o600
    gone = client.send(f"training_runs/{model}/checkpoints/sampler_weights/loose", method="DELETE")
    assert gone.status_code == 204
    while loose.exists():
        time.sleep(0.1)
    client.close()


def test_what_is_refused(service: Service, service_at: Callable[..., Service]) -> None:
    """Where none are trained, and where nothing samples from them: by name, with the remedy; the operations
    behind it go on. An adapter is not loaded into a whole model."""
    client = RawClient(service.url, "tml-any")
    body = {"session_id": client.session_id, "model_seq_id": 0, "base_model": BASE}
    answer = client.send("create_model", body)
    assert answer.status_code == 400
    assert "lora_config: whole models are not trained here: send it" in answer.text
    assert "full = 1" in answer.text
    full = service_at("full", *FULL)
    client = RawClient(full.url, "tml-any")
    model, adapter = client.model(0), client.model()
    saves = [{"model_id": name, "seq_id": 1, "path": "a"} for name in (model, adapter)]
    whole_path, adapter_path = (client.result(client.told("save_weights", s)).json()["path"] for s in saves)
    for into, path in ((model, adapter_path), (adapter, whole_path)):
        loading = {"model_id": into, "seq_id": 2, "path": path, "optimizer": True}
        assert "make a model from them" in client.failure("load_weights", loading)
    full.kill()
    full.words = ()
    full.start()
    text = "nothing samples from whole models here: only [sampler] engine = embedded with full = 1 does"
    saving = {"model_id": model, "seq_id": 3, "path": "b"}
    assert text in client.failure("save_weights_for_sampler", saving)
    opening = {"session_id": client.session_id, "sampling_session_seq_id": 0, "model_path": whole_path}
    assert text in client.send("create_sampling_session", opening).text
    again = {"session_id": client.session_id, "model_seq_id": 5, "path": whole_path, "optimizer": True}
    assert "whole models are not trained here" in client.send("load_weights", again).text
    assert client.loss(pass_of(model, 4, good())) > 0
