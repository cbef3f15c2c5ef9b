"""What can be said of a replay before it starts: whether the recorded bits are promised to come out
here."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.events import Json
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.environment import Difference, differences, unrecorded

_NO = frozenset({"", "0", "false"})
_RING = 2
"""GPUs whose sum does not depend on how they are connected: a ring of more may begin anywhere."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Whether a step is promised to come out bit for bit, and the reasons against it.

    Attributes:
        against: differences that may change bits.
        unsteady: what may change bits from one run to the next even in the same environment, as
            text.
        unrecorded: what may change bits and was not recorded: keys of a fingerprint.
        beside: differences that are not known to change bits.
    """

    against: tuple[Difference, ...]
    unsteady: tuple[str, ...]
    unrecorded: tuple[str, ...]
    beside: tuple[Difference, ...]

    @property
    def bits(self) -> bool:
        """Whether bits are promised. They may come out the same even without a promise."""
        return not (self.against or self.unsteady or self.unrecorded)

    @property
    def told(self) -> list[str]:
        """All that differs or is unsteady, a line each, whether it is known to change bits or not."""
        return [*map(str, (*self.against, *self.beside)), *self.unsteady]

    @property
    def reasons(self) -> list[str]:
        """Why there is no promise, a line each."""
        reasons = [*map(str, self.against), *self.unsteady]
        if self.unrecorded:
            reasons.append(f"not recorded by that step: {', '.join(self.unrecorded)}")
        return reasons


def promise(recorded: Json, here: Json) -> Promise:
    """Whether a step recorded in one environment is promised to give the same bits in another.

    Args:
        here: the fingerprint that the step would get here: taken once its threads and deterministic kernels
            are set, as `set_deterministic` does.
    """
    diffs = differences(recorded, here)
    return Promise(
        against=tuple(diff for diff in diffs if diff.matters == "bits"),
        unsteady=tuple(_unsteady(recorded, "as recorded") or _unsteady(here, "here")),
        unrecorded=tuple(unrecorded(recorded, here)),
        beside=tuple(diff for diff in diffs if diff.matters != "bits"),
    )


def _unsteady(environment: Json, where: str) -> list[str]:
    """Reasons in an environment why the same step may come out differently from run to run."""
    reasons = []
    if not environment.get("deterministic", True):
        reasons.append(f"deterministic kernels are off ({where})")
    if environment.get("flags", {}).get("warn_only", False):
        reasons.append(f"kernels that are not deterministic only warn ({where})")
    dynamic = (environment.get("variables") or {}).get("OMP_DYNAMIC")
    if dynamic is not None and dynamic.strip().lower() not in _NO:
        reasons.append(
            f"OMP_DYNAMIC={dynamic} lets the machine's load decide how many threads add up ({where})"
        )
    ranks = recorded_parallel(environment.get("parallel") or {})[1]
    if str(environment.get("device", "")).startswith("cuda") and ranks > _RING:
        reasons.append(f"{ranks} GPUs add up in an order that follows how they are connected ({where})")
    return reasons
