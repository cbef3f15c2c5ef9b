"""Names the training that a configuration describes, so that a restart finds its earlier steps.

The name is a digest of the values that affect training. Only values that differ from their
defaults count, so that a new key does not change the names of old configurations; therefore a
default must never change. A store that has names of the earlier form keeps them.
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
        *("sync", "model", "admission", "on_not_finite", "evaluation", "stop", "parallel"),
        *("recompute", "mode", "num_iters_per_train_update", "reference_apart", "checkpoint", "record"),
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
"""The keys, and the keys of tables, of the earlier form of names, which included defaults."""


def family_in(history: History, config: TrainConfig, source: str) -> str:
    """The name of this training in a history: that of its steps, or the current form if it has none."""
    names = family_names(config, source)
    return next((name for name in names if history.of_family(name)), names[0])


def family_names(config: TrainConfig, source: str) -> list[str]:
    """Names of this training: in the current form, then in the earlier one if that can express it."""
    deciding = _deciding(config.model_dump(mode="json", exclude_defaults=True))
    names = [digest_json({"form": 2, "source": source, "config": deciding})]
    if _known(deciding, _FORM_1):
        whole = _deciding(config.as_json())
        names.append(digest_json([{key: _part(whole[key], key) for key in _FORM_1}, source]))
    return names


def _deciding(values: Json) -> Json:
    return {key: value for key, value in values.items() if key not in FREE}


def _known(values: Json, form: Mapping[str, Sequence[str]]) -> bool:
    tables = ((form[key], value) for key, value in values.items() if key in form and isinstance(value, dict))
    return values.keys() <= form.keys() and all(value.keys() <= set(keys) for keys, value in tables)


def _part(value: Any, key: str) -> Any:
    """A value in the earlier form: of a table only the keys that existed then."""
    return {k: v for k, v in value.items() if k in _FORM_1[key]} if isinstance(value, dict) else value
