"""Signs that something failed beside the learning: steps, syncs, turns, launches of agents. Pure."""

from __future__ import annotations

from rollbook.train.doctor.evidence import Course, Finding


def failed_steps(course: Course) -> Finding | None:
    """Attempts at steps failed."""
    if not course.failed:
        return None
    numbers = sorted(course.failed)
    return Finding(
        "failed_steps",
        f"{len(numbers)} steps had attempts that failed; the last: {course.failed[numbers[-1]][:200]}",
        (numbers[0], numbers[-1]),
        {"steps": numbers},
        course.training.failed_steps(),
        ("optimizer.lr", "on_not_finite"),
    )


def failed_syncs(course: Course) -> Finding | None:
    """Engines did not get weights that were sent."""
    if not course.syncs:
        return None
    return Finding(
        "failed_syncs",
        f"{len(course.syncs)} syncs failed; the last, of version {course.syncs[-1][0]}: "
        f"{course.syncs[-1][1][:200]}",
        None,
        {"syncs": len(course.syncs), "versions": sorted({version for version, _ in course.syncs})},
        course.training.failed_syncs(),
        ("sync.timeout_s", "sync.transport", "the engine's log"),
    )


def failed_turns(course: Course) -> Finding | None:
    """Of the turns that ended since the training began, more than one in twenty failed, and three or more."""
    failed = [turns for turns in course.turns if turns.status == "failed"]
    count, ended = sum(turns.count for turns in failed), sum(turns.count for turns in course.turns)
    if count < 3 or count <= 0.05 * ended:
        return None
    most = "; ".join(f"{turns.count} in lane {turns.lane}: {turns.error[:120]}" for turns in failed[:3])
    others = sum(turns.count for turns in failed[3:])
    return Finding(
        "failed_turns",
        f"{count} of {ended} turns failed since the training began ({count / ended:.0%}). {most}"
        + (f"; {others} others" if others else ""),
        course.whole(),
        {
            "failed": count,
            "ended": ended,
            "errors": [{"lane": t.lane, "error": t.error, "turns": t.count} for t in failed[:10]],
        },
        course.training.ended_turns(),
        ("the engine's log", "the agents' concurrency", "the engine's memory and timeouts"),
    )


def failed_launches(course: Course) -> Finding | None:
    """Of the launches that ended since the training began, more than one in ten failed by their
    infrastructure, and three or more: groups are late, or lack trajectories."""
    failed = [launches for launches in course.launches if launches.by_infrastructure]
    count, ended = (sum(launches.count for launches in of) for of in (failed, course.launches))
    if count < 3 or count <= 0.1 * ended:
        return None
    most = "; ".join(f"{of.count} of rollouts {of.rollout}: {of.why[:120]}" for of in failed[:3])
    return Finding(
        "failed_launches",
        f"{count} of {ended} launches failed by their infrastructure since the training began "
        f"({count / ended:.0%}). {most}",
        course.whole(),
        {
            "failed": count,
            "ended": ended,
            "infra_failed_rate": count / ended,
            "errors": [{"rollout": of.rollout, "why": of.why, "launches": of.count} for of in failed[:10]],
        },
        course.training.ended_launches(),
        ("the reasons", "the engine's log", "the rollouts' concurrency and agent.limits"),
    )
