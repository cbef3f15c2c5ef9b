"""The demo's task, and its sloppy teacher: arithmetic that needs a calculator.

"What is 37 plus 58?" is answered by calling `calc`, reading its result and repeating it. The teacher
refuses at times, mixes up operators and miscopies digits, so a model that imitates it is right about
a third of the time, and reinforcement learning has something to gain.
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
    """A question, and what it asks."""

    text: str
    a: int
    op: str
    b: int


def calculate(a: int, op: str, b: int) -> int:
    """The calculator."""
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def is_held_out(a: int, b: int) -> bool:
    """A tenth of all number pairs is never trained on."""
    return (a * 7919 + b * 104729) % 10 == 0


def problems(rng: random.Random, count: int, *, held_out: bool) -> Iterator[Problem]:
    """Random problems over two-digit numbers, held-out pairs apart from the others."""
    made = 0
    while made < count:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        op = rng.choice("+-*")
        text = rng.choice(PHRASES[op]).format(a=a, b=b)
        if is_held_out(a, b) == held_out:
            made += 1
            yield Problem(text, a, op, b)


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
    result = str(calculate(problem.a, problem.op, problem.b))
    return [
        {"role": "user", "content": problem.text},
        call_message(problem.a, problem.op, problem.b),
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def parse(text: str) -> Problem:
    """The problem a question states."""
    for op, phrases in PHRASES.items():
        for phrase in phrases:
            pattern = re.escape(phrase).replace(r"\{a\}", r"(\d+)").replace(r"\{b\}", r"(\d+)")
            if match := re.fullmatch(pattern, text):
                return Problem(text, int(match[1]), op, int(match[2]))
    raise ValueError(f"not a problem of this task: {text!r}")


def teacher(messages: Sequence[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The script behind `--engine scripted`: the same messages always get the same answer."""
    rng = random.Random(repr([(m["role"], m.get("content")) for m in messages]))
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": _copied(messages[-1]["content"], rng)}
    problem = parse(messages[-1]["content"])
    if rng.random() < REFUSE:
        return {"role": "assistant", "content": "I am not sure."}
    op = CONFUSED[problem.op] if rng.random() < CONFUSE else problem.op
    return call_message(problem.a, op, problem.b)


def _copied(text: str, rng: random.Random) -> str:
    """The text, at times with one digit wrong."""
    if rng.random() >= SLIP:
        return text
    place = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
    wrong = rng.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + wrong + text[place + 1 :]
