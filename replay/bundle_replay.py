"""Replays the step of a bundle that was opened, as far as what is in the bundle goes."""

from __future__ import annotations

from rollbook.replay.partial import Part
from rollbook.replay.step import replay_step
from rollbook.replay.verdict import StepReplay
from rollbook.store import Store
from rollbook.store.interchange.bundle_layout import Bundle


def replay_bundle(bundle: Bundle, log: Store, *, trust_parts: bool = False) -> StepReplay:
    """Replay the step of a bundle in the store that it was opened as.

    Raises:
        as `replay_step`
    """
    part = None if bundle.up_to is None else Part(last=bundle.up_to, model=False)
    return replay_step(log, bundle.step, bundle.run, bundle.policy, trust_parts=trust_parts, part=part)
