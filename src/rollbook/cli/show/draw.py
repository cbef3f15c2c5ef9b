"""Draws a trajectory with Rich: a header, and its turns as a tree.

Of a turn's tokens those of the prompt are dim, sampled ones coloured by their logprobs.

A conversation that never forks is one list, however long: a turn that is its parent's only continuation
follows it on the same level. Only where a conversation goes on in several ways is each of them set in, and
past some depth not even then (each turn says what it extends).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rollbook.store.errors import ModelError
from rollbook.store.events import Json, VersionSpan
from rollbook.store.sql.vocabularies import TOKENIZER, read_tokenizer, token_texts
from rollbook.transcript.facts import (
    COMPLETED,
    ERASED,
    FAILED,
    RUNNING,
    Answer,
    Label,
    Reward,
    TrajectoryFacts,
    TurnFacts,
)
from rollbook.transcript.messages import REASONING, Message, part_words
from rollbook.transcript.reading import CHAT_COMPLETIONS
from rollbook.transcript.text import clock, duration, one_line, short_id, shortened, visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IN_DETAIL = 16
"""Of a trajectory with more turns only the first and the last are drawn whole; the others get a line each."""
FIRST, LAST = 2, 6
LINE = 400
"""Characters of a line that is cut to the terminal's width in the end."""
STATUS = {
    **{"completed": "green", "open": "yellow", "truncated": "yellow"},
    **{"aborted": "red", "failed": "red", "void": "dim"},
}
ROLES = {"system": "magenta", "developer": "magenta", "user": "blue", "tool": "yellow"}

Words = list[tuple[str, str]]
"""Pieces of a line with their styles."""


@dataclass(frozen=True, slots=True)
class View:
    """Which parts of a trajectory to draw.

    Attributes:
        words: the text of tokens; None leaves them out.
        only: the turns to draw, all if None.
    """

    full: bool = False
    words: TokenText | None = None
    only: frozenset[str] | None = field(default=None)


def draw(facts: TrajectoryFacts, view: View) -> Group:
    """The trajectory."""
    parts: list[RenderableType] = [_header(facts)]
    if view.words is not None:
        parts.append(legend())
    names = {turn.turn_id: f"{turn.number}" for turn in facts.turns}
    chosen = [turn for turn in facts.turns if view.only is None or turn.turn_id in view.only]
    whole = _drawn_whole(chosen, view)
    tree = Tree("", hide_root=True, guide_style="dim")
    waiting: list[tuple[Tree, Node]] = [(tree, node) for node in reversed(arrange(chosen))]
    while waiting:
        place, node = waiting.pop()
        turn = node.turn
        branch = place.add(_whole(turn, names, view) if turn.turn_id in whole else _line(turn, names))
        waiting += [(branch, beneath) for beneath in reversed(node.beneath)]
    missing = len(chosen) - len(whole)
    parts += [Text(), tree if chosen else Text("no turns", "dim")]
    if missing:
        hint = f"{missing:,} turns have a line only: --turn ID for one of them, --full for all"
        parts += [Text(), Text(hint, "dim")]
    return Group(*parts)


def _drawn_whole(turns: list[TurnFacts], view: View) -> set[str]:
    if not (view.full or view.only is not None or len(turns) <= IN_DETAIL):
        turns = [*turns[:FIRST], *turns[-LAST:]]
    return {turn.turn_id for turn in turns}


# The header -----------------------------------------------------------------------------------------


def _header(facts: TrajectoryFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _header_rows(facts):
        table.add_row(name, Text.assemble(*words))
    return table


def _header_rows(facts: TrajectoryFacts) -> Iterator[tuple[str, Words]]:
    yield "trajectory", [(visible(facts.name), "bold"), (f"  {visible(facts.trajectory_id)}", "dim")]
    where = [("run", facts.run), ("lane", facts.lane), ("split", facts.split), ("group", facts.group)]
    yield "recorded", _listed([(f"{name} {visible(value)}", "") for name, value in where if value])
    if facts.origin is not None:
        yield "origin", _origin(facts.origin)
    if facts.task:
        yield "task", [(shortened(facts.task), "")]
    marks = [f"{name}={one_line(value, 80)}" for name, value in facts.labels.items()]
    if marks or facts.added_labels:
        yield "labels", _listed([(visible(mark), "") for mark in marks] + _labels(facts.added_labels))
    success = {None: "", True: ", success", False: ", no success"}[facts.success]
    took = (
        f", {duration((facts.finished_us - facts.opened_us) / 1000)}" if facts.finished_us is not None else ""
    )
    status: Words = [
        (visible(facts.status), STATUS.get(facts.status, "")),
        (success, "green" if facts.success else "red"),
    ]
    yield "status", [*status, (f"  opened {clock(facts.opened_us, '%Y-%m-%d %H:%M:%S')}{took}", "dim")]
    if facts.erased is not None:
        yield "erased", [(one_line(facts.erased, 200), "red")]
    yield "rewards", _listed(_rewards(facts.rewards)) or [("none", "dim")]
    states = {state: sum(turn.status == state for turn in facts.turns) for state in (FAILED, RUNNING)}
    counted = "".join(f", {count} {state}" for state, count in states.items() if count)
    yield "turns", [(f"{len(facts.turns):,}{counted}", "")]
    yield "tokens", [(f"{facts.tokens:,}, {facts.sampled:,} of them sampled", ""), (_versions(facts), "")]
    yield (
        "fidelity",
        [(facts.fidelity or "nothing completed", "green" if facts.fidelity == "exact" else "yellow")],
    )


def _origin(origin: Json) -> Words:
    if origin["how"] == "judged":
        return [(visible(f"judges {origin['trajectory_id']}"), "")]
    how = f"{origin['trajectory_id']}, {origin['how']} from turn {short_id(origin['turn_id'])}"
    return [
        (visible(how), ""),
        (visible(f"  by version {origin['policy_version']} of {origin['policy']}"), "dim"),
    ]


def _versions(facts: TrajectoryFacts) -> str:
    versions = facts.versions()
    if not versions:
        return ""
    span = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    return f", by version {span}"


def _rewards(rewards: tuple[Reward, ...]) -> Words:
    return [(f"{visible(reward.source)} {reward.reward:g}", "bold yellow") for reward in rewards]


def _labels(labels: tuple[Label, ...]) -> Words:
    return [(f"{visible(x.name)}={one_line(x.value, 80)} by {visible(x.source)}", "") for x in labels]


def _listed(words: Words) -> Words:
    return [piece for word in words for piece in ((", ", ""), word)][1:]


# A turn ---------------------------------------------------------------------------------------------


def _whole(turn: TurnFacts, names: Mapping[str, str], view: View) -> RenderableType:
    """A turn with its messages, reply and tokens."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    for label, text in _rows(turn, names, view):
        table.add_row(label, text)
    return Group(Text.assemble(*_head(turn, names)), table, Text())


def _line(turn: TurnFacts, names: Mapping[str, str]) -> Text:
    """A turn in one line, cut where the terminal ends."""
    words = _head(turn, names, brief=True)
    if turn.answer is not None:
        text = " ".join(part_words(part, LINE) for part in turn.answer.reply.parts)
        words += [("  ", ""), (one_line(text, LINE), "dim")]
    elif turn.error:
        words += [("  ", ""), (one_line(turn.error, LINE), "red")]
    return Text.assemble(*words, no_wrap=True, overflow="ellipsis")


def _head(turn: TurnFacts, names: Mapping[str, str], *, brief: bool = False) -> Words:
    """A turn's first line: its number, its parent, and how it ended; `brief` leaves some out."""
    if turn.parent is not None:
        hangs = (f"extends {names.get(turn.parent) or short_id(turn.parent)}", "")
    else:
        hangs = (f"root: {visible(turn.root_reason or 'unknown')}", "magenta")
    words: Words = [(f"{turn.number}", "bold"), (short_id(turn.turn_id), "dim"), hangs]
    if turn.endpoint != CHAT_COMPLETIONS:
        words.append((visible(turn.endpoint), "blue"))
    counts = (("choice", turn.choice), ("retry", turn.retry))
    words += [(f"{name} {count}", "") for name, count in counts if count is not None]
    if turn.answer is None:
        words.append((turn.status, "bold red" if turn.status == FAILED else "bold yellow"))
    else:
        words += _outcome(turn, turn.answer, brief=brief)
    if turn.latency_ms is not None:
        words.append((duration(turn.latency_ms), ""))
    words += _rewards(turn.rewards)
    return [piece for word in words for piece in (("  ", ""), word)][1:]


def _outcome(turn: TurnFacts, answer: Answer, *, brief: bool) -> Words:
    cut = answer.finish_reason not in ("stop", "tool_calls", "unknown")
    words: Words = [(visible(answer.finish_reason), "yellow" if cut else "green")]
    words += [(visible(flag), "bold yellow") for flag in answer.flags]
    if answer.fidelity == "text_only":
        words.append(("text only", "yellow"))
    else:
        words.append((f"{answer.prompt_tokens:,}+{len(answer.completion_ids):,} tokens", "cyan"))
    if answer.spans:
        steps = " > ".join(f"v{span.version}" for span in answer.spans)
        words.append((f"{visible(answer.spans[-1].policy)} {steps}", "magenta"))
    if answer.mean_logprob is not None and not brief:
        words.append((f"logprob {answer.mean_logprob:.3f}, min {answer.min_logprob:.3f}", ""))
    how = {"sent": "delivered", None: "not delivered"}.get(turn.delivered, f"delivered: {turn.delivered}")
    if turn.delivered is None or not brief:
        words.append((visible(how), "dim" if turn.delivered else "yellow"))
    return words


def _rows(turn: TurnFacts, names: Mapping[str, str], view: View) -> Iterator[tuple[Text, Text]]:
    # Of a turn that extends another one, its first line says so already.
    if turn.shared_messages and turn.base and (view.full or turn.parent is None):
        base = names.get(turn.base) or short_id(turn.base)
        many = "message" if turn.shared_messages == 1 else "messages"
        yield Text("  ..."), Text(f"{turn.shared_messages} {many} as in {base}", "dim")
    for message in turn.messages:
        if view.full or not message.echo:
            yield _message(message, view)
    if turn.answer is not None:
        yield from _prompt(turn, turn.answer, view)
        yield from _reply(turn, turn.answer, view)
    if turn.error is not None:
        yield Text("  error", "red"), Text(shortened(turn.error, full=view.full), "red")
    if turn.not_honoured:
        fields = ", ".join(visible(name) for name in turn.not_honoured)
        yield Text("  asked", "dim"), Text(f"not honoured: {fields}", "yellow")
    if turn.labels:
        yield Text("  labels", "dim"), Text.assemble(*_listed(_labels(turn.labels)))
    if view.full and turn.sampling:
        yield Text("  sampling", "dim"), Text(one_line(turn.sampling, LINE), "dim")


def _message(message: Message, view: View) -> tuple[Text, Text]:
    label = Text(f"  {visible(message.role)}", ROLES.get(message.role, "dim"))
    lead = f"{visible(message.name)}: " if message.name else ""
    return label, Text.assemble((lead, "dim"), _parts(message, view))


def _prompt(turn: TurnFacts, answer: Answer, view: View) -> Iterator[tuple[Text, Text]]:
    count = len(answer.context_ids)
    if view.words is not None and count:
        yield Text("  context", "dim"), context_text(answer, view.words, full=view.full)
    elif count and not turn.messages and not turn.shared_messages:
        yield Text("  prompt", "blue"), Text(f"{count:,} tokens and no messages: --tokens shows them", "dim")


def _reply(turn: TurnFacts, answer: Answer, view: View) -> Iterator[tuple[Text, Text]]:
    yield Text("  reply", "bold"), _parts(answer.reply, view)
    if view.words is not None and len(answer.completion_ids):
        delivered = turn.delivered is not None
        yield Text("  sampled", "bold"), sampled_text(answer, view.words, delivered=delivered, full=view.full)


def _parts(message: Message, view: View) -> Text:
    """A message's parts beneath each other; reasoning dim, calls and images marked."""
    styles = {REASONING: "dim italic", "call": "cyan", "image": "green", "other": "dim", "erased": "dim"}
    text = Text("", no_wrap=False)
    for part in message.parts:
        if text:
            text.append("\n")
        text.append(shortened(part_words(part), full=view.full), styles.get(part.kind, ""))
    return text if message.parts else Text("(nothing)", "dim")


BANDS = ((-0.1, "green"), (-1.0, "cyan"), (-3.0, "yellow"), (-8.0, "red"))
"""A token is of the first band whose logprob its own is not below."""
BELOW_ALL = "bold white on red"
NO_LOGPROB = ""
MASKED = "dim"
MARK = "bold magenta"
CONTEXT_TOKENS, SAMPLED_TOKENS = 60, 240
"""So many of a part's tokens are shown unless all are asked for: three quarters from its beginning."""


def legend() -> Text:
    """The legend of the colours."""
    text = Text("logprob  ")
    for least, style in BANDS:
        text.append(f">= {least:g}", style).append("  ")
    text.append(f"below {BANDS[-1][0]:g}", BELOW_ALL).append("  none", NO_LOGPROB)
    return text.append("  context", MASKED).append("  [v2]", MARK).append(" a version takes over")


def style_of(logprob: float | None) -> str:
    """The style of a sampled token; NaN and None have no colour."""
    if logprob is None or logprob != logprob:
        return NO_LOGPROB
    return next((style for least, style in BANDS if logprob >= least), BELOW_ALL)


def context_text(answer: Answer, words: TokenText, *, full: bool) -> Text:
    """The prompt's tokens that are new in a turn."""
    styles = [MASKED] * len(answer.context_ids)
    return _text(answer, answer.context_ids.tolist(), styles, (), words, None if full else CONTEXT_TOKENS)


def sampled_text(answer: Answer, words: TokenText, *, delivered: bool, full: bool) -> Text:
    """A completion's tokens, coloured; also dim if the turn was not delivered and is not trained."""
    count = len(answer.completion_ids)
    logprobs = [None] * count if answer.logprobs is None else answer.logprobs.tolist()
    masked = "" if delivered else f" {MASKED}"
    styles = [(style_of(logprob) + masked).strip() for logprob in logprobs]
    ids = answer.completion_ids.tolist()
    return _text(answer, ids, styles, answer.spans, words, None if full else SAMPLED_TOKENS)


def _text(
    answer: Answer,
    ids: list[int],
    styles: list[str],
    spans: Sequence[VersionSpan],
    words: TokenText,
    most: int | None,
) -> Text:
    if answer.fidelity == ERASED:
        return Text(f"[{len(ids):,} tokens, erased]", MASKED)
    shown = list(range(len(ids)))
    if most is not None and len(ids) > most:
        shown = [*shown[: most * 3 // 4], *shown[-(most // 4) :]]
    # A version that begins where nothing is shown is named where showing goes on.
    starts = {span.start: span.version for span in spans}
    pieces = words.pieces(ids[i] for i in shown)
    runs: list[tuple[str, str]] = []
    version = before = None
    for place, piece in zip(shown, pieces, strict=True):
        first = 0 if before is None else before + 1
        if place > first:
            runs.append((f" ... {place - first:,} tokens more ... ", MASKED))
        begun = [starts[i] for i in range(first, place + 1) if i in starts]
        if begun and begun[-1] != version:
            if version is not None:
                runs.append((f"[v{begun[-1]}]", MARK))
            version = begun[-1]
        runs.append((piece, styles[place]))
        before = place
    text = Text.assemble(*_joined(runs))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _joined(runs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Joins neighbours of one style, because Rich lays out few runs faster than many."""
    joined: list[tuple[list[str], str]] = []
    for piece, style in runs:
        if joined and joined[-1][1] == style:
            joined[-1][0].append(piece)
        else:
            joined.append(([piece], style))
    return [("".join(pieces), style) for pieces, style in joined]


_LINE_END = "↵\n"
"""How the end of a line is shown, so that it is seen to be a token's."""


class TokenText:
    """Tokens as text by one tokenizer, safe to print; each id is looked up once. Without one, as numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @classmethod
    def load(cls, model: Path) -> TokenText:
        """Read the tokenizer.json of a model directory.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        file = model / TOKENIZER
        if not file.exists():
            raise ModelError(f"{model}: holds no tokenizer.json; give the directory of a model with --model")
        return cls(read_tokenizer(file))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id."""
        listed = [int(i) for i in ids]
        if self._tokenizer is None:
            return [f"{i} " for i in listed]
        missing = sorted({i for i in listed if i not in self._known})
        for i, text in zip(missing, token_texts(self._tokenizer, missing), strict=True):
            shown = f"<{i}>" if text is None else visible(text, lines=True)
            self._known[i] = shown.replace("\n", _LINE_END)
        return [self._known[i] for i in listed]


MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A turn, and what is drawn beneath it."""

    turn: TurnFacts
    beneath: list[Node] = field(default_factory=list)


_Start = tuple[TurnFacts, list[Node], list[Node] | None, int]
"""A turn with which a line begins, where it goes, where its line goes (None: beneath it), and the depth."""


def arrange(turns: Sequence[TurnFacts]) -> list[Node]:
    """The roots, with all other turns beneath them; every turn once, and siblings as they were asked."""
    there = {turn.turn_id for turn in turns}
    children: dict[str | None, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        children[turn.parent if turn.parent in there else None].append(turn)
    roots: list[Node] = []
    waiting: list[_Start] = [(turn, roots, None, 1) for turn in reversed(children[None])]
    while waiting:
        turn, place, line, depth = waiting.pop()
        node = Node(turn)
        place.append(node)
        line = node.beneath if line is None else line
        waiting += reversed(_follow(node, line, children, depth))
    return roots


def _follow(
    head: Node, line: list[Node], children: dict[str | None, list[TurnFacts]], depth: int
) -> list[_Start]:
    """Append a chain of only children; returns the turns at its fork."""
    node = head
    while True:
        after = children.get(node.turn.turn_id, [])
        # One that failed ends there: asked again, the conversation goes on as if it had not forked.
        ways = [turn for turn in after if turn.status == COMPLETED or turn.turn_id in children]
        if len(ways) > 1:
            if depth >= MAX_DEPTH:
                return [(turn, line, line, depth) for turn in after]
            return [(turn, node.beneath, None, depth + 1) for turn in after]
        for turn in after:
            line.append(Node(turn))
            if ways and turn is ways[0]:
                following = line[-1]
        if not ways:
            return []
        node = following
