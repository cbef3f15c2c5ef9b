"""SQL queries that derive per-turn and per-trajectory rows from events. Pure text.

The same query computes a unit's derived files and, at query time, the rows of unsealed events. So deleting a
derived file changes no answer, only its duration.
"""

from __future__ import annotations

from rollbook.store.events import VOID

OUTLIER_BELOW = -8.0
"""Tokens with a smaller natural-log probability are outliers: fewer than one in 2,980."""

TURN_KINDS = "('turn.requested', 'turn.completed', 'turn.failed', 'turn.delivered')"

ONE_VERSION = """(coalesce(len(version_spans) = 1 AND version_spans[1].start = 0
      AND version_spans[1]."end" = len(completion_ids)
      AND version_spans[1].version = policy_version AND version_spans[1].policy = policy, false)
      OR (coalesce(len(version_spans), 0) = 0 AND policy IS NULL AND policy_version IS NULL))"""
"""Whether the typed columns say which policy version sampled all of a turn's tokens (null: none did)."""

_MERGED = (
    "run",
    "lane",
    "seq",
    "requested",
    "parent_turn_id",
    "root_reason",
    "requested_model",
    "completed",
    "policy",
    "policy_version",
    "prompt_length",
    "completion_length",
    "finish_reason",
    "min_version",
    "max_version",
    "min_logprob",
    "sum_logprob",
    "error",
    "completed_lane",
    "completed_seq",
    "delta_length",
    "known_tokens",
    "exact_logprobs",
    "altered",
    "erased",
    "temperature",
    "prompt_sha256",
    "lowest_token",
    "highest_token",
    "upstream_prompt_tokens",
    "upstream_completion_tokens",
    "upstream_total_tokens",
)

_TRUE = (
    "coalesce("
    + " AND ".join(f"{{0}} <> '{nothing}'" for nothing in ("", "false", "0", "[]", "{{}}", "null"))
    + ", false)"
)
"""Whether JSON as text is something; each comparison by itself, since a list of them would be a join."""

_FIELDS = (
    "prompt_length",
    "finish_reason",
    "prompt_sha256",
    "logprob_semantics.altered",
    "logprob_semantics.temperature",
)
"""What the list `done` has of a completed turn's fields that have no column, as text."""

_FIRST_NAMES = ["parent_turn_id", "root_reason"]
_FIRST_ASKED = (
    r'^\{"request_id":"[^"\\]*",' + ",".join(rf'"{name}":(null|"[^"\\]*")' for name in _FIRST_NAMES) + ","
)
"""The beginning of a requested turn's fields, as they are written. What follows are messages: to parse these
takes as long as all else that is asked of a turn."""

_TRAINED = {
    "delta_length": "coalesce(len(prompt_ids), 0)",
    "known_tokens": """CAST(coalesce(list_sum(list_transform(
        version_spans, lambda s: s."end" - s.start)), 0) AS BIGINT)""",
    "exact_logprobs": "logprobs IS NOT NULL AND NOT list_contains(logprobs, CAST('nan' AS FLOAT))",
    "erased": """contains(extra, '"tokens_erased"')""",
    "temperature": "coalesce(nullif(CAST(done[5] AS DOUBLE), 0), 1)",
    "lowest_token": "CAST(least(list_min(prompt_ids), list_min(completion_ids)) AS BIGINT)",
    "highest_token": "CAST(greatest(list_max(prompt_ids), list_max(completion_ids)) AS BIGINT)",
}
"""What decides how a completed turn is trained: tokens that its prompt adds, sampled tokens whose version is
known, whether each has a logprob, whether tokens were erased, the temperature (greedy turns have the
distribution of 1), and the lowest and the highest id among its tokens."""

_USAGE = (
    "prompt_tokens",
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "completion_tokens",
    "output_tokens",
    "total_tokens",
)
"""Fields of an upstream's usage in the APIs that are recorded: OpenAI's and Anthropic's names."""


def _reported() -> str:
    """The columns of an upstream's usage, from the list `usage` of the texts of `_USAGE`.

    A value that is no count becomes null. Anthropic counts cached prompt tokens separately,
    OpenAI includes them in the others.
    """
    count = {name: f"CAST(TRY_CAST(usage[{i}] AS UINTEGER) AS BIGINT)" for i, name in enumerate(_USAGE, 1)}
    cached = "".join(f" + coalesce({count[name]}, 0)" for name in _USAGE if name.startswith("cache_"))
    columns = {
        "upstream_prompt_tokens": f"coalesce({count['prompt_tokens']}, {count['input_tokens']}{cached})",
        "upstream_completion_tokens": f"coalesce({count['completion_tokens']}, {count['output_tokens']})",
        "upstream_total_tokens": count["total_tokens"],
    }
    return ", ".join(f"any_value({query}) AS {name}" for name, query in columns.items())


def _asked(name: str) -> str:
    """A requested turn's field, from the struct `first` of what `_FIRST_ASKED` found; where it found nothing,
    from all of `extra`."""
    parsed = f"json_extract_string(extra, '$.{name}')"
    return f"""CASE WHEN first.{name} = '' THEN {parsed}
                           WHEN first.{name} <> 'null' THEN first.{name}[2:-2] END"""


def turn_parts(events: str) -> str:
    """One row per turn in the relation `events`: its scalars, as far as these events hold them.

    `whole` says that no other event can add to the row: within these events the turn was
    requested, completed and delivered, or it failed.
    """
    asked = "CASE WHEN kind = 'turn.requested' THEN {} END"
    done = "CASE WHEN kind = 'turn.completed' THEN {} END"
    first = f"regexp_extract(extra, '{_FIRST_ASKED}', {_FIRST_NAMES})"
    model = "json_extract_string(extra, '$.requested_model')"
    fields_done = f"json_extract_string(extra, {[f'$.{field}' for field in _FIELDS]})"
    usage = f"json_extract_string(extra, {[f'$.upstream.usage.{name}' for name in _USAGE]})"
    return f"""
    SELECT trajectory_id, turn_id, any_value(run) AS run,
           any_value({asked.format("lane")}) AS lane,
           any_value({asked.format("seq")}) AS seq,
           any_value({asked.format("time")}) AS requested,
           {", ".join(f"any_value({_asked(name)}) AS {name}" for name in _FIRST_NAMES)},
           any_value(requested_model) AS requested_model,
           any_value({done.format("time")}) AS completed,
           any_value(policy) AS policy, any_value(policy_version) AS policy_version,
           any_value(CAST(done[1] AS BIGINT)) AS prompt_length,
           any_value(len(completion_ids)) AS completion_length,
           any_value(done[2]) AS finish_reason,
           any_value(list_min(versions)) AS min_version, any_value(list_max(versions)) AS max_version,
           any_value(list_min(logprobs)) AS min_logprob,
           any_value(list_sum(CAST(logprobs AS DOUBLE[]))) AS sum_logprob,
           any_value({done.format("lane")}) AS completed_lane,
           any_value({done.format("seq")}) AS completed_seq,
           {", ".join(f"any_value({name}) AS {name}" for name in _TRAINED)},
           any_value({done.format(_TRUE.format("done[4]"))}) AS altered,
           any_value(unhex(done[3])) AS prompt_sha256, {_reported()},
           any_value(error) AS error, max(delivered) AS delivered,
           bool_and(one_version) AS one_version,
           coalesce(bool_or(kind = 'turn.requested') AND (
             bool_or(kind = 'turn.failed')
             OR (bool_or(kind = 'turn.completed') AND max(delivered) = 'sent')), false) AS whole
    FROM (
      SELECT *, {asked.format(first)} AS first, {asked.format(model)} AS requested_model,
             {done.format(fields_done)} AS done,
             {done.format(usage)} AS usage,
             CASE WHEN kind = 'turn.failed' THEN json_extract_string(extra, '$.error') END AS error,
             CASE WHEN kind = 'turn.delivered' THEN json_extract_string(extra, '$.how') END AS delivered,
             list_transform(version_spans, lambda s: s.version) AS versions,
             CASE WHEN kind = 'turn.completed' THEN {ONE_VERSION} END AS one_version,
             {", ".join(f"{done.format(query)} AS {name}" for name, query in _TRAINED.items())}
      FROM {events} WHERE kind IN {TURN_KINDS})
    GROUP BY trajectory_id, turn_id
    """


def turn_scalars(parts: str, ready: str | None) -> str:
    """One row per turn in the relation `parts` of `turn_parts` rows, which may hold a turn several times.

    Args:
        ready: a relation with all of these rows that are whole; None if none is, which halves planning time.
    """
    names = ", ".join(_MERGED)
    merged = ", ".join(f"any_value({name}) AS {name}" for name in _MERGED)
    whole = f"SELECT trajectory_id, turn_id, {names}, delivered, one_version FROM {ready} WHERE whole"
    return f"""
    {f"{whole} UNION ALL" if ready else ""}
    SELECT trajectory_id, turn_id, {merged}, max(delivered) AS delivered,
           bool_and(one_version) AS one_version
    FROM {parts} WHERE NOT whole GROUP BY trajectory_id, turn_id HAVING any_value(requested) IS NOT NULL
    """


def tokens(turn_events: str, several: str) -> str:
    """One row per sampled token of the `turn.completed` rows in the relation `turn_events`.

    A turn of one version takes it from its typed column, so that a filter on the version passes over row
    groups by their statistics. The tokens of other turns look for their span.

    Args:
        several: a relation with the rows that are not of one version, and perhaps more.
    """
    exploded = """
      SELECT run, trajectory_id, turn_id, unnest(range(len(completion_ids))) AS position,
             unnest(completion_ids) AS token_id, unnest(logprobs) AS logprob, {}
      FROM {} WHERE kind = 'turn.completed' AND len(completion_ids) > 0 AND {}"""
    return f"""
    {exploded.format("policy, policy_version", turn_events, ONE_VERSION)}
    UNION ALL
    SELECT run, trajectory_id, turn_id, position, token_id, logprob,
           span.policy AS policy, span.version AS policy_version
    FROM (SELECT *, list_filter(
                   version_spans, lambda s: s.start <= position AND position < s."end")[1] AS span
          FROM ({exploded.format("version_spans", several, f"NOT {ONE_VERSION}")}))
    """


def outliers(turn_events: str) -> str:
    """The tokens below `OUTLIER_BELOW` of the `turn.completed` rows in the relation `turn_events`."""
    return f"""
    SELECT run, trajectory_id, turn_id, position, token_id, logprob, policy, policy_version
    FROM ({tokens(turn_events, turn_events)}) WHERE logprob < {OUTLIER_BELOW}
    """


def trajectory_parts(events: str) -> str:
    """One row per trajectory in the relation `events`: its scalars, as far as these events hold them.

    `whole` says that it was opened and finished within these events and was never in another lane, so that
    all its turns lie between.
    """
    opened = "CASE WHEN kind = 'trajectory.opened' THEN {} END"
    finished = "CASE WHEN kind = 'trajectory.finished' THEN {} END"
    texts = "json_extract_string(extra, ['$.name', '$.group', '$.task', '$.split'])"
    return f"""
    SELECT trajectory_id, any_value(run) AS run, any_value({opened.format("lane")}) AS lane,
           any_value(texts[1]) AS trajectory, any_value(texts[2]) AS "group", any_value(texts[3]) AS task,
           any_value(texts[4]) AS split, any_value(labels) AS labels, any_value(origin) AS origin,
           any_value({opened.format("time")}) AS opened, any_value({finished.format("time")}) AS finished,
           any_value(status) AS status, any_value(success) AS success,
           count(*) FILTER (kind = 'turn.completed') AS turns,
           count(*) FILTER (kind = 'turn.completed' AND NOT erased AND len(completion_ids) > 0)
             AS exact_turns,
           count(*) FILTER (kind = 'turn.completed' AND erased) AS erased_turns,
           min(list_min(versions)) AS min_version, max(list_max(versions)) AS max_version,
           coalesce(bool_or(kind = 'trajectory.opened') AND bool_or(kind = 'trajectory.finished')
                    AND NOT bool_or(kind = 'trajectory.adopted'), false) AS whole
    FROM (
      SELECT *, {opened.format(texts)} AS texts,
             {opened.format("CAST(json_extract(extra, '$.labels') AS VARCHAR)")} AS labels,
             {opened.format("nullif(CAST(json_extract(extra, '$.origin') AS VARCHAR), 'null')")} AS origin,
             {finished.format("json_extract_string(extra, '$.status')")} AS status,
             {finished.format("CAST(json_extract_string(extra, '$.success') AS BOOLEAN)")} AS success,
             list_transform(version_spans, lambda s: s.version) AS versions, {_TRAINED["erased"]} AS erased
      FROM {events}
      WHERE kind IN ('trajectory.opened', 'trajectory.adopted', 'trajectory.finished', 'turn.completed'))
    GROUP BY trajectory_id
    """


def trajectory_scalars(parts: str, ready: str | None) -> str:
    """One row per opened trajectory in the relation `parts`, which may hold one several times.

    Args:
        ready: as of `turn_scalars`.
    """
    same = [
        "run",
        "lane",
        "trajectory",
        '"group"',
        "task",
        "split",
        "labels",
        "origin",
        "opened",
        "finished",
        "status",
        "success",
    ]
    names = ", ".join(same)
    merged = ", ".join(f"any_value({name}) AS {name}" for name in same)
    split = f"CASE WHEN status = '{VOID}' THEN '{VOID}' ELSE split END AS split"
    numbers = "turns, exact_turns, erased_turns, min_version, max_version"
    whole = f"SELECT trajectory_id, {names}, {numbers} FROM {ready} WHERE whole"
    return f"""
    SELECT * REPLACE ({split}) FROM (
      {f"{whole} UNION ALL" if ready else ""}
      SELECT trajectory_id, {merged}, CAST(sum(turns) AS BIGINT) AS turns,
             CAST(sum(exact_turns) AS BIGINT) AS exact_turns,
             CAST(sum(erased_turns) AS BIGINT) AS erased_turns,
             min(min_version) AS min_version, max(max_version) AS max_version
      FROM {parts} WHERE NOT whole GROUP BY trajectory_id HAVING any_value(opened) IS NOT NULL)
    """


def paths(events: str, parts: str) -> str:
    """The turns of single-path trajectories, whole within `events`, by the version that sampled them.

    No event elsewhere adds to such a trajectory: it was opened and finished here, was never in
    another lane, and before its finish every turn was requested, completed and delivered, or
    failed. It has one leaf, every completed turn was sampled by one version and has tokens, none
    was altered or erased. So its turns go where its only sample goes, and need not be looked at
    one by one.

    Args:
        parts: a relation with the rows of `turn_parts` of these events.
    """
    return f"""
    WITH turn AS MATERIALIZED (SELECT * FROM {parts}),
    ended AS (
      SELECT trajectory_id,
             CASE WHEN any_value(CASE WHEN kind = 'trajectory.finished'
                                      THEN json_extract_string(extra, '$.status') END) = '{VOID}'
                  THEN '{VOID}'
                  ELSE any_value(CASE WHEN kind = 'trajectory.opened'
                                      THEN json_extract_string(extra, '$.split') END) END AS split
      FROM {events} WHERE kind LIKE 'trajectory.%' OR kind IN {TURN_KINDS}
      GROUP BY trajectory_id
      HAVING bool_or(kind = 'trajectory.opened') AND NOT bool_or(kind = 'trajectory.adopted')
         AND max(seq) FILTER (kind = 'trajectory.finished') > max(seq) FILTER (kind IN {TURN_KINDS})
    ),
    leaf AS (
      SELECT trajectory_id, turn_id FROM turn t WHERE completed IS NOT NULL AND NOT EXISTS (
        FROM turn c WHERE c.trajectory_id = t.trajectory_id AND c.parent_turn_id = t.turn_id
                      AND c.completed IS NOT NULL)
    ),
    one AS (
      SELECT trajectory_id, split, any_value(leaf.turn_id) AS leaf_turn_id
      FROM leaf JOIN ended USING (trajectory_id) GROUP BY ALL HAVING count(*) = 1
    ),
    plain AS (
      SELECT trajectory_id FROM turn GROUP BY trajectory_id
      HAVING bool_and(whole AND (completed IS NULL OR (one_version AND completion_length > 0
             AND NOT coalesce(altered, false) AND NOT coalesce(erased, false))))
    )
    SELECT run, trajectory_id, split, leaf_turn_id, policy, policy_version, count(*) AS turns,
           CAST(sum(completion_length) AS BIGINT) AS tokens
    FROM turn JOIN one USING (trajectory_id) SEMI JOIN plain USING (trajectory_id)
    WHERE completed IS NOT NULL GROUP BY ALL
    """


def standings(trajectories: str, parts: str) -> str:
    """How far each trajectory has come, as far as that decides what of it can be trained, by the relations
    `trajectories` of `trajectory_parts` rows and `parts` of `turn_parts` rows of the same events.

    A turn may be trained if a version sampled it and nothing altered it, once it is delivered: `productive`
    says that one was, `oldest` has the oldest version of each of `policies` that sampled one. `sampled` are
    turns that only a delivery elsewhere is missing of, `delivered` those that were completed elsewhere.
    `whole` says that no event elsewhere changes any of this.
    """
    useful = "min_version IS NOT NULL AND NOT coalesce(altered, false)"
    return f"""
    SELECT coalesce(t.run, s.run) AS run, trajectory_id, t."group", t.split, t.status,
           epoch_us(t.opened) AS opened, epoch_us(t.finished) AS finished,
           coalesce(s.productive, false) AS productive, coalesce(s.policies, []) AS policies,
           coalesce(s.oldest, []) AS oldest, coalesce(s.sampled, []) AS sampled,
           coalesce(s.delivered, []) AS delivered,
           coalesce(t.whole AND coalesce(len(s.sampled) + len(s.delivered), 0) = 0, false) AS whole
    FROM {trajectories} t FULL JOIN (
      SELECT trajectory_id, any_value(run) AS run, bool_or(productive) AS productive,
             list(policy ORDER BY policy) FILTER (oldest IS NOT NULL) AS policies,
             list(oldest ORDER BY policy) FILTER (oldest IS NOT NULL) AS oldest,
             list_sort(flatten(list(sampled))) AS sampled, list_sort(flatten(list(delivered))) AS delivered
      FROM (
        SELECT trajectory_id, policy, any_value(run) AS run,
               coalesce(bool_or(delivered IS NOT NULL) FILTER ({useful}), false) AS productive,
               min(min_version) FILTER ({useful}) AS oldest,
               coalesce(list(turn_id) FILTER ({useful} AND delivered IS NULL), []) AS sampled,
               coalesce(list(turn_id) FILTER (completed IS NULL AND delivered IS NOT NULL), []) AS delivered
        FROM {parts} GROUP BY trajectory_id, policy)
      GROUP BY trajectory_id) s USING (trajectory_id)
    """


def apart(parts: str, paths: str) -> str:
    """The rows of the relation `parts` of `turn_parts` rows whose trajectory the relation `paths` does not
    have: the turns that are looked at one by one."""
    return f"SELECT * FROM {parts} ANTI JOIN {paths} USING (trajectory_id)"


def amounts(parts: str) -> str:
    """How many turns were sampled, and of how many tokens, by run and version, in the relation `parts` of
    `turn_parts` rows; the version means nothing where not one of them sampled all (`one_version`)."""
    return f"""
    SELECT run, policy, policy_version, one_version, count(*) AS turns,
           CAST(sum(completion_length) AS BIGINT) AS tokens
    FROM {parts} WHERE completed IS NOT NULL GROUP BY run, policy, policy_version, one_version
    """


def plans(events: str) -> str:
    """The `step.planned` rows of the relation `events`: what decides where the samples went that they name.

    `path_taken` says that the recipe takes one path of a trajectory, `grouping` that the step decided on
    whole groups of the log, and `batch` names the samples of the rollout batch that it began, if they are
    not its own.
    """
    refs = """from_json(json_extract(extra, '$.{}'),
        '[{{"trajectory_id": "VARCHAR", "turn_id": "VARCHAR"}}]')"""
    named = "json_type(extra, '$.rollout_batch.samples') = 'ARRAY'"
    return f"""
    SELECT lane, seq, event_id, run, policy, policy_version, step, CAST(texts[1] AS BIGINT) AS attempt,
           texts[2] AS cut,
           coalesce(texts[3], 'all') <> 'all' AS path_taken,
           coalesce(json_type(extra, '$.schedule') = 'OBJECT'
                    AND coalesce(json_type(extra, '$.schedule.slice'), 'NULL') = 'NULL'
                    AND (coalesce(json_type(extra, '$.rollout_batch'), 'NULL') = 'NULL' OR {named})
                    AND coalesce(json_contains(json_extract(extra, '$.recipe.splits'), '"train"'), true),
                    false) AS grouping,
           {refs.format("samples")} AS samples,
           CASE WHEN {named} THEN {refs.format("rollout_batch.samples")} END AS batch
    FROM (SELECT *, json_extract_string(extra, ['$.attempt', '$.cut', '$.recipe.paths']) AS texts
          FROM {events} WHERE kind = 'step.planned')
    """


def rewards(events: str) -> str:
    """The `reward.assigned` rows of the relation `events` with their rarer fields as columns."""
    return f"""
    SELECT run, trajectory_id, turn_id, reward, texts[1] AS source, texts[2] AS supersedes, event_id, time,
           lane, seq, texts[3] AS key
    FROM (SELECT *, json_extract_string(extra, ['$.source', '$.supersedes', '$.by']) AS texts
          FROM {events} WHERE kind = 'reward.assigned')
    """


def several(turn_events: str) -> str:
    """How many completed turns of the relation were not sampled entirely by one policy version."""
    return f"SELECT count(*) FROM {turn_events} WHERE kind = 'turn.completed' AND NOT {ONE_VERSION}"
