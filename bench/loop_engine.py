"""The replies of the loop's scripted engine: ids of ordinary characters, decided by prompt and seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from tokenizers import Tokenizer

from rollbook.bench.scripted.job import Answer, Script

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
END = "<|im_end|>"
LENGTHS = (6, 24)
"""Fewest and most tokens of a reply."""


def paced(path: Path) -> Script:
    """A script from a JSON file: the `tokenizer`, the seconds before the first and before any other token.

    Every reply begins with the file's `mark`, and so says which engine made it.
    """
    pace = orjson.loads(path.read_bytes())
    tokenizer = Tokenizer.from_file(pace["tokenizer"])
    ordinary = [i for i in map(tokenizer.token_to_id, CHARACTERS) if i is not None]
    mark, end = tokenizer.token_to_id(pace["mark"]), tokenizer.token_to_id(END)

    def script(input_ids: list[int], params: Mapping[str, Any]) -> Answer:
        # With the request's seed: a request that is asked again gets another reply, as of a real engine.
        seed = xxhash.xxh3_64_intdigest(np.array(input_ids, np.int64).tobytes(), params["sampling_seed"])
        rng = np.random.default_rng(seed)
        length = int(rng.integers(*LENGTHS))
        ids = [mark, *rng.choice(ordinary, length).tolist(), end]
        return Answer(ids, first_s=pace["first_s"], token_s=pace["token_s"])

    return script
