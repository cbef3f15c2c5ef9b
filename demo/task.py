"""The demo's task, and its sloppy teacher: arithmetic that needs a calculator.

"What is 37 plus 58?" is answered by calling `calc`, reading its result and repeating it. The teacher
refuses at times, mixes up operators and miscopies digits, so a model that imitates it is right about
a third of the time, and reinforcement learning has something to gain. A longer question goes on, as in "What
is 37 plus 58? Then multiply by 6.", and takes a second call with the first one's result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PHRASES = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?"),
    "-": ("What is {a} minus {b}?", "Compute {a} less {b}.", "How much is {a} - {b}?"),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} * {b}?"),
}
FURTHER = {"+": " Then add {b}.", "-": " Then subtract {b}.", "*": " Then multiply by {b}."}
CONFUSED = {"+": "*", "-": "+", "*": "-"}
REFUSE, CONFUSE, SLIP = 0.15, 0.55, 0.10

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Exact integer arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "op": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "integer"},
                },
                "required": ["a", "op", "b"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question: a number, and the operations applied to it, each with a call of its own."""

    text: str
    a: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The result of each call; the last is the answer."""
        results = [self.a]
        for op, b in self.steps:
            results.append(calculate(results[-1], op, b))
        return tuple(results[1:])


def calculate(a: int, op: str, b: int) -> int:
    """The calculator."""
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair of numbers is held out; a tenth of all pairs is, and is never trained on."""
    return (a * 7919 + b * 104729) % 10 == 0


def problems(rng: random.Random, count: int, *, held_out: bool, calls: int = 1) -> Iterator[Problem]:
    """Random problems over two-digit numbers, either of held-out pairs or of the others.

    Args:
        calls: of the calculator that a problem takes; those after the first have one-digit
            numbers.
    """
    count_made = 0
    while count_made < count:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        op = rng.choice("+-*")
        text = rng.choice(PHRASES[op]).format(a=a, b=b)
        if is_held_out(a, b) == held_out:
            count_made += 1
            further = tuple((rng.choice("+-*"), rng.randint(2, 9)) for _ in range(calls - 1))
            text += "".join(FURTHER[op].format(b=b) for op, b in further)
            yield Problem(text, a, ((op, b), *further))


def call_message(a: int, op: str, b: int) -> dict[str, Any]:
    """The assistant message that calls the calculator."""
    function = {"name": "calc", "arguments": {"a": a, "op": op, "b": b}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def conversation(problem: Problem) -> list[dict[str, Any]]:
    """A right answer, as messages (the tokenizer is trained on such)."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.text}]
    a = problem.a
    for (op, b), result in zip(problem.steps, problem.results, strict=True):
        messages += [call_message(a, op, b), {"role": "tool", "content": str(result)}]
        a = result
    return [*messages, {"role": "assistant", "content": str(a)}]


def parse(text: str) -> Problem:
    """The problem a question states."""
    for op, phrases in PHRASES.items():
        for phrase in phrases:
            pattern = _numbered(phrase, a=r"(\d+)", b=r"(\d+)")
            if match := re.match(pattern, text):
                further = _further(text[match.end() :])
                if further is not None:
                    return Problem(text, int(match[1]), ((op, int(match[2])), *further))
    raise ValueError(f"not a problem of this task: {text!r}")


def _further(text: str) -> list[tuple[str, int]] | None:
    """The operations after the first call; None if the text is something else."""
    operations = list[tuple[str, int]]()
    while text:
        matches = {op: re.match(_numbered(phrase, b=r"(\d+)"), text) for op, phrase in FURTHER.items()}
        known = [(op, match) for op, match in matches.items() if match]
        if not known:
            return None
        [(op, match)] = known
        operations.append((op, int(match[1])))
        text = text[match.end() :]
    return operations


def _numbered(phrase: str, **patterns: str) -> str:
    """A regular expression for the phrase, with patterns in the places of its numbers."""
    regex = re.escape(phrase)
    for name, pattern in patterns.items():
        regex = regex.replace(rf"\{{{name}\}}", pattern)
    return regex


def teacher(messages: Sequence[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The script behind `--engine scripted`: the same messages always get the same answer."""
    rng = random.Random(repr([(m["role"], m.get("content")) for m in messages]))
    results = [m["content"] for m in messages if m["role"] == "tool"]
    problem = parse(next(m["content"] for m in messages if m["role"] == "user"))
    if len(results) == len(problem.steps):
        return {"role": "assistant", "content": _copied(results[-1], rng)}
    if not results and rng.random() < REFUSE:
        return {"role": "assistant", "content": "I am not sure."}
    op, b = problem.steps[len(results)]
    op = CONFUSED[op] if rng.random() < CONFUSE else op
    return call_message(int(results[-1]) if results else problem.a, op, b)


def _copied(text: str, rng: random.Random) -> str:
    """The text, at times with one digit wrong."""
    if rng.random() >= SLIP:
        return text
    place = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
    wrong = rng.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + wrong + text[place + 1 :]
