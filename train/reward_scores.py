"""`rollbook score`: scores finished trajectories with a reward model, and appends the rewards to
the log.

The reward model is read as transformers reads it, and scores whole paths of tokens: here, or in workers of
Ray, which get the tokens. Rewards are appended here, in order.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.engines.model_files import check_unchanged, origin_of, require_folder
from rollbook.engines.weights.digests import digest_stream
from rollbook.store import Event, Store
from rollbook.store.cut import Cut
from rollbook.store.digest import is_tree
from rollbook.store.errors import ConfigError, ModelError, NotFiniteError
from rollbook.store.events import (
    SPLITS,
    EvalFinished,
    Json,
    Record,
    RewardAssigned,
    RunOpened,
    TokenIds,
    TrajectoryFinished,
)
from rollbook.store.fold.versions import BINDING, VersionDigests
from rollbook.store.interchange.destination import Progress
from rollbook.store.log.tail import Filter
from rollbook.store.log.writer import LaneWriter
from rollbook.store.workers import HERE, Spread, Workers, sliced, spread
from rollbook.train.batches.materialize import Materializer
from rollbook.train.checkpoints.checkpoint import stream_checkpoint
from rollbook.train.checkpoints.export import model_directory
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.model.shape import SCORE_LABELS, SCORES
from rollbook.train.ranks.ray_ranks import sent_environment
from rollbook.train.select.references import References, find_references
from rollbook.train.select.samples import Sample, samples_of

AT_A_TIME = 64
"""Trajectories whose rewards become durable together."""
LOOK_S = 0.5
"""Seconds between looks at the tail."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is scored, and how a score becomes a reward.

    Attributes:
        run: whose finished trajectories are scored.
        source: the source of the rewards.
        splits: of the trajectories.
        penalty: for each standard deviation of a score (PURM); 0: none.
        temperature: by which scores are divided.
    """

    run: str
    source: str
    splits: tuple[str, ...] = tuple(sorted(SPLITS))
    penalty: float = 0.0
    temperature: float = 1.0

    def reward(self, score: Score) -> float:
        """The lower bound of a score, divided by the temperature."""
        return (score.mean - self.penalty * (score.deviation or 0.0)) / self.temperature


@dataclass(slots=True)
class Scored:
    """The result: rewards appended, trajectories that already had one, and those left out, by
    reason."""

    scored: int = 0
    already: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def score_run(
    log: Store,
    model: RewardModel,
    scoring: Scoring,
    *,
    lane: str,
    idle_timeout_s: float | None,
    progress: Progress,
    device: str = "auto",
    workers: Workers = HERE,
) -> Scored:
    """Reward every finished trajectory that has no reward from the source yet, by the score of its
    last path.

    Rewards are durable before the next ones are appended, so that an interrupted command goes on where
    it was.

    Args:
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one here.
        workers: of Ray, which compute the scores.
        idle_timeout_s: go on with trajectories that finish later, until none has for so long;
            None: do not.

    Raises:
        ConfigError: the source has rewards of another model, or of this one made otherwise.
        NotFiniteError: the model gives a trajectory a score that is not finite.
        LaneLockedError: another process writes the lane, or scores the run by this source.
    """
    what = f"scoring run {scoring.run} as {scoring.source!r}"
    with log.claim(what, "let it finish, or name another --source"):
        settings = asdict(scoring) | {"splits": list(scoring.splits), "model_digest": model.digest}
        _check_source(log, scoring, settings)
        cut, done = log.head(), Scored()
        with _scores(model, device, workers) as scores, log.writer(lane) as writer:
            scorer = _Scorer(model, scores, scoring, writer, done, RunOpened("score", settings))
            references = find_references(log, cut, scoring.run, _recipe(scoring))
            numbers = _last_paths(references, done)
            paths = Materializer(log, cut, references, scoring.run)
            with progress(f"score run {scoring.run}", len(numbers)) as advance:
                scorer.add((paths.samples(part) for part in sliced(numbers, AT_A_TIME)), advance)
            if idle_timeout_s is not None:
                _follow(log, cut, scorer, idle_timeout_s)
    return done


def calibrated(log: Store, folder: Path) -> float:
    """The temperature of a checkpoint's newest evaluation in this store.

    Raises:
        ConfigError: the folder is no checkpoint, or its evaluation fitted none.
    """
    origin, versions = origin_of(folder), VersionDigests()
    for event in log.events_of(BINDING):
        versions.add(event)
    if origin is None or versions.own(origin.run, origin.policy, origin) is None:
        raise ConfigError(f"--calibrated: {folder} is no checkpoint of a training that was evaluated here")
    run, policy, version = origin.run, origin.policy, origin.version
    temperatures = [
        event.record.metrics.get("calibration_temperature")
        for event in log.events_of({EvalFinished.KIND})
        if event.run == run
        and isinstance(event.record, EvalFinished)
        and (event.record.policy, event.record.policy_version) == (policy, version)
    ]
    if not temperatures or temperatures[-1] is None:
        why = "fitted no temperature" if temperatures else "is not there"
        raise ConfigError(
            f"--calibrated: the evaluation of version {version} of policy {policy!r} in run {run!r} {why}: "
            "train it with [evaluation] on pairs of which some are rated wrongly, or leave the option out"
        )
    return float(temperatures[-1])


class _Scorer:
    """Scores samples and appends their rewards; the first append also records the model and
    settings."""

    def __init__(
        self,
        model: RewardModel,
        scores: Spread[list[TokenIds], list[Score]],
        scoring: Scoring,
        writer: LaneWriter,
        done: Scored,
        opened: RunOpened,
    ) -> None:
        self.model, self.scoring, self.done = model, scoring, done
        self._scores, self._writer, self._opened = scores, writer, [opened]

    def add(
        self, parts: Iterable[Iterable[Sample]], advance: Callable[[int], object] = lambda count: None
    ) -> None:
        """Score samples, one of each trajectory, and wait until the rewards of each part are durable.

        Args:
            advance: called with how many were scored or left out.
        """
        waiting: deque[tuple[int, list[tuple[Sample, TokenIds]]]] = deque()

        def paths() -> Iterator[list[TokenIds]]:
            for part in parts:
                samples = list(part)
                waiting.append((len(samples), self._kept(samples)))
                yield [tokens for _, tokens in waiting[-1][1]]

        for scores in self._scores(paths()):
            count, kept = waiting.popleft()
            rewards = [self._reward(s, score) for (s, _), score in zip(kept, scores, strict=True)]
            if rewards:
                records: list[Record] = [*self._opened, *rewards]
                self._writer.append([Event(record, self.scoring.run) for record in records]).result()
                self._opened = []
            self.done.scored += len(rewards)
            advance(count)

    def _kept(self, samples: Iterable[Sample]) -> list[tuple[Sample, TokenIds]]:
        """The samples that can be scored, and their tokens up to the last that was sampled; others are
        counted."""
        kept: list[tuple[Sample, TokenIds]] = []
        for sample in samples:
            ended = np.flatnonzero(sample.loss_mask)
            tokens = sample.tokens[: ended[-1] + 1] if len(ended) else sample.tokens[:0]
            why = "erased" if sample.erased else None if len(ended) else "nothing_sampled"
            why = why or self.model.unfit(tokens)
            if why is None:
                kept.append((sample, tokens))
            else:
                self.done.left_out[why] += 1
        return kept

    def _reward(self, sample: Sample, score: Score) -> RewardAssigned:
        reward = self.scoring.reward(score)
        if not np.isfinite(reward):
            raise NotFiniteError(
                f"the model gives trajectory {sample.name} ({sample.trajectory_id}) the score {score}: it is "
                "not appended, nor any after it; use a version whose weights are sound",
                "scores",
            )
        return RewardAssigned(sample.trajectory_id, None, reward, self.scoring.source)


def _follow(log: Store, cut: Cut, scorer: _Scorer, idle_timeout_s: float) -> None:
    """Score trajectories as they finish, until none has for so long."""
    scoring = scorer.scoring
    with log.tail(cut, Filter(kinds=frozenset({TrajectoryFinished.KIND}), run=scoring.run)) as tail:
        last = time.monotonic()
        while time.monotonic() < last + idle_timeout_s:
            ids = {e.record.trajectory_id for e in tail.poll() if isinstance(e.record, TrajectoryFinished)}
            if ids:
                scorer.add(
                    _finished(log, tail.cut(), part, scorer) for part in sliced(sorted(ids), AT_A_TIME)
                )
                last = time.monotonic()
            tail.wait(LOOK_S)


def _finished(log: Store, cut: Cut, ids: Sequence[str], scorer: _Scorer) -> Iterator[Sample]:
    """The last sample of each of these trajectories that is to be scored."""
    for trajectory in log.trajectories(cut, set(ids)).values():
        scoring = scorer.scoring
        samples = [s for s in samples_of(trajectory, scoring.source) if s.trained or s.erased]
        if trajectory.split not in scoring.splits:
            continue
        if trajectory.reward(scoring.source) is not None:
            scorer.done.already += 1
        elif samples:
            yield samples[-1]
        else:
            scorer.done.left_out["nothing_sampled"] += 1


def _last_paths(references: References, done: Scored) -> list[int]:
    """The number of the last path with sampled tokens of each finished trajectory without a reward."""
    rewarded = references.trajectories["reward"].is_valid().to_numpy()
    done.already = int(rewarded.sum())
    last: dict[int, int] = {}
    for number in np.flatnonzero((references.trained_tokens > 0) | references.erased).tolist():
        row = int(references.trajectory[number])
        if not rewarded[row] and (row not in last or references.leaf[number] > references.leaf[last[row]]):
            last[row] = number
    done.left_out["nothing_sampled"] += int((~rewarded).sum()) - len(last)
    return list(last.values())


def _recipe(scoring: Scoring) -> RecipeConfig:
    """A recipe that leaves nothing out, and shows which trajectories have a reward from the source."""
    return RecipeConfig(reward_source=scoring.source).model_copy(update={"splits": scoring.splits})


def _check_source(log: Store, scoring: Scoring, settings: Json) -> None:
    """Check that all rewards of the source were given by this model, in this way.

    Raises:
        ConfigError: they were not.
    """
    for event in log.events_of({RunOpened.KIND}):
        record = event.record
        if not isinstance(record, RunOpened) or (event.run, record.command) != (scoring.run, "score"):
            continue
        if record.config.get("source") != scoring.source:
            continue
        for key in ("model_digest", "penalty", "temperature"):
            if (there := record.config.get(key)) != settings[key]:
                raise ConfigError(
                    f"--source {scoring.source!r}: run {scoring.run!r} has rewards of it with {key} {there}, "
                    f"not {settings[key]}: name another source, which the recipe's reward_source then names"
                )


BATCH_TOKENS = 16384
"""Most tokens in a forward pass, padding included, unless one path has more."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a model gives a path: a score, and its standard deviation where the model has one (PURM)."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True, slots=True)
class RewardModel:
    """What is known of a `ForSequenceClassification` model of transformers without its weights.

    Attributes:
        gives_deviations: whether it gives a mean and a log-deviation; else one score.
        vocabulary, context: how many ids, and tokens, it takes.
        digest: of its weights.
    """

    folder: Path
    gives_deviations: bool
    vocabulary: int
    context: int
    digest: str

    @classmethod
    def of(cls, folder: Path) -> RewardModel:
        """The model in a folder: a checkpoint that algorithm `reward_model` trained, or another reward model.

        Raises:
            ModelError: it is no reward model, or transformers cannot read it.
        """
        require_folder(folder, "the command")
        config = _config(folder)
        _check_scores(folder, config)
        origin = origin_of(folder)
        tree = origin is not None and is_tree(origin.digest)
        digest = digest_stream(stream_checkpoint(folder), tree=tree)
        check_unchanged(folder, origin, digest)
        sizes = int(config.vocab_size), int(config.max_position_embeddings)
        return cls(folder, config.num_labels == 2, *sizes, digest)

    def unfit(self, tokens: TokenIds) -> str | None:
        """The reason why the model cannot score a path; None if it can."""
        if len(tokens) > self.context:
            return "too_long"
        return "outside_vocabulary" if int(tokens.max()) >= self.vocabulary else None


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"{folder}: transformers cannot read this reward model: {error}")


def _check_scores(folder: Path, config: Any) -> None:
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


def _scores(
    model: RewardModel, device: str, workers: Workers
) -> AbstractContextManager[Spread[list[TokenIds], list[Score]]]:
    """Context: a function that scores parts of paths, here or in workers."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not workers.count:
        return spread(partial(_scoring, model, device), workers)
    workers = replace(workers, gpu=device == "cuda", environment=sent_environment(), ahead=1)
    return spread(partial(_scoring_there, model, device), workers)


def _scoring(model: RewardModel, device: str) -> Callable[[list[TokenIds]], list[Score]]:
    return RewardClassifier(model, device).scores


def _scoring_there(model: RewardModel, device: str) -> Callable[[list[TokenIds]], list[Score]]:
    if RewardModel.of(model.folder).digest != model.digest:
        raise ModelError(
            f"{model.folder} on host {socket.gethostname()}, where Ray has a worker, has other weights than "
            "here: have the same model on every node"
        )
    return _scoring(model, device)


class RewardClassifier:
    """A reward model with its weights.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        ModelError: transformers cannot read it.
    """

    def __init__(self, model: RewardModel, device: str) -> None:
        from transformers import AutoModelForSequenceClassification

        folder, config = model.folder, _config(model.folder)
        dtype = torch.float32 if device == "cpu" else config.dtype or torch.float32
        try:
            with model_directory(folder) as whole:
                weights: Any = AutoModelForSequenceClassification.from_pretrained(
                    whole, local_files_only=True, use_safetensors=True, dtype=dtype
                )
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from error
        if not hasattr(weights, "score"):
            raise ModelError(f"{folder}: a {type(weights).__name__} has no head named score")
        self._model, self._device = weights.to(device).eval(), device
        self._distribution = model.gives_deviations

    def scores(self, paths: Sequence[TokenIds]) -> list[Score]:
        """The scores of paths, each of its last token. Paths of about one length share a forward pass."""
        order = sorted(range(len(paths)), key=lambda i: len(paths[i]))
        scores: dict[int, Score] = {}
        for part in _parts(order, [len(path) for path in paths]):
            scores |= zip(part, self._forward([paths[i] for i in part]), strict=True)
        return [scores[i] for i in range(len(paths))]

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
