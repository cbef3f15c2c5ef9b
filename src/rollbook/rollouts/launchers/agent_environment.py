"""What a program is given: its variables and its task's file. Pure but for the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import orjson

from rollbook.rollouts.config import AgentConfig
from rollbook.rollouts.tasks import Task

NO_KEY = "none"
"""In the place of a key where the proxy asks for none: clients refuse an empty one."""

HOST_NETWORK, DEFAULT_NETWORK = "host", "default"
"""Networks of containers: this host's, and the engine's own default, which has no name."""
GATEWAY = "host.docker.internal"
"""The name of this host in a container that has a network of its own."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a trajectory's requests go.

    Attributes:
        proxy: its URL, without a path.
        trajectory: the trajectory's name.
        key: its own API key.
    """

    proxy: str
    trajectory: str
    key: str

    def at(self, proxy: str) -> Address:
        """The same, where the proxy has another URL."""
        return replace(self, proxy=proxy)

    @property
    def root(self) -> str:
        """The base URL of Anthropic's clients."""
        return f"{self.proxy.rstrip('/')}/t/{quote(self.trajectory, safe='')}"

    @property
    def finish(self) -> str:
        """Where its agent may finish it."""
        return f"{self.proxy.rstrip('/')}/v1/trajectories/{quote(self.trajectory, safe='')}/finish"

    @property
    def openai(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.root}/v1"


def on_loopback(url: str) -> bool:
    """Whether a server is reached from its own host alone."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def network_of(network: str, proxy: str) -> str:
    """The network of containers; `auto` is the host's for a proxy on loopback, else the engine's default."""
    if network != "auto":
        return network
    return HOST_NETWORK if on_loopback(proxy) else DEFAULT_NETWORK


def address_in(network: str, agent: AgentConfig, proxy: str) -> str:
    """The proxy's URL as containers on a network reach it."""
    if agent.address is not None:
        return agent.address
    if network == HOST_NETWORK or not on_loopback(proxy):
        return proxy
    parts = urlsplit(proxy)
    return urlunsplit(parts._replace(netloc=f"{GATEWAY}:{parts.port or 80}"))


def variables(
    agent: AgentConfig, address: Address, group: str, task: Task, folder: Path, own: Mapping[str, str]
) -> dict[str, str]:
    """All variables of a program.

    Args:
        folder: of the launch, as the program sees it; its task's file is in it.
        own: this process's, of which those that are allowed are passed on.
    """
    ours = {
        "OPENAI_BASE_URL": address.openai,
        "OPENAI_API_BASE": address.openai,
        "OPENAI_API_KEY": address.key,
        "ANTHROPIC_BASE_URL": address.root,
        "ANTHROPIC_API_KEY": address.key,
        "ROLLBOOK_BASE_URL": address.openai,
        "ROLLBOOK_API_KEY": address.key,
        "ROLLBOOK_FINISH_URL": address.finish,
        "ROLLBOOK_TRAJECTORY_ID": address.trajectory,
        "ROLLBOOK_GROUP": group,
        "ROLLBOOK_TASK": task.name,
        "ROLLBOOK_TASK_FILE": str(folder / "task.json"),
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    theirs = passed(agent, own)
    if agent.launcher == "docker":
        theirs.pop("PATH", None)  # an image has its programs elsewhere
    known = theirs | ours | agent.environment
    return known | {name: known[source] for name, source in agent.names.items() if source in known}


def passed(agent: AgentConfig, own: Mapping[str, str]) -> dict[str, str]:
    """This process's variables that programs are given."""
    return {name: own[name] for name in agent.pass_environment if name in own}


def files_of(command: Sequence[str]) -> dict[str, Path]:
    """Words of a command that are files as seen from here -> where they are.

    Links stay as they are: an environment's interpreter is one, and knows its environment by where it lies.
    """
    return {word: Path(os.path.abspath(word)) for word in command if word and Path(word).is_file()}


def needed_by(file: Path) -> list[Path]:
    """The folders that a file of a command is seen with: its own, or the environment whose program it is."""
    environment = file.parent.parent
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return [file.parent]
    homes = [
        Path(line.partition("=")[2].strip()) for line in lines if line.partition("=")[0].strip() == "home"
    ]
    return [environment, *(home.parent for home in homes)]


def placed(command: Sequence[str]) -> tuple[str, ...]:
    """The command with its files as absolute paths, so that it is understood from any folder."""
    files = files_of(command)
    return tuple(str(files.get(word, word)) for word in command)


def command_of(command: Sequence[str], task: Task) -> tuple[str, ...]:
    """The program and its arguments, `{name}` replaced by the task's value where it has one."""
    values = {name: str(value) for name, value in task.values.items()} | {"task": task.name}

    def filled(word: str) -> str:
        for name, value in values.items():
            word = word.replace("{" + name + "}", value)
        return word

    return tuple(map(filled, command))


def folder_of(folder: Path, trajectory: str, launch_id: str) -> Path:
    """Where a launch has its folder, in that of its rollouts."""
    return (folder / f"{trajectory}-{launch_id[-8:]}").resolve()


def make_folder(folder: Path, task: Task) -> None:
    """A launch's folder, for it alone, with its task."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / "task.json").write_bytes(orjson.dumps(task.values, default=str, option=orjson.OPT_INDENT_2))
    os.chmod(folder / "task.json", 0o600)
