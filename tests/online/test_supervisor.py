"""Parts of a run as small programs: started in order, started again, stopped in order, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import LIGHT, WarmProcess

from rollbook.online import guard, parts
from rollbook.online import parts as supervisors
from rollbook.online.parts import Part, PartError, Spec, Supervisor
from rollbook.testing.asgi import free_port

SERVER = """
import http.server, os, signal, sys, time
port, how = int(sys.argv[1]), sys.argv[2]
print("begins", os.getpid(), flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if how == "hangs" and os.path.exists("hang"):
            time.sleep(600)
        open("answered", "w").close()
        self.send_response(503 if how == "waits" else 200); self.end_headers()
    def log_message(self, *words): pass
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", time.time(), flush=True), os._exit(0)))
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
MODULES = (*LIGHT, "rollbook.online.earlier", "rollbook.online.parts")
"""What another process with a supervisor or a guard needs."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "LOOK_S", 0.1)
    monkeypatch.setattr(parts, "PAUSE_S", 0.05)
    monkeypatch.setattr(parts, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(supervisors, "LINGER_S", 0.5)


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., Spec]:
    """Makes a part that answers at an address of its own."""
    (tmp_path / "server.py").write_text(SERVER)

    def make(name: str, how: str = "well", **more: Any) -> Spec:
        port = free_port()
        command = (sys.executable, "-S", str(tmp_path / "server.py"), str(port), how)
        return Spec(name, command, tmp_path / f"{name}.log", health=f"http://127.0.0.1:{port}/", **more)

    return make


def program(name: str, code: str, **more: Any) -> Spec:
    """A part that runs some Python and ends by itself."""
    return Spec(name, (sys.executable, "-S", "-c", code), Path(f"{name}.log"), ends=True, **more)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it within a minute."""
    asyncio.run(asyncio.wait_for(work, 60))


def pids(spec: Spec) -> list[int]:
    """Of all its starts whose line is complete."""
    lines = spec.log.read_text().splitlines(keepends=True)
    return [int(line.split()[1]) for line in lines if line.startswith("begins") and line.endswith("\n")]


def gone(pid: int) -> bool:
    """Whether nothing runs under this pid, within a moment."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    while not holds():
        await asyncio.sleep(0.02)


def test_in_order(server: Callable[..., Spec]) -> None:
    """The second begins once the first answers, and the first is asked to end once the second has."""
    first, second = server("first"), server("second")
    work = program("work", "import os; print('work', os.path.exists('answered'))")
    supervisor = Supervisor([[first], [second], [work]], lambda text: None)
    run(supervisor.run())
    assert work.log.read_text() == "work True\n"
    ended = [float(spec.log.read_text().split()[-1]) for spec in (first, second)]
    assert ended[1] < ended[0]
    assert [part.state for part in supervisor.parts] == ["ended"] * 3
    assert all(gone(pid) for spec in (first, second) for pid in pids(spec))


def test_one_that_waits_for_another(server: Callable[..., Spec]) -> None:
    """It answers that it is not ready, and that is enough for the next to begin."""
    for how, begins in (("waits", True), ("well", True)):
        first = server(how, how, any_answer=how == "waits")
        run(Supervisor([[first], [program("work", "print('begun')")]], lambda text: None).run())
        assert (Path("work.log").read_text() == "begun\n") is begins
        Path("work.log").unlink()
    never = server("never", "waits", ready_s=0.5)
    with pytest.raises(PartError, match="never was ended by SIGKILL before it was ready"):
        run(Supervisor([[never], [program("work", "print('begun')")]], lambda text: None).run())
    assert not Path("work.log").exists()


def test_what_dies_is_started_again(server: Callable[..., Spec]) -> None:
    """A server that is killed, and a program that was: this ends once it ends well."""
    first, messages = server("first"), list[str]()
    code = (
        "import os, signal, time\nprint('begins', os.getpid(), flush=True)\n"
        "if os.path.exists('again'): raise SystemExit(0)\nopen('again', 'w').close()\ntime.sleep(600)"
    )
    work = program("work", code)

    async def killed() -> None:
        supervisor = Supervisor([[first], [work]], messages.append)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: Path("again").exists())
        os.kill(pids(first)[0], signal.SIGKILL)
        await until(lambda: len(pids(first)) == 2 and supervisor.parts[0].state == "running")
        os.kill(pids(work)[0], signal.SIGKILL)
        await running

    run(killed())
    assert messages == [
        f"first was ended by SIGKILL: it is started again; {first.log} says more",
        "work was ended by SIGKILL: it is started again; work.log says more",
        "work has ended",
    ]
    assert (len(pids(first)), len(pids(work))) == (2, 2)


def test_a_server_that_falls_silent(server: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and another one is started in its place."""
    monkeypatch.setattr(parts, "ANSWER_S", 0.3)
    first, messages = server("first", "hangs", silence_s=0.3), list[str]()

    async def silent() -> None:
        supervisor = Supervisor([[first]], messages.append)
        running = asyncio.create_task(supervisor.run())
        await supervisor.parts[0].ready.wait()
        Path("hang").touch()
        await until(lambda: len(pids(first)) == 2)
        supervisor.stop()
        await running

    run(silent())
    assert any("does not answer" in text for text in messages)
    assert all(gone(pid) for pid in pids(first))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no such model')", "first ended with exit code 1 before it was ready"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "was ended by SIGKILL before it was ready",
        ),
    ],
)
def test_a_server_that_never_begins(server: Callable[..., Spec], code: str, why: str) -> None:
    """It is not tried again: the error has its last lines; what was started before it is stopped."""
    other = server("other")
    first = Spec("first", (sys.executable, "-S", "-c", code), Path("first.log"), health="http://127.0.0.1:9/")
    with pytest.raises(PartError, match=why) as caught:
        run(Supervisor([[other], [first]], lambda text: None).run())
    if "model" in code:
        assert str(caught.value).endswith("no such model")
    assert all(gone(pid) for pid in pids(other))


def test_bad_input_ends_it_at_once() -> None:
    """Exit code 2 of one of our commands: another start would not mend it."""
    with pytest.raises(PartError, match="work ended with exit code 2") as caught:
        run(Supervisor([[program("work", "print('steps: is missing'); raise SystemExit(2)")]], print).run())
    assert "steps: is missing" in str(caught.value)


def test_a_training_that_lost_a_rank() -> None:
    """Exit code 75, at its first start: another one goes on."""
    code = (
        "import os; a = os.path.exists('again'); open('again', 'w').close(); raise SystemExit(0 if a else 75)"
    )
    messages: list[str] = []
    run(Supervisor([[program("work", code)]], messages.append).run())
    assert messages == [
        "work ended with exit code 75: it is started again; work.log says more",
        "work has ended",
    ]


def test_one_that_dies_too_often() -> None:
    """It is given up, with the reason."""
    messages: list[str] = []
    with pytest.raises(PartError, match="for the 6th time within 10 minutes"):
        run(Supervisor([[program("work", "raise SystemExit(3)")]], messages.append).run())
    assert len(messages) == 5


def test_no_such_program() -> None:
    """It is named."""
    spec = Spec("engine", ("no-such-program",), Path("x.log"))
    with pytest.raises(PartError, match="engine cannot be started: no-such-program: No such file"):
        run(Supervisor([[spec]], print).run())


def test_one_that_does_not_end(server: Callable[..., Spec]) -> None:
    """After its time it is killed, with all that it started."""
    deaf, messages = server("deaf", "deaf", stop_s=0.3), list[str]()

    async def stopped() -> None:
        supervisor = Supervisor([[deaf]], messages.append)
        running = asyncio.create_task(supervisor.run())
        await supervisor.parts[0].ready.wait()
        supervisor.stop()
        await running

    run(stopped())
    assert messages == ["deaf did not end within 0.3 s of SIGTERM: killed"]
    assert gone(pids(deaf)[0])


def test_a_second_signal_ends_all_at_once(server: Callable[..., Spec]) -> None:
    """However long they were to have."""
    deaf = server("deaf", "deaf", stop_s=600.0)

    async def stopped() -> None:
        supervisor = Supervisor([[deaf]], lambda text: None)
        running = asyncio.create_task(supervisor.run())
        await supervisor.parts[0].ready.wait()
        supervisor.stop()
        await asyncio.sleep(0.2)
        supervisor.stop()
        await running

    began = time.monotonic()
    run(stopped())
    assert time.monotonic() - began < 30
    assert gone(pids(deaf)[0])


def test_those_that_linger_are_stopped() -> None:
    """Once the training has ended, rollouts that do not notice."""
    work = program("work", "pass")
    rest = program("rest", "import os, time; print('begins', os.getpid(), flush=True); time.sleep(600)")
    began = time.monotonic()
    run(Supervisor([[work, rest]], lambda text: None).run())
    assert time.monotonic() - began < 30
    assert gone(pids(rest)[0])


def test_its_parts_end_with_it(server: Callable[..., Spec]) -> None:
    """Also with a supervisor that is killed."""
    spec = server("first")
    code = f"""
import asyncio
from pathlib import Path
from rollbook.online.parts import Spec
from rollbook.online.parts import Supervisor

spec = Spec("first", {spec.command!r}, Path({str(spec.log)!r}), health={spec.health!r})
asyncio.run(Supervisor([[spec]], print).run())
"""
    child = WarmProcess([sys.executable, "-c", code], modules=MODULES)
    by = time.monotonic() + 30
    while not Path("answered").exists():
        assert time.monotonic() < by
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert gone(pids(spec)[0])


def test_nothing_outlives_it() -> None:
    """Killed: what is deaf to SIGTERM, and has a session of its own, is ended by the guard."""
    code = """
import asyncio, os, signal, subprocess, sys
from rollbook.online import guard
from rollbook.online.earlier import guarded

async def main():
    guard.GRACE_S = 1.0
    async with guarded("the-mark", print):
        deaf = (
            "import os, signal, time; signal.signal(15, signal.SIG_IGN); "
            "os.write(1, b'%d%c' % (os.getpid(), 10)); time.sleep(600)"  # whole, beside another's
        )
        words, environment = [sys.executable, "-S", "-c", deaf], os.environ | {"ROLLBOOK_START": "the-mark"}
        for _ in range(2):
            subprocess.Popen(words, env=environment, start_new_session=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    child = WarmProcess([sys.executable, "-c", code], modules=MODULES, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    deaf = [int(child.stdout.readline()) for _ in range(2)]
    assert sorted(guard.marked("ROLLBOOK_START=the-mark")) == sorted(deaf)
    child.kill()
    child.wait()
    assert guard.GRACE_S < 15
    by = time.monotonic() + 30
    while guard.marked("ROLLBOOK_START=the-mark"):
        assert time.monotonic() < by
        time.sleep(0.1)
    assert all(gone(pid) for pid in deaf)


def test_what_it_prints_is_kept() -> None:
    """The last lines are those of the last start."""
    spec = program("work", "print('\\n'.join(map(str, range(40))))")
    part = Part(spec, print)
    run(part.run())
    assert part.last_lines().splitlines() == [str(n) for n in range(25, 40)]
    again = Part(program("work", "print('of this start')"), print)
    run(again.run())
    assert again.last_lines() == "of this start"
