"""Low-rank adapters in a folder with PEFT's files: their factors, and what they make of a fixed sequence.

Their digest says which factors lie there, and nothing of what a server applies: an SGLang has no checksums of
adapters. So whoever trained the factors writes beside them what the model with them makes of a sequence of
tokens, and a server is held to that. It finds factors that are left out, scaled or placed wrongly, and those
of a model that answers otherwise; two versions that differ by less than the bound look the same to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollbook.engines.model_files import PEFT_CONFIG, PEFT_WEIGHTS, read_json
from rollbook.engines.weights.digests import Tensors
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import Logprobs, TokenIds, token_ids
from rollbook.store.safe_paths import fsync_file

PREFIX = "base_model.model."
"""What PEFT's names of a model's parts begin with."""
PROBE = "probe.json"
PROBE_LENGTH, PROBE_STRIDE = 64, 7919
"""Of the sequence: its tokens at most, and from one to the next in the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What a model with an adapter makes of a fixed sequence.

    Attributes:
        logprobs: of the tokens from the second on, of temperature 1.
        dtype: that they were computed in.
    """

    ids: TokenIds
    logprobs: Logprobs
    dtype: str


def probe_ids(vocabulary: int, context: int) -> TokenIds:
    """The sequence for a model: tokens from everywhere in its vocabulary."""
    return token_ids([(1 + at * PROBE_STRIDE) % vocabulary for at in range(min(PROBE_LENGTH, context))])


def write_probe(folder: Path, probe: Probe) -> None:
    """Write a probe beside the factors, durably but for the folder itself."""
    content = {"ids": probe.ids.tolist(), "logprobs": probe.logprobs.tolist(), "dtype": probe.dtype}
    (folder / PROBE).write_bytes(orjson.dumps(content))
    fsync_file(folder / PROBE)


def read_probe(folder: Path) -> Probe:
    """The probe in an adapter's folder. A logprob that was no number is NaN, and equal to none.

    Raises:
        EngineError: it has none.
    """
    try:
        content = read_json(folder, PROBE)
        logprobs = np.array([np.nan if p is None else p for p in content["logprobs"]], np.float32)
        probe = Probe(token_ids(content["ids"]), logprobs, str(content["dtype"]))
    except (ModelError, KeyError, TypeError, ValueError, OverflowError) as error:
        text = f"{folder} has no {PROBE}, by which a server's answers are verified: save the weights again"
        raise EngineError(text) from error
    if len(probe.ids) != len(logprobs) + 1:
        raise EngineError(f"{folder}/{PROBE} has {len(logprobs)} logprobs of {len(probe.ids)} tokens")
    return probe


def read_peft(folder: Path) -> tuple[Tensors, float]:
    """(the factors in a folder with PEFT's files, the scale of their product)

    Raises:
        EngineError: it has none.
    """
    try:
        config = read_json(folder, PEFT_CONFIG)
        return load_file(folder / PEFT_WEIGHTS), config["lora_alpha"] / config["r"]
    except (ModelError, OSError, SafetensorError, KeyError, TypeError, ZeroDivisionError) as error:
        raise EngineError(f"{folder}: no adapter of PEFT's form: {error}") from error
