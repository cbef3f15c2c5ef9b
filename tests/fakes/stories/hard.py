"""Stores that a viewer of logs has a hard time with: hostile names and texts, long and wide trajectories."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import numpy as np
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.upkeep.erase import erase_trajectory

RUN = "hard"
SCRIPT = "<script>alert(1)</script>"
NAMES = (
    *("a/b", "a%2Fb", "a%252Fb", "~2F", "quo\"te's", SCRIPT, "\u202eevil\u2066", "line\nbreak", "tab\tbed"),
    *("", " ", ".", "..", "../..", "x.json", ".json", "a?b=c&d#e", "a\\b", "{{7*7}}", "{% raw %}"),
    *("javascript:alert(1)", "\x1b[31mred\x07", "\u05d0\u05d1\u05d2", "n" * 100_000, "-", "ledger", "+ +"),
)
"""Of runs, policies, trajectories, groups and tasks."""
ATTACKS = (
    SCRIPT,
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)><a xlink:href=javascript:alert(1)>go</a></svg>",
    "</pre></article><iframe src=//elsewhere.test/></iframe>",
    "[go](javascript:alert(1)) <a href='javascript:alert(1)'>go</a>",
    "{{7*7}} {% for x in y %} ${7*7} <%= 7*7 %>",
    "<div hx-get=//elsewhere.test/ hx-trigger=load></div>",
    "<meta http-equiv=refresh content=0;url=//elsewhere.test>",
    "<base href=//elsewhere.test/><link rel=stylesheet href=//elsewhere.test/x.css>",
    "<form action=//elsewhere.test/><button id=theme>go</button></form>",
    "\x1b]0;title\x07\x1b[2J\x1b[31mred \u202egnp.exe\u202c \u2067isolated\u2069 \x00 nul \r back \b",
    '--> ]]> \'; DROP TABLE turns; -- " onmouseover="alert(1)',
)
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()
IMAGES = (
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    {"type": "image_url", "image_url": {"url": "https://elsewhere.test/cat.png"}},
    {"type": "image_url", "image_url": {"url": "javascript:alert(1)"}},
    {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,!!!" + SCRIPT}},
    {"type": "image", "source": {"type": "base64", "media_type": SCRIPT, "data": PIXEL}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 3_000_000}},
    {"type": "image_url", "image_url": None},
    {"type": "image_url"},
    {"type": "input_image", "image_url": 7},
)
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(200), "at the bottom")
ODD = (
    None,
    7,
    "text where a message should be",
    {"role": None, "content": None},
    {"role": SCRIPT, "content": [None, 3, "plain", {"type": SCRIPT, "x": 1}, [1, [2]]]},
    {"role": "assistant", "content": f"<think>{SCRIPT}</think>\nanswer", "tool_calls": [7, None]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": SCRIPT, "arguments": "{not json"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "x" * 1_000_000},
    {"role": "user", "content": "many\n" * 40_000},
)


class Path:
    """Tokens from a root to a turn: how many, and their digest so far."""

    def __init__(self) -> None:
        self.length, self._sum = 0, hashlib.sha256()

    def add(self, ids: Any) -> None:
        """Go on with these."""
        self.length += len(ids)
        self._sum.update(ids.astype("<i4").data)

    @property
    def sha256(self) -> str:
        """The digest."""
        return self._sum.hexdigest()

    def copy(self) -> Path:
        """Another one, from here on."""
        other = Path()
        other.length, other._sum = self.length, self._sum.copy()
        return other


def turn(
    trajectory: str, name: str, path: Path | None = None, parent: str | None = None, **fields: Any
) -> list[Any]:
    """A turn: asked, answered with the tokens 7 and 8, and delivered.

    Args:
        path: to its parent; it goes on to this turn.
    """
    path = path or Path()
    messages = fields.pop("messages", [{"role": "user", "content": "go on"}])
    given = np.array(fields.pop("prompt", [1, 2]), np.int32)
    sampled = np.array(fields.pop("sampled", [7, 8]), np.int32)
    path.add(given)
    length, prompt = path.length, path.sha256
    path.add(sampled)
    root = None if parent else "first_turn"
    version = fields.pop("version", 3)
    return [
        turn_requested(trajectory, name, parent_turn_id=parent, root_reason=root, messages=messages),
        turn_completed(
            trajectory,
            name,
            policy_version=version,
            prompt_ids=given,
            completion_ids=sampled,
            version_spans=(kinds.VersionSpan("actor", version, 0, len(sampled)),),
            prompt_length=length,
            prompt_sha256=prompt,
            **{"logprobs": np.full(len(sampled), -0.5, np.float32)}
            | {"reply": {"role": "assistant", "content": "so be it"}, "timings": {"engine_us": 10}}
            | fields,
        ),
        kinds.TurnDelivered(trajectory, name, "sent"),
    ]


def planned(turns: list[str], **fields: Any) -> Any:
    """A step of samples by their leaves, whose names begin with those of their trajectories."""
    samples = [{"trajectory_id": turn.partition(".")[0], "turn_id": turn} for turn in turns]
    grpo = {"name": "grpo", "groups": 1, "group_size": max(len(turns), 2)}
    recipe = {"reward_source": "agent"}
    partition = [[list(range(len(turns)))]]
    return step_planned(0, samples=samples, partition=partition, algorithm=grpo, recipe=recipe, **fields)


def named(name: str, at: int) -> Iterator[Any]:
    """A trajectory, and a step that trained it, in which all that has a name has this one."""
    key = f"named-{at}"
    yield kinds.TrajectoryOpened(key, name, name, name, "train", {"k": name})
    yield from turn(key, f"{key}.0")
    yield kinds.RewardAssigned(key, None, 0.5, name or "agent")
    yield kinds.LabelAdded(key, None, name or "label", {"of": name}, name or "agent")
    yield kinds.TrajectoryFinished(key, "completed", True)
    yield planned([f"{key}.0"], policy=name, phase=name)
    yield kinds.StepCommitted(0, 1, name, 1, {"samples": "0" * 64}, {"reward": 0.5, name or "m": 1.0})


def hostile_trajectories() -> Iterator[Any]:
    """Trajectories of run `RUN` whose texts are hostile, whose images are broken, whose numbers are odd."""
    yield kinds.TrajectoryOpened("attacks", SCRIPT, SCRIPT, SCRIPT, "train", {SCRIPT: [SCRIPT]})
    path = Path()
    messages = [{"role": "user", "content": text} for text in ATTACKS]
    reply = {"role": "assistant", "content": "\n".join(ATTACKS), "reasoning_content": SCRIPT}
    yield from turn("attacks", "attacks.0", path, messages=messages, reply=reply, finish_reason=SCRIPT)
    yield turn_requested("attacks", "attacks.1", parent_turn_id="attacks.0", messages=messages[:1])
    yield kinds.TurnFailed("attacks", "attacks.1", "\n".join(ATTACKS))
    yield kinds.TrajectoryFinished("attacks", "completed", False)

    yield kinds.TrajectoryOpened("images", "images", None, None, "train")
    content = [{"type": "text", "text": "look"}, *IMAGES]
    yield from turn("images", "images.0", messages=[{"role": "user", "content": content}])
    yield from turn("images", "odd.0", messages=list(ODD))
    yield kinds.TrajectoryFinished("images")

    for number, value in enumerate((1.7e308, -1.7e308, 1.6e308, 5e-324)):
        name = f"number-{number}"
        yield kinds.TrajectoryOpened(name, name, "numbers", None, "train")
        logprobs = np.array([math.nan, -math.inf, math.inf, -0.5], np.float32)
        yield from turn(name, f"{name}.0", sampled=[7, 8, 9, 10], logprobs=logprobs)
        yield kinds.RewardAssigned(name, None, value)
        yield kinds.TrajectoryFinished(name)

    yield planned([f"number-{at}.0" for at in range(4)])
    yield kinds.StepCommitted(0, 1, "actor", 4, {}, {"reward": 1.7e308, "loss": -1.7e308})

    yield kinds.TrajectoryOpened("orphan", "orphan", None, None, "train")
    yield from turn("orphan", "orphan.1", None, "orphan.0")
    yield turn_requested(
        "orphan", "orphan.2", parent_turn_id="orphan.1", messages=[{"role": "user", "content": DEEP}]
    )

    for name, split in (("void", "train"), ("stray", kinds.QUARANTINE), ("judged", kinds.JUDGE)):
        yield kinds.TrajectoryOpened(name, name, None, None, split, origin=None)
        yield from turn(name, f"{name}.0")
        yield kinds.TrajectoryFinished(name, kinds.VOID if name == "void" else "completed")

    yield kinds.TrajectoryOpened("empty", "empty", None, None, "eval")
    yield kinds.TrajectoryOpened("erased", "erased", "secret group", "secret task", "train", {"secret": "x"})
    path = Path()
    yield from turn("erased", "erased.0", path, messages=[{"role": "user", "content": "a secret"}])
    yield from turn(
        "erased", "erased.1", path, "erased.0", messages=[{"role": "user", "content": "secret 2"}]
    )
    yield kinds.TrajectoryFinished("erased")
    yield planned(["erased.1"], policy="forgetful")
    yield kinds.StepCommitted(0, 1, "forgetful", 1, {}, {})


def long_sample(tokens: int) -> Iterator[Any]:
    """A trajectory of one turn that sampled so many tokens."""
    yield kinds.TrajectoryOpened("long", "long", None, None, "train")
    rng = np.random.default_rng(5)
    yield from turn(
        "long",
        "long.0",
        sampled=rng.integers(0, 256, tokens),
        logprobs=-rng.exponential(1.0, tokens).astype(np.float32),
    )
    yield kinds.TrajectoryFinished("long")


def chain(turns: int) -> Iterator[Any]:
    """A trajectory whose turns each extend the one before."""
    yield kinds.TrajectoryOpened("chain", "chain", None, None, "train")
    path = Path()
    for at in range(turns):
        parent = f"chain.{at - 1}" if at else None
        content = [{"role": "user", "content": f"question {at}"}]
        yield from turn("chain", f"chain.{at}", path, parent, messages=content)
    yield kinds.TrajectoryFinished("chain")


def forks(depth: int) -> Iterator[Any]:
    """A trajectory in which each turn of a path forks: one of both goes on, and forks."""
    yield kinds.TrajectoryOpened("forks", "forks", None, None, "train")
    path = Path()
    yield from turn("forks", "forks.0", path)
    for at in range(depth):
        aside = path.copy()
        parent = f"forks.{at}"
        yield from turn("forks", f"aside.{at}", aside, parent, prompt=[5])
        yield from turn("forks", f"forks.{at + 1}", path, parent)


def make(path: Folder, *, tokens: int, turns: int, depth: int) -> Store:
    """A store with all of it; one trajectory of it is erased."""
    log = rb.open(path, create=True)
    records = [
        kinds.RunOpened("serve", {}),
        *hostile_trajectories(),
        *long_sample(tokens),
        *chain(turns),
        *forks(depth),
    ]
    events = [Event(record, RUN) for record in records]
    for at, name in enumerate(NAMES):
        events += [
            Event(record, name) for record in (kinds.RunOpened(name, {name: name}, name), *named(name, at))
        ]
    for at, event in enumerate(events):
        if isinstance(event.record, kinds.StepPlanned):
            events[at] = replace(event, record=replace(event.record, cut=f"serve={at + 10}"))
    with log.writer("serve") as writer:
        for at in range(0, len(events), 1000):
            writer.append(events[at : at + 1000]).result(30)
    erase_trajectory(log, "erased", "asked to <b>forget</b>")
    return log
