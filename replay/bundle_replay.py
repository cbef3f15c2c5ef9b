"""Replays the step of a bundle that was opened, and says what is proven by it."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.replay.step import StepReplay, replay_step
from rollbook.store import Store
from rollbook.store.interchange.bundle_layout import Bundle

OF_OPTIMIZER = frozenset(
    (
        "input_optimizer",
        "optimizer",
        "weights",
        "critic_input_optimizer",
        "critic_optimizer",
        "critic_weights",
    )
)
"""The stages that the optimizer's state decides."""


@dataclass(frozen=True, slots=True)
class BundleReplay:
    """What the replay of a bundle's step comes to.

    Attributes:
        replay: of the step; of a bundle without the optimizer it may differ in what is not proven.
        differs_at_step, differs_in: the first step and stage that differ of those that are proven, or None.
        not_proven: stages that need what was left out of the bundle.
    """

    replay: StepReplay
    differs_at_step: int | None
    differs_in: str | None
    not_proven: tuple[str, ...]


def replay_bundle(bundle: Bundle, log: Store, *, trust_parts: bool = False) -> BundleReplay:
    """Replay the step of a bundle in the store that it was opened as.

    Raises:
        as `replay_step`
    """
    result = replay_step(log, bundle.step, bundle.run, bundle.policy, trust_parts=trust_parts)
    if not bundle.without:
        return BundleReplay(result, result.differs_at_step, result.differs_in, ())
    # It is the only step that was run, so what differs in it is not the consequence of another.
    differs = [
        stage
        for stage, (recorded, found) in result.stages.items()
        if stage not in OF_OPTIMIZER and recorded is not None and recorded != found
    ]
    left = tuple(stage for stage in result.stages if stage in OF_OPTIMIZER)
    return BundleReplay(result, bundle.step if differs else None, differs[0] if differs else None, left)
