"""Secrets that clients and operators put anywhere are on no disk; and the search finds what is there."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest

from rollbook import store
from rollbook.bench.hostile.secret_runs import search
from rollbook.bench.hostile.secrets import (
    KNOWN,
    OPERATORS,
    PLACES,
    Planted,
    found_in,
    haystacks,
    spellings,
    unknown,
)
from rollbook.bench.hostile.stage import Stage
from rollbook.store import Event
from rollbook.store.events import TrajectoryOpened


@pytest.mark.timeout(200)
def test_no_secret_is_on_disk(stage: Stage) -> None:
    """40 in 20 places outside the conversation; each known format within it, with `--redact known`."""
    result = search(stage)
    assert result.unanswered == []
    assert list(result.found.values()) == []
    assert (len(PLACES) + len(OPERATORS), result.planted) == (20, 40)
    assert result.inside == 2 * (len(KNOWN) + 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_spelling_is_looked_for(seed: int) -> None:
    """As it is, as URLs and JSON write it, and in base64 wherever it stands in what is encoded."""
    rng = random.Random(seed)
    secret = unknown(rng) + 'a"\\\n'
    before, after = rng.randbytes(rng.randrange(9)), rng.randbytes(rng.randrange(9))
    raw = secret.encode()
    for data in (
        raw,
        quote(secret, safe="").encode(),
        orjson.dumps({"a": secret}),
        base64.b64encode(before + raw + after),
        base64.urlsafe_b64encode(before + raw + after),
    ):
        assert any(form in data for form in spellings(secret)), data
    assert min(map(len, spellings(secret))) > 20  # nothing so short that noise would hold it


def test_a_secret_in_a_log_is_found(tmp_path: Path) -> None:
    """In a record, in a file beside it, and in what was printed; one that is nowhere is not."""
    planted = [
        Planted(place, f"secret-{place}-0123456789") for place in ("log", "file", "printed", "nowhere")
    ]
    with store.open(tmp_path / "s", create=True).writer("w") as writer:
        record = TrajectoryOpened("t", "name", labels={"a": planted[0].secret})
        writer.append([Event(record, "run")]).result(10)
    (tmp_path / "s" / "catalog.tmp").write_text(planted[1].secret)
    hits = found_in(planted, haystacks(tmp_path / "s", [("stderr", planted[2].secret.encode())]))
    assert {hit.place for hit in hits} == {"log", "file", "printed"}
