"""Views of what agents did: trajectories, turns, tokens, rewards. Pure; see `store.sql.views`."""

from __future__ import annotations

import re
from collections.abc import Collection

from rollbook.store.sql import columns
from rollbook.store.sql.columns import View, json, text

_NAMES = """(SELECT trajectory_id, any_value(trajectory) AS trajectory
               FROM internal.trajectory_parts GROUP BY trajectory_id)"""
"""Grouped, so that DuckDB knows there is one row per key and drops the join from queries that need no
name."""

TOKEN_TEXT = "token_text"
"""SQL function (run, token id) -> text of the token. It is called only by queries that select the column."""

EVENTS = View(
    "events",
    "Every event of the log, one row each, as stored; `extra` holds the kind's rarer fields as JSON.",
    "SELECT * FROM internal.turn_events UNION ALL SELECT * FROM internal.mark_events",
    columns.EVENTS,
)

RUNS = View(
    "runs",
    "A command that began to write events of a run, with its configuration.",
    f"""
    SELECT run, time AS opened, lane, {text("command")} AS command, {text("model")} AS model,
           {json("config")} AS config, {json("environment")} AS environment
    FROM internal.mark_events WHERE kind = 'run.opened'
    """,
    columns.RUNS,
)

BODIES = View(
    "bodies",
    'A large part of a request, stored once a segment: what `{"$body": digest}` in a request stands for.',
    f"""
    SELECT {text("digest")} AS digest, any_value({json("body")}) AS body, count(*) AS copies,
           CAST(any_value(length({text("body")})) AS BIGINT) AS length
    FROM internal.mark_events WHERE kind = 'body.stored' GROUP BY digest
    """,
    columns.BODIES,
)

_REWARDS = """(
    SELECT r.run, r.trajectory_id, r.turn_id, r.reward, r.source, r.event_id, r.time, r.lane, r.seq,
           s.supersedes IS NOT NULL AS superseded, r.key
    FROM internal.rewards r
    LEFT JOIN (SELECT trajectory_id, supersedes FROM internal.rewards
               WHERE supersedes IS NOT NULL GROUP BY ALL) s
      ON s.trajectory_id = r.trajectory_id AND s.supersedes = r.event_id)"""

REWARDS = View(
    "rewards",
    "Every reward ever assigned, to a trajectory (turn_id is null) or to a turn; a superseded one stays.",
    f"""
    SELECT r.run, r.trajectory_id, o.trajectory, r.turn_id, r.reward, r.source, r.event_id, r.time, r.lane,
           r.seq, r.superseded, r.key
    FROM {_REWARDS} r LEFT JOIN {_NAMES} o USING (trajectory_id)
    """,
    columns.REWARDS,
)


PREFERENCES = View(
    "preferences",
    "Two trajectories of which one was preferred.",
    f"""
    SELECT p.run, p.trajectory_id, p.rejected_trajectory_id, c.trajectory, r.trajectory AS rejected, p.margin,
           p.source, p.event_id, p.time, p.lane, p.key
    FROM (SELECT run, trajectory_id, {text("rejected_trajectory_id")} AS rejected_trajectory_id,
                 CAST({text("margin")} AS DOUBLE) AS margin, {text("source")} AS source, event_id, time, lane,
                 {text("by")} AS key
          FROM internal.mark_events WHERE kind = 'preference.added') p
    LEFT JOIN {_NAMES} c ON c.trajectory_id = p.trajectory_id
    LEFT JOIN {_NAMES} r ON r.trajectory_id = p.rejected_trajectory_id
    """,
    columns.PREFERENCES,
)


def _in_force(which: str) -> str:
    """The agent's reward that is not superseded, one row per trajectory and turn (null: of the whole
    trajectory)."""
    return f"""(SELECT trajectory_id, turn_id, arg_max(reward, (lane, seq)) AS reward
               FROM {_REWARDS} WHERE {which} AND NOT superseded AND source = 'agent'
               GROUP BY trajectory_id, turn_id)"""


def _first_asked(among: str) -> str:
    """For each turn stored as a sibling, the request of the first turn, which holds the shared fields."""
    return f"""(
        SELECT s.trajectory_id, s.turn_id, f.extra AS first_asked
        FROM (SELECT trajectory_id, turn_id, json_extract_string(extra, '$.sibling_of') AS first_turn_id
              FROM internal.turn_events
              WHERE kind = 'turn.requested' AND contains(extra, '"sibling_of":"') AND {among}) s
        JOIN (SELECT trajectory_id, turn_id, extra FROM internal.turn_events
              WHERE kind = 'turn.requested' AND {among}) f
          ON f.trajectory_id = s.trajectory_id AND f.turn_id = s.first_turn_id)"""


def _details(among: str) -> str:
    """What the fat events hold of each turn."""
    return f"""(
      SELECT trajectory_id, turn_id, any_value(version_spans) AS version_spans,
             any_value(prompt_ids) AS prompt_ids, any_value(completion_ids) AS completion_ids,
             any_value(logprobs) AS logprobs, any_value(asked) AS asked,
             any_value(first_asked) AS first_asked, any_value(answered) AS answered
      FROM (
        SELECT trajectory_id, turn_id, version_spans, prompt_ids, completion_ids, logprobs,
               CASE WHEN kind = 'turn.requested' THEN extra END AS asked,
               CASE WHEN kind = 'turn.completed' THEN extra END AS answered
        FROM internal.turn_events WHERE {among}
        UNION ALL BY NAME
        SELECT trajectory_id, turn_id, prompt_ids FROM internal.mark_events
        WHERE kind = 'turn.failed' AND {among}
        UNION ALL BY NAME
        SELECT * FROM {_first_asked(among)})
      GROUP BY trajectory_id, turn_id)"""


_TURN_COLUMNS = {
    "run": "s.run",
    "trajectory": "n.trajectory",
    "trajectory_id": "s.trajectory_id",
    "turn_id": "s.turn_id",
    "parent_turn_id": "s.parent_turn_id",
    "root_reason": "s.root_reason",
    "status": """CASE WHEN s.completed IS NOT NULL THEN 'completed'
                WHEN s.error IS NOT NULL THEN 'failed' ELSE 'running' END""",
    "delivered": "s.delivered",
    "policy": "s.policy",
    "policy_version": "s.policy_version",
    "version_spans": "d.version_spans",
    "prompt_delta": "d.prompt_ids",
    "prompt_length": "s.prompt_length",
    "completion_ids": "d.completion_ids",
    "logprobs": "d.logprobs",
    "completion_length": "s.completion_length",
    "finish_reason": "s.finish_reason",
    "content": "json_extract_string(d.answered, '$.reply.content')",
    "reply": "json_extract(d.answered, '$.reply')",
    "new_messages": "json_extract(d.asked, '$.messages')",
    "request": "json_extract(coalesce(d.first_asked, d.asked), '$.request')",
    "requested_model": "s.requested_model",
    "sampling": """CASE WHEN d.first_asked IS NULL THEN json_extract(d.asked, '$.sampling')
                ELSE json_merge_patch(json_extract(d.first_asked, '$.sampling'),
                                      json_extract(d.asked, '$.sampling')) END""",
    "reward": "w.reward",
    "requested": "s.requested",
    "completed": "s.completed",
    "latency_ms": "date_diff('microsecond', s.requested, s.completed) / 1000.0",
    "lane": "s.lane",
    "seq": "s.seq",
    "error": "s.error",
    "flags": "json_extract(d.answered, '$.flags')",
    "timings": "json_extract(d.answered, '$.timings')",
    "min_version": "s.min_version",
    "max_version": "s.max_version",
    "min_logprob": "s.min_logprob",
    "sum_logprob": "s.sum_logprob",
    "endpoint": """coalesce(json_extract_string(coalesce(d.first_asked, d.asked), '$.wire.endpoint'),
                    '/v1/chat/completions')""",
    "choice": "coalesce(CAST(json_extract_string(d.asked, '$.wire.choice') AS BIGINT), 0)",
    "retry": """coalesce(CAST(json_extract_string(coalesce(d.first_asked, d.asked), '$.wire.retry')
                              AS BIGINT), 0)""",
    "fidelity": """CASE WHEN s.completed IS NULL THEN NULL WHEN s.erased THEN 'erased'
                WHEN s.completion_length > 0 THEN 'exact' ELSE 'text_only' END""",
    "key": "json_extract_string(coalesce(d.first_asked, d.asked), '$.wire.key')",
    "upstream_prompt_tokens": "s.upstream_prompt_tokens",
    "upstream_completion_tokens": "s.upstream_completion_tokens",
    "upstream_total_tokens": "s.upstream_total_tokens",
    "repeats": "json_extract_string(d.asked, '$.wire.repeats')",
}
"""Column -> its SQL, over a turn's scalars `s`, and what is joined to them: `n`, the trajectory's name; `w`,
the reward in force; and `d`, what the fat events hold."""

NAMED, REWARDED, DETAILED = (
    frozenset(name for name, sql in _TURN_COLUMNS.items() if re.search(rf"\b{alias}\.", sql))
    for alias in "nwd"
)
"""The columns that each of the joins brings."""


def turns_query(joined: Collection[str], among: str = "true", only: str = "true") -> str:
    """The SQL of `turns`.

    Args:
        joined: the columns that joins bring, of those that are wanted: no other such column is there, and no
            join that brings none.
        among: a condition on the `trajectory_id` of what is joined; only: one on the turns' scalars.
    """
    every = NAMED | REWARDED | DETAILED
    selected = {name: sql for name, sql in _TURN_COLUMNS.items() if name in joined or name not in every}
    turn = "{0}.trajectory_id = s.trajectory_id AND {0}.turn_id = s.turn_id"
    rewards = _in_force(f"turn_id IS NOT NULL AND {among}")
    joins = [
        (NAMED, f"{_NAMES} n ON n.trajectory_id = s.trajectory_id"),
        (REWARDED, f"{rewards} w ON {turn.format('w')}"),
        (DETAILED, f"{_details(among)} d ON {turn.format('d')}"),
    ]
    return f"""
    SELECT {", ".join(f"{sql} AS {name}" for name, sql in selected.items())}
    FROM internal.turn_scalars s
    {" ".join(f"LEFT JOIN {join}" for brings, join in joins if brings & set(joined))}
    WHERE {only}
    """


TURNS = View(
    "turns",
    "One model call: what was asked, the exact tokens and logprobs, and which policy version made them.",
    turns_query(NAMED | REWARDED | DETAILED),
    columns.TURNS,
)

TRAJECTORIES = View(
    "trajectories",
    "One agent run: its group, task, split, outcome, turns and the policy versions that made it.",
    f"""
    SELECT o.run, o.trajectory, o.trajectory_id, o."group", o.task, o.split, CAST(o.labels AS JSON) AS labels,
           coalesce(o.status, 'open') AS status, o.success, r.reward, o.turns, o.min_version, o.max_version,
           o.opened, o.finished, o.lane,
           CASE WHEN o.turns = 0 THEN NULL WHEN o.erased_turns = o.turns THEN 'erased'
                WHEN o.exact_turns = o.turns THEN 'exact'
                WHEN o.exact_turns + o.erased_turns = 0 THEN 'text_only' ELSE 'mixed' END AS fidelity,
           CAST(o.origin AS JSON) AS origin
    FROM internal.trajectory_scalars o
    LEFT JOIN (SELECT trajectory_id, any_value(reward) AS reward
               FROM {_in_force("turn_id IS NULL")} GROUP BY trajectory_id) r
      ON r.trajectory_id = o.trajectory_id
    """,
    columns.TRAJECTORIES,
)

_LAUNCHES = f"""(
      SELECT run, trajectory_id, {text("launch_id")} AS launch_id,
             arg_min(event, event_id) FILTER (kind = 'launch.started') AS started,
             arg_min(event, event_id) FILTER (kind = 'launch.ended') AS ended,
             CAST(coalesce(sum(json_array_length({json("processes")})), 0) AS BIGINT) AS leaked
      FROM (SELECT *, {{'extra': extra, 'time': time, 'lane': lane, 'seq': seq}} AS event
            FROM internal.mark_events WHERE kind IN ('launch.started', 'launch.ended', 'launch.leaked'))
      GROUP BY ALL HAVING started IS NOT NULL)"""
"""The launches, in one pass over the events. Two proxies may have been told of the same start or end at the
same time: then the smallest event id counts."""

_NAMES_AND_GROUPS = """(
      SELECT trajectory_id, any_value(trajectory) AS trajectory, any_value("group") AS "group"
      FROM internal.trajectory_parts GROUP BY trajectory_id)"""

LAUNCHES = View(
    "launches",
    "An agent program that was started for a trajectory: what it was, how it ended, what it left behind.",
    f"""
    SELECT l.run, o.trajectory, l.trajectory_id, l.launch_id, {text("rollout", "started")} AS rollout,
           o."group", CAST({text("place.epoch", "started")} AS BIGINT) AS epoch,
           {text("place.task", "started")} AS task,
           CAST({text("place.sample", "started")} AS BIGINT) AS sample,
           CAST({text("attempt", "started")} AS BIGINT) AS attempt,
           CAST({text("places", "started")} AS BIGINT) AS places,
           {text("launcher", "started")} AS launcher, {json("isolation", "started")} AS isolation,
           {text("owner", "started")} AS owner, coalesce({text("status", "ended")}, 'running') AS status,
           {text("why", "ended")} AS why, CAST({text("proxy_away", "ended")} AS BOOLEAN) AS proxy_away,
           CAST({text("exit_code", "ended")} AS BIGINT) AS exit_code,
           CAST({text("signal", "ended")} AS BIGINT) AS signal,
           l.started.time AS started, l.ended.time AS ended,
           CAST({text("seconds", "ended")} AS DOUBLE) AS seconds,
           CAST({text("cpu_s", "ended")} AS DOUBLE) AS cpu_s,
           CAST({text("peak_rss_mb", "ended")} AS DOUBLE) AS peak_rss_mb,
           {json("output", "ended")} AS output, {json("scoring", "ended")} AS scoring, l.leaked,
           l.started.lane AS lane, l.started.seq AS seq
    FROM {_LAUNCHES} l LEFT JOIN {_NAMES_AND_GROUPS} o USING (trajectory_id)
    """,
    columns.LAUNCHES,
)

TOKENS = View(
    "tokens",
    "One sampled token: its place in the turn's completion, its logprob and policy version.",
    f"SELECT *, {TOKEN_TEXT}(run, token_id) AS text FROM internal.tokens",
    columns.TOKENS,
)

OUTLIERS = View(
    "outliers",
    "A sampled token whose logprob is below -8 (one in 2,980): view tokens, but ready-made when sealed.",
    f"SELECT *, {TOKEN_TEXT}(run, token_id) AS text FROM internal.outliers",
    columns.TOKENS,
)

PATHS = View(
    "paths",
    "A root-to-leaf path of completed turns, which is what a sample is made of; named by its leaf.",
    """
    WITH RECURSIVE done AS (
      SELECT * FROM internal.turn_scalars WHERE completed IS NOT NULL
    ), walk AS (
      SELECT run, trajectory_id, turn_id, turn_id AS node, parent_turn_id, prompt_length,
             completion_length, completion_length AS sampled, min_version, max_version, 1 AS turns
      FROM done d WHERE NOT EXISTS (
        SELECT 1 FROM done c WHERE c.trajectory_id = d.trajectory_id AND c.parent_turn_id = d.turn_id)
      UNION ALL
      SELECT w.run, w.trajectory_id, w.turn_id, p.turn_id, p.parent_turn_id, w.prompt_length,
             w.completion_length, w.sampled + p.completion_length,
             least(w.min_version, p.min_version), greatest(w.max_version, p.max_version), w.turns + 1
      FROM walk w JOIN done p ON p.trajectory_id = w.trajectory_id AND p.turn_id = w.parent_turn_id
    )
    SELECT run, trajectory_id, turn_id, node AS root_turn_id, CAST(turns AS BIGINT) AS turns,
           prompt_length + completion_length AS length, CAST(sampled AS BIGINT) AS sampled,
           min_version, max_version
    FROM walk WHERE parent_turn_id IS NULL
    """,
    columns.PATHS,
)
