"""What `rollbook show` draws: exact text, styles of tokens, and nothing that drives a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console, RenderableType
from tokenizers import Tokenizer

from rollbook.cli.show.draw import TokenText, View, context_text, draw, legend, sampled_text, style_of
from rollbook.store import Event
from rollbook.store.events import VersionSpan
from rollbook.transcript.facts import Answer
from rollbook.transcript.reading import facts_of

DRAWN = """\
trajectory  fix-readme  T-1
recorded    run demo, lane serve, split train, group g-7
task        repair it
labels      level=2, reviewed=true by a person
status      completed, success  opened 2023-11-14 22:13:20.000, 11.5 s
rewards     agent 1, judge 0.75
turns       7, 1 failed, 1 running
tokens      19, 10 of them sampled, by version 3 to 4
fidelity    mixed

1  aaaa0001  root: first_turn  tool_calls  3+3 tokens  actor v3  logprob -0.850, min -2.000
delivered  500 ms
  system  SYSTEM
  user    What is wrong?
          [image sha256 a8626d27cb13... image/png, 15 bytes]
  reply   I should look at the file.
          read_file(path="a.py")

├── 2  aaaa0002  extends 1  stop  8+4 tokens  actor v3 > v4  logprob -1.888, min -5.000  delivered:
│   echoed  500 ms  judge 0.25
│     tool    read_file: x = 1
│             y = 2
│     reply   y is unused
│     asked   not honoured: seed
│
│   ├── 4  aaaa0004  extends 2  failed  500 ms
│   │     error   EngineError('the engine is gone')
│   │
│   └── 7  aaaa0007  extends 2  running
│         user    and?
│
└── 3  aaaa0003  extends 1  length  malformed_tool_call  8+2 tokens  actor v3  logprob -0.275, min
    -0.500  not delivered  500 ms
      tool    read_file: x = 1
              y = 2
      reply   red \\x1b[31malert\\x07 \\u202e gnp
      labels  odd=yes by judge

5  aaaa0005  root: history_changed  stop  2+1 tokens  not delivered  500 ms
  ...     1 message as in 2
  user    Shorter
  reply   <think>so</think>
          ok

6  aaaa0006  root: no_matching_turn  /v1/messages  retry 1  unknown  without_tokens  text only
delivered: imported  500 ms
  user    hi
  reply   hello
"""


def _text(drawn: RenderableType, width: int = 140) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    console.print(drawn)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def _answer(turn: int, tale: list[Event]) -> Answer:
    answer = facts_of(tale).turns[turn - 1].answer
    assert answer is not None
    return answer


def test_a_tree_shows_siblings_failures_and_roots(tale: list[Event]) -> None:
    """Header, siblings, a failed and a running turn, a root that shares messages, images, text-only turns."""
    drawn = _text(draw(facts_of(tale), View()), width=100)
    system = next(line for line in drawn.splitlines() if line.startswith("  system"))
    end = drawn.index("  user ")
    assert "... 780 characters more ..." in drawn[:end]
    assert drawn[: drawn.index(system)] + "  system  SYSTEM\n" + drawn[end:].rstrip("\n") + "\n" == DRAWN


def test_full_shows_whole_messages_and_sampling(tale: list[Event]) -> None:
    """Everything: whole messages, echoes, and what each request was to be sampled with."""
    drawn = _text(draw(facts_of(tale), View(full=True)), width=2000)
    assert "You repair programs. " * 59 + "You repair programs." in drawn
    assert '      ...       2 messages as in 1\n│     assistant read_file(path="a.py")\n' in drawn.replace(
        "│     ...", "      ..."
    )
    assert 'sampling {"temperature":1.0,"max_new_tokens":64}' in drawn


def test_nothing_acts_on_the_terminal(tale: list[Event], byte_level: Tokenizer) -> None:
    """Escapes in names, tasks, roles, labels, errors, replies and tokens are shown, not sent."""
    evil = "\x1b]0;x\x07"
    facts = facts_of(tale)
    turns = [
        replace(t, error=evil, root_reason=evil, endpoint=evil, delivered=evil, not_honoured=(evil,))
        for t in facts.turns
    ]
    message = replace(facts.turns[0].messages[0], role=evil, name=evil)
    turns[0] = replace(turns[0], messages=(message,))
    ids = np.array(byte_level.encode(evil).ids, np.int32)
    turns[1] = replace(
        turns[1],
        answer=replace(
            _answer(2, tale), completion_ids=ids, logprobs=None, flags=(evil,), finish_reason=evil
        ),
    )
    facts = replace(
        facts,
        name=evil,
        task=evil,
        group=evil,
        run=evil,
        status=evil,
        labels={evil: evil},
        erased=evil,
        turns=tuple(turns),
    )
    for full in (False, True):
        drawn = _text(draw(facts, View(full, TokenText(byte_level))))
        assert "\x1b" not in drawn
        assert "\x07" not in drawn
        assert drawn.count("\\x1b]0;x\\x07") > 15


def test_a_long_trajectory_has_a_line_for_most_turns(long_tale: Callable[..., list[Event]]) -> None:
    """The first two and the last six of forty turns are whole; `full` has all of them."""
    facts = facts_of(long_tale(40))
    drawn = _text(draw(facts, View()), width=100)
    assert drawn.count("  reply   answer") == 8
    line = r"├── 20  00000019  extends 19  stop  97\+3 tokens  actor v7  \d+ ms  answer 19\n"
    assert re.search(line, drawn)
    assert "32 turns have a line only: --turn ID for one of them, --full for all" in drawn
    assert all(len(line) <= 100 for line in drawn.splitlines())
    assert _text(draw(facts, View(full=True))).count("  reply   ") == 40


def test_one_turn_alone_keeps_the_number_it_extends(tale: list[Event]) -> None:
    """Only that turn, and what it extends by its number all the same."""
    drawn = _text(draw(facts_of(tale), View(full=True, only=frozenset({"turn-aaaa0003"}))))
    assert "\n3  aaaa0003  extends 1  length" in drawn
    assert "aaaa0002" not in drawn


# Tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logprob", "style"),
    [
        (0.0, "green"),
        (-0.1, "green"),
        (-0.11, "cyan"),
        (-1.0, "cyan"),
        (-2.9, "yellow"),
        (-8.0, "red"),
        (-8.1, "bold white on red"),
        (float("-inf"), "bold white on red"),
        (float("nan"), ""),
        (None, ""),
    ],
)
def test_styles_follow_the_thresholds_of_the_legend(logprob: float | None, style: str) -> None:
    """By thresholds that the legend names; what is no number has none."""
    assert style_of(logprob) == style
    assert not style or style in {str(span.style) for span in legend().spans}


def test_sampled_tokens_are_coloured_by_logprob(tale: list[Event]) -> None:
    """Coloured by logprob, a change of version marked where it is, dim if the turn was not delivered."""
    answer, words = _answer(2, tale), TokenText(None)
    text = sampled_text(answer, words, delivered=True, full=False)
    assert text.plain == "9 10 [v4]11 12 "
    styles = [(text.plain[s.start : s.end], s.style) for s in text.spans]
    assert styles == [
        ("9 ", "green"),
        ("10 ", "cyan"),
        ("[v4]", "bold magenta"),
        ("11 ", "yellow"),
        ("12 ", "red"),
    ]
    dim = sampled_text(answer, words, delivered=False, full=False)
    assert [s.style for s in dim.spans][:2] == ["green dim", "cyan dim"]
    without = sampled_text(replace(answer, logprobs=None, spans=()), words, delivered=True, full=False)
    assert (without.plain, [s for s in without.spans if s.style]) == ("9 10 11 12 ", [])
    context = context_text(answer, words, full=False)
    assert [(context.plain, s.style) for s in context.spans] == [("7 8 ", "dim")]


def test_long_completions_are_cut_in_the_middle(tale: list[Event]) -> None:
    """How many tokens are missing is said, and a version that began among them is named after them."""
    count = 1000
    answer = replace(
        _answer(2, tale),
        completion_ids=np.arange(count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        spans=(VersionSpan("actor", 3, 0, 500), VersionSpan("actor", 4, 500, count)),
    )
    cut = sampled_text(answer, TokenText(None), delivered=True, full=False).plain
    assert " 179  ... 760 tokens more ... [v4]940 " in cut
    whole = sampled_text(answer, TokenText(None), delivered=True, full=True).plain
    assert whole.split() == [*(f"{i}" for i in range(500)), "[v4]500", *(f"{i}" for i in range(501, count))]


def test_erased_tokens_are_not_shown(tale: list[Event]) -> None:
    """Are not shown as the ids they have now."""
    answer = replace(_answer(2, tale), fidelity="erased")
    assert sampled_text(answer, TokenText(None), delivered=True, full=True).plain == "[4 tokens, erased]"


def test_tokens_in_the_tree(tale: list[Event], byte_level: Tokenizer) -> None:
    """Context and sampled tokens as text, with the legend above."""
    facts = facts_of(tale)
    ids = np.array(byte_level.encode("hello\nthere\n").ids, np.int32)
    answer = replace(_answer(2, tale), context_ids=ids, completion_ids=ids[:1])
    facts = replace(facts, turns=(replace(facts.turns[1], parent=None, answer=answer),))
    drawn = _text(draw(facts, View(words=TokenText(byte_level))))
    assert "\nlogprob  >= -0.1  >= -1  >= -3  >= -8  below -8  none" in drawn
    assert "\n  context hello↵\n          there↵\n  reply   y is unused\n  sampled hello\n" in drawn
