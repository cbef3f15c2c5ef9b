"""Which training a configuration is: the name by which a restart finds the steps it goes on after.

The name is a digest of what decides the course of training, in a form that new keys leave alone: only what
differs from the defaults is said, so that a default must never change. Stores keep the names they began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.store.digest import digest_json
from rollbook.store.events import Json
from rollbook.store.fold.history import History
from rollbook.train.config.config import TrainConfig

FREE = frozenset(
    {
        *("steps", "checkpoint_every", "threads", "device", "engine_gap_alarm", "idle_timeout_s"),
        *("sync", "model", "admission", "on_not_finite"),
    }
)
"""Keys that may change between restarts of the same training."""

_FORM_1_OPTIMIZER = (
    *("lr", "min_lr", "warmup_steps", "decay", "decay_steps", "wsd_decay_steps", "betas", "eps"),
    *("weight_decay", "clip_grad"),
)
_FORM_1: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("run", "policy", "seed", "micro_batch_size"), ()),
    "algorithm": (*("name", "batch_size", "group_size", "groups", "clip_low", "clip_high", "std_epsilon"),),
    "recipe": ("splits", "reward_source", "max_staleness", "drop_zero_variance"),
    "optimizer": _FORM_1_OPTIMIZER,
}
"""The keys, and the keys of tables, that there were when names said all values, defaults included."""


def family_in(history: History, config: TrainConfig, source: str) -> str:
    """The name of this training in a history: the one its steps have, or today's where there are none."""
    names = family_names(config, source)
    return next((name for name in names if history.of_family(name)), names[0])


def family_names(config: TrainConfig, source: str) -> list[str]:
    """Names of this training: in today's form, then in the earlier one where that could say it."""
    said = _deciding(config.model_dump(mode="json", exclude_defaults=True))
    names = [digest_json({"form": 2, "source": source, "config": said})]
    if _known(said, _FORM_1):
        whole = _deciding(config.as_json())
        names.append(digest_json([{key: _part(whole[key], key) for key in _FORM_1}, source]))
    return names


def _deciding(values: Json) -> Json:
    return {key: value for key, value in values.items() if key not in FREE}


def _known(said: Json, form: Mapping[str, Sequence[str]]) -> bool:
    tables = ((form[key], value) for key, value in said.items() if key in form and isinstance(value, dict))
    return said.keys() <= form.keys() and all(value.keys() <= set(keys) for keys, value in tables)


def _part(value: Any, key: str) -> Any:
    """A value, of a table only the keys that there were."""
    return {k: v for k, v in value.items() if k in _FORM_1[key]} if isinstance(value, dict) else value
