"""How a host is named."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from rollbook.store.hosts.host import host_name


def test_hosts_of_one_machine_name_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two with one name in a store each would take the other's lanes for its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Rollouts_of_team-7.example.org")
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    first, second = (host_name(tmp_path / str(number)) for number in range(2))
    assert re.fullmatch(r"rollouts-of-tea-[0-9a-f]{8}", first)
    assert first.partition("-tea-")[0] == second.partition("-tea-")[0]
    assert first != second
    assert host_name(tmp_path / "0") == first
