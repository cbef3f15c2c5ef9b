"""The demo's task and its teacher."""

from __future__ import annotations

import random
import re

import pytest

from rollbook.demo.agent import TOOLS as AGENT_TOOLS
from rollbook.demo.agent import calculator
from rollbook.demo.task import (
    CONFUSE,
    REFUSE,
    SLIP,
    TOOLS,
    calculate,
    conversation,
    is_held_out,
    parse,
    problems,
    teacher,
)


def _answers(count: int) -> tuple[int, int, int]:
    """Of so many first turns: refusals, calls with the right operator, calls with another one."""
    refused = right = wrong = 0
    for problem in problems(random.Random(1), count, held_out=False):
        reply = teacher([{"role": "user", "content": problem.text}], TOOLS)
        if "tool_calls" not in reply:
            refused += 1
        elif reply["tool_calls"][0]["function"]["arguments"]["op"] == problem.steps[0][0]:
            right += 1
        else:
            wrong += 1
    return refused, right, wrong


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_every_question_is_understood(calls: int) -> None:
    """A problem's text states its numbers and operators, in every phrasing."""
    for problem in problems(random.Random(0), 300, held_out=False, calls=calls):
        assert parse(problem.text) == problem
        assert len(problem.steps) == calls


def test_a_further_call_takes_the_result() -> None:
    """Of the call before; a right answer repeats the last one's."""
    problem = parse("What is 37 plus 58? Then multiply by 6. Then subtract 9.")
    assert (problem.a, problem.steps) == (37, (("+", 58), ("*", 6), ("-", 9)))
    assert problem.results == (95, 570, 561)
    messages = conversation(problem)
    calls = [m["tool_calls"][0]["function"]["arguments"] for m in messages if "tool_calls" in m]
    assert [(call["a"], call["op"], call["b"]) for call in calls] == [
        (37, "+", 58),
        (95, "*", 6),
        (570, "-", 9),
    ]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["95", "570", "561"]
    assert messages[-1] == {"role": "assistant", "content": "561"}


def test_the_teacher_takes_every_call() -> None:
    """It goes on from the result that it was given, errs at any call, and refuses at the first only."""
    right = wrong = 0
    for problem in problems(random.Random(2), 1000, held_out=False, calls=2):
        messages = conversation(problem)[:3]
        reply = teacher(messages, TOOLS)
        call = reply["tool_calls"][0]["function"]["arguments"]
        op, b = problem.steps[1]
        assert (call["a"], call["b"]) == (problem.results[0], b)
        right, wrong = right + (call["op"] == op), wrong + (call["op"] != op)
    assert wrong / (right + wrong) == pytest.approx(CONFUSE, abs=0.063)


def test_a_foreign_question_is_refused() -> None:
    """The teacher knows this task only."""
    for text in ("Who are you?", "What is 37 plus 58? Then rest.", "And what is 37 plus 58?"):
        with pytest.raises(ValueError, match=re.escape(text)):
            parse(text)


def test_held_out_pairs_are_never_trained_on() -> None:
    """Training and held-out problems share no pair of numbers, and the held-out are a tenth."""
    trained = {(p.a, p.steps[0][1]) for p in problems(random.Random(0), 3000, held_out=False)}
    held_out = {(p.a, p.steps[0][1]) for p in problems(random.Random(0), 3000, held_out=True)}
    assert trained.isdisjoint(held_out)
    share = sum(is_held_out(a, b) for a in range(10, 100) for b in range(10, 100)) / 8100
    assert share == pytest.approx(0.1, abs=0.01)


def test_the_teacher_errs_as_often_as_it_should() -> None:
    """Refusals and mixed-up operators come at their rates, within four standard errors."""
    refused, right, wrong = _answers(4000)
    assert refused / 4000 == pytest.approx(REFUSE, abs=0.023)
    assert wrong / (right + wrong) == pytest.approx(CONFUSE, abs=0.035)


def test_the_teacher_slips_one_digit() -> None:
    """A copied result differs from the tool's in at most one digit, at the rate of slips."""
    slips = 0
    question = {"role": "user", "content": "What is 37 plus 58?"}
    for number in range(1000, 4000):
        reply = teacher([question, {"role": "tool", "content": str(number)}], TOOLS)["content"]
        wrong = sum(a != b for a, b in zip(reply, str(number), strict=True))
        assert wrong <= 1
        slips += wrong
    assert slips / 3000 == pytest.approx(SLIP, abs=0.022)


def test_the_teacher_is_a_function_of_the_messages() -> None:
    """The same messages get the same answer, so a retry changes nothing."""
    messages = [{"role": "user", "content": "What is 37 plus 58?"}]
    assert teacher(messages, TOOLS) == teacher(messages, TOOLS)


@pytest.mark.parametrize(("op", "result"), [("+", 95), ("-", -21), ("*", 2146)])
def test_the_agents_calculator_is_the_tasks(op: str, result: int) -> None:
    """The agent brings its own calculator and tool description; both are the task's."""
    assert calculate(37, op, 58) == result
    assert calculator(f'{{"a": 37, "op": "{op}", "b": 58}}') == str(result)
    assert AGENT_TOOLS == TOOLS


@pytest.mark.parametrize("arguments", ["", "[]", '{"a": 1}', '{"a": 1, "b": 2, "op": "/"}', '{"a": "x"}'])
def test_a_wrong_call_is_reported_to_the_model(arguments: str) -> None:
    """An invalid tool call of the model is an error message, and the agent goes on."""
    assert calculator(arguments).startswith("error: ")
