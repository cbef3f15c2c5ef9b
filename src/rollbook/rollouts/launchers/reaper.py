"""Starts one agent, tells how it ended, and leaves nothing of it. A program: `python -I -S reaper.py`.

It stands between a launcher and its agent since only a parent, and in a namespace only process 1, adopts what
a daemon leaves behind, sees how it ends and what it took. As process 1 the agent itself would also be deaf to
SIGTERM. It imports little, to start fast.

Its stdin is a socket to the launcher. From there come the length and the marshalled dict of what to start,
and then perhaps a `T`, at which the agent is asked to end. The end of the stream, which is also that of the
launcher, ends all of it. To there go lines: `started`, or `failed WHY`; at the end `left PID COMMAND` for
each process that had to be ended, and `ended CODE SIGNAL CPU_S RSS_KB`.

What is started may be the client of another program that runs the agent. Then a command, `after`, ends the
agent there and tidies up, however the client ended, and whoever is gone by then; twice, if the client has to
be ended.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import time

TYPE_CHECKING = False  # as in `typing`, whose import takes as long as all others together
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal as signal  # what `signal` is made of: that imports `enum`, which takes a third of a start

LENGTH_BYTES = 8
"""Of the length before what is to be started."""
SETTLE_S = 0.2
"""What ends by itself so soon after its agent, as a tracker of resources does, was not left behind."""
LOOK_S = 0.05
"""Between two looks whether it did."""
INSIST_S = 3.0
"""So long what was sent SIGKILL is waited for: of another user, or at a hung disk, it may never end."""
TOLD, TOLD_LENGTH = 100, 500
"""Most processes that are told as left, and most characters of a command line."""
AFTER_S = 60.0
"""So long the command that tidies up may take."""
CLIENT_S = 1.0
"""So long a client may take to end once it was asked, and once more when what it ran is gone."""
PR_SET_CHILD_SUBREAPER = 36


class Reaper:
    """Watches over one agent.

    Args:
        agent: the pid of its first process.
        own_group: it leads a process group.
    """

    def __init__(self, agent: int, own_group: bool) -> None:
        self.agent, self.own_group = agent, own_group
        self.status: int | None = None
        """Of its first process, once it ended: the exit code, or minus the signal."""
        self._stopping = self._over = False
        self._only_ours = os.getpid() == 1  # every other process of the namespace is the agent's
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def watch(self) -> None:
        """Wait until the first process ended and the rest had its time, or the launcher wants an end."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        settled: float | None = None
        while not self._over:
            remain = self._reap()
            if self.status is not None:
                settled = settled or time.monotonic() + SETTLE_S
                if not remain or (time.monotonic() > settled and not self._has_grace()):
                    return
            for descriptor, _ in poll.poll(None if self.status is None else LOOK_S * 1000):
                if descriptor == 0:
                    self._hear()
                else:
                    os.read(self._woken, 512)

    def _hear(self) -> None:
        try:
            data = os.read(0, 64)
        except ConnectionResetError:  # the launcher ended before it had read what it was told
            data = b""
        if not data:
            self._over = True
        elif not self._stopping:
            self._stopping = True
            self._ask()

    def _ask(self) -> None:
        """SIGTERM, while the pid is still the agent's."""
        if self.own_group and self._has_grace():
            os.killpg(self.agent, signal.SIGTERM)
        elif self.status is None:
            os.kill(self.agent, signal.SIGTERM)

    def _has_grace(self) -> bool:
        """Whether the agent was asked to end and others of its group, asked as well, are still at it."""
        if not (self._stopping and self.own_group):
            return False
        try:
            os.killpg(self.agent, 0)
        except ProcessLookupError:
            return False
        return True

    def _reap(self) -> bool:
        """Take what ended; whether any process of the agent's is there yet."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.agent and self.status is None:
                self.status = os.waitstatus_to_exitcode(status)

    def left(self) -> list[tuple[int, str]]:
        """The processes that still run, without the first: pids and command lines."""
        if self.status is not None and not self._reap():
            return []
        return [(pid, command_of(pid)) for pid in self._running() if pid != self.agent]

    def _running(self) -> list[int]:
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (state_and_parent := _stat(name)) and state_and_parent[0] != b"Z":
                parents[int(name)] = int(state_and_parent[1])
        if self._only_ours:
            return sorted(parents.keys() - {1})
        pids: list[int] = []
        ours = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
            pids += sorted(more)
        return pids

    def dismiss(self, tidy: Callable[[], None]) -> None:
        """End a client in order, if it can be: nobody knows what one was starting when it was killed.

        podman for instance lets its runtime make a container before it writes down that there is one;
        SIGTERM waits until it did.
        """
        if self.status is None and not self._stopping:
            self._stopping = True
            self._ask()
            self._await()
        if self.status is None:
            tidy()
            self._await()

    def _await(self) -> None:
        until = time.monotonic() + CLIENT_S
        while self._reap() and self.status is None and time.monotonic() < until:
            time.sleep(0.002)

    def end(self) -> None:
        """SIGKILL to all that there is, until nothing is there any more."""
        until = time.monotonic() + INSIST_S
        while self._reap() and time.monotonic() < until:
            for pid in [-1] if self._only_ours else self._running():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue  # it ended meanwhile, or is another user's
            time.sleep(0.002)


def _stat(name: str) -> list[bytes] | None:
    """State and parent of a process."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()[:2]
    except OSError:
        return None


def command_of(pid: int) -> str:
    """A process's command line, or its beginning; `?` of one that has none, or ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * TOLD_LENGTH).replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"
    return " ".join(words.split())[:TOLD_LENGTH] or "?"


def _received() -> dict[str, Any]:
    """What is to be started: `command`, `environment`, `folder`, `limits`, `own_group`, `after`; the
    descriptors, `entrances`, of the cgroups that it is to enter; and uid, gid and groups of the `user` to be,
    or nothing."""
    data = bytearray()
    length = LENGTH_BYTES
    while len(data) < length:
        more = os.read(0, length - len(data))
        if not more:
            raise SystemExit
        data += more
        if length == LENGTH_BYTES and len(data) == length:
            length += int.from_bytes(data, "big")
    received: dict[str, Any] = marshal.loads(data[LENGTH_BYTES:])
    return received


def _adopt() -> None:
    """Have what loses its parent become a child of this process, as if it were process 1."""
    import ctypes  # a few milliseconds, and process 1 needs none of it

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(task: dict[str, Any]) -> tuple[int, str]:
    """The agent's first process, and what kept it from becoming the agent."""
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for entrance in task["entrances"]:
                os.write(entrance, b"0")
                os.close(entrance)
            _become(*task["user"])
            _prepare(task["folder"], task["own_group"])
            _limit(task["limits"])
            os.execvpe(task["command"][0], task["command"], task["environment"])
        except BaseException as error:
            os.write(tell, _why(error).encode(errors="replace")[:1000])
        finally:
            os._exit(127)
    os.close(tell)
    with open(hear, "rb") as heard:
        return pid, heard.read().decode(errors="replace")


def _tidy(task: dict[str, Any]) -> None:
    """Run the command that comes after, for as long as it may take."""
    pid = os.fork()
    if pid == 0:
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            _prepare("/", own_group=True)
            os.execvpe(task["after"][0], task["after"], task["environment"])
        finally:
            os._exit(127)
    until = time.monotonic() + AFTER_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)


def _why(error: BaseException) -> str:
    # Of a program that is looked for in PATH, the error names but the last place.
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _become(*user: int) -> None:
    """Be another user, without a way back."""
    if user:
        import warnings  # noqa: F401  (of `execvpe`: the other user may not read where it lies)

        uid, gid, *groups = user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _prepare(folder: str, own_group: bool) -> None:
    if own_group:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.chdir(folder)
    except OSError as error:
        raise RuntimeError(f"its folder {folder}: {error.strerror}") from error
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _limit(limits: dict[str, int]) -> None:
    for name, wanted in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(which)[1]
        # A second more for SIGXCPU to be heeded in; beyond what this process itself may, none can be given.
        hard = wanted + 1 if name == "CPU" else wanted
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(which, (min(wanted, hard), hard))


def _say(*lines: str) -> None:
    """Tell the launcher, which may be gone."""
    data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    try:
        while data:
            data = data[os.write(0, data) :]
    except OSError:
        return


def main() -> None:
    """Start what the launcher sends, and stay until nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    task = _received()
    if os.getpid() != 1 and not task["after"]:
        _adopt()
    agent, why = _start(task)
    if why:
        _say("failed " + " ".join(why.split()))
        return
    _say("started")
    keeper = Reaper(agent, task["own_group"])
    keeper.watch()
    if task["after"]:
        keeper.dismiss(lambda: _tidy(task))
    left = keeper.left()
    keeper.end()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    if task["after"]:
        _tidy(task)
    status = -signal.SIGKILL if keeper.status is None else keeper.status
    code, ended_by = (status, 0) if status >= 0 else (0, -status)
    _say(
        *(f"left {pid} {command}" for pid, command in left[:TOLD]),
        f"ended {code} {ended_by} {usage.ru_utime + usage.ru_stime:.3f} {usage.ru_maxrss}",
    )


if __name__ == "__main__":
    main()
