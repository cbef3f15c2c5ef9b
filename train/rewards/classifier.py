"""A reward model as transformers reads it, which gives whole paths of tokens a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.ingest.engines.model_files import check_unchanged, origin_of, require_folder
from rollbook.ingest.engines.weights.digests import digest_stream
from rollbook.store.errors import ModelError
from rollbook.store.events import TokenIds
from rollbook.train.checkpoints.checkpoint import stream_checkpoint
from rollbook.train.checkpoints.export import model_directory
from rollbook.train.megatron.shape import SCORE_LABELS, SCORES

BATCH_TOKENS = 16384
"""Most tokens in a forward pass, padding included, unless one path has more."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a model gives a path: a score, and its standard deviation where the model has one (PURM)."""

    mean: float
    deviation: float | None = None


class RewardClassifier:
    """A `ForSequenceClassification` model of transformers with one score, or with a mean and a log-deviation.

    Args:
        folder: a checkpoint that algorithm `reward_model` trained, or another reward model.
        device: `cpu`, `cuda`, or `auto`.

    Raises:
        ModelError: it is no reward model, or transformers cannot read it.
    """

    def __init__(self, folder: Path, device: str = "auto") -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        require_folder(folder, "the command")
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            self._check(folder, config)
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = torch.float32 if device == "cpu" else config.dtype or torch.float32
            with model_directory(folder) as whole:
                model: Any = AutoModelForSequenceClassification.from_pretrained(
                    whole, local_files_only=True, use_safetensors=True, dtype=dtype
                )
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: transformers cannot read this reward model: {error}") from error
        if not hasattr(model, "score"):
            raise ModelError(f"{folder}: a {type(model).__name__} has no head named score")
        self._model, self._device = model.to(device).eval(), device
        self._distribution = config.num_labels == 2
        self.vocabulary, self.context = int(config.vocab_size), int(config.max_position_embeddings)
        self.digest = digest_stream(stream_checkpoint(folder))
        """Digest of its weights."""
        check_unchanged(folder, origin_of(folder), self.digest)

    @staticmethod
    def _check(folder: Path, config: Any) -> None:
        named = [str(name) for name in getattr(config, "architectures", None) or ()]
        labels = [str(name) for name in config.id2label.values()]
        if not any(name.endswith(SCORES) for name in named):
            raise ModelError(
                f"{folder}: a {' or '.join(named) or 'model of no named architecture'} gives no scores: name "
                "a reward model, such as a checkpoint that algorithm reward_model trained"
            )
        if len(labels) != 1 and labels[1:] != [*SCORE_LABELS[1:]]:
            raise ModelError(
                f"{folder}: gives {len(labels)} values ({', '.join(labels)}): a reward model gives one score"
            )

    @property
    def gives_deviations(self) -> bool:
        """Whether its scores have a standard deviation."""
        return self._distribution

    def unfit(self, tokens: TokenIds) -> str | None:
        """Why it cannot be given a path; None if it can."""
        if len(tokens) > self.context:
            return "too_long"
        return "outside_vocabulary" if int(tokens.max()) >= self.vocabulary else None

    def scores(self, paths: Sequence[TokenIds]) -> list[Score]:
        """The scores of paths, each of its last token. Paths of about one length share a forward pass."""
        order = sorted(range(len(paths)), key=lambda i: len(paths[i]))
        found: dict[int, Score] = {}
        for part in _parts(order, [len(path) for path in paths]):
            found |= zip(part, self._forward([paths[i] for i in part]), strict=True)
        return [found[i] for i in range(len(paths))]

    def _forward(self, paths: Sequence[TokenIds]) -> list[Score]:
        lengths = np.array([len(path) for path in paths])
        ids = np.zeros((len(paths), lengths.max()), np.int64)
        for row, path in enumerate(paths):
            ids[row, : len(path)] = path
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        with torch.inference_mode():
            hidden = self._model.base_model(
                input_ids=torch.from_numpy(ids).to(self._device),
                attention_mask=torch.from_numpy(mask).to(self._device),
            ).last_hidden_state
            # The head by itself: its class would look for the last token by that of the padding.
            last = hidden[torch.arange(len(paths)), torch.from_numpy(lengths - 1)]
            values = self._model.score(last).float().cpu()
        if self._distribution:
            return [Score(float(mean), float(log.exp())) for mean, log in values]
        return [Score(float(mean)) for (mean,) in values]


def _parts(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Paths from the shortest on, in parts of at most `BATCH_TOKENS` when padded."""
    parts: list[list[int]] = [[]]
    for i in order:
        if parts[-1] and (len(parts[-1]) + 1) * lengths[i] > BATCH_TOKENS:
            parts.append([])
        parts[-1].append(i)
    return [part for part in parts if part]
