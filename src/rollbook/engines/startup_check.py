"""Checks of the engines before anything is recorded, so that a setup that cannot work fails at once.

One is whether an engine's model is the one whose tokenizer makes its ids, as far as the engine reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from rollbook.engines.engine import Engine
from rollbook.engines.fleet import Fleet
from rollbook.engines.model_files import model_file, read_json
from rollbook.engines.weights.identify import Identity
from rollbook.store.errors import ModelError
from rollbook.store.events import Json


def check_engines(engine: Engine, identity: Identity, model: Path) -> list[str]:
    """Check that an engine can be used, and return notes for its user, a sentence each.

    Args:
        model: the directory whose tokenizer and template make the ids.

    Raises:
        EngineError: no server can be reached, or one is none that can be used.
        VersionError: what is to count as a version is not what the log has bound that version to.
    """
    if not isinstance(engine, Fleet):
        return []
    answers = asyncio.run(engine.look())
    notes = [f"{url} {text}" for url, info in answers for text in differences(model, info)]
    for member in engine.members:
        if (held := member.engine.held()) is not None:
            identity.log.check(*held, f"{model}")
        if (why := member.engine.unverified()) is not None:
            notes.append(f"what {member.url} makes has no policy version and is never trained: {why}")
    return notes


KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "eos_token_id",
)
"""Of a configuration: where these differ, ids or weights mean something else."""
FILES = ("tokenizer.json",)


def differences(model: Path, reported: Json) -> list[str]:
    """The signs that an engine serves another model than `model`, each half a sentence.

    Args:
        reported: the engine's answer to /model_info. Where its `model_path` can be read here, its files are
            compared too; of a server elsewhere only the architecture is known.
    """
    own = _config(model)
    signs = []
    for key in ("model_type", "architectures"):
        if key in own and reported.get(key) and reported[key] != own[key]:
            signs.append(f"serves a {_shown(reported[key])}, and {model} is a {_shown(own[key])}")
            break
    path = Path(str(reported.get("model_path") or ""))
    if not path.is_absolute() or not path.is_dir() or path.resolve() == model.resolve():
        return signs
    other = _config(path)
    signs += [
        f"has {key} {other[key]!r} ({path}), and {model} has {own[key]!r}"
        for key in KEYS
        if key in own and key in other and own[key] != other[key]
    ]
    signs += [
        f"has another {name} ({path}) than {model}, so ids may mean other text"
        for name in FILES
        if len({_digest(folder, name) for folder in (path, model)} - {None}) == 2
    ]
    return signs


def _config(folder: Path) -> dict[str, Any]:
    """A model directory's, with what one of several parts says of its text; empty if there is none."""
    try:
        config = read_json(folder, "config.json")
        return {**config, **config.get("text_config", {})}
    except (ModelError, TypeError):
        return {}


def _digest(folder: Path, name: str) -> str | None:
    try:
        file = model_file(folder, name)
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except (ModelError, OSError):
        return None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
