"""Which trajectory a rollout becomes, with nothing but a header, a key, or nothing at all."""

from __future__ import annotations

from tests.clients.conftest import Proxy, Run
from tests.clients.programs.conversation import ANSWER

from rollbook.store.events import QUARANTINE
from rollbook.store.fold.trajectory import Trajectory


def _path(trajectory: Trajectory) -> list[str | None]:
    return [turn.requested.parent_turn_id for turn in trajectory.turns.values()]


def _one_path(trajectory: Trajectory) -> bool:
    return _path(trajectory) == [None, *list(trajectory.turns)[:-1]] and len(trajectory.turns) == 3


def test_a_session_id_names_the_trajectory(proxy: Proxy, run: Run) -> None:
    """A header that agents send by themselves names the trajectory."""
    name = proxy.new_name()
    output = run("openai_chat.py", at=proxy.url, OPENAI_CUSTOM_HEADERS=f"X-Session-ID: {name}")
    assert output.answer == ANSWER
    assert _one_path(proxy.trajectory(name))


def test_a_header_names_the_trajectory(proxy: Proxy, run: Run) -> None:
    """Anthropic's client also takes headers from its environment."""
    name = proxy.new_name()
    headers = f"X-Rollbook-Trajectory: {name}\nX-Rollbook-Group: g"
    output = run("anthropic_messages.py", at=proxy.url, ANTHROPIC_CUSTOM_HEADERS=headers)
    assert output.answer == ANSWER
    trajectory = proxy.trajectory(name)
    assert trajectory.opened.group == "g"
    assert _one_path(trajectory)


def test_an_api_key_names_the_trajectory(proxy: Proxy, run: Run) -> None:
    """A key that names the trajectory is sent wherever the library sends its key."""
    name = proxy.new_name()
    output = run("openai_responses.py", at=proxy.url, OPENAI_API_KEY=f"trajectory:{name}")
    assert output.answer == ANSWER
    assert _one_path(proxy.trajectory(name))


def test_unnamed_requests_are_quarantined_as_one_trajectory(proxy: Proxy, run: Run) -> None:
    """Requests of a rollout without a name are quarantined, all in one trajectory."""
    before = set(proxy.trajectories())
    output = run("openai_chat.py", at=proxy.url)
    assert output.answer == ANSWER
    [name] = set(proxy.trajectories()) - before
    trajectory = proxy.trajectory(name)
    assert trajectory.opened.split == QUARANTINE
    assert _one_path(trajectory)
