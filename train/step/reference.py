"""The reference of an algorithm: when it is renewed, and the names of the lines of weights that others than
the policy have.

Every so many steps the policy's newest version becomes the reference. The manifest of each step
holds the version that it used, so a replay needs nothing else. Source: the hard update of
Gorbatovski et al. 2024 (arXiv:2404.09656), there for DPO; `ref_update_interval` of TRL's
`ref_model_sync_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.store.fold.history import CommittedStep
from rollbook.train.algorithms.algorithm import Algorithm


def steps_since(algorithm: Algorithm, steps: Sequence[CommittedStep]) -> int:
    """How many of a training's committed steps began with the reference's version or a later one.

    Args:
        algorithm: of the next step, with the reference in force.
    """
    return sum(step.planned.policy_version >= (algorithm.reference or 0) for step in steps)


def reference_line(policy: str) -> str:
    """The name under which the log has the references of a policy, as a line of weights of its own."""
    return f"{policy}.reference"


def policy_of(line: str) -> str:
    """The policy that a line of weights belongs to; for a line of references, the policy whose
    references they are."""
    return line.removesuffix(".reference")
