"""A teacher that an SGLang server serves: it is asked for the logprobs of the policy's tokens.

What it answers cannot be computed again, so the training records it. The server's checksums say whether it
still serves the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollbook.engines.model_files import model_file
from rollbook.engines.sglang.protocol import read_scores
from rollbook.engines.weights.rank_checksums import ranks_digest
from rollbook.store.errors import EngineError, TrainError
from rollbook.store.events import token_ids
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import MicroBatch, Partition
from rollbook.train.batches.experience import Bools, trained_masks
from rollbook.train.select.samples import Sample
from rollbook.train.sync.control import EngineControl

AT_ONCE = 16
"""Samples that a server is asked about at a time."""
PROBED = 256
"""Ids whose text is compared with that of the policy's tokenizer."""


@dataclass(slots=True, eq=False)
class TeacherEngine:
    """A teacher behind an address.

    Args:
        digest: of the weights that it is to serve, by its checksums.
    """

    control: EngineControl
    digest: str
    _askers: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._askers = ThreadPoolExecutor(AT_ONCE, "rollbook-teacher")

    def logprobs(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], Singles]:
        """As `Teacher`, asked for while the policy computes.

        Raises:
            TrainError: a sample was sampled at another temperature than 1, of which alone SGLang tells
                logprobs of given tokens.

        What is returned raises:
            EngineError: it does not answer, or serves other weights by now.
        """
        for sample in samples:
            check_temperature(sample, self.control.url)
        masks = trained_masks(samples)
        asked = [self._askers.submit(self._ask, s, mask) for s, mask in zip(samples, masks, strict=True)]

        def whole() -> Singles:
            values = [answer.result() for answer in asked]
            self.check_weights()
            return np.concatenate([np.zeros(0, np.float32), *values])

        return whole

    def _ask(self, sample: Sample, mask: Bools) -> Singles:
        ids = token_ids(sample.tokens.tolist())
        answer = self.control.score(ids)
        return np.asarray(read_scores(answer, ids, 0).logprobs[mask], np.float32)

    def check_weights(self) -> None:
        """Check that it serves the weights that it is to serve.

        Raises:
            EngineError: it serves others, as one may that was started again.
        """
        if (now := weights_of(self.control)) != self.digest:
            raise EngineError(
                f"teacher {self.control.url} serves other weights than its training began with (checksums "
                f"{self.digest[:12]}, now {now[:12]}): start it with those, or begin a new training with "
                "these by another teacher.name"
            )

    def close(self) -> None:
        """Close its connections."""
        self._askers.shutdown(cancel_futures=True)
        self.control.close()


def weights_of(control: EngineControl) -> str:
    """The digest of the weights that a server holds, by its checksums.

    Raises:
        EngineError: it does not answer, or has no checksums.
    """
    return ranks_digest(control.checksums())


def check_temperature(sample: Sample, url: str) -> None:
    """Check that a server can tell a sample's logprobs.

    Raises:
        TrainError: its tokens were sampled at another temperature than 1.
    """
    other = sample.temperatures[sample.loss_mask & (sample.temperatures != 1)]
    if len(other):
        raise TrainError(
            f"trajectory {sample.name!r} was sampled at temperature {other[0]:g}, and teacher {url} tells "
            "logprobs of temperature 1 alone: sample at 1, or name the teacher's `model`"
        )


def check_text(control: EngineControl, policy: Path) -> None:
    """Check that a server's ids mean what the policy's do, by the text of some of them.

    Args:
        policy: folder of the policy; without a tokenizer nothing is compared.

    Raises:
        TrainError: they do not; it names the first that differs.
        EngineError: the server does not answer.
    """
    from tokenizers import Tokenizer

    file = model_file(policy, "tokenizer.json")
    if file is None:
        return
    tokenizer = Tokenizer.from_file(str(file))
    known = sorted(tokenizer.get_vocab().values())
    probed = known[:: -(-len(known) // PROBED)]
    answer = control.score(token_ids(probed), return_text_in_logprobs=True)
    try:
        texts = [str(entry[2]) for entry in answer["meta_info"]["input_token_logprobs"]]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"teacher {control.url}: its answer is not SGLang's: {error!r}") from error
    for number, text in zip(probed, texts, strict=True):
        own = tokenizer.decode([number], skip_special_tokens=False)
        if own != text and "\ufffd" not in own + text:
            raise TrainError(
                f"teacher {control.url} has another tokenizer than the policy: id {number} is {own!r} to the "
                f"policy and {text!r} to the teacher. Its logprobs would be of other text: choose a teacher "
                "with the policy's tokenizer"
            )
