"""Random trees of turns: clients re-serialise, drop, edit, fork, retry and compact, across restarts."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import EngineError

from .desks import TokenDesk
from .invariants import check_invariants

NAMES = ("a", "b")
TOOLS = [
    {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]
LETTERS = "abc XYZ.,\n\t{}[]\"'\\<>|_éü天気🌦12"
STOP = "#stop#"
EDITED = "edited"


@dataclass(frozen=True)
class Line:
    """A conversation as its client has it.

    Attributes:
        messages: as the proxy sent them and the client wrote them, without the next request.
        turn: the turn that it goes on from: the last reply is that turn's.
        certain: whether it must be extended from that turn, or must not be; None: either.
    """

    name: str
    messages: tuple[Any, ...]
    tools: Any
    turn: Any = None
    certain: bool | None = False


def _echoed(message: Any, rng: random.Random) -> Any:
    """A reply as some client would send it back, reasoning and all."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        arguments = arguments if isinstance(arguments, dict) else json.loads(arguments)
        shuffled = dict(rng.sample(list(arguments.items()), len(arguments)))
        function["arguments"] = rng.choice(
            [shuffled, json.dumps(shuffled, indent=rng.choice([None, 1])), function["arguments"]]
        )
        if rng.random() < 0.3:
            call.pop("type", None)
    text = message.get("content")
    if not text:
        message["content"] = rng.choice([None, "", []])
    elif isinstance(text, str) and rng.random() < 0.4:
        cut = rng.randint(0, len(text))
        message["content"] = [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]
    if rng.random() < 0.4:
        message |= {"refusal": None, "annotations": [], "audio": None}
    if "reasoning_content" in message and rng.random() < 0.3:
        message["reasoning"] = message.pop("reasoning_content")
    return dict(rng.sample(list(message.items()), len(message)))


def _silent(message: Any) -> Any:
    return {k: v for k, v in message.items() if k not in ("reasoning_content", "reasoning")}


def _thinks(message: Any) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning"))


class Clients(RuleBasedStateMachine):
    """Agents of two trajectories at one desk. Each of them keeps to what it was told, or does not."""

    chats: dict[str, ChatTokenizer]

    @initialize(
        seed=st.integers(0, 2**32),
        template=st.sampled_from(["chatml", "chatml", "rewriting", "qwen3", "glm4moe"]),
        policy=st.sampled_from(
            [
                TreePolicy(),
                TreePolicy(),
                TreePolicy(reasoning="respect"),
                TreePolicy("restore", "preserve", "close"),
            ]
        ),
    )
    def open(self, seed: int, template: str, policy: TreePolicy) -> None:
        """A desk with a policy of its own."""
        self.rng, self.policy = random.Random(seed), policy
        self.simple = template == "chatml"  # where it is known beforehand what extends
        self.folder = tempfile.TemporaryDirectory()
        self.answers: deque[Any] = deque()
        # The reply's form is Hermes' throughout, whatever the template: what the tests look at are ids.
        tokenizer = self.chats[template]
        self.desk = TokenDesk(
            Path(self.folder.name) / "store", tokenizer, lambda *_: self.answers.popleft(), policy
        )
        self.desk.engine.rng = random.Random(seed + 1)
        self.lines: list[Line] = []
        self.raw: dict[str, list[Any]] = {name: [] for name in NAMES}
        self.used_tools = template in ("chatml", "qwen3", "glm4moe")

    def teardown(self) -> None:
        """Whatever was done, everything holds; and after another restart it does too."""
        if not hasattr(self, "desk"):
            return
        try:
            self._all_holds()
            self.desk.restart()
            self._all_holds()
        finally:
            self.desk.close()
            self.folder.cleanup()

    def _all_holds(self) -> None:
        for trajectory in self.desk.trajectories():
            check_invariants(self.desk, trajectory.opened.name)
        turns = [
            t for trajectory in self.desk.trajectories() for t in trajectory.turns.values() if t.completed
        ]
        assert {t.turn_id for t in turns} == set(self.desk.engine.seen)

    # What is said ---------------------------------------------------------------------------

    def _text(self) -> str:
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(1, 12)))

    def _answer(self, tools: Any) -> Any:
        """What the engine will say: (answer, finished)."""
        rng, stop = self.rng, self.desk.tokenizer.stop_ids
        text = rng.choice(["", self._text()]) if rng.random() < 0.9 else ""
        if rng.random() < 0.4:
            text = f"<think>{rng.choice(['', ' '])}{self._text()}</think>" + rng.choice(["", "\n"]) + text
        if tools and rng.random() < 0.5:
            arguments = {
                self._text(): rng.choice([1, 2.0, self._text(), None, [True, {"k": 0.5}]]) for _ in range(3)
            }
            calls = [
                {"name": rng.choice(["calc", "look"]), "arguments": arguments}
                for _ in range(rng.randint(1, 2))
            ]
            text += "".join(f"<tool_call>{json.dumps(c, ensure_ascii=False)}</tool_call>" for c in calls)
        kind = rng.random()
        if kind < 0.12:
            return (text + "cut", rng.choice(["length", "abort"]), None), False
        if kind < 0.18:
            return (text + STOP, "stop", None), False
        if kind < 0.24 and len(stop) > 1 and self.simple:
            return (text, "stop", stop[1]), None  # an end, but not the template's
        return (text, "stop", stop[0]), True

    def _new(self, reply: Any) -> list[Any]:
        """What an agent adds behind a reply."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self._text()}
            for call in reply.get("tool_calls") or ()
        ]
        self.rng.shuffle(results)
        return results or [{"role": "user", "content": self._text()}]

    # What is done ---------------------------------------------------------------------------

    def _said(
        self, line: Line, index: int, answered: Any, finished: bool | None, messages: list[Any]
    ) -> None:
        """The line goes on with what it was answered."""
        history = (*messages, answered.reply)
        grown = replace(line, messages=history, turn=answered, certain=self._extends(finished))
        self.lines = [*self.lines[:index], grown, *self.lines[index + 1 :]]

    def _request(self, line: Line, *, drop: bool) -> tuple[list[Any], Any]:
        """(messages as sent, what their link must be: a turn's id, root or None)."""
        messages = [m if m["role"] != "assistant" else _echoed(m, self.rng) for m in line.messages]
        if drop:
            messages = [_silent(m) for m in messages]
        if line.turn is not None:
            messages += self._new(line.messages[-1])
        if line.turn is None or not self.simple:
            return messages, None
        if drop and self.policy.reasoning == "respect" and any(map(_thinks, line.messages)):
            return messages, None  # a root, unless what was dropped had been dropped before
        if drop and line.messages[-1].get("reasoning_content") == EDITED:
            return messages, None  # what was edited is not sent: it may be the turn itself again
        return messages, {True: line.turn.turn_id, False: "root"}.get(line.certain)  # type: ignore[arg-type]

    def _check_link(self, answered: Any, expected: Any, line: Line) -> None:
        link = self.desk.link(answered, line.name)
        if expected is None or link == expected or (expected == "root" and link.startswith("root:")):
            return
        # Of twins, which nothing the client shows tells apart, the latest that can be extended is taken.
        assert link != line.turn.turn_id
        assert "ambiguous_parent" in answered.completed.flags, link
        twin = self.desk.trajectory(line.name).turns[link]
        assert twin.completed.reply.get("content") == line.turn.reply.get("content")

    @rule(name=st.sampled_from(NAMES), system=st.booleans(), tools=st.booleans())
    def start(self, name: str, system: bool, tools: bool) -> None:
        """A conversation: an agent's, or its sub-agent's, with a prompt of its own."""
        lead = [{"role": "system", "content": self._text()}] if system else []
        user = {"role": "user", "content": self._text()}
        self.lines.append(Line(name, (*lead, user), TOOLS if tools and self.used_tools else None))

    @precondition(lambda self: self.lines)
    @rule(which=st.integers(0, 99), drop=st.booleans(), undelivered=st.booleans())
    def go_on(self, which: int, drop: bool, undelivered: bool) -> None:
        """A turn."""
        index = which % len(self.lines)
        line = self.lines[index]
        messages, expected = self._request(line, drop=drop)
        answer, finished = self._answer(line.tools)
        self.answers.append(answer)
        body: dict[str, Any] = {"messages": messages, "stop": [STOP]}
        body |= {"tools": line.tools} if line.tools else {}
        [[answered]] = self.desk.take_all(body, name=line.name, delivered=not undelivered)
        self._check_link(answered, expected, line)
        assert self.desk.trajectory(line.name).messages(self.desk.turn(answered, line.name)) == messages
        self._said(line, index, answered, finished, messages)

    @precondition(lambda self: self.lines)
    @rule(which=st.integers(0, 99), n=st.integers(2, 3), at_once=st.integers(1, 2))
    def go_on_in_several_ways(self, which: int, n: int, at_once: int) -> None:
        """n > 1, and requests at once: siblings all; the client goes on from each of them, or does not."""
        index = which % len(self.lines)
        line = self.lines[index]
        messages, expected = self._request(line, drop=False)
        drawn = [self._answer(line.tools) for _ in range(n * at_once)]
        self.answers.extend(answer for answer, _ in drawn)
        body: dict[str, Any] = {"messages": messages, "n": n, "stop": [STOP]}
        body |= {"tools": line.tools} if line.tools else {}
        rows = self.desk.take_all(*[body] * at_once, name=line.name)
        for turn, (answer, finished) in zip(itertools.chain(*rows), drawn, strict=True):
            self._check_link(turn, expected, line)
            assert self.desk.tokenizer.decode(turn.completed.completion_ids) == answer[0]
            grown = Line(line.name, (*messages, turn.reply), line.tools, turn, self._extends(finished))
            if len(self.lines) < 8:
                self.lines.append(grown)

    def _extends(self, finished: bool | None) -> bool:
        return {True: True, False: self.policy.unfinished == "close", None: False}[finished]

    @precondition(lambda self: any(line.turn for line in self.lines))
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        """The same history is gone on from twice."""
        lines = [line for line in self.lines if line.turn]
        if len(self.lines) < 8:
            self.lines.append(lines[which % len(lines)])

    @precondition(lambda self: any(line.turn for line in self.lines))
    @rule(
        which=st.integers(0, 99),
        how=st.sampled_from(["content", "reasoning", "injected", "tools", "compacted"]),
    )
    def edit(self, which: int, how: str) -> None:
        """The client makes another conversation of it: what it changed was not sampled."""
        indexes = [i for i, line in enumerate(self.lines) if line.turn]
        index = indexes[which % len(indexes)]
        line = self.lines[index]
        last, tools, messages = line.messages[-1], line.tools, line.messages[:-1]
        match how:
            case "content":
                last = _silent(last) | {"content": self._text() + "edited"}
            case "reasoning":
                last = _silent(last) | {"reasoning_content": EDITED}
            case "injected":
                messages = (*messages, last, {"role": "user", "content": "x"})
                last = {"role": "assistant", "content": self._text() + "injected"}
            case "tools":
                function = {"name": "calc", "description": self._text(), "parameters": {"type": "object"}}
                tools = [{"type": "function", "function": function}]
            case "compacted":
                summary = {"role": "user", "content": self._text() + "summary"}
                self.lines[index] = Line(line.name, (summary,), tools)
                return
        self.lines[index] = replace(line, messages=(*messages, last), tools=tools, certain=False)

    @precondition(lambda self: self.lines)
    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        """The engine fails: the request is on record, and no turn."""
        line = self.lines[which % len(self.lines)]
        messages, _ = self._request(line, drop=False)
        self.answers.append(EngineError("gone"))
        with pytest.raises(EngineError):
            self.desk.take_all({"messages": messages}, name=line.name)

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["text", "ids", "more", "more", "edited"]))
    def complete(self, name: str, how: str) -> None:
        """A raw prompt: its ids are the client's, and extend a turn whose ids they begin with."""
        (answer, _), known = self._answer(None), self.raw[name]
        prompt: Any = self.desk.tokenizer.encode(self._text()).tolist()
        whole: list[int] = []
        if known and how in ("more", "edited"):
            _, whole = self.rng.choice(known)
            prompt = [*whole, *prompt]
            if how == "edited":
                prompt[-len(prompt) // 2] ^= 1
        if how == "text":
            prompt = self._text()
        self.answers.append(answer)
        answered = self.desk.complete(prompt, name, stop=[STOP])
        sent = self.desk.engine.seen[answered.turn_id].prompt
        if how == "text":
            assert self.desk.link(answered, name).startswith("root:")
        else:
            assert sent.tolist() == prompt
        if whole and how == "more":
            parent = self.desk.turn(answered, name).requested.parent_turn_id
            longest = max(
                len(ids) for _, ids in known if ids == prompt[: len(ids)] and len(ids) < len(prompt)
            )
            assert len(whole) <= longest
            assert [ids for t, ids in known if t.turn_id == parent] == [prompt[:longest]]
        known.append((answered, [*sent.tolist(), *answered.completed.completion_ids.tolist()]))

    @rule()
    def restart(self) -> None:
        """The proxy ends, and another one goes on with what the log holds."""
        self.desk.restart()

    @rule(swaps=st.sampled_from([None, 1, 4]))
    def train(self, swaps: int | None) -> None:
        """New weights: from the next completion on, or within one."""
        self.desk.engine.version += 1
        self.desk.engine.swaps = swaps

    @invariant()
    def nothing_waits(self) -> None:
        """Every answer that was drawn was asked for."""
        assert not getattr(self, "answers", ())


@pytest.fixture(scope="module")
def chats(
    chat: Callable[[str], ChatTokenizer], real_chat: Callable[[str], ChatTokenizer]
) -> dict[str, ChatTokenizer]:
    """Two templates of ours, and two real ones."""
    ours = {name: chat(name) for name in ("chatml", "rewriting")}
    return ours | {name: real_chat(name) for name in ("qwen3", "glm4moe")}


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.more)])
def test_whatever_clients_do_the_log_is_what_the_engine_saw(
    chats: dict[str, ChatTokenizer], examples: int
) -> None:
    """28: I1 to I10 hold of every trajectory, before and after restarts; what must extend does."""
    clients = type("Clients", (Clients,), {"chats": chats})
    profile = settings(
        max_examples=examples,
        stateful_step_count=25,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(clients, settings=profile)
