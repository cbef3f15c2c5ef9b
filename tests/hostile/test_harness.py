"""That the harness itself sees what is wrong: acknowledgements that a log does not hold, answers, figures."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rollbook.bench import hostile
from rollbook.bench.hostile.agents import CHAT, MESSAGES, RESPONSES, said
from rollbook.bench.hostile.attack import OK, RECORD, REFUSED, TOKENS, Attack, Ground, Tally, carry_out
from rollbook.bench.hostile.attacks import attacks_on
from rollbook.bench.hostile.checks import Held, compare
from rollbook.bench.hostile.kills import HOSTILE, Killed
from rollbook.bench.hostile.laps import Fought, Lap, Round, tracebacks
from rollbook.bench.hostile.outcome import Measured, figures, ratios
from rollbook.bench.hostile.secret_runs import Searched
from rollbook.bench.hostile.sender import CUT, Answer, request

ROOT = Path(__file__).resolve().parents[2]
NOT_OF_THE_PAGE = {"test_harness.py", "test_attacks.py"}

TURN = {"what": "turn", "turn_id": "u", "trajectory": "t", "question": "q1", "text": "a", "mark": "m1"}
FINISH = {"what": "finish", "trajectory": "t", "reward": 0.5, "turns": 1}
REWARD = {"what": "reward", "event_id": "e", "trajectory": "t", "reward": 0.2, "source": "s"}
TURNS = [("u", "t", "completed", "a", '{"user": "m1"}')]
TRAJECTORIES, REWARDS = [("t", "completed", 0.5, 1)], [("e", "t", 0.2, "s")]
ASKED = {"u": '[{"content": "q1"}]'}


def _held(**other: Any) -> Held:
    values: dict[str, Any] = {
        "turns": TURNS,
        "trajectories": TRAJECTORIES,
        "rewards": REWARDS,
        "questions": ASKED,
    }
    return compare([TURN, FINISH, REWARD], **values | other)


def test_a_complete_log_has_no_lost_turn() -> None:
    """In a log that holds every acknowledged turn none is lost or changed."""
    held = _held()
    assert (held.acks, held.lost, held.changed) == (3, [], [])


@pytest.mark.parametrize(
    ("key", "what"), [("turns", "turn"), ("trajectories", "finish"), ("rewards", "reward")]
)
def test_a_missing_turn_counts_as_lost(key: str, what: str) -> None:
    """Each kind of acknowledgement."""
    held = _held(**{key: []})
    assert [text.split()[0] for text in held.lost] == [what]


@pytest.mark.parametrize(
    "other",
    [
        {"turns": [("u", "t", "completed", "b", '{"user": "m1"}')]},
        {"turns": [("u", "t", "running", "a", '{"user": "m1"}')]},
        {"turns": [("u", "other", "completed", "a", '{"user": "m1"}')]},
        {"turns": [("u", "t", "completed", "a", '{"user": "m2"}')]},
        {"questions": {"u": '[{"content": "q2"}]'}},
        {"questions": {}},
        {"trajectories": [("t", "open", 0.5, 1)]},
        {"trajectories": [("t", "completed", 0.4, 1)]},
        {"trajectories": [("t", "completed", 0.5, 0)]},
        {"rewards": [("e", "other", 0.2, "s")]},
        {"rewards": [("e", "t", 0.3, "s")]},
        {"rewards": [("e", "t", 0.2, "agent")]},
    ],
)
def test_a_different_turn_counts_as_changed(other: dict[str, Any]) -> None:
    """Each thing that was told."""
    held = _held(**other)
    assert (held.lost, len(held.changed)) == ([], 1)


def test_wrong_answers_are_counted() -> None:
    """Counted are a 200 that must not be one, every 500, and any unexpected status."""
    tally = Tally()
    for status, allowed in ((200, REFUSED), (201, REFUSED), (200, OK), (400, REFUSED), (CUT, REFUSED)):
        tally.add("x", Answer(status), allowed)
    assert (len(tally.wrong_200), tally.errors_500, tally.strange) == (2, [], [])
    for status, allowed in ((500, REFUSED), (500, (500,)), (502, REFUSED), (400, OK)):
        tally.add("x", Answer(status), allowed)
    assert (len(tally.errors_500), len(tally.strange), tally.answers.total()) == (2, 2, 9)


def test_an_attack_is_repeated_and_ended() -> None:
    """As often as there is time, several at once; one that does not end is ended; its own fault is raised."""
    calls: list[int] = []

    async def volley(ground: Ground) -> None:
        calls.append(1)
        if len(calls) > 4:
            await asyncio.sleep(60)

    async def wrong(ground: Ground) -> None:
        raise ValueError("its own")

    def ground() -> Ground:
        return Ground("http://127.0.0.1:1", "", "", None, random.Random(0))  # type: ignore[arg-type]

    asyncio.run(carry_out(Attack("a", "", volley, at_once=2, pause_s=0.01), ground(), 0.3))
    assert len(calls) in (5, 6)
    with pytest.raises(ValueError, match="its own"):
        asyncio.run(carry_out(Attack("b", "", wrong), ground(), 0.3))


def test_requests_are_sent_as_they_are() -> None:
    """Lengths are given unless they are said otherwise; bytes that are no text stay what they are."""
    assert request("POST", "/a", "h", {"X": "\udcff"}, b"{}") == (
        b"POST /a HTTP/1.1\r\nHost: h\r\nX: \xff\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert b"Content-Length: 2" not in request("POST", "/a", "h", {"Content-Length": "9"}, b"{}")


def test_replies_of_each_api_are_read() -> None:
    """Replies of each API are read, whole and in pieces."""
    assert said(
        CHAT, b'{"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}', False
    ) == ["a", "b"]
    assert said(MESSAGES, b'{"content": [{"text": "a"}, {"text": "b"}]}', False) == ["ab"]
    assert said(RESPONSES, b'{"output": [{"content": [{"text": "a"}]}]}', False) == ["a"]
    chunk = b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n'
    assert said(CHAT, chunk % b"a" + chunk % b"b" + b"data: [DONE]\n\n", True) == ["ab"]
    assert said(MESSAGES, b'data: {"type": "content_block_delta", "delta": {"text": "a"}}\n', True) == ["a"]
    assert said(RESPONSES, b'data: {"type": "response.output_text.delta", "delta": "a"}\n', True) == ["a"]
    assert said(CHAT, b'{"error": 1}', False) == []


def test_tracebacks_in_a_log_are_counted() -> None:
    """Tracebacks are found at any position in a log."""
    assert tracebacks("all is well") == []
    assert len(tracebacks("x\nTraceback (most recent call last):\n  File y\nValueError: z\n")) == 1


def test_every_attack_says_what_must_hold() -> None:
    """In a sentence; and those of the kills are known."""
    every = attacks_on(TOKENS)
    assert len(every) > 30
    assert all(attack.says.endswith(".") and len(attack.says) > 30 for attack in every)
    assert set(HOSTILE) <= {attack.name for attack in every}


def test_the_page_names_every_attack() -> None:
    """docs/security.md says which promise each attack tests, and names no test that is not there."""
    page = (ROOT / "docs" / "security.md").read_text()
    every = {attack.name for kind in (TOKENS, RECORD) for attack in attacks_on(kind)}
    named = set(re.findall(r"`([a-z_]+)`", page))
    assert every <= named
    files = set(re.findall(r"`(test_\w+\.py)`", page))
    assert all((ROOT / "tests" / "hostile" / file).exists() for file in files)
    assert {file.name for file in (ROOT / "tests" / "hostile").glob("test_*.py")} - files == NOT_OF_THE_PAGE


def _lap(*ms: float, refused: int = 0, errors: int = 0) -> Lap:
    return Lap(list(ms), refused, errors, ["told"] * bool(refused))


def test_figures_are_medians_peaks_and_counts() -> None:
    """Ratios are medians over the rounds, peaks and counts are over everything."""
    calm, bad = Tally(), Tally()
    bad.add("x", Answer(200), REFUSED)
    bad.add("x", Answer(500), REFUSED)
    measured = Measured(
        rounds=[
            Round(
                TOKENS,
                [_lap(10.0), _lap(20.0)],
                [Fought("a", _lap(40.0), calm, 300 << 20), Fought("b", _lap(20.0), bad, 200 << 20)],
            ),
            Round(
                TOKENS,
                [_lap(10.0)],
                [
                    Fought("a", _lap(40.0, refused=1), calm, 150 << 20),
                    Fought("c", _lap(errors=2), calm, 0, refuses=True),
                ],
            ),
        ],
        quiet={TOKENS: 100 << 20},
        held={TOKENS: Held(10, ["x"], ["y", "z"], ["lane"])},
        killed=Killed(kills=3, held=Held(5, ["k"]), tracebacks=["t"]),
        searched=Searched(40, 14, {"s": "place"}),
    )
    assert ratios(measured) == {"a (tokens)": [2.0, 4.0], "b (tokens)": [1.0]}
    by_name = {figure.figure: figure for figure in figures(measured)}
    assert {name: figure.value for name, figure in by_name.items()} == {
        "hostile.lost": 2,
        "hostile.changed": 3,
        "hostile.wrong_200": 1,
        "hostile.errors_500": 4,
        "hostile.p99_ratio": 3.0,
        "hostile.rss_peak_mb": 200.0,
        "hostile.secrets_on_disk": 1,
        "hostile.refused": 1,
    }
    assert "worst: a (tokens)" in str(by_name["hostile.p99_ratio"].against)
    assert "15 acknowledgements, 3 kills; first: x; k" in str(by_name["hostile.lost"].against)
    assert hostile.outcome(measured).spreads
    assert hostile.sized(0.1).kills == 10
