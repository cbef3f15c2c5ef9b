"""Tasks of Harbor whose environment is files alone: played on this host, scored by their own tests.

Their paths are those of a container: `/app`, `/tests`, `/logs/verifier`. With isolation bwrap these are parts
of the launch's own folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from rollbook.rollouts.launchers.isolation import SYSTEM
from rollbook.rollouts.launchers.launching import Launch
from rollbook.rollouts.launchers.subprocess_launcher import SubprocessLauncher
from rollbook.rollouts.outcome import Attempt
from rollbook.rollouts.tasks import HARBOR, Task, instructions
from rollbook.store.errors import LaunchError, RolloutError

PARTS = "harbor"
"""Folder within a launch's own: its root holds what programs find at the root of a container."""
REWARDS = ("reward.txt", "reward.json")
WITHOUT_EFFECT = ("FROM", "WORKDIR", "LABEL", "CMD", "EXPOSE")
"""Of a Dockerfile: what says nothing of files. The programs are this host's, whatever FROM says."""
TAKEN = {PurePosixPath(path).parts[1] for path in SYSTEM} | {"dev", "proc", "tmp"}
REMEDY = "play it with launcher verifiers, whose taskset `harbor` takes containers"
SHOWN = 2000


def places_of(task: Task, folder: Path) -> dict[str, Path]:
    """Path in a container -> the folder made for it on this host; none for tasks that are not Harbor's.

    Raises:
        LaunchError: the environment is more than files.
    """
    if HARBOR not in task.values:
        return {}
    root, environment = folder / PARTS, Path(task.values[HARBOR]) / "environment"
    _inside(root, PurePosixPath(task.values["workdir"])).mkdir(parents=True, exist_ok=True)
    for name in ("agent", "verifier", "artifacts"):
        (root / "logs" / name).mkdir(parents=True, exist_ok=True)
    workdir = PurePosixPath("/")
    for what, *words in instructions(environment):
        if what == "WORKDIR":
            workdir /= words[0]
        elif what == "COPY" and len(words) > 1 and not any(word[:1] in ("-", "[") for word in words):
            _copy(environment, words[:-1], root, workdir, words[-1])
        elif what not in WITHOUT_EFFECT:
            needed = " ".join([what, *words])[:100]
            raise LaunchError(
                f"task {task.name}: its environment needs {needed!r}, and a container: {REMEDY}"
            )
    places = {f"/{path.name}": path for path in sorted(root.iterdir())}
    if shadowed := sorted(TAKEN & {path.name for path in places.values()}):
        text = f"task {task.name}: its environment has files in /{shadowed[0]}"
        raise LaunchError(f"{text}, and needs a container: {REMEDY}")
    return places


def _copy(environment: Path, sources: Sequence[str], root: Path, workdir: PurePosixPath, to: str) -> None:
    """Do a COPY of a Dockerfile."""
    paths = [path for source in sources for path in sorted(environment.glob(source.strip("/") or "."))]
    if not paths:
        raise LaunchError(f"{environment / 'Dockerfile'}: COPY {' '.join(sources)}: there is no such file")
    target = _inside(root, workdir / to)
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
        else:
            into = target / path.name if to.endswith(("/", ".")) or len(paths) > 1 else target
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, into)


def _inside(root: Path, path: PurePosixPath) -> Path:
    """A container's path within a folder, and never beside it."""
    return root / os.path.normpath(path).lstrip("/")


async def tests(task: Task, attempt: Attempt) -> float:
    """The reward that the task's tests give what an agent left: for `function` of a [[score]].

    Raises:
        RolloutError: they say nothing that is a reward.
    """
    root, output = attempt.folder / PARTS, attempt.folder / "score-harbor"
    output.mkdir(exist_ok=True)
    shutil.copytree(Path(task.values[HARBOR]) / "tests", root / "tests", dirs_exist_ok=True)
    verifier = root / "logs" / "verifier"
    for name in REWARDS:
        (verifier / name).unlink(missing_ok=True)  # which the agent may have written
    launch = Launch(
        launch_id=f"score-{uuid.uuid4()}",
        command=("sh", "-c", 'cd "$0" && exec bash /tests/test.sh', task.values["workdir"]),
        environment={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(attempt.folder)},
        folder=attempt.folder,
        output=output,
        isolation="bwrap",
        places={f"/{path.name}": path for path in sorted(root.iterdir())},
    )
    running = await SubprocessLauncher().start(launch)
    try:
        await running.wait()
    except BaseException:
        await running.stop(0)
        raise
    printed = "".join((output / f"{name}.log").read_text(errors="replace") for name in ("stdout", "stderr"))
    return reward_in(verifier, printed[-SHOWN:])


def reward_in(verifier: Path, printed: str = "") -> float:
    """The reward that tests wrote: a number, or an object with `reward` or with one number alone.

    Args:
        printed: by the tests, for an error.

    Raises:
        RolloutError: there is none.
    """
    for file in (verifier / name for name in REWARDS):
        if file.exists():
            try:
                return _number(json.loads(file.read_text()))
            except ValueError as error:
                raise RolloutError(f"{file}: {error}; the tests printed: {printed}") from error
    raise RolloutError(
        f"the tests wrote no {' and no '.join(REWARDS)} to /logs/verifier; they printed: {printed}"
    )


def _number(value: object) -> float:
    if isinstance(value, Mapping):
        if "reward" not in value and len(value) != 1:
            raise ValueError(f"it has {sorted(value)}, and no `reward`")
        value = value.get("reward", next(iter(value.values())))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)
