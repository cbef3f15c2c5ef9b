"""The view of the metrics of steps, a column each. Pure; see `store.sql.views`."""

from __future__ import annotations

from rollbook.store.sql import columns
from rollbook.store.sql.columns import ViewColumn
from rollbook.store.sql.view import View

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
