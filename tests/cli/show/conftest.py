"""A trajectory with one of everything that can be shown, and tokenizers for its ids."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.fold.trajectory import prompt_sha256

EPOCH = 1_700_000_000_000_000
PIXEL = b"\x89PNG not really"
CALL = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
SYSTEM = "You repair programs. " * 60
ESCAPES = "red \x1b[31malert\x07 \u202e gnp"


def _asked(
    turn: str,
    parent: str | None,
    reason: str | None,
    base: str | None,
    shared: int,
    messages: list[Any],
    **other: Any,
) -> Any:
    values: dict[str, Any] = {"request": {"temperature": 1.0}, "requested_model": "actor", "context_key": "k"}
    values |= {"sampling": {"temperature": 1.0, "max_new_tokens": 64}, "honoured": {}}
    return turn_requested(
        "T-1",
        turn,
        request_id=f"r-{turn}",
        parent_turn_id=parent,
        root_reason=reason,
        base_turn_id=base,
        shared_messages=shared,
        messages=messages,
        **values | other,
    )


def _done(turn: str, delta: list[int], length: int, ids: list[int], reply: Any, **other: Any) -> Any:
    last = other.pop("version", 3)
    values: dict[str, Any] = {
        "policy": "actor",
        "policy_version": last,
        "logprobs": np.array([-0.05, -0.5, -2.0, -5.0, -9.0, -0.05][: len(ids)], np.float32),
        "version_spans": (kinds.VersionSpan("actor", last, 0, len(ids)),),
        "finish_reason": "stop",
        "logprob_semantics": {},
        "flags": [],
        "timings": {"engine_us": 900},
    }
    values |= {"prompt_length": length, "prompt_sha256": prompt_sha256(np.array(delta, np.int32))} | other
    prompt, completion = np.array(delta, np.int32), np.array(ids, np.int32)
    return kinds.TurnCompleted(
        "T-1", turn, prompt_ids=prompt, completion_ids=completion, reply=reply, **values
    )


def _records() -> list[Any]:
    image = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    question = [
        {"type": "text", "text": "What is wrong?"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    then = [called, {"role": "tool", "tool_call_id": "c1", "content": "x = 1\ny = 2"}]
    spans = (kinds.VersionSpan("actor", 3, 0, 2), kinds.VersionSpan("actor", 4, 2, 4))
    untouched = {"policy": None, "policy_version": None, "version_spans": (), "logprobs": None}
    no_tokens = untouched | {"flags": ["without_tokens"], "finish_reason": "unknown"}
    thinking = called | {"reasoning_content": "I should look at the file."}
    return [
        kinds.TrajectoryOpened("T-1", "fix-readme", "g-7", "repair it", "train", {"level": 2}),
        _asked("turn-aaaa0001", None, "first_turn", None, 0, first),
        _done("turn-aaaa0001", [1, 2, 3], 3, [4, 5, 6], thinking, finish_reason="tool_calls"),
        kinds.TurnDelivered("T-1", "turn-aaaa0001", "sent"),
        _asked("turn-aaaa0002", "turn-aaaa0001", None, "turn-aaaa0001", 2, then, honoured={"seed": False}),
        _done(
            *("turn-aaaa0002", [7, 8], 8, [9, 10, 11, 12], {"role": "assistant", "content": "y is unused"}),
            version_spans=spans,
            version=4,
        ),
        kinds.TurnDelivered("T-1", "turn-aaaa0002", "echoed"),
        _asked("turn-aaaa0003", "turn-aaaa0001", None, "turn-aaaa0001", 2, then),
        _done(
            *("turn-aaaa0003", [7, 8], 8, [13, 14], {"role": "assistant", "content": ESCAPES}),
            finish_reason="length",
            flags=["malformed_tool_call"],
        ),
        _asked("turn-aaaa0004", "turn-aaaa0002", None, "turn-aaaa0002", 4, []),
        kinds.TurnFailed("T-1", "turn-aaaa0004", "EngineError('the engine is gone')"),
        _asked(
            "turn-aaaa0005",
            None,
            "history_changed",
            "turn-aaaa0002",
            1,
            [{"role": "user", "content": "Shorter"}],
        ),
        _done(
            "turn-aaaa0005",
            [1, 15],
            2,
            [16],
            {"role": "assistant", "content": "<think>so</think>\nok"},
            **untouched,
        ),
        _asked(
            "turn-aaaa0006",
            None,
            "no_matching_turn",
            None,
            0,
            [{"role": "user", "content": "hi"}],
            wire={"endpoint": "/v1/messages", "retry": 1},
        ),
        _done("turn-aaaa0006", [], 0, [], {"role": "assistant", "content": "hello"}, **no_tokens),
        kinds.TurnDelivered("T-1", "turn-aaaa0006", "imported"),
        _asked(
            "turn-aaaa0007", "turn-aaaa0002", None, "turn-aaaa0002", 4, [{"role": "user", "content": "and?"}]
        ),
        kinds.RewardAssigned("T-1", None, 0.5),
        kinds.RewardAssigned("T-1", None, 0.75, "judge"),
        kinds.RewardAssigned("T-1", None, 1.0, "agent", "e-17"),
        kinds.RewardAssigned("T-1", "turn-aaaa0002", 0.25, "judge"),
        kinds.LabelAdded("T-1", None, "reviewed", True, "a person"),
        kinds.LabelAdded("T-1", "turn-aaaa0003", "odd", "yes", "judge"),
        kinds.TrajectoryFinished("T-1", "completed", True),
    ]


@pytest.fixture(scope="session")
def tale() -> list[Event]:
    """Events of trajectory T-1, half a second between them, with ids e-0, e-1, ..."""
    return [
        Event(record, "demo", f"e-{i}", EPOCH + i * 500_000, "serve", i)
        for i, record in enumerate(_records())
    ]


@pytest.fixture
def told_tale(store: Store, tale: list[Event]) -> Store:
    """A store that holds the tale."""
    with store.writer("serve") as writer:
        writer.append(tale).result(30)
    return store


@pytest.fixture(scope="session")
def long_tale() -> Callable[..., list[Event]]:
    """A factory of a trajectory whose n turns follow each other, each with so many tokens."""

    def make(turns: int, context: int = 2, sampled: int = 3, key: str = "L-1") -> list[Event]:
        rng = np.random.default_rng(0)
        records: list[Any] = [kinds.TrajectoryOpened(key, f"long-{key}")]
        parent, length = None, 0
        for i in range(turns):
            turn = f"{key}-turn-{i:08}"
            messages = [{"role": "assistant", "content": f"answer {i - 1}"}] if i else []
            messages.append({"role": "user", "content": f"question {i} " + "lorem ipsum " * 40})
            records.append(
                turn_requested(
                    key,
                    turn,
                    request_id=f"r-{turn}",
                    parent_turn_id=parent,
                    root_reason=None if parent else "first_turn",
                    base_turn_id=parent,
                    shared_messages=max(2 * i - 1, 0),
                    messages=messages,
                    requested_model="m",
                    context_key="k",
                )
            )
            delta = rng.integers(0, 250, context).astype(np.int32)
            ids = rng.integers(0, 250, sampled).astype(np.int32)
            length += context
            records.append(
                turn_completed(
                    key,
                    turn,
                    policy_version=7,
                    prompt_ids=delta,
                    completion_ids=ids,
                    logprobs=-rng.exponential(0.5, sampled).astype(np.float32),
                    version_spans=(kinds.VersionSpan("actor", 7, 0, sampled),),
                    prompt_length=length,
                    prompt_sha256="0" * 64,
                    reply={"role": "assistant", "content": f"answer {i}"},
                )
            )
            records.append(kinds.TurnDelivered(key, turn, "sent"))
            parent, length = turn, length + sampled
        return [Event(record, "demo") for record in records]

    return make


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level tokenizer that has a token for every byte, and few others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["hello hello there there"] * 9, trainer=trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A tokenizer in SentencePiece's manner: `▁` for a space, unknown characters as their bytes."""
    words = ["<unk>", "▁", "a", "▁hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
