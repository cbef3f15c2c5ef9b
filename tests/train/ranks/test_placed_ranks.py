"""Ranks that Ray places, in a real cluster of this host.

A training is that of one rank, and replays; of one that fails the rank is named, nothing is left, and the
training goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.cli.train.training import run_train
from rollbook.engines.weights.digests import read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError, RankError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepFailed, StepPlanned
from rollbook.train.ranks.launch import FOLLOW
from rollbook.train.ranks.ray_ranks import Room, launch_by_ray

pytestmark = pytest.mark.ranks
Stores = Callable[..., Store]
SGD_LIKE = {"lr": 1e-4, "eps": 1.0, "clip_grad": 0.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster with two CPUs, which ends with this module; the address of its one node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        handler = signal.getsignal(signal.SIGTERM)
        folder = tempfile.mkdtemp(prefix="ray-")  # a short path: sockets are in it
        try:
            ray.init(
                "local",
                num_cpus=2,
                num_gpus=2,  # Ray believes it
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=80 * 2**20,
                _temp_dir=folder,
            )
            yield ray.util.get_node_ip_address()
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def mark(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable that ranks get, by which they are found; when the test is done no rank is left, and no
    placement group."""
    from ray.util.placement_group import placement_group_table

    # As in a process of its own: this is what an earlier training of this one set.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("GLOO_MARK", mark)
    yield mark
    assert _ranks(mark) == []
    until = time.monotonic() + 20
    while {group["state"] for group in placement_group_table().values()} - {"REMOVED"}:
        assert time.monotonic() < until, placement_group_table()
        time.sleep(0.1)


def _place(log: Store, settings: Any, ranks: int = 2, within_s: float = 30.0) -> None:
    """`rollbook train --launch ray`."""
    run_train(settings, log.path, "cut", "head", "train", None, ranks, ("PACK", within_s))


def _ranks(mark: str) -> list[psutil.Process]:
    """The processes of ranks that have the mark."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if FOLLOW[1] in process.cmdline() and process.environ().get("GLOO_MARK") == mark:
                processes.append(process)
    return processes


def _came(mark: str) -> psutil.Process:
    """The one rank, once it is there."""
    until = time.monotonic() + 60
    while not (processes := _ranks(mark)):
        assert time.monotonic() < until
        time.sleep(0.1)
    (process,) = processes
    return process


def test_a_training_is_that_of_one_rank(recorded: Stores, mark: str) -> None:
    """And its steps replay bit for bit, by ranks of this host."""
    single, two = recorded("one"), recorded("two")
    settings = fabric.config(fabric.SFT, steps=2, optimizer=SGD_LIKE)
    fabric.train(single, settings)
    _place(two, settings)
    for ours, theirs in zip(records_of(two, StepCommitted), records_of(single, StepCommitted), strict=True):
        for metric in ("loss", "gradient_norm"):
            assert ours.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-5, abs=1e-6)
    weights = [read_weights(log.path / records_of(log, CheckpointWritten)[-1].path) for log in (single, two)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-6
    assert records_of(two, StepPlanned)[0].environment["parallel"]["data"] == 2
    assert [replay_step(two, step).differs_in for step in (0, 1)] == [None, None]


@pytest.mark.parametrize("who", ["rank", "actor", "rank that hangs"])
def test_a_rank_that_dies_or_hangs(
    recorded: Stores, mark: str, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The step fails and names it, and the same training goes on."""
    from rollbook.train.loop import trainer

    log = recorded()
    settings = fabric.config(fabric.SFT, steps=2, checkpoint_every=1, parallel={"timeout_s": 8.0})
    run = trainer.run_step

    def ends(policy: Any, settings: Any, *given: Any, **options: Any) -> Any:
        if settings.version == 1:
            (process,) = _ranks(mark)
            how = signal.SIGSTOP if who == "rank that hangs" else signal.SIGKILL
            (process.parent() if who == "actor" else process).send_signal(how)
            if who == "actor":
                process.wait(60)  # the kernel ends it soon, but a step is short
        return run(policy, settings, *given, **options)

    message = {
        "rank": "rank 1 was ended by SIGKILL.*; its last words:",
        "actor": r"rank 1 was lost with its actor; Ray says:\n.*died",
        "rank that hangs": "rank 1 does not answer",
    }[who]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "run_step", ends)
        with pytest.raises(RankError, match=message):
            _place(log, settings)
    assert _ranks(mark) == []
    (failed,) = records_of(log, StepFailed)
    assert failed.step == 1
    assert "rank 1" in failed.error
    _place(log, settings)
    assert [step.step for step in records_of(log, StepCommitted)] == [0, 1]
    assert replay_step(log, 1).differs_in is None


def test_there_is_no_room(recorded: Stores, mark: str) -> None:
    """The error says what was asked for and what there is; nothing was planned."""
    log = recorded()
    began = time.monotonic()
    with pytest.raises(RankError, match=r"asked for 3 x 1 CPU by PACK.* has 2 CPU on 1 node, 2 of them free"):
        _place(log, fabric.config(fabric.SFT), ranks=3, within_s=1.0)
    assert time.monotonic() - began < 20
    assert records_of(log, StepPlanned) == []


def test_what_a_rank_is_sent(cluster: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of rank 0's node, its number of threads, and named variables; nothing else of the
    environment of the command."""
    monkeypatch.setenv("HF_TOKEN", mark)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    _, others = launch_by_ray(Room(), 2)
    try:
        process = _came(mark)
        has, words = process.environ(), process.cmdline()
    finally:
        others.close()
    assert mark not in {has[name] for name in has if name != "GLOO_MARK"}
    assert has["NCCL_DEBUG"] == "WARN"
    assert has["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    assert words[words.index(FOLLOW[1]) + 1] == cluster


def test_each_rank_has_a_gpu(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 too, though it is no actor: no other gets the one that it uses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, others = launch_by_ray(Room(gpus=True), 2)
    try:
        devices = [os.environ["CUDA_VISIBLE_DEVICES"], _came(mark).environ()["CUDA_VISIBLE_DEVICES"]]
    finally:
        others.close()
    assert sorted(devices) == ["0", "1"]


COMMAND = """
import signal, sys, time
from rollbook.train.ranks.ray_ranks import Room, launch_by_ray

def own(*_): ...

signal.signal(signal.SIGTERM, own)
kept = launch_by_ray(Room(), 2)
print("kept" if signal.getsignal(signal.SIGTERM) is own else "Ray's", flush=True)
time.sleep(60)
"""


def test_ranks_end_with_the_first(cluster: str, mark: str) -> None:
    """However that ends. Until then SIGTERM is its own, not Ray's."""
    import ray

    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "kept\n"
            process = _came(mark)
        finally:
            first.kill()
    process.wait(60)


# What is asked for --------------------------------------------------------------------------------


def test_ray_is_not_installed(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said how it is."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollbook\[ray\]'"):
        _place(recorded(), fabric.config(fabric.SFT))


def test_rank_0_would_be_outside(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a cluster is not in it: others could not meet it there."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    with pytest.raises(ConfigError, match="ray://elsewhere:10001: rank 0 must be on a node of the cluster"):
        _place(recorded(), fabric.config(fabric.SFT))


def test_a_launcher_started_them(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not asked for ranks that are there."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="a launcher started 2 ranks already"):
        _place(recorded(), fabric.config(fabric.SFT))
