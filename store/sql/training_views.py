"""Views of weights, steps, and where every token went. Pure; see `store.sql.views`."""

from __future__ import annotations

from rollbook.store.sql import columns
from rollbook.store.sql.view import View, json, text

POLICIES = View(
    "policies",
    "A policy version: when it was published, and when an engine first served it, verified.",
    f"""
    SELECT run, policy, policy_version,
           any_value(CAST({text("parent_version")} AS BIGINT))
             FILTER (kind = 'policy.published') AS parent_version,
           any_value({text("weights_digest")}) AS weights_digest,
           coalesce(any_value({text("path")}) FILTER (kind = 'policy.published'),
                    any_value({text("path")})) AS path,
           min(time) FILTER (kind = 'policy.published') AS published,
           min(time) FILTER (kind = 'policy.activated') AS activated
    FROM _mark_events WHERE kind IN ('policy.published', 'policy.activated')
    GROUP BY run, policy, policy_version
    """,
    columns.POLICIES,
)

STEPS = View(
    "steps",
    "An attempt at an optimizer step: its manifest, and its results once it committed.",
    f"""
    SELECT p.run, p.step, CAST({text("attempt", "p")} AS BIGINT) AS attempt,
           CASE WHEN c.step IS NOT NULL THEN 'committed' WHEN f.step IS NOT NULL THEN 'failed'
                ELSE 'planned' END AS status,
           p.policy, p.policy_version, c.policy_version AS output_version,
           {text("algorithm.name", "p")} AS algorithm,
           {text("cut", "p")} AS cut,
           CAST({text("learning_rate", "p")} AS DOUBLE) AS learning_rate,
           CAST(json_array_length({json("samples", "p")}) AS BIGINT) AS samples,
           CAST({text("metrics.loss", "c")} AS DOUBLE) AS loss,
           {json("metrics", "c")} AS metrics,
           {json("digests", "c")} AS digests,
           p.extra AS manifest, p.time AS planned, c.time AS committed,
           {text("phase", "p")} AS phase, {text("error", "f")} AS error
    FROM _mark_events p
    LEFT JOIN (SELECT * FROM _mark_events WHERE kind = 'step.committed') c
      ON c.run = p.run AND c.step = p.step AND c.policy = p.policy
     AND {text("attempt", "c")} = {text("attempt", "p")}
    LEFT JOIN (SELECT * FROM _mark_events WHERE kind = 'step.failed') f
      ON f.run = p.run AND f.step = p.step AND f.policy = p.policy
     AND {text("attempt", "f")} = {text("attempt", "p")}
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
    SELECT run, trajectory_id, turn_id, {text("rule")} AS rule, {text("recipe")} AS recipe,
           step, {json("detail")} AS detail, time,
           CAST(coalesce({text("attempt")}, '1') AS BIGINT) AS attempt
    FROM _mark_events WHERE kind = 'sample.dropped'
    """,
    columns.DROPS,
)

SYNCS = View(
    "syncs",
    "A transfer of weights to an engine: how it went, its bytes and seconds.",
    f"""
    SELECT s.run, s.policy, s.policy_version, {text("engine", "s")} AS engine,
           {text("transport", "s")} AS transport, {text("sync_id", "s")} AS sync_id,
           CASE WHEN f.event_id IS NOT NULL THEN 'finished' WHEN x.event_id IS NOT NULL THEN 'failed'
                ELSE 'running' END AS status,
           CAST({text("bytes", "f")} AS BIGINT) AS bytes, CAST({text("seconds", "f")} AS DOUBLE) AS seconds,
           s.time AS started, coalesce(f.time, x.time) AS ended, {text("error", "x")} AS error
    FROM _mark_events s
    LEFT JOIN (SELECT *, {text("sync_id")} AS sync_id FROM _mark_events WHERE kind = 'sync.finished') f
      ON f.sync_id = {text("sync_id", "s")}
    LEFT JOIN (SELECT *, {text("sync_id")} AS sync_id FROM _mark_events WHERE kind = 'sync.failed') x
      ON x.sync_id = {text("sync_id", "s")}
    WHERE s.kind = 'sync.started'
    """,
    columns.SYNCS,
)

LINEAGE = View(
    "lineage",
    "A turn on the path of a sample that a step consumed: which turns made a step, where a turn went.",
    """
    WITH RECURSIVE walk AS (
      SELECT run, step, attempt, status, policy, policy_version, position, trajectory_id,
             turn_id AS leaf_turn_id, turn_id
      FROM samples
      UNION ALL
      SELECT walk.run, step, attempt, status, walk.policy, walk.policy_version, position,
             walk.trajectory_id, leaf_turn_id, s.parent_turn_id AS turn_id
      FROM walk JOIN _turn_scalars s
        ON s.trajectory_id = walk.trajectory_id AND s.turn_id = walk.turn_id
      WHERE s.parent_turn_id IS NOT NULL
    )
    SELECT * FROM walk
    """,
    columns.LINEAGE,
)

LEDGER = View(
    "ledger",
    "Where the sampled tokens of each policy version went; over all terms they are all that were sampled.",
    """
    WITH RECURSIVE trained AS (
      SELECT DISTINCT trajectory_id, turn_id FROM lineage WHERE status = 'committed'
    ), kept_back AS (
      SELECT d.trajectory_id, d.turn_id, d.rule
      FROM drops d JOIN steps p ON p.run = d.run AND p.step = d.step AND p.attempt = d.attempt
      WHERE p.status = 'committed'
      UNION
      SELECT k.trajectory_id, s.parent_turn_id, k.rule
      FROM kept_back k JOIN _turn_scalars s ON s.trajectory_id = k.trajectory_id AND s.turn_id = k.turn_id
      WHERE s.parent_turn_id IS NOT NULL
    ), dropped AS (
      SELECT trajectory_id, turn_id, min(rule) AS rule FROM kept_back GROUP BY trajectory_id, turn_id
    ), turn AS (
      SELECT s.run, s.trajectory_id, s.turn_id, s.policy, s.policy_version, s.one_version,
             s.completion_length,
             CASE WHEN t.turn_id IS NOT NULL AND s.delivered IS NOT NULL THEN 'trained'
                  WHEN o.split IN ('eval', 'teacher') THEN 'kept out'
                  WHEN o.status = 'open' THEN 'in flight'
                  WHEN s.delivered IS NULL OR s.min_version IS NULL THEN 'kept out'
                  WHEN d.rule IS NOT NULL THEN 'dropped' ELSE 'waiting' END AS term,
             CASE WHEN t.turn_id IS NOT NULL AND s.delivered IS NOT NULL THEN NULL
                  WHEN o.split IN ('eval', 'teacher') THEN o.split
                  WHEN o.status = 'open' THEN NULL
                  WHEN s.delivered IS NULL THEN 'undelivered'
                  WHEN s.min_version IS NULL THEN 'no version'
                  ELSE d.rule END AS rule
      FROM _turn_scalars s
      LEFT JOIN trajectories o ON o.trajectory_id = s.trajectory_id
      LEFT JOIN trained t ON t.trajectory_id = s.trajectory_id AND t.turn_id = s.turn_id
      LEFT JOIN dropped d ON d.trajectory_id = s.trajectory_id AND d.turn_id = s.turn_id
      WHERE s.completed IS NOT NULL AND s.completion_length > 0
    ), spans AS (
      SELECT trajectory_id, turn_id, unnest(version_spans) AS span
      FROM _turn_events SEMI JOIN (SELECT trajectory_id, turn_id FROM turn WHERE NOT one_version)
        USING (trajectory_id, turn_id)
      WHERE kind = 'turn.completed'
    ), share AS (
      SELECT run, policy, policy_version, term, rule, turn_id, completion_length AS tokens
      FROM turn WHERE one_version
      UNION ALL
      SELECT run, span.policy, span.version, term, rule, turn_id, span."end" - span.start
      FROM turn JOIN spans USING (trajectory_id, turn_id) WHERE NOT one_version
      UNION ALL
      SELECT run, NULL, NULL, term, rule, turn_id,
             completion_length - coalesce((SELECT sum(span."end" - span.start) FROM spans
               WHERE spans.trajectory_id = turn.trajectory_id AND spans.turn_id = turn.turn_id), 0)
      FROM turn WHERE NOT one_version
    )
    SELECT run, policy, policy_version, term, rule, count(DISTINCT turn_id) AS turns,
           CAST(sum(tokens) AS BIGINT) AS tokens
    FROM share WHERE tokens > 0 GROUP BY run, policy, policy_version, term, rule
    """,
    columns.LEDGER,
)
