"""Turns made of real text, which compresses differently from random numbers.

The text is the Python standard library's source, as installed with this interpreter; a
byte-level BPE tokenizer is trained on part of it on the spot. Every prompt and every completion
is its own window of the text, so no record repeats another. Logprobs are made as an engine makes
them: float32 log-softmax of bfloat16 logits.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook.bench.turns import RUN
from rollbook.store import Event
from rollbook.store.events import (
    Logprobs,
    RewardAssigned,
    TokenIds,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
    VersionSpan,
)
from rollbook.store.ids import new_id

TURNS_OF_A_TRAJECTORY = 4
PROMPT_TOKENS, COMPLETION_TOKENS = (200, 2000), (50, 1000)
"""Shortest and longest: 1,100 and 525 on average."""
ALTERNATIVES = 24
"""Tokens that have any probability worth adding up, at each place."""
TRAINING_CHARACTERS = 4 << 20
CHUNK = 1 << 16


def read_text(characters: int) -> str:
    """Source code of the standard library, in the order of its files' names, up to about this much.

    Raises:
        FileNotFoundError: the interpreter comes without its library's source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    missing = characters
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" not in path.parts and missing > 0:
            parts.append(path.read_text(errors="ignore"))
            missing -= len(parts[-1])
    if not parts:
        raise FileNotFoundError(f"{folder} holds no source of the standard library to make text of")
    return "\n".join(parts)[:characters]


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_chunks(text), trainer=trainer)
    return tokenizer


def _chunks(text: str) -> list[str]:
    return [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]


def model_logprobs(rng: np.random.Generator, count: int) -> Logprobs:
    """Logprobs of sampled tokens: logits rounded to bfloat16, their log-softmax in float32."""
    logits = rng.normal(0.0, 2.5, (count, ALTERNATIVES)).astype(np.float32)
    logits[:, 0] += rng.gamma(2.0, 4.0, count).astype(np.float32)
    bits = logits.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    highest = rounded.max(axis=1)
    total = np.log(np.exp(rounded - highest[:, None]).sum(axis=1)) + highest
    sampled = np.argmax(rounded + rng.gumbel(size=rounded.shape), axis=1)
    logprobs: Logprobs = (rounded[np.arange(count), sampled] - total).astype(np.float32)
    return logprobs


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text as ids, and the tokenizer that encoded it."""

    tokenizer: Tokenizer
    ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, characters: int, vocabulary: int) -> Corpus:
        """Read the text, train on its first part, and encode all of it."""
        text = read_text(characters)
        tokenizer = train_tokenizer(text[:TRAINING_CHARACTERS], vocabulary)
        encoded = tokenizer.encode_batch_fast(_chunks(text))
        return cls(tokenizer, np.concatenate([np.array(e.ids, np.int32) for e in encoded]))

    def trajectories(self, turns: int, seed: int = 0) -> Iterator[list[Event]]:
        """The events of one trajectory after the other, until the turns or the text end."""
        rng = np.random.default_rng(seed)
        at = 0
        for first in range(0, turns, TURNS_OF_A_TRAJECTORY):
            trajectory_id = new_id()
            records: list[Any] = [TrajectoryOpened(trajectory_id, f"agent-{first}", task="fix-the-code")]
            parent = None
            for _ in range(min(TURNS_OF_A_TRAJECTORY, turns - first)):
                prompt = int(rng.integers(*PROMPT_TOKENS, endpoint=True))
                completion = int(rng.integers(*COMPLETION_TOKENS, endpoint=True))
                if at + prompt + completion > len(self.ids):
                    return
                window = self.ids[at : at + prompt + completion]
                at += prompt + completion
                parent, turn = self._turn(rng, trajectory_id, parent, window[:prompt], window[prompt:])
                records += turn
            records += [RewardAssigned(trajectory_id, None, float(rng.random() < 0.5))]
            records += [TrajectoryFinished(trajectory_id, success=True)]
            yield [Event(record, RUN) for record in records]

    def _turn(
        self,
        rng: np.random.Generator,
        trajectory_id: str,
        parent: str | None,
        prompt: TokenIds,
        completion: TokenIds,
    ) -> tuple[str, list[Any]]:
        """(the turn's id, its records)"""
        turn_id, version = new_id(), int(rng.integers(40, 44))
        prompt_text, completion_text = self.tokenizer.decode_batch([prompt.tolist(), completion.tolist()])
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": COMPLETION_TOKENS[1]}
        requested = TurnRequested(
            *(trajectory_id, turn_id, new_id(), parent, None if parent else "first", parent, 0),
            messages=[{"role": "tool" if parent else "user", "content": prompt_text}],
            request={"model": "actor"} | sampling,
            requested_model="actor",
            sampling=sampling,
            honoured={},
            context_key=hashlib.sha256(trajectory_id.encode()).hexdigest(),
        )
        completed = TurnCompleted(
            *(trajectory_id, turn_id, "actor", version, prompt, completion),
            model_logprobs(rng, len(completion)),
            (VersionSpan("actor", version, 0, len(completion)),),
            *(len(prompt), hashlib.sha256(prompt.tobytes()).hexdigest(), "stop"),
            reply={"role": "assistant", "content": completion_text},
            logprob_semantics={"kind": "sampled", "of": "softmax(logits / temperature)", "temperature": 1.0},
            flags=[],
            timings={"held_us": int(rng.integers(50, 5000)), "engine_us": int(rng.integers(10**5, 10**7))},
        )
        return turn_id, [requested, completed, TurnDelivered(trajectory_id, turn_id, "sent")]
