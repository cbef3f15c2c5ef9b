"""A service of several processes over PostgreSQL: two that clients reach in turn, and two that train."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.fakes.processes.postgresql import DATABASE, EMPTY, Server
from tests.fakes.processes.ray_nodes import ray_nodes
from tests.fakes.proxies.lossy import LossyProxy
from tests.fakes.stories import fabric
from tests.service.conftest import BASE, Service, begun, done_by, printed
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.store.events import OperationEnded
from rollbook.train.tenants.history import events_of_clients

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
KILLS, STEPS = 6, 5


@pytest.fixture
def processes(tmp_path: Path, postgres: Server) -> Iterator[list[Service]]:
    """Two that serve, and then two that train, all of one store."""
    store, config = tmp_path / "shared", tmp_path / "shared.toml"
    rb.open(store, create=True)
    url = postgres.url(DATABASE).render_as_string(hide_password=False)
    (store / "store.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    config.write_text(f'base = "{fabric.model_folder()}"\nname = "{BASE}"\nshared = true\ntrains = false\n')
    made = [Service(store, config, worker=worker) for worker in (False, False, True, True)]
    for process in made:
        process.start()
    yield made
    for process in made:
        process.stop()
    postgres.run(*EMPTY, database=DATABASE)


def test_killed_one_by_one(processes: list[Service], service_at: Callable[..., Service]) -> None:
    """A client does not notice: what it has, and every digest, are those of a process alone."""
    alone = service_at("alone")
    expected = alone.run("everything", base=BASE, count=STEPS)
    serving, chance = processes[:2], random.Random(1)
    with LossyProxy([process.port for process in serving], 0.0, seed=1) as balancer:
        program = begun("client_loops.py", balancer.url, "everything", base=BASE, count=STEPS)
        for at in range(KILLS):
            time.sleep(1.0 + 2.0 * chance.random())
            processes[(0, 2, 1, 3, 2, 0)[at]].kill()
            time.sleep(0.5)
            processes[(0, 2, 1, 3, 2, 0)[at]].start()
        assert printed(program) == expected
    log = processes[0].log
    assert done_by(log) == done_by(alone)
    lanes = {e.lane for e in events_of_clients(log) if isinstance(e.record, OperationEnded)}
    assert len(lanes) >= 3
    assert "Traceback" not in processes[0].errors.read_text()


def test_models_are_trained_at_once(processes: list[Service]) -> None:
    """By both workers; steps of either are replayed from the log, bit for bit."""
    urls = [process.url for process in processes[:2]]
    programs = [
        begun("client_loops.py", url, "train", base=BASE, count=6, seed=at)
        for at, url in enumerate(urls)
        for _ in range(2)
    ]
    came = [printed(program) for program in programs]
    assert len({str(one) for one in came}) == 2
    log = processes[0].log
    ended = [e for e in events_of_clients(log) if isinstance(e.record, OperationEnded)]
    assert len({event.lane for event in ended}) == 2
    for lane in {event.lane for event in ended}:
        run = next(event.run for event in ended if event.lane == lane)
        words = ["replay", "step", "4", "--run", run, "--store", str(log.path)]
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, "bit for bit" in done.output) == (0, True), done.output


def test_ray_places_workers_and_replaces_one(
    processes: list[Service], service_at: Callable[..., Service]
) -> None:
    """A worker that is killed is there again, in another process; the client does not notice."""
    expected = service_at("alone").run("train", base=BASE, count=12)
    for process in processes[1:]:
        process.kill()
    with ray_nodes({}):
        workers = Service(processes[0].store, processes[0].config, ("--ray", "1"), worker=True)
        workers.start()
        try:
            assert processes[0].run("train", base=BASE, count=2)
            program = processes[0].begin("train", base=BASE, count=12)
            first = _trainer()
            first.kill()
            assert printed(program) == expected
            assert _trainer().pid != first.pid
        finally:
            workers.stop()


def _trainer() -> psutil.Process:
    """The process that Ray has for its worker."""
    by = time.monotonic() + 180
    while time.monotonic() < by:
        for process in psutil.process_iter(["name", "cmdline"]):
            if "RayWorker.work" in " ".join(process.info["cmdline"] or []):
                return process
        time.sleep(0.1)
    raise AssertionError("Ray has no worker")
