"""Events of many trajectories as Arrow tables, made without a Python object for each event.

The content of turns is drawn once for a pool of trajectories: exact token ids with the sha256 of
each prompt, logprobs, and text of the standard library's source. Trajectories share an entry of
the pool only if they are too far apart for one page of a file to hold both; ids, names,
versions, rewards and times are each one's own. A wave of trajectories runs side by side: all of
them open, take turn after turn, are rewarded and finish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.bench.corpus import read_text
from rollbook.store import Event
from rollbook.store import events as kinds
from rollbook.store.events import codec
from rollbook.store.events.schema import SPAN, row_of
from rollbook.store.events.upcast import version_of
from rollbook.store.ids import new_id
from rollbook.store.sealed.parquet import TABLE_SCHEMA

LANE, RUN, POLICY = "serve", "scale", "actor"
TURNS, GROUP = 8, 5
"""Turns of a trajectory, and trajectories of a group."""
WAVE = 2_000
"""Trajectories that run side by side, and entries of the pool."""
EVENTS = 3 * TURNS + 3
"""Of a trajectory: opened; requested, completed and delivered for each turn; rewarded, finished."""
PROMPT_IDS, COMPLETION_IDS = (100, 500), (50, 350)
"""Fewest and most of a turn: 500 new tokens on average."""
VOCABULARY = (8, 256)
"""Ids that the tiny model's tokenizer knows as plain text."""
CHARACTERS, TEXT_CHARACTERS = 4, 16 << 20
"""Characters a token, and of the text that all turns are windows of."""
START_US, STEP_US = 1_750_000_000_000_000, 300
_REQUEST, _PARENT, _NAME, _GROUP = "@request@", "@parent@", "@name@", "@group@"
_COMPLETED = tuple(2 + 3 * turn for turn in range(TURNS))
"""Which of a wave's blocks of events hold completed turns."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Trajectories that ran side by side, in the order in which they began.

    Attributes:
        table: their events in the order of the lane, with `TABLE_SCHEMA`.
        trajectory_ids, leaf_ids: of each, its id and that of its last turn.
    """

    table: pa.Table
    trajectory_ids: list[str]
    leaf_ids: list[str]


def trajectory_name(number: int) -> str:
    """The client's name of a trajectory, by its place in the store."""
    return f"task-{number}"


def reward_of(number: int) -> float:
    """Its reward: rewards differ within a group, except in each 16th group."""
    return 0.5 if is_flat(number // GROUP) else float(number * 7 % 11) / 10


def is_flat(group: int) -> bool:
    """Whether all members of the group have the same reward, so that GRPO learns nothing from it."""
    return group % 16 == 7


class Agents:
    """Makes one wave after the other.

    Args:
        version_of: place of a trajectory in the store -> policy version that samples it.
    """

    def __init__(self, version_of: Callable[[int], int], seed: int = 0) -> None:
        self._version_of, self._seed = version_of, seed
        self._made = self._next_seq = 0

    def wave(self, count: int) -> Wave:
        """The next so many trajectories, at most `WAVE`."""
        pool = _pool(count, self._seed)
        first, rows = self._made, count * EVENTS
        trajectory_ids = [new_id() for _ in range(count)]
        turn_ids = [pa.array([new_id() for _ in range(count)], pa.string()) for _ in range(TURNS)]
        ids = pa.array(trajectory_ids, pa.string())
        seq = np.arange(self._next_seq, self._next_seq + rows, dtype=np.int64)
        versions = np.array([self._version_of(first + i) for i in range(count)], np.int64)
        rewards = np.array([reward_of(first + i) for i in range(count)], np.float64)
        columns: dict[str, Any] = {
            "lane": pa.repeat(pa.scalar(LANE), rows),
            "seq": pa.array(seq),
            "event_id": pa.array([new_id() for _ in range(rows)], pa.string()),
            "time": pa.array(START_US + STEP_US * seq).view(pa.timestamp("us")),
            "run": pa.repeat(pa.scalar(RUN), rows),
            "trajectory_id": pa.concat_arrays([ids] * EVENTS),
            "turn_id": _turn_column(turn_ids, count),
            "policy": _blocks(pa.repeat(pa.scalar(POLICY), count), _COMPLETED, count),
            "policy_version": _blocks(pa.array(versions), _COMPLETED, count),
            "step": pa.nulls(rows, pa.int64()),
            "reward": _blocks(pa.array(rewards), (EVENTS - 2,), count),
            "version_spans": _spans(versions, pool.lengths, count),
            "extra": _extra(pool, first, turn_ids, count),
            **pool.columns,
        }
        self._made, self._next_seq = first + count, self._next_seq + rows
        table = pa.Table.from_arrays([columns[name] for name in TABLE_SCHEMA.names], schema=TABLE_SCHEMA)
        return Wave(table, trajectory_ids, turn_ids[-1].to_pylist())


def events_of(table: pa.Table) -> list[Event]:
    """A wave's events as records, for a writer of the log."""
    batch = table.drop_columns("lane").combine_chunks().to_batches()[0]
    return [Event(e.record, e.run, e.event_id, e.time_us) for e in codec.decode(batch, LANE)]


@dataclass(frozen=True, slots=True)
class _Pool:
    """The content shared by all waves of so many trajectories.

    Attributes:
        columns: whole columns of the wave's table.
        lengths: of the completions, turn by turn.
        opened, requested: texts of `extra` in pieces, between which a trajectory's names and ids
            go.
        completed: texts of `extra`, turn by turn.
        constant: `extra` of the kinds whose events are all the same.
    """

    columns: dict[str, pa.Array]
    lengths: list[npt.NDArray[np.int32]]
    opened: list[pa.Array]
    requested: list[list[pa.Array]]
    completed: list[pa.Array]
    constant: dict[str, str]


@lru_cache(maxsize=4)
def _pool(count: int, seed: int) -> _Pool:
    rng = np.random.default_rng(seed)
    prompts, completions = (
        rng.integers(low, high, (count, TURNS), endpoint=True) for low, high in (PROMPT_IDS, COMPLETION_IDS)
    )
    prompt_ids = [[_ids(rng, n) for n in row] for row in prompts.tolist()]
    completion_ids = [[_ids(rng, n) for n in row] for row in completions.tolist()]
    text = read_text(TEXT_CHARACTERS)
    writing = _Writing(text, rng, prompts.tolist(), completions.tolist())
    shas = [_prompt_hashes(a, s) for a, s in zip(prompt_ids, completion_ids, strict=True)]
    replies = [[writing.reply(n) for n in row] for row in completions.tolist()]
    by_turn = range(TURNS)
    requested = [[_requested(writing, replies[i], i, turn) for i in range(count)] for turn in by_turn]
    completed = [[_completed(replies[i][turn], *shas[i][turn]) for i in range(count)] for turn in by_turn]
    kinds_column, versions = _kinds(count)
    ids = "trajectory", "turn"
    marks = (
        kinds.TurnDelivered(*ids, "sent"),
        kinds.RewardAssigned(ids[0], None, 0.0),
        kinds.TrajectoryFinished(ids[0], success=True),
    )
    opened = kinds.TrajectoryOpened(ids[0], _NAME, _GROUP, "fix-the-code")
    return _Pool(
        columns={
            "kind": kinds_column,
            "schema_version": versions,
            "prompt_ids": _lists(prompt_ids, np.int32, pa.int32()),
            "completion_ids": _lists(completion_ids, np.int32, pa.int32()),
            "logprobs": _lists(
                [
                    [-rng.exponential(0.5, len(ids)).astype(np.float32) for ids in row]
                    for row in completion_ids
                ],
                *(np.float32, pa.float32()),
            ),
        },
        lengths=[completions[:, turn].astype(np.int32) for turn in by_turn],
        opened=_pieces([_extra_of(opened)] * count),
        requested=[_pieces(texts) for texts in requested],
        completed=[pa.array(texts, pa.string()) for texts in completed],
        constant={mark.KIND: _extra_of(mark) for mark in marks},
    )


def _ids(rng: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
    return rng.integers(*VOCABULARY, count).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Writing:
    """The text of prompts and replies: windows of one long text, as long as their tokens."""

    text: str
    rng: np.random.Generator
    prompts: list[list[int]]
    completions: list[list[int]]

    def window(self, tokens: int) -> str:
        at = int(self.rng.integers(0, len(self.text) - tokens * CHARACTERS))
        return self.text[at : at + tokens * CHARACTERS]

    def reply(self, tokens: int) -> kinds.Json:
        return {"role": "assistant", "content": self.window(tokens)}


def _prompt_hashes(prompts: Sequence[Any], completions: Sequence[Any]) -> list[tuple[int, str]]:
    """Of each turn the length and the sha256 of its whole prompt."""
    digest, length, hashes = hashlib.sha256(), 0, []
    for prompt, completion in zip(prompts, completions, strict=True):
        digest.update(prompt.data)
        hashes.append((length + len(prompt), digest.hexdigest()))
        digest.update(completion.data)
        length += len(prompt) + len(completion)
    return hashes


def _requested(writing: _Writing, replies: Sequence[kinds.Json], number: int, turn: int) -> str:
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": COMPLETION_IDS[1]}
    content = writing.window(writing.prompts[number][turn])
    parent = _PARENT if turn else None
    new = [replies[turn - 1], {"role": "tool", "content": content}] if turn else []
    return _extra_of(
        kinds.TurnRequested(
            *("trajectory", "turn", _REQUEST, parent, None if turn else "first", parent),
            shared_messages=2 * turn - 1 if turn else 0,
            messages=new or [{"role": "user", "content": content}],
            request={"model": POLICY} | sampling,
            requested_model=POLICY,
            sampling=sampling,
            honoured={},
            context_key=hashlib.sha256(b"%d" % number).hexdigest(),
        )
    )


def _completed(reply: kinds.Json, prompt_length: int, prompt_sha256: str) -> str:
    none = np.empty(0, np.int32)
    return _extra_of(
        kinds.TurnCompleted(
            *("trajectory", "turn", POLICY, 0, none, none, None, ()),
            *(prompt_length, prompt_sha256, "stop", reply),
            logprob_semantics={"kind": "sampled", "of": "softmax(logits / temperature)", "temperature": 1.0},
            flags=[],
            timings={"held_us": 0, "engine_us": 1_500_000},
        )
    )


def _extra_of(record: kinds.Record) -> str:
    text: bytes = row_of(Event(record, RUN))[-1]
    return text.decode()


def _pieces(texts: Sequence[str]) -> list[pa.Array]:
    """Texts cut at their placeholders; all have the same ones."""
    for marker in (_REQUEST, _PARENT, _NAME, _GROUP):
        texts = [text.replace(marker, "\0") for text in texts]
    return [pa.array(piece, pa.string()) for piece in zip(*(t.split("\0") for t in texts), strict=True)]


def _kinds(count: int) -> tuple[pa.Array, pa.Array]:
    turn = (kinds.TurnRequested, kinds.TurnCompleted, kinds.TurnDelivered)
    order = [kinds.TrajectoryOpened, *turn * TURNS, kinds.RewardAssigned, kinds.TrajectoryFinished]
    names = pa.concat_arrays([pa.repeat(pa.scalar(record.KIND), count) for record in order])
    versions = np.repeat([version_of(record.KIND) for record in order], count)
    return names, pa.array(versions.astype(np.int16))


def _lists(rows: Sequence[Sequence[Any]], dtype: Any, value_type: pa.DataType) -> pa.Array:
    """Arrays of trajectory and turn as a whole column: null but for completed turns."""
    count = len(rows)
    parts = [row[turn] for turn in range(TURNS) for row in rows]
    lengths = np.zeros(count * EVENTS, np.int64)
    valid = np.zeros(count * EVENTS, np.bool_)
    for turn, block in enumerate(_COMPLETED):
        place = slice(block * count, (block + 1) * count)
        lengths[place] = [len(part) for part in parts[turn * count : (turn + 1) * count]]
        valid[place] = True
    offsets = np.fromiter(accumulate(lengths.tolist(), initial=0), np.int32, count * EVENTS + 1)
    values = pa.array(np.concatenate(parts).astype(dtype), value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~valid))


def _blocks(block: pa.Array, places: Sequence[int], count: int) -> pa.Array:
    """A column that has the block's values in these blocks of the wave, and is null elsewhere."""
    nothing = pa.nulls(count, block.type)
    return pa.concat_arrays([block if place in places else nothing for place in range(EVENTS)])


def _turn_column(turn_ids: Sequence[pa.Array], count: int) -> pa.Array:
    nothing = pa.nulls(count, pa.string())
    turns = [ids for ids in turn_ids for _ in range(3)]
    return pa.concat_arrays([nothing, *turns, nothing, nothing])


def _spans(versions: npt.NDArray[np.int64], lengths: Sequence[Any], count: int) -> pa.Array:
    """One version for all of a completion."""
    valid = np.zeros(count * EVENTS, np.bool_)
    for block in _COMPLETED:
        valid[block * count : (block + 1) * count] = True
    offsets = np.concatenate(([0], np.cumsum(valid))).astype(np.int32)
    total = count * TURNS
    values = pa.StructArray.from_arrays(
        [
            pa.repeat(pa.scalar(POLICY), total),
            pa.array(np.tile(versions, TURNS)),
            pa.array(np.zeros(total, np.int32)),
            pa.array(np.concatenate(lengths).astype(np.int32)),
        ],
        fields=list(SPAN),
    )
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~valid))


def _extra(pool: _Pool, first: int, turn_ids: Sequence[pa.Array], count: int) -> pa.Array:
    places = range(first, first + count)
    names = pa.array([trajectory_name(number) for number in places], pa.string())
    groups = pa.array([f"group-{number // GROUP}" for number in places], pa.string())
    delivered = pa.repeat(pa.scalar(pool.constant[kinds.TurnDelivered.KIND]), count)
    blocks = [_joined(pool.opened, [names, groups])]
    for turn, own in enumerate(turn_ids):
        parent = turn_ids[turn - 1]
        blocks += [_joined(pool.requested[turn], [own, parent, parent] if turn else [own])]
        blocks += [pool.completed[turn], delivered]
    for kind in (kinds.RewardAssigned.KIND, kinds.TrajectoryFinished.KIND):
        blocks.append(pa.repeat(pa.scalar(pool.constant[kind]), count))
    return pa.concat_arrays(blocks)


def _joined(pieces: Sequence[pa.Array], between: Sequence[pa.Array]) -> pa.Array:
    """Pieces of text, joined with a column of values after each but the last."""
    woven = [part for pair in zip(pieces, between, strict=False) for part in pair]
    return pc.binary_join_element_wise(*woven, pieces[len(between)], "")
