"""Clusters of proxies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.proxies.served import Served
from tests.fakes.proxies.several import Cluster


@pytest.fixture(scope="module")
def words(text_model: Callable[[str], Path], script: Path) -> list[str]:
    """What a scripted server takes."""
    return ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]


@pytest.fixture
def cluster(serve: Callable[..., Served], words: list[str], tmp_path: Path) -> Callable[..., Cluster]:
    """Starts so many proxies, which have seen each other, over one folder."""
    return _starting(serve, words, tmp_path, hosts=False)


@pytest.fixture(params=["one folder", "hosts"])
def either_cluster(
    serve: Callable[..., Served],
    words: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Cluster]:
    """The same: over one folder, or over one each, with a medium between them."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    return _starting(serve, words, tmp_path, hosts=request.param == "hosts")


def _starting(
    serve: Callable[..., Served], words: list[str], tmp_path: Path, *, hosts: bool
) -> Callable[..., Cluster]:

    def make(
        count: int = 3,
        *more: str,
        given: list[str] | None = None,
        seen_by: dict[str, str] | None = None,
    ) -> Cluster:
        proxies = Cluster(serve, tmp_path, [*(words if given is None else given), *more], count, hosts=hosts)
        proxies.headers = seen_by or {}
        for number in range(count):
            proxies.start(number)
        for number in range(count):
            proxies.until_holds(number, *([seat] for seat in range(count)))
        return proxies

    return make
