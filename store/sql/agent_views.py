"""Views of what agents did: trajectories, turns, tokens, rewards. Pure; see `store.sql.views`."""

from __future__ import annotations

from rollbook.store.sql import columns
from rollbook.store.sql.view import View, json, text

_NAMES = f"""(SELECT trajectory_id, any_value({text("name")}) AS trajectory FROM _mark_events
               WHERE kind = 'trajectory.opened' GROUP BY trajectory_id)"""
"""Grouped, so that DuckDB sees it is one row each and leaves the join out where no name is asked for."""

EVENTS = View(
    "events",
    "Every event of the log, one row each, as stored; `extra` holds the kind's rarer fields as JSON.",
    "SELECT * FROM _turn_events UNION ALL SELECT * FROM _mark_events",
    columns.EVENTS,
)

RUNS = View(
    "runs",
    "A command that began to write events of a run, with its configuration.",
    f"""
    SELECT run, time AS opened, lane, {text("command")} AS command, {text("model")} AS model,
           {json("config")} AS config, {json("environment")} AS environment
    FROM _mark_events WHERE kind = 'run.opened'
    """,
    columns.RUNS,
)

BODIES = View(
    "bodies",
    'A large part of a request, stored once a segment: what `{"$body": digest}` in a request stands for.',
    f"""
    SELECT {text("digest")} AS digest, any_value({json("body")}) AS body, count(*) AS copies,
           CAST(any_value(length({text("body")})) AS BIGINT) AS length
    FROM _mark_events WHERE kind = 'body.stored' GROUP BY digest
    """,
    columns.BODIES,
)

REWARDS = View(
    "rewards",
    "Every reward ever assigned, to a trajectory (turn_id is null) or to a turn; a superseded one stays.",
    f"""
    SELECT r.run, r.trajectory_id, o.trajectory, r.turn_id, r.reward, {text("source", "r")} AS source,
           r.event_id, r.time, r.lane, r.seq, r.event_id IN (
             SELECT {text("supersedes")} FROM _mark_events
             WHERE kind = 'reward.assigned' AND {text("supersedes")} IS NOT NULL
           ) AS superseded
    FROM _mark_events r LEFT JOIN {_NAMES} o USING (trajectory_id)
    WHERE r.kind = 'reward.assigned'
    """,
    columns.REWARDS,
)


def _in_force(key: str, which: str) -> str:
    """The agent's reward in force, one row per `key`."""
    return f"""(SELECT {key}, arg_max(reward, (lane, seq)) AS reward FROM rewards
               WHERE {which} AND NOT superseded AND source = 'agent' GROUP BY {key})"""


TURNS = View(
    "turns",
    "One model call: what was asked, the exact tokens and logprobs, and which policy version made them.",
    f"""
    SELECT s.run, o.trajectory, s.trajectory_id, s.turn_id, s.parent_turn_id, s.root_reason,
           CASE WHEN s.completed IS NOT NULL THEN 'completed'
                WHEN s.error IS NOT NULL THEN 'failed' ELSE 'running' END AS status,
           s.delivered, s.policy, s.policy_version, c.version_spans,
           c.prompt_ids AS prompt_delta, s.prompt_length,
           c.completion_ids, c.logprobs, s.completion_length, s.finish_reason,
           json_extract_string(c.answered, '$.reply.content') AS content,
           json_extract(c.answered, '$.reply') AS reply,
           json_extract(c.asked, '$.messages') AS new_messages,
           json_extract(c.asked, '$.request') AS request, s.requested_model,
           json_extract(c.asked, '$.sampling') AS sampling,
           r.reward, s.requested, s.completed,
           date_diff('microsecond', s.requested, s.completed) / 1000.0 AS latency_ms, s.lane, s.seq,
           s.error, json_extract(c.answered, '$.flags') AS flags,
           json_extract(c.answered, '$.timings') AS timings,
           s.min_version, s.max_version, s.min_logprob, s.sum_logprob
    FROM _turn_scalars s
    LEFT JOIN {_NAMES} o USING (trajectory_id)
    LEFT JOIN {_in_force("turn_id", "turn_id IS NOT NULL")} r ON r.turn_id = s.turn_id
    LEFT JOIN (SELECT trajectory_id, turn_id, any_value(version_spans) AS version_spans,
                      any_value(prompt_ids) AS prompt_ids, any_value(completion_ids) AS completion_ids,
                      any_value(logprobs) AS logprobs,
                      any_value(CASE WHEN kind = 'turn.requested' THEN extra END) AS asked,
                      any_value(CASE WHEN kind = 'turn.completed' THEN extra END) AS answered
               FROM _turn_events GROUP BY trajectory_id, turn_id) c
      ON c.trajectory_id = s.trajectory_id AND c.turn_id = s.turn_id
    """,
    columns.TURNS,
)

TRAJECTORIES = View(
    "trajectories",
    "One agent run: its group, task, split, outcome, turns and the policy versions that made it.",
    f"""
    SELECT o.run, {text("name", "o")} AS trajectory, o.trajectory_id,
           {text("group", "o")} AS "group",
           {text("task", "o")} AS task,
           {text("split", "o")} AS split,
           {json("labels", "o")} AS labels,
           coalesce(f.status, 'open') AS status, CAST(f.success AS BOOLEAN) AS success,
           r.reward, coalesce(t.turns, 0) AS turns, t.min_version, t.max_version,
           o.time AS opened, f.time AS finished, o.lane
    FROM _mark_events o
    LEFT JOIN (SELECT trajectory_id, any_value({text("status")}) AS status,
                      any_value({text("success")}) AS success, any_value(time) AS time
               FROM _mark_events WHERE kind = 'trajectory.finished' GROUP BY trajectory_id) f
      ON f.trajectory_id = o.trajectory_id
    LEFT JOIN {_in_force("trajectory_id", "turn_id IS NULL")} r ON r.trajectory_id = o.trajectory_id
    LEFT JOIN (SELECT trajectory_id, count(*) AS turns, min(min_version) AS min_version,
                      max(max_version) AS max_version
               FROM _turn_scalars WHERE completed IS NOT NULL GROUP BY trajectory_id) t
      ON t.trajectory_id = o.trajectory_id
    WHERE o.kind = 'trajectory.opened'
    """,
    columns.TRAJECTORIES,
)

TOKENS = View(
    "tokens",
    "One sampled token: its place in the turn's completion, its logprob and policy version.",
    "SELECT * FROM _tokens",
    columns.TOKENS,
)

OUTLIERS = View(
    "outliers",
    "A sampled token whose logprob is below -8 (one in 2,980): view tokens, but ready-made when sealed.",
    "SELECT * FROM _outliers",
    columns.TOKENS,
)

PATHS = View(
    "paths",
    "A root-to-leaf path of completed turns, which is what a sample is made of; named by its leaf.",
    """
    WITH RECURSIVE done AS (
      SELECT * FROM _turn_scalars WHERE completed IS NOT NULL
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
