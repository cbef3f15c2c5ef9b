"""Views of weights, steps, their metrics, and what steps consumed. Pure; see `store.sql.views`."""

from __future__ import annotations

from rollbook.store.sql import columns
from rollbook.store.sql.columns import View, ViewColumn, json, text

POLICIES = View(
    "policies",
    "A policy version: when it was published, and when an engine first served it, verified.",
    f"""
    SELECT run, policy, policy_version,
           any_value(parent_version) FILTER (published) AS parent_version,
           any_value(weights_digest) AS weights_digest,
           coalesce(any_value(path) FILTER (published AND removed IS NULL),
                    any_value(path) FILTER (published), any_value(path)) AS path,
           min(time) FILTER (published) AS published,
           min(time) FILTER (NOT published) AS activated,
           CASE WHEN count(*) FILTER (published AND removed IS NULL) = 0
                THEN max(removed) FILTER (published) END AS removed
    FROM (SELECT p.run, policy, policy_version, time, kind = 'policy.published' AS published,
                 {text("path")} AS path, {text("weights_digest")} AS weights_digest,
                 CAST({text("parent_version")} AS BIGINT) AS parent_version,
                 CASE WHEN kind = 'policy.published' AND removal > event_id THEN removed END AS removed
          FROM internal.mark_events p
          LEFT JOIN (SELECT run, {text("path")} AS gone, max(event_id) AS removal,
                            arg_max(time, event_id) AS removed
                     FROM internal.mark_events WHERE kind = 'checkpoint.removed' GROUP BY ALL) r
            ON r.run = p.run AND r.gone = {text("path", "p")}
          WHERE kind IN ('policy.published', 'policy.activated'))
    GROUP BY run, policy, policy_version
    """,
    columns.POLICIES,
)

STEPS = View(
    "steps",
    "An attempt at an optimizer step: its manifest, and its results once it committed.",
    f"""
    SELECT p.run, p.step, CAST({text("attempt", "p")} AS BIGINT) AS attempt,
           CASE WHEN a.step IS NOT NULL THEN 'abandoned' WHEN c.step IS NOT NULL THEN 'committed'
                WHEN f.step IS NOT NULL THEN 'failed' ELSE 'planned' END AS status,
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
    FROM internal.mark_events p
    LEFT JOIN (SELECT * FROM internal.mark_events WHERE kind = 'step.committed') c
      ON c.run = p.run AND c.step = p.step AND c.policy = p.policy
     AND {text("attempt", "c")} = {text("attempt", "p")}
    LEFT JOIN (SELECT * FROM internal.mark_events WHERE kind = 'step.failed') f
      ON f.run = p.run AND f.step = p.step AND f.policy = p.policy
     AND {text("attempt", "f")} = {text("attempt", "p")}
    LEFT JOIN (SELECT * FROM internal.mark_events WHERE kind = 'step.abandoned') a
      ON a.run = p.run AND a.step = p.step AND a.policy = p.policy
     AND {text("attempt", "a")} = {text("attempt", "p")}
    WHERE p.kind = 'step.planned'
    """,
    columns.STEPS,
)

EVALUATIONS = View(
    "evaluations",
    "An evaluation of a policy version on what is held out of training: samples and rewards of split eval.",
    f"""
    SELECT run, policy, policy_version,
           CAST({text("metrics.loss")} AS DOUBLE) AS loss,
           CAST({text("metrics.preference_accuracy")} AS DOUBLE) AS preference_accuracy,
           CAST({text("metrics.preference_margin")} AS DOUBLE) AS preference_margin,
           CAST({text("metrics.reward")} AS DOUBLE) AS reward,
           CAST({text("metrics.success")} AS DOUBLE) AS success,
           CAST({text("samples")} AS BIGINT) AS samples, CAST({text("tokens")} AS BIGINT) AS tokens,
           CAST({text("trajectories")} AS BIGINT) AS trajectories,
           CAST({text("expected")} AS BIGINT) AS expected, CAST({text("whole")} AS BOOLEAN) AS whole,
           CAST({text("oldest_version")} AS BIGINT) AS oldest_version,
           CAST({text("newest_version")} AS BIGINT) AS newest_version,
           {text("cut")} AS cut, {json("metrics")} AS metrics, {text("phase")} AS phase, time
    FROM internal.mark_events WHERE kind = 'eval.finished'
    """,
    columns.EVALUATIONS,
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
    SELECT d.run, d.trajectory_id, d.turn_id, {text("rule", "d")} AS rule, {text("recipe", "d")} AS recipe,
           d.step, {json("detail", "d")} AS detail, d.time,
           CAST(coalesce({text("attempt", "d")}, '1') AS BIGINT) AS attempt,
           d.policy_version, {text("cut", "d")} AS cut, p.policy
    FROM (SELECT * FROM internal.mark_events WHERE kind = 'sample.dropped') d
    ASOF LEFT JOIN (SELECT lane, seq, run, policy FROM internal.mark_events WHERE kind = 'step.planned') p
      ON p.lane = d.lane AND p.run = d.run AND d.seq <= p.seq
    """,
    columns.DROPS,
)
"""A drop names no policy: it was appended together with the plan that follows it."""

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
    FROM internal.mark_events s
    LEFT JOIN (SELECT *, {text("sync_id")} AS sync_id
               FROM internal.mark_events WHERE kind = 'sync.finished') f
      ON f.sync_id = {text("sync_id", "s")}
    LEFT JOIN (SELECT *, {text("sync_id")} AS sync_id
               FROM internal.mark_events WHERE kind = 'sync.failed') x
      ON x.sync_id = {text("sync_id", "s")}
    WHERE s.kind = 'sync.started'
    """,
    columns.SYNCS,
)

ACTIVATIONS = View(
    "activations",
    "An engine that serves a policy version, its own tensors verified; a version may come to it repeatedly.",
    f"""
    SELECT run, policy, policy_version, {text("engine")} AS engine,
           {text("weights_digest")} AS weights_digest, {text("path")} AS path,
           coalesce({text("weight_name")}, '') AS weight_name, event_id, time, lane, seq
    FROM internal.mark_events WHERE kind = 'policy.activated'
    """,
    columns.ACTIVATIONS,
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
      FROM walk JOIN internal.turn_scalars s
        ON s.trajectory_id = walk.trajectory_id AND s.turn_id = walk.turn_id
      WHERE s.parent_turn_id IS NOT NULL
    )
    SELECT * FROM walk
    """,
    columns.LINEAGE,
)


RECORDED = (
    ViewColumn("loss", "DOUBLE", "as its algorithm normalizes it"),
    ViewColumn("gradient_norm", "DOUBLE", "2-norm of the whole gradient, before it is clipped"),
    ViewColumn("samples", "BIGINT", "samples that it trained on"),
    ViewColumn("trained_tokens", "BIGINT", "tokens with loss"),
    ViewColumn("length_mean", "DOUBLE", "trained tokens of a sample, on average"),
    ViewColumn("length_max", "BIGINT", "trained tokens of the longest sample"),
    ViewColumn("truncated", "DOUBLE", "share of samples that were cut off at their greatest length"),
    ViewColumn("reward", "DOUBLE", "mean of the samples' rewards"),
    ViewColumn("reward_std", "DOUBLE", "their standard deviation, over n"),
    ViewColumn("trajectories", "BIGINT", "trajectories with a reward whose samples it trained on"),
    ViewColumn("trajectory_reward", "DOUBLE", "mean of their rewards, each counted once"),
    ViewColumn("trajectory_reward_std", "DOUBLE", "the standard deviation of these, over n"),
    ViewColumn("flat_groups", "DOUBLE", "share of groups whose rewards are all equal"),
    ViewColumn("entropy", "DOUBLE", "mean entropy of the policy at its trained tokens, in nats"),
    ViewColumn("kl", "DOUBLE", "KL divergence from the reference policy, estimated by k3"),
    ViewColumn("old_kl", "DOUBLE", "KL divergence from the policy that ratios are taken to, by k3"),
    ViewColumn("ratio_mean", "DOUBLE", "mean probability ratio of trained tokens"),
    ViewColumn("ratio_min", "DOUBLE", "the least of them"),
    ViewColumn("ratio_max", "DOUBLE", "the greatest of them"),
    ViewColumn(
        "clipped_low", "DOUBLE", "share of tokens without a gradient by the lower clip (cispo: it clips)"
    ),
    ViewColumn("clipped_high", "DOUBLE", "the same by the upper clip"),
    ViewColumn("clipped_dual", "DOUBLE", "share of tokens whose loss the dual clip bounds"),
    ViewColumn("weight_mean", "DOUBLE", "mean weight of trained tokens, by correction and age"),
    ViewColumn("rejected", "DOUBLE", "share of them with weight 0"),
    ViewColumn("staleness_mean", "DOUBLE", "mean age of trained tokens, in versions"),
    ViewColumn("staleness_max", "BIGINT", "age of the oldest of them"),
    ViewColumn(
        "engine_logprob_gap", "DOUBLE", "engine's logprob against the trainer's, same version, greatest"
    ),
    ViewColumn("engine_logprob_gap_mean", "DOUBLE", "the same, mean"),
    ViewColumn("stale_logprob_gap", "DOUBLE", "the same for older versions, greatest"),
    ViewColumn("routing_replayed", "DOUBLE", "share of positions whose recorded experts were replayed"),
    ViewColumn("own_routing_logprob_gap", "DOUBLE", "`engine_logprob_gap` had the routers chosen, of a part"),
    ViewColumn("preference_accuracy", "DOUBLE", "share of pairs whose chosen sample is rated higher"),
    ViewColumn("preference_margin", "DOUBLE", "mean rating of chosen samples less that of rejected ones"),
    ViewColumn("chosen_logratio", "DOUBLE", "mean log-ratio of chosen samples' tokens to the reference"),
    ViewColumn("score_mean", "DOUBLE", "mean score that a reward model gives its samples"),
    ViewColumn("score_deviation", "DOUBLE", "mean standard deviation of such scores, of PURM"),
    ViewColumn("value_loss", "DOUBLE", "mean loss of the critic"),
    ViewColumn("value_mean", "DOUBLE", "mean value of trained tokens, before the step"),
    ViewColumn("explained_variance", "DOUBLE", "share of the returns' variance that the values explain"),
    ViewColumn("critic_gradient_norm", "DOUBLE", "2-norm of the critic's gradient"),
    ViewColumn("publish_s", "DOUBLE", "seconds that the checkpoint and sync of the version before took"),
    ViewColumn("wait_s", "DOUBLE", "seconds that it then waited for a batch"),
    ViewColumn("data_s", "DOUBLE", "seconds of building the batch"),
    ViewColumn("scoring_s", "DOUBLE", "of forward passes before: reference, old policy, values"),
    ViewColumn("forward_s", "DOUBLE", "of forward passes and losses, the critic's too"),
    ViewColumn("backward_s", "DOUBLE", "of backward passes, and of what ranks tell each other there"),
    ViewColumn("optimizer_s", "DOUBLE", "of the optimizer's step"),
    ViewColumn("manifest_s", "DOUBLE", "of digests, events and all else"),
    ViewColumn("memory_gib", "DOUBLE", "the most memory so far, of the GPU or else of the process"),
)
"""What a step's `step.committed` records in `metrics`, of those that it has."""

_NAMED = tuple(
    c for c in columns.STEPS if c.name in ("run", "step", "status", "policy", "policy_version", "algorithm")
)
_FIELDS = ", ".join(
    f"CAST(json_extract_string(metrics, '$.{c.name}') AS {c.type}) AS {c.name}" for c in RECORDED
)

METRICS = View(
    "metrics",
    "The dashboard of a step that was committed, also if it was abandoned later: what it was given, how the "
    "policy moved, and how long it took.",
    f"""
    SELECT run, step, status, policy, policy_version, algorithm, learning_rate, {_FIELDS},
           epoch(committed - planned) AS seconds,
           CAST(json_extract_string(metrics, '$.trained_tokens') AS DOUBLE)
             / nullif(epoch(committed - planned), 0) AS tokens_s, held_out_reward,
           held_out_whole
    FROM steps LEFT JOIN (
        SELECT run, policy, policy_version AS output_version, max_by(reward, time) AS held_out_reward,
               max_by(coalesce(whole, true), time) AS held_out_whole
        FROM evaluations GROUP BY run, policy, policy_version) USING (run, policy, output_version)
    WHERE status IN ('committed', 'abandoned')
    """,
    (
        *_NAMED,
        ViewColumn("learning_rate", "DOUBLE", "as applied"),
        *RECORDED,
        ViewColumn("seconds", "DOUBLE", "from its plan to its commit"),
        ViewColumn("tokens_s", "DOUBLE", "trained tokens in a second of that time"),
        ViewColumn("held_out_reward", "DOUBLE", "mean held-out reward of the version it made, if evaluated"),
        ViewColumn("held_out_whole", "BOOLEAN", "false: NOT WHOLE, some trajectories came to no end"),
    ),
)
