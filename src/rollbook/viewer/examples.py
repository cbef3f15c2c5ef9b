"""Example questions about a log, and their SQL, as data. Pure.

A test runs each of them on a store that has an answer to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """A question, what to know about its answer, and the query."""

    question: str
    doc: str
    sql: str


EXAMPLES: tuple[Example, ...] = (
    Example(
        "How does the reward move with the policy version?",
        "Of each policy by itself: versions of two have nothing to do with each other. A trajectory counts\n"
        "for the newest version that sampled a turn of it; a teacher has none.",
        """\
WITH sampled AS (
  SELECT trajectory_id, policy, max(policy_version) AS version
  FROM turns WHERE policy IS NOT NULL GROUP BY ALL
)
SELECT policy, version, count(*) AS trajectories, avg(reward) AS reward, avg(success::INT) AS success_rate
FROM sampled JOIN trajectories USING (trajectory_id)
WHERE split = 'train'
GROUP BY ALL ORDER BY policy, version""",
    ),
    Example(
        "Which turns were slowest?",
        "`latency_ms` runs from the request's event to the answer's; `held_us` of it the engine kept the\n"
        "request waiting while weights were replaced.",
        """\
SELECT trajectory, turn_id, latency_ms, prompt_length, completion_length,
       (timings->>'$.held_us')::BIGINT AS held_us
FROM turns
WHERE latency_ms IS NOT NULL
ORDER BY latency_ms DESC LIMIT 10""",
    ),
    Example(
        "Which tokens were very unlikely when they were sampled?",
        "Natural logarithms: -10 is one in 22,026. `outliers` has those below -8 ready; `tokens` has all.",
        """\
SELECT trajectory, turn_id, position, token_id, text, logprob, tokens.policy_version
FROM outliers AS tokens JOIN turns USING (trajectory_id, turn_id)
WHERE logprob < -10
ORDER BY logprob LIMIT 20""",
    ),
    Example(
        "Which turns became roots, and why?",
        "A root begins a sample of its own. `first_turn` is as it should be; any other reason says why the\n"
        "request could not extend an earlier turn token for token.",
        """\
SELECT root_reason, count(*) AS turns, sum(prompt_length) AS prompt_tokens, any_value(turn_id) AS one_of_them
FROM turns
WHERE parent_turn_id IS NULL
GROUP BY root_reason ORDER BY turns DESC""",
    ),
    Example(
        "Which answers did the client perhaps never get?",
        "Completed turns without proof of delivery. Their tokens are never trained.",
        """\
SELECT trajectory, turn_id, completion_length, completed
FROM turns
WHERE status = 'completed' AND delivered IS NULL
ORDER BY completed""",
    ),
    Example(
        "Which requests failed?",
        "The error is the engine's, or the proxy's own.",
        """\
SELECT trajectory, turn_id, requested, error
FROM turns
WHERE status = 'failed'
ORDER BY requested""",
    ),
    Example(
        "How stale were the samples that each step consumed?",
        "A sample is a path of turns; its staleness is the version the step started from less that of the\n"
        "oldest token in it that its policy sampled. (Where leaves share turns, only the first is trained\n"
        "on those.)",
        """\
WITH RECURSIVE path AS (
  SELECT run, policy, step, position, policy_version, turn_id AS node
  FROM samples WHERE status = 'committed'
  UNION ALL
  SELECT path.run, path.policy, step, position, path.policy_version, turns.parent_turn_id
  FROM path JOIN turns ON turns.turn_id = node WHERE turns.parent_turn_id IS NOT NULL
), oldest AS (
  SELECT path.run, path.policy, step, position, any_value(path.policy_version) AS input_version,
         min(list_min(list_transform(list_filter(version_spans, lambda s: s.policy = path.policy),
                                     lambda s: s.version))) AS version
  FROM path JOIN turns ON turns.turn_id = node GROUP BY ALL
)
SELECT run, policy, step, count(*) AS samples, avg(input_version - version) AS mean_staleness,
       max(input_version - version) AS worst
FROM oldest WHERE version IS NOT NULL
GROUP BY ALL ORDER BY run, policy, step""",
    ),
    Example(
        "Which step trained on this trajectory?",
        "None until it was consumed; several if a configuration goes over the log in epochs.",
        """\
SELECT trajectory, samples.step, samples.position, samples.turn_id
FROM samples JOIN trajectories USING (trajectory_id)
WHERE trajectory = 'task-1-0' AND samples.status = 'committed'
ORDER BY samples.step, samples.position""",
    ),
    Example(
        "Which trajectories did this step train on?",
        "In the order in which they lay in its batch.",
        """\
SELECT position, trajectory, "group", reward, min_version, max_version
FROM samples JOIN trajectories USING (trajectory_id)
WHERE step = 0 AND samples.status = 'committed'
ORDER BY position""",
    ),
    Example(
        "What was kept out of training, by which rule?",
        "`detail` holds the numbers that the rule compared. A drop counts once its step has committed;\n"
        "a later attempt at the step notes it again.",
        """\
SELECT run, rule, count(DISTINCT turn_id) AS samples, min(step) AS first_step, max(step) AS last_step,
       any_value(detail) AS one_of_them
FROM drops
WHERE (run, step) IN (SELECT (run, step) FROM steps WHERE status = 'committed')
GROUP BY run, rule ORDER BY samples DESC""",
    ),
    Example(
        "How many tokens did each version sample, and how many were trained on?",
        "Trained on are the tokens of delivered turns in samples that a committed step consumed. Tokens\n"
        "without a version are a teacher's.",
        """\
WITH RECURSIVE trained AS (
  SELECT turn_id FROM samples WHERE status = 'committed'
  UNION
  SELECT parent_turn_id FROM trained JOIN turns USING (turn_id) WHERE parent_turn_id IS NOT NULL
)
SELECT tokens.run, tokens.policy_version, count(*) AS sampled,
       count(*) FILTER (turns.delivered IS NOT NULL AND turn_id IN (FROM trained)) AS trained
FROM tokens JOIN turns USING (turn_id)
GROUP BY ALL ORDER BY ALL""",
    ),
    Example(
        "Which groups teach nothing, because all their rewards are equal?",
        "Group-relative advantages are zero where the standard deviation is.",
        """\
SELECT "group", task, count(*) AS trajectories, avg(reward) AS reward, stddev_samp(reward) AS deviation
FROM trajectories
WHERE "group" IS NOT NULL AND reward IS NOT NULL
GROUP BY "group", task HAVING count(*) > 1
ORDER BY deviation, reward""",
    ),
    Example(
        "Where do these weights come from?",
        "The lineage of a version: every step back to version 0, with what it consumed and where a\n"
        "checkpoint of it lies.",
        """\
WITH RECURSIVE made AS MATERIALIZED (
  SELECT * EXCLUDE (manifest) FROM steps WHERE status = 'committed'
), lineage AS (
  SELECT run, policy, max(policy_version) AS version FROM policies GROUP BY run, policy
  UNION ALL
  SELECT made.run, made.policy, made.policy_version
  FROM lineage JOIN made ON made.run = lineage.run AND made.policy = lineage.policy
                        AND made.output_version = lineage.version
)
SELECT lineage.run, version, made.step, made.algorithm, made.samples, made.cut,
       policies.path AS checkpoint, coalesce(policies.weights_digest, made.digests->>'$.weights') AS weights
FROM lineage
LEFT JOIN made ON made.run = lineage.run AND made.policy = lineage.policy
              AND made.output_version = version
LEFT JOIN policies ON policies.run = lineage.run AND policies.policy = lineage.policy
                  AND policies.policy_version = version
ORDER BY lineage.run, version DESC""",
    ),
    Example(
        "What did an agent say, turn by turn?",
        "`new_messages` is what a request added to the turn it goes on from.",
        """\
SELECT turn_id, parent_turn_id, new_messages->>'$[#-1].content' AS last_message,
       coalesce(content, reply->>'$.tool_calls') AS reply, policy_version, reward
FROM turns
WHERE trajectory = 'task-1-0'
ORDER BY lane, seq""",
    ),
    Example(
        "Whose reward counts?",
        "All of a trajectory's rewards, superseded ones too. `trajectories.reward` is the agent's last one\n"
        "in force.",
        """\
SELECT trajectory, turn_id, source, reward, superseded, time
FROM rewards
ORDER BY trajectory, lane, seq""",
    ),
    Example(
        "How often do preferences and rewards agree?",
        "Of pairs whose two trajectories have a reward, by who preferred.",
        """\
SELECT p.source, count(*) AS pairs, avg((c.reward > r.reward)::INT) AS agree, avg(p.margin) AS margin
FROM preferences p
JOIN trajectories c USING (trajectory_id)
JOIN trajectories r ON r.trajectory_id = p.rejected_trajectory_id
WHERE c.reward IS NOT NULL AND r.reward IS NOT NULL
GROUP BY p.source ORDER BY pairs DESC""",
    ),
    Example(
        "Where did every sampled token go?",
        "Per policy version the terms add up to what was sampled: trained, dropped (by which rule),\n"
        "waiting, in flight (the trajectory is open), or kept out (evaluation, undelivered and others).\n"
        "[The ledger](ledger.md) says what each means.",
        """\
SELECT run, policy_version, term, rule, turns, tokens,
       round(100.0 * tokens / nullif(sum(tokens) OVER (PARTITION BY run, policy_version), 0), 1) AS percent
FROM ledger
ORDER BY run, policy_version, tokens DESC, term""",
    ),
    Example(
        "What became of each policy version's tokens?",
        "A row for each run, policy and version; a version of null is an engine that named none.",
        """\
SELECT run, policy, policy_version, sum(tokens) AS generated,
       coalesce(sum(tokens) FILTER (term = 'trained'), 0) AS trained,
       coalesce(sum(tokens) FILTER (term = 'dropped'), 0) AS dropped,
       coalesce(sum(tokens) FILTER (term = 'waiting'), 0) AS waiting,
       coalesce(sum(tokens) FILTER (term = 'in flight'), 0) AS in_flight,
       coalesce(sum(tokens) FILTER (term = 'kept out'), 0) AS kept_out
FROM ledger
GROUP BY run, policy, policy_version ORDER BY run, policy, policy_version""",
    ),
    Example(
        "What was there to train on when a step was planned?",
        "Ask it with `--as-of step:1` (Python: `as_of='step:1'`): all views are then of the log that the\n"
        "step saw. At every cut the terms are all that had been sampled by then.",
        """\
SELECT run, sum(tokens) AS generated,
       coalesce(sum(tokens) FILTER (term = 'waiting'), 0) AS waiting,
       sum(tokens) = (SELECT sum(completion_length) FROM turns WHERE turns.run = ledger.run) AS balances
FROM ledger
GROUP BY run ORDER BY run""",
    ),
    Example(
        "Which turns made this step, and which steps did this turn go into?",
        "The lineage both ways: every turn on the path of every sample that a step consumed.",
        """\
SELECT step, position, trajectory, lineage.turn_id, lineage.turn_id = leaf_turn_id AS is_leaf
FROM lineage JOIN trajectories USING (trajectory_id)
WHERE lineage.status = 'committed' AND step = 0
ORDER BY position, lineage.turn_id""",
    ),
    Example(
        "How long are the sequences, and how much of them was sampled?",
        "A path is what a sample is made of; the rest of its tokens are prompts and tool results.",
        """\
SELECT turns, count(*) AS paths, avg(length) AS tokens, max(length) AS longest,
       avg(sampled / length) AS sampled_share
FROM paths
GROUP BY turns ORDER BY turns""",
    ),
    Example(
        "How did latency and throughput develop?",
        "`completion_length` over the time between a request's event and its answer's, by minute.",
        """\
SELECT date_trunc('minute', completed) AS minute, count(*) AS turns,
       quantile_cont(latency_ms, 0.5) AS p50_ms, quantile_cont(latency_ms, 0.99) AS p99_ms,
       sum(completion_length) AS tokens
FROM turns WHERE completed IS NOT NULL
GROUP BY minute ORDER BY minute""",
    ),
    Example(
        "Which weight transfers failed, and how long did the others take?",
        "From `sync.started` to the engine's verified digest.",
        """\
SELECT policy_version, engine, transport, status, bytes / 1e6 AS megabytes, seconds, error
FROM syncs
ORDER BY started""",
    ),
    Example(
        "What do large requests have in common?",
        "Bodies stored once: images, tool schemas, long system prompts. In `turns.request` and\n"
        '`turns.new_messages` each is `{"$body": digest}`.',
        """\
SELECT digest, length, copies, substr(body::VARCHAR, 1, 60) AS begins
FROM bodies
ORDER BY length DESC LIMIT 10""",
    ),
    Example(
        "Did entropy collapse?",
        "The mean logprob of sampled tokens by version: at 0 the policy would no longer choose at all.",
        """\
SELECT policy_version, sum(completion_length) AS tokens,
       sum(sum_logprob) / sum(completion_length) AS mean_logprob, min(min_logprob) AS least_likely
FROM turns WHERE sum_logprob IS NOT NULL
GROUP BY policy_version ORDER BY policy_version""",
    ),
    Example(
        "What did an upstream charge for?",
        "Tokens as its replies report them, with or without their ids. All choices of one request report\n"
        "the same usage, so one of them is counted.",
        """\
SELECT requested_model, count(*) AS requests, sum(upstream_prompt_tokens) AS prompt_tokens,
       sum(upstream_completion_tokens) AS completion_tokens
FROM turns WHERE upstream_completion_tokens IS NOT NULL AND choice = 0
GROUP BY requested_model ORDER BY completion_tokens DESC""",
    ),
    Example(
        "How often does the infrastructure fail, by rollout and hour?",
        "Of the launches of agents that ended in the hour, the share that ended as `infra_error`: not by\n"
        "what the agent did.",
        """\
SELECT rollout, date_trunc('hour', ended) AS hour, count(*) AS launches,
       avg((status = 'infra_error')::INT) AS infra_failed_rate
FROM launches WHERE ended IS NOT NULL
GROUP BY rollout, hour ORDER BY rollout, hour""",
    ),
    Example(
        "How much does the log hold?",
        "Events by kind and lane, and when they were written.",
        """\
SELECT kind, lane, count(*) AS events, min(time) AS first, max(time) AS last
FROM events
GROUP BY kind, lane ORDER BY kind, lane""",
    ),
)
