"""The fingerprint of a step's environment, and how two of them differ."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch

from rollbook import __version__
from rollbook.store.digest import digest_json
from rollbook.store.events import Json
from rollbook.train.algorithms.parts import sources
from rollbook.train.loop.computing import flags, gpu, instructions, libraries, processor, threading
from rollbook.train.loop.source_digests import source_digests
from rollbook.train.loop.variables import kept_variables, only_places

PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "safetensors")
FORM = 2
"""The form of fingerprints. Those without one, the first, name six variables whether they are set or not, and
leave out what came later."""

Matters = Literal["bits", "nothing known"]

_SET = frozenset({"parts", "variables"})
"""Keys under which what is not named is not set, since the second form."""
_NO_BITS = frozenset({"kernel", "threading.interop", "packages.transformers", "packages.safetensors"})
"""Keys that no bits are known to hang on: an operating system's release; threads for what no step does; files
and tokenizers, which are read but not computed with."""


def fingerprint(
    device: torch.device,
    algorithm: Json | None = None,
    parallel: Json | None = None,
    *,
    dtype: str = "float32",
) -> Json:
    """Everything known to change bits: versions and sources, processor, threads, flags, variables, parallel
    layout, and the sources of an algorithm's parts that are not Rollbook's.

    What cannot change in a process is looked up once: the first takes some 50 ms, the next well under 1 ms.
    """
    found: Json = {
        **_of_process(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "threading": threading(),
        "dtype": dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flags": flags(device),
        "parallel": parallel or {"data": 1, "tensor": 1, "pipeline": 1},
        "variables": kept_variables(os.environ),
    }
    if own := sources(algorithm or {}):
        found["parts"] = own
    if device.type == "cuda":
        found["gpu"] = _gpu(device)
    return found


@functools.cache
def _of_process() -> Json:
    """What stays as it is for as long as a process runs."""
    return {
        "form": FORM,
        "rollbook": __version__,
        "sources": source_digests(),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "kernel": platform.release(),
        "packages": {name: version(name) for name in PACKAGES},
        "torch_build": digest_json(torch.__config__.show()),
        "libraries": libraries(),
        "processor": processor(),
        "instructions": instructions(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


_gpu = functools.cache(gpu)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that was recorded of an environment, and is not so here.

    Attributes:
        key: its place in a fingerprint, such as `packages.torch` or `sources.algorithms`.
        recorded, here: both values; None where there is none, as of a variable that is not set.
        matters: what it is known to be able to change.
    """

    key: str
    recorded: Any
    here: Any
    matters: Matters

    def __str__(self) -> str:
        aside = "" if self.matters == "bits" else " (not known to change bits)"
        return f"{self.key}: recorded {self.recorded!r}, here {self.here!r}{aside}"


def differences(recorded: Json, here: Json) -> list[Difference]:
    """How an environment differs from the recorded one, leaf by leaf, sorted by key.

    What the step did not record, since the release of then did not know it, is no difference.
    """
    before, now = _leaves(recorded), _leaves(here)
    return [
        Difference(key, before.get(key), now.get(key), _matters(key, recorded, here))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _unrecorded(key, recorded, before)
    ]


def unrecorded(recorded: Json, here: Json) -> list[str]:
    """What is known of an environment here and was not recorded of the other, and may change bits; by its
    outermost key of which nothing was recorded."""
    before = _leaves(recorded)
    missing = [
        key
        for key in _leaves(here)
        if _unrecorded(key, recorded, before) and _matters(key, recorded, here) == "bits"
    ]
    return sorted({key if key.partition(".")[0] in recorded else key.partition(".")[0] for key in missing})


def _leaves(values: Json, prefix: str = "") -> dict[str, Any]:
    """`outer.inner` -> value, of all that is no object itself; but not the form."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        elif prefix or key != "form":
            found[prefix + key] = value
    return found


def _unrecorded(key: str, recorded: Json, leaves: Mapping[str, Any]) -> bool:
    """Whether a step says nothing of a key."""
    if key in leaves:
        return False
    outer = key.partition(".")[0]
    if outer == "parallel":  # of which sizes of 1 are left out
        return outer not in recorded
    return outer not in _SET or recorded.get("form", 1) < FORM


def _matters(key: str, recorded: Json, here: Json) -> Matters:
    """What a difference in a key is known to be able to change. An unknown key may change anything."""
    if key in _NO_BITS or (key.startswith("variables.") and only_places(key.removeprefix("variables."))):
        return "nothing known"
    part_of = {"python": _minor, "device": _kind}.get(key)
    if part_of is not None:
        return "nothing known" if part_of(recorded.get(key)) == part_of(here.get(key)) else "bits"
    if key == "rollbook" and "sources" in recorded:  # these say it better
        return "nothing known"
    return "bits"


def _minor(python: Any) -> list[str]:
    """Of Python's version what packages are compiled for."""
    return str(python).split(".")[:2]


def _kind(device: Any) -> str:
    return str(device).partition(":")[0]
