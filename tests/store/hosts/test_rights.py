"""A host whose credentials have the rights of docs/cluster.md, and no others."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from tests.fakes.storage.s3_server import KEYS
from tests.store.hosts.conftest import Hosts, rows

from rollbook.store.errors import MediumError
from rollbook.store.events import Event
from rollbook.store.hosts.join import join
from rollbook.store.medium.medium import lane_sequence, session_sequence, units_sequence
from rollbook.store.settings import MediumSettings
from rollbook.store.upkeep.sealer import Sealer

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage

Note = Callable[..., Event]
EVERYTHING = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
}


def _policy(root: Path, store_id: str) -> str:
    """The one on the page, of a machine that is called node-7."""
    page = (root / "docs" / "cluster.md").read_text()
    [policy] = re.findall(r"```json\n(\{\s+\"Version\".*?)```", page, re.DOTALL)
    for name, value in {
        "BUCKET": "rollouts",
        "PREFIX": "team",
        "STORE-ID": store_id,
        "HOST": "node-7",
    }.items():
        policy = policy.replace(name, value)
    return str(policy.replace("?", "."))  # moto takes what is not a * as a regular expression


@pytest.fixture
def keys(storage: ObjectStorage) -> Iterator[Callable[[str], dict[str, str]]]:
    """Makes users of the service, each with a policy; afterwards everybody may do everything again."""
    own = {name.lower(): value for name, value in KEYS.items()}
    iam = boto3.client("iam", endpoint_url=storage.endpoint, region_name="us-east-1", **own)

    def make(policy: str) -> dict[str, str]:
        name = f"user-{len(iam.list_users()['Users'])}"
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}

    yield make
    storage.check_credentials(False)


def test_a_host_of_agents_may_put_its_own_lanes_only(
    tmp_path: Path,
    storage: ObjectStorage,
    root: Path,
    keys: Callable[[str], dict[str, str]],
    note: Note,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joins, records, seals and follows with these rights; another host's lanes, units and sessions it can
    neither add to, nor end, nor remove."""
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    hosts = Hosts(tmp_path, MediumSettings(url=f"s3://{storage.BUCKET}/team", endpoint=storage.endpoint))
    everything, least = keys(json.dumps(EVERYTHING)), keys(_policy(root, hosts.store_id))
    storage.check_credentials(True)
    for name, value in everything.items():
        monkeypatch.setenv(name, value)
    a = hosts.open("a")
    with a.writer("serve") as writer:
        writer.append([note("first")]).result(10)
    Sealer(a).run_once(10)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    for name, value in least.items():
        monkeypatch.setenv(name, value)
    join(hosts.folder / "b", f"{hosts.settings.url}/{hosts.store_id}", hosts.settings)
    b = hosts.open("b")
    assert b.carrier.host.startswith("node-7-")
    assert rows(b) == rows(a)
    with b.claim("recording run r", "wait"), b.writer("serve") as second:
        second.append([note("second")]).result(10)
    Sealer(b).run_once(10)
    a.carrier.catch_up()
    b.carrier.catch_up()
    assert rows(a) == rows(b)
    assert len(rows(a)) == 2

    medium, other = b.carrier.medium, a.carrier.host
    taken = (
        lane_sequence(other, writer.lane),
        units_sequence(other),
        session_sequence(a.carrier.session.name),
    )
    for sequence in taken:
        newest = medium.last(sequence)
        assert newest is not None
        with pytest.raises(MediumError, match="credentials"):
            medium.put(sequence, newest + 1, b"not mine")
        assert medium.last(sequence) == newest
    with pytest.raises(MediumError):
        b.carrier.end_lanes(a.carrier.session.name)
    hosts.close()
