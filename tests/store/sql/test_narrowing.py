"""A query reads of `turns` what it names, and has the rows that it has of the whole view."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest

from rollbook import store as rb
from rollbook.store import Event
from rollbook.store.sql.narrowing import Narrowed, narrowed
from rollbook.store.sql.sandbox import Connection

IN_TWO = [
    "select * from turns limit 3",
    "FROM Turns LIMIT 3;",
    "select content, 'é' from turns as \"a \"\"t\"\" b\" where 'é' = 'é' limit 4 -- few",
    "select turn_id, left(content, 3), logprobs[1], reply ->> '$.role' from turns limit 2",
    "select * from turns order by requested desc, turn_id limit 5",
    "select * exclude (request) from turns where status = 'completed' order by turn_id limit 4",
    "select * from turns where trajectory_id in (select max(trajectory_id) from trajectories) limit 9",
    "select * from turns where trajectory = 'no such name'",
    "select turn_id, content from turns where reward is null and trajectory like 'a%' order by turn_id",
    "select count(*), max(content) from turns where status = 'completed'",
    "select content, row_number() over (order by turn_id) from turns where latency_ms > 0 order by turn_id",
    "select unnest(logprobs) as p from turns where policy = 'actor' order by p limit 3",
    "select content from turns where policy = 'actor' order by 1 limit 3 offset 1",
    "with a as (select 't1' id) select * from turns where trajectory_id in (select id from a) order by seq",
    "select * from turns order by turn_id limit 1000",
    "select * from turns limit 0",
]
WHOLE = [
    "select count(*) from turns limit 1",
    "select count(content) over (), content from turns limit 3",
    "select unnest(logprobs) from turns limit 3",
    "select content from turns using sample 100% limit 3",
    "select turn_id, reward from turns order by reward desc nulls last, turn_id limit 4",
    "select distinct content from turns order by content limit 3",
    "select content, count(*) from turns group by all order by all limit 3",
    "select content from turns order by 1 limit 3",
    "select -reward as reward, turn_id from turns order by reward, turn_id limit 3",
    "select * from turns order by turn_id limit 3 offset 2",
    "select content from turns order by turn_id limit 30%",
    "select content from turns order by turn_id limit 1001",
    "select content from turns where random() < 2 order by turn_id limit 3",
    "select content from turns qualify row_number() over (order by turn_id) < 3 limit 3",
    "select content from turns join trajectories using (trajectory_id) order by turn_id limit 3",
    "select content from turns union all select 'x' order by 1 limit 3",
    "select (select max(content) from turns) from turns limit 3",
    "select content from turns where content > '' order by turn_id limit 3",
    "select * from turns",
    "select max(content) from turns",
]


SCALARS = [
    "select turn_id, latency_ms from turns order by turn_id limit 3",
    "select t.status, count(*) from turns t group by all order by 1",
    "select status from (select status from main.turns where delivered is not null) order by 1",
    "with late as (select turn_id from turns) select count(*) from late join turns using (turn_id)",
    'select count(*) from turns a, turns as "b" where a.turn_id = b.parent_turn_id',
    "explain select turn_id from turns",
]
"""Queries that need no join."""
EVERYTHING = [
    "select #1 from turns order by all",
    "select turns from turns order by turn_id limit 2",
    "select t from turns t order by t.turn_id limit 2",
    "select columns('rew.*') from turns order by all",
    "select t.* from trajectories natural join turns t order by all",
    "describe turns",
]
"""Queries that may name any column."""
NOT_OURS = [
    "with turns as (select 1 as content) select content from turns limit 3",
    "select r.a from turns as r(a, b) order by 1",
    "select 'turns'",
    "select content from turns order by turn_id limit 3; select 1",
]
"""Queries that are left as they are."""


@pytest.fixture(scope="module")
def connection(
    tmp_path_factory: pytest.TempPathFactory, story: dict[str, list[Event]]
) -> Iterator[Connection]:
    """To a store of the story, with all views: tests only read."""
    log = rb.open(tmp_path_factory.mktemp("narrowing") / "store", create=True)
    for lane, events in story.items():
        with log.writer(lane) as writer:
            writer.append(events).result(30)
    with rb.connect(log.path) as opened:
        assert opened.raw is not None
        yield opened


def _narrowed(connection: Connection, query: str) -> Narrowed | None:
    return narrowed(connection.raw, query, lambda sql: sql)


def _same_rows(connection: Connection, query: str) -> None:
    rows, whole = connection.execute(query).fetchall(), connection.raw.execute(query).fetchall()
    assert sorted(rows, key=repr) == sorted(whole, key=repr)


@pytest.mark.parametrize("query", IN_TWO)
def test_few_turns(connection: Connection, query: str) -> None:
    """As many as there are of the whole view; in their order, where one is asked for."""
    narrow = _narrowed(connection, query)
    assert narrow is not None
    assert narrow.which is not None
    rows = connection.execute(query).fetchall()
    lazily = connection.sql(query).fetchall()
    whole = connection.raw.execute(query).fetchall()
    every = connection.raw.execute(query.lower().partition("limit")[0]).fetchall()
    assert len(rows) == len(lazily) == len(whole)
    assert all(row in every for row in rows)
    assert rows == lazily == whole or " order by " not in query


@pytest.mark.parametrize("query", WHOLE)
def test_a_query_in_one(connection: Connection, query: str) -> None:
    """Which turns it is about cannot be asked for less."""
    narrow = _narrowed(connection, query)
    assert narrow is not None
    assert narrow.which is None
    _same_rows(connection, query)


@pytest.mark.parametrize("query", SCALARS)
def test_a_query_of_scalars(connection: Connection, query: str) -> None:
    """It joins nothing."""
    narrow = _narrowed(connection, query)
    assert narrow is not None
    assert (narrow.joined, narrow.which) == (frozenset(), None)
    assert "LEFT JOIN" not in narrow.whole()
    if "explain" not in query:
        _same_rows(connection, query)


def test_each_column_brings_its_own_join(connection: Connection) -> None:
    """The name, the reward and the details, each alone."""
    brought = {
        "trajectory": "internal.trajectory_parts",
        "reward": "internal.rewards",
        "content": "turn_events",
    }
    for column, relation in brought.items():
        narrow = _narrowed(connection, f"select {column} from turns")
        assert narrow is not None
        assert (
            narrow.whole().count("LEFT JOIN") - narrow.whole().count("LEFT JOIN (SELECT trajectory_id, sup")
            == 1
        )
        assert relation in narrow.whole()


@pytest.mark.parametrize("query", EVERYTHING)
def test_a_query_that_may_name_any_column(connection: Connection, query: str) -> None:
    """It has all of them."""
    narrow = _narrowed(connection, query)
    assert narrow is None or {"trajectory", "reward", "content"} <= narrow.joined
    _same_rows(connection, query)


@pytest.mark.parametrize("query", NOT_OURS)
def test_another_query(connection: Connection, query: str) -> None:
    """It is run as it stands."""
    assert _narrowed(connection, query) is None
    _same_rows(connection, query)


def test_what_is_wrong_is_told_of_the_query_as_it_stands(connection: Connection) -> None:
    """Its own words, not those of half of it."""
    for query in (
        "select * from turns where nothing = 1 limit 3",
        "select content as c from turns where d limit 3",
    ):
        with pytest.raises(duckdb.BinderException) as ours:
            connection.execute(query)
        with pytest.raises(duckdb.BinderException) as plain:
            connection.raw.execute(query)
        assert str(ours.value) == str(plain.value)


def test_parameters_are_those_of_the_whole(connection: Connection) -> None:
    """A query with some is asked as it stands."""
    query = "select turn_id, content from turns where prompt_length >= $1 order by turn_id limit 2"
    rows = connection.execute(query, [1]).fetchall()
    assert rows == connection.raw.execute(query, [1]).fetchall()
    assert len(rows) == 2
