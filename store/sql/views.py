"""The SQL views over the log, as data: their names, meaning and definitions. Pure.

Each is a query over the table `log` (the log's columns, see `store.schema`, with `lane` first).
`docs/sql.md` is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.sql import columns
from rollbook.store.sql.columns import ViewColumn


@dataclass(frozen=True, slots=True)
class View:
    """A view: its name, one sentence on its rows, its SQL, and what each column means."""

    name: str
    doc: str
    sql: str
    columns: tuple[ViewColumn, ...]


def _text(field: str, of: str = "") -> str:
    return f"json_extract_string({of and of + '.'}extra, '$.{field}')"


def _json(field: str, of: str = "") -> str:
    return f"json_extract({of and of + '.'}extra, '$.{field}')"


EVENTS = View(
    "events",
    "Every event of the log, one row each, as stored; `extra` holds the kind's rarer fields as JSON.",
    "SELECT * FROM log",
    columns.EVENTS,
)

RUNS = View(
    "runs",
    "A command that began to write events of a run, with its configuration.",
    f"""
    SELECT run, time AS opened, lane, {_text("command")} AS command, {_text("model")} AS model,
           {_json("config")} AS config, {_json("environment")} AS environment
    FROM log WHERE kind = 'run.opened'
    """,
    columns.RUNS,
)

REWARDS = View(
    "rewards",
    "Every reward ever assigned, to a trajectory (turn_id is null) or to a turn; a superseded one stays.",
    f"""
    SELECT r.run, r.trajectory_id, o.trajectory, r.turn_id, r.reward, {_text("source")} AS source,
           r.event_id, r.time, r.lane, r.seq, r.event_id IN (
             SELECT {_text("supersedes")} FROM log
             WHERE kind = 'reward.assigned' AND {_text("supersedes")} IS NOT NULL
           ) AS superseded
    FROM log r
    LEFT JOIN (SELECT trajectory_id, {_text("name")} AS trajectory FROM log
               WHERE kind = 'trajectory.opened') o USING (trajectory_id)
    WHERE kind = 'reward.assigned'
    """,
    columns.REWARDS,
)

TURNS = View(
    "turns",
    "One model call: what was asked, the exact tokens and logprobs, and which policy version made them.",
    f"""
    SELECT q.run, o.trajectory, q.trajectory_id, q.turn_id,
           {_text("parent_turn_id", "q")} AS parent_turn_id,
           {_text("root_reason", "q")} AS root_reason,
           CASE WHEN c.turn_id IS NOT NULL THEN 'completed'
                WHEN f.turn_id IS NOT NULL THEN 'failed' ELSE 'running' END AS status,
           d.how AS delivered, c.policy, c.policy_version, c.version_spans,
           c.prompt_ids AS prompt_delta,
           CAST({_text("prompt_length", "c")} AS BIGINT) AS prompt_length,
           c.completion_ids, c.logprobs, len(c.completion_ids) AS completion_length,
           {_text("finish_reason", "c")} AS finish_reason,
           {_text("reply.content", "c")} AS content,
           {_json("reply", "c")} AS reply,
           {_json("messages", "q")} AS new_messages,
           {_json("request", "q")} AS request,
           {_text("requested_model", "q")} AS requested_model,
           {_json("sampling", "q")} AS sampling,
           r.reward, q.time AS requested, c.time AS completed,
           date_diff('microsecond', q.time, c.time) / 1000.0 AS latency_ms, q.lane, q.seq,
           f.error, {_json("flags", "c")} AS flags, {_json("timings", "c")} AS timings
    FROM log q
    LEFT JOIN (SELECT trajectory_id, {_text("name")} AS trajectory FROM log
               WHERE kind = 'trajectory.opened') o USING (trajectory_id)
    LEFT JOIN (SELECT * FROM log WHERE kind = 'turn.completed') c USING (turn_id)
    LEFT JOIN (SELECT turn_id, {_text("error")} AS error
               FROM log WHERE kind = 'turn.failed') f USING (turn_id)
    LEFT JOIN (SELECT turn_id, max({_text("how")}) AS how FROM log
               WHERE kind = 'turn.delivered' GROUP BY turn_id) d USING (turn_id)
    LEFT JOIN (SELECT turn_id, last(reward ORDER BY lane, seq) AS reward FROM rewards
               WHERE turn_id IS NOT NULL AND NOT superseded AND source = 'agent'
               GROUP BY turn_id) r USING (turn_id)
    WHERE q.kind = 'turn.requested'
    """,
    columns.TURNS,
)

TRAJECTORIES = View(
    "trajectories",
    "One agent run: its group, task, split, outcome, turns and the policy versions that made it.",
    f"""
    SELECT o.run, {_text("name", "o")} AS trajectory, o.trajectory_id,
           {_text("group", "o")} AS "group",
           {_text("task", "o")} AS task,
           {_text("split", "o")} AS split,
           {_json("labels", "o")} AS labels,
           coalesce({_text("status", "f")}, 'open') AS status,
           CAST({_text("success", "f")} AS BOOLEAN) AS success,
           r.reward, coalesce(t.turns, 0) AS turns, t.min_version, t.max_version,
           o.time AS opened, f.time AS finished, o.lane
    FROM log o
    LEFT JOIN (SELECT * FROM log WHERE kind = 'trajectory.finished') f USING (trajectory_id)
    LEFT JOIN (SELECT trajectory_id, last(reward ORDER BY lane, seq) AS reward FROM rewards
               WHERE turn_id IS NULL AND NOT superseded AND source = 'agent'
               GROUP BY trajectory_id) r USING (trajectory_id)
    LEFT JOIN (SELECT trajectory_id, count(*) AS turns,
                      min(list_min(list_transform(version_spans, lambda s: s.version))) AS min_version,
                      max(list_max(list_transform(version_spans, lambda s: s.version))) AS max_version
               FROM log WHERE kind = 'turn.completed' GROUP BY trajectory_id) t
      USING (trajectory_id)
    WHERE o.kind = 'trajectory.opened'
    """,
    columns.TRAJECTORIES,
)

TOKENS = View(
    "tokens",
    "One sampled token: its place in the turn's completion, its logprob and policy version.",
    """
    SELECT run, trajectory_id, turn_id, position, token_id, logprob,
           span.policy AS policy, span.version AS policy_version
    FROM (SELECT *, list_filter(
                   version_spans, lambda s: s.start <= position AND position < s."end")[1] AS span
          FROM (SELECT run, trajectory_id, turn_id, unnest(range(len(completion_ids))) AS position,
                       unnest(completion_ids) AS token_id, unnest(logprobs) AS logprob, version_spans
                FROM log WHERE kind = 'turn.completed' AND len(completion_ids) > 0))
    """,
    columns.TOKENS,
)

POLICIES = View(
    "policies",
    "A policy version: when it was published, and when an engine first served it, verified.",
    f"""
    SELECT run, policy, policy_version,
           any_value(CAST({_text("parent_version")} AS BIGINT))
             FILTER (kind = 'policy.published') AS parent_version,
           any_value({_text("weights_digest")}) AS weights_digest,
           coalesce(any_value({_text("path")}) FILTER (kind = 'policy.published'),
                    any_value({_text("path")})) AS path,
           min(time) FILTER (kind = 'policy.published') AS published,
           min(time) FILTER (kind = 'policy.activated') AS activated
    FROM log WHERE kind IN ('policy.published', 'policy.activated')
    GROUP BY run, policy, policy_version
    """,
    columns.POLICIES,
)

STEPS = View(
    "steps",
    "An attempt at an optimizer step: its manifest, and its results once it committed.",
    f"""
    SELECT p.run, p.step, CAST({_text("attempt", "p")} AS BIGINT) AS attempt,
           CASE WHEN c.step IS NOT NULL THEN 'committed' WHEN f.step IS NOT NULL THEN 'failed'
                ELSE 'planned' END AS status,
           p.policy, p.policy_version, c.policy_version AS output_version,
           {_text("algorithm.name", "p")} AS algorithm,
           {_text("cut", "p")} AS cut,
           CAST({_text("learning_rate", "p")} AS DOUBLE) AS learning_rate,
           CAST(json_array_length({_json("samples", "p")}) AS BIGINT) AS samples,
           CAST({_text("metrics.loss", "c")} AS DOUBLE) AS loss,
           {_json("metrics", "c")} AS metrics,
           {_json("digests", "c")} AS digests,
           p.extra AS manifest, p.time AS planned, c.time AS committed,
           {_text("phase", "p")} AS phase, {_text("error", "f")} AS error
    FROM log p
    LEFT JOIN (SELECT * FROM log WHERE kind = 'step.committed') c
      ON c.run = p.run AND c.step = p.step AND c.policy = p.policy
     AND {_text("attempt", "c")} = {_text("attempt", "p")}
    LEFT JOIN (SELECT * FROM log WHERE kind = 'step.failed') f
      ON f.run = p.run AND f.step = p.step AND f.policy = p.policy
     AND {_text("attempt", "f")} = {_text("attempt", "p")}
    WHERE p.kind = 'step.planned'
    """,
    columns.STEPS,
)

SAMPLES = View(
    "samples",
    "A sample a step consumed, in the order it consumed them; a sample is named by its leaf turn.",
    """
    SELECT run, step, attempt, status, policy, policy_version, position,
           ref->>'$.trajectory_id' AS trajectory_id, ref->>'$.turn_id' AS turn_id
    FROM (SELECT *, generate_subscripts(refs, 1) - 1 AS position, unnest(refs) AS ref
          FROM (SELECT *, CAST(json_extract(manifest, '$.samples') AS JSON[]) AS refs FROM steps))
    """,
    columns.SAMPLES,
)

DROPS = View(
    "drops",
    "A sample that a recipe's rule kept out of training, and why.",
    f"""
    SELECT run, trajectory_id, turn_id, {_text("rule")} AS rule, {_text("recipe")} AS recipe,
           step, {_json("detail")} AS detail, time,
           CAST(coalesce({_text("attempt")}, '1') AS BIGINT) AS attempt
    FROM log WHERE kind = 'sample.dropped'
    """,
    columns.DROPS,
)

VIEWS: tuple[View, ...] = (
    EVENTS,
    RUNS,
    REWARDS,
    TURNS,
    TRAJECTORIES,
    TOKENS,
    POLICIES,
    STEPS,
    SAMPLES,
    DROPS,
)
"""All views, each after those it reads."""
