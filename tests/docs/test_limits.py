"""What the pages say is not possible, or only so far, agrees with what the typed settings take.

A limit that is lifted leaves sentences behind in pages that nobody had open at the time. Each limit here is
asked of the settings themselves; a page that states one that they no longer have is named, with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from rollbook.ingest.settings import ServeSettings
from rollbook.rollouts.config import AgentConfig
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model.shape import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = (
    *[ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/README.md"))],
    *(ROOT / layer / "README.md" for layer in ("store", "ingest", "train", "replay")),
)
NAMES = {
    **{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE"},
    **{"gemma3_text": "Gemma 3 (text)", "gpt_oss": "gpt-oss"},
}
"""Each family of models that is trained, as prose calls it."""
DTYPES = get_args(TrainConfig.model_fields["dtype"].annotation)
LAUNCHERS = get_args(AgentConfig.model_fields["launcher"].annotation)


def _accepts(**sizes: int) -> bool:
    try:
        ParallelConfig(**sizes)  # type: ignore[arg-type]
    except ValidationError:
        return False
    return True


SIZES = ("tensor", "pipeline", "context", "expert")
SPREADS, ROUNDS = any(_accepts(**{size: 2}) for size in SIZES), len(DTYPES) > 1
LIFTED = {
    r"\bone process: data|\bparallel sizes? (is|are) 1\b": SPREADS,
    r"\bone proxy at a time\b|\brecords a run, on one host\b": "proxies" in ServeSettings.model_fields,
    r"\bagents and sandboxes on the host that it runs on\b": "ray" in LAUNCHERS,
    r"\b(models in|gpt-oss,) float32[,.]|\b(only|alone) in float32\b|\bfloat32 (only|alone)\b": ROUNDS,
}
"""Words of a limit -> whether the settings lift it."""


def _stated(words: str) -> Iterator[str]:
    """The places that say so, whichever way their lines are broken."""
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(words.replace(" ", r"\s+"), text, re.IGNORECASE):
            yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


@pytest.mark.parametrize("words", LIFTED)
def test_no_page_states_a_limit_that_was_lifted(words: str) -> None:
    """Wherever it stood once."""
    assert not LIFTED[words] or list(_stated(words)) == []


def test_what_is_trained_is_what_the_settings_take() -> None:
    """The README's sentence and the layer's limit name every family and type, and the ways not to share."""
    front = re.search(r"Today Rollbook trains (.*?); it serves", (ROOT / "README.md").read_text(), re.DOTALL)
    limits = (ROOT / "train" / "README.md").read_text().partition("\n## Limits\n")[2]
    layer = re.search(r"- (Llama.*?)\n- ", limits, re.DOTALL)
    assert front
    assert layer
    assert set(NAMES) == set(FAMILIES), "a family of models was added: say its name here"
    for text in (front[1], layer[1]):
        assert [name for name in NAMES.values() if name not in text] == []
        assert set(re.findall(r"\b(?:b?float|fp)\d+\b", text)) == set(DTYPES)
    unbuilt = {size for size in SIZES if not _accepts(**{size: 2})}
    assert set(re.findall(r"`(\w+)`", layer[1])) == unbuilt
    ranks = re.search(r"Not\s+built: (.*?)\n\n", (ROOT / "docs" / "ranks.md").read_text(), re.DOTALL)
    assert ranks
    assert set(re.findall(r"`(\w+)` above 1,", ranks[1])) == unbuilt
    assert "several ranks" in front[1]


def test_what_may_be_several_is_named_where_limits_are() -> None:
    """Proxies of one run, in the layer's limits and promises, and on the front page."""
    text = (ROOT / "ingest" / "README.md").read_text()
    several = [key for key in ("workers", "proxies") if key in ServeSettings.model_fields]
    assert [key for key in several if f"`--{key}`" not in text] == []
    assert re.search(r"one proxy or by\s+several", (ROOT / "README.md").read_text())
