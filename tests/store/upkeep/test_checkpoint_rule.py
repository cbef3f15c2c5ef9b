"""Which checkpoints may go: whatever the history, those that stay make every step and version again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from rollbook.store.events import CheckpointWritten
from rollbook.store.upkeep.checkpoints import Keep, StepTaken, why_kept


def _nobody(path: str) -> None:
    """Who serves a checkpoint: nobody."""


@dataclass(slots=True)
class Story:
    """A training: its steps, and the checkpoints that were written on the way."""

    steps: list[StepTaken] = field(default_factory=list)
    present: list[CheckpointWritten] = field(default_factory=list)
    version: int = 0

    def write(self, phase: str | None, *, whole: bool) -> None:
        """Write a checkpoint of the version at hand."""
        path, optimizer = f"c/{self.version}/{len(self.present)}", "o" if whole else None
        weights = f"w{self.version}"
        self.present.append(CheckpointWritten("actor", self.version, path, weights, optimizer, phase, 1))

    def step(self, phase: str, names: dict[int, str] | None = None, **said: bool) -> None:
        """Take a step."""
        number = len(self.steps)
        self.steps.append(StepTaken(number, phase, self.version, self.version + 1, names or {}, **said))
        self.version += 1


def _train(versions: int, every: int = 1, phase: str = "p", story: Story | None = None) -> Story:
    """So many steps more, with a checkpoint after every so many and at the end."""
    story = story or Story()
    if not story.present:
        story.write(None, whole=False)
    for i in range(1, versions + 1):
        story.step(phase)
        if i % every == 0 or i == versions:
            story.write(phase, whole=True)
    return story


def _kept(story: Story, keep: Keep, named: dict[int, str] | None = None, user: str = "") -> list[int]:
    why = why_kept(story.present, story.steps, keep, named or {}, lambda path: path if path == user else None)
    return [record.policy_version for record, reason in zip(story.present, why, strict=True) if reason]


def test_the_newest_and_the_first_of_each_row() -> None:
    """Version 0 and the last so many, and of every so many versions the first that was written."""
    story = _train(30, 4)
    assert [record.policy_version for record in story.present] == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    assert _kept(story, Keep(1)) == [0, 30]
    assert _kept(story, Keep(3)) == [0, 24, 28, 30]
    assert _kept(story, Keep(1, 10)) == [0, 12, 20, 30]
    assert _kept(story, Keep(1, 1)) == [record.policy_version for record in story.present]


def test_what_is_named_stays() -> None:
    """References and bases of steps to be replayed, versions on their way, folders that are served."""
    story = _train(12, 2)
    story.steps[9] = replace(story.steps[9], names={4: "the reference"})
    story.steps[5] = replace(story.steps[5], names={2: "the base of the low-rank factors"})
    assert _kept(story, Keep(1)) == [0, 2, 4, 12]
    assert _kept(story, Keep(1), {8: "an engine"}) == [0, 2, 4, 8, 12]
    assert _kept(story, Keep(1), user="c/10/5") == [0, 2, 4, 10, 12]


def test_what_a_retired_step_names_may_go() -> None:
    """Nothing replays it; but the checkpoint after it is not made again any more, and stays."""
    story = _train(12, 2)
    story.steps[9] = replace(story.steps[9], names={4: "the reference"}, retired=True, again=False)
    assert _kept(story, Keep(1)) == [0, 10, 12]


def test_the_beginning_of_a_configuration_stays() -> None:
    """Its optimizer begins there: no step of it is replayed from before."""
    story = _train(6, 2)
    _train(6, 2, "q", story)
    assert _kept(story, Keep(1)) == [0, 6, 12]


def test_weights_alone_and_second_attempts() -> None:
    """Weights for engines go where nobody needs them; of a version with several the whole one stands."""
    story = _train(4)
    story.step("p")
    story.write("p", whole=False)
    story.step("p")
    story.write("p", whole=True)
    story.write("p", whole=False)
    story.step("p")
    story.write("p", whole=False)
    kept = why_kept(story.present, story.steps, Keep(2), {}, _nobody)
    assert [bool(why) for why in kept] == [True, False, False, False, True, False, True, False, True]
    assert [record.optimizer_digest for record in story.present][4:] == ["o", None, "o", None, None]


def test_a_number_that_training_went_on_under() -> None:
    """It goes only while the version that training went back to stays: its weights are the same."""
    story = _train(4, 2)
    steps = len(story.steps)
    story.version = 7
    story.present.append(replace(story.present[-1], policy_version=7, path="c/7"))
    for number in (steps, steps + 1):
        story.steps.append(StepTaken(number, "p", story.version, story.version + 1, {}))
        story.version += 1
        story.write("p", whole=True)
    assert _kept(story, Keep(1, 4)) == [0, 4, 8, 9]
    assert _kept(story, Keep(1)) == [0, 7, 9]
    story.present[3] = replace(story.present[3], weights_digest="other")
    assert _kept(story, Keep(1, 4)) == [0, 4, 7, 8, 9]


@st.composite
def _stories(draw: st.DrawFn) -> tuple[Story, Keep, dict[int, str]]:
    """Phases of steps, some of which cannot be run again, with checkpoints here and there."""
    story = Story()
    story.write(None, whole=False)
    for phase in ("p", "q", "r")[: draw(st.integers(1, 3))]:
        for _ in range(draw(st.integers(1, 8))):
            held = [record.policy_version for record in story.present]
            names = {draw(st.sampled_from(held)): "the reference"} if draw(st.booleans()) else {}
            retired = draw(st.integers(0, 9)) == 0
            story.step(phase, names, retired=retired, again=not retired and draw(st.integers(0, 9)) > 0)
            for _ in range(draw(st.integers(0, 2))):
                story.write(phase, whole=draw(st.booleans()))
        story.write(phase, whole=True)
    keep = Keep(draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 6)))
    return story, keep, {draw(st.integers(0, story.version)): "an engine"}


def _from(present: list[CheckpointWritten], steps: list[StepTaken], step: StepTaken) -> int | None:
    """The version that a replay of a step starts from; None: it cannot be replayed.

    As `History.base_for` finds it, said once more: the newest whole one of its phase, or its beginning.
    """
    phase = [other for other in steps if other.phase == step.phase]
    usable = {
        c.policy_version
        for c in present
        if c.policy_version <= step.began
        and ((c.phase == step.phase and c.optimizer_digest is not None) or c.policy_version == phase[0].began)
    }
    if not usable:
        return None
    base = max(usable)
    between = [other for other in phase if base <= other.began < step.began]
    return base if all(other.again for other in between) and step.again else None


@given(_stories())
def test_what_stays_makes_all_again(made: tuple[Story, Keep, dict[int, str]]) -> None:
    """Each step that could be replayed still can, with its reference; the rule said again removes nothing."""
    story, keep, named = made
    why = why_kept(story.present, story.steps, keep, named, _nobody)
    stays = [record for record, reason in zip(story.present, why, strict=True) if reason]
    versions = {record.policy_version for record in stays}
    for step in story.steps:
        if _from(story.present, story.steps, step) is not None:
            assert _from(stays, story.steps, step) is not None, step
        if not step.retired:
            assert step.names.keys() <= versions
    assert {0, story.version} <= versions
    assert {v for v in named if any(c.policy_version == v for c in story.present)} <= versions
    whole = sorted({c.policy_version for c in story.present if c.optimizer_digest is not None})
    assert set(whole[-keep.last :]) <= versions
    assert all(why_kept(stays, story.steps, keep, named, _nobody))


@given(_stories(), st.data())
def test_a_removal_that_ends_in_the_middle(
    made: tuple[Story, Keep, dict[int, str]], data: st.DataObject
) -> None:
    """Whichever of them went, the rule lets the same others go."""
    story, keep, named = made
    why = why_kept(story.present, story.steps, keep, named, _nobody)
    goes = [record for record, reason in zip(story.present, why, strict=True) if not reason]
    went = set(data.draw(st.lists(st.sampled_from(goes), unique=True))) if goes else set()
    left = [record for record in story.present if record not in went]
    again = why_kept(left, story.steps, keep, named, _nobody)
    assert [r for r, reason in zip(left, again, strict=True) if not reason] == [
        r for r in goes if r not in went
    ]
