"""The view that says where every sampled token went, and the query beneath it. Pure; see
`store.sql.views`.

It follows the trainer's rules (`train.select.samples`, `train.select.recipe`): a turn belongs to
the sample of the first leaf above it in turn order, and goes where that sample went.
`rollbook.testing.ledger` computes the same as a fold.

A single-path trajectory that is whole in a sealed unit goes where its only sample goes, all at
once (`internal.paths`); the turns of all others are looked at one by one.
"""

from __future__ import annotations

from rollbook.store.sealed.projections import ONE_VERSION
from rollbook.store.sql import columns
from rollbook.store.sql.columns import View, text

_DONE = """
    done AS MATERIALIZED (
      SELECT any_value(run) AS run, trajectory_id, turn_id, any_value(parent_turn_id) AS parent_turn_id,
             any_value(lane) AS lane, any_value(seq) AS seq, any_value(completion_length) AS tokens,
             any_value(policy) AS policy, any_value(policy_version) AS policy_version,
             bool_and(one_version) AS one_version,
             CASE WHEN any_value(requested) IS NOT NULL THEN max(delivered) END AS delivered,
             any_value(requested) IS NOT NULL AS asked, coalesce(any_value(altered), false) AS altered,
             coalesce(any_value(erased), false) AS erased
      FROM internal.apart_parts ANTI JOIN internal.paths USING (trajectory_id) WHERE ({of})
      GROUP BY trajectory_id, turn_id HAVING any_value(completed) IS NOT NULL
    )"""
"""Completed turns of all but `internal.paths`; those whose request lies outside the cut as well, so that no
token is left out."""

_ORDER = f"""
    adopted AS MATERIALIZED (
      SELECT trajectory_id, lane, seq, {text("last_event_id")} AS last_event_id
      FROM internal.mark_events WHERE kind = 'trajectory.adopted'
    ), tenure_start AS MATERIALIZED (
      SELECT * FROM adopted
      UNION ALL
      SELECT trajectory_id, lane, seq, NULL FROM internal.mark_events WHERE kind = 'trajectory.opened'
         AND trajectory_id IN (SELECT trajectory_id FROM adopted)
    ), named_event AS MATERIALIZED (
      SELECT trajectory_id, event_id, lane, seq
      FROM (SELECT trajectory_id, event_id, lane, seq FROM internal.turn_events
            UNION ALL SELECT trajectory_id, event_id, lane, seq FROM internal.mark_events)
      WHERE event_id IN (SELECT last_event_id FROM tenure_start WHERE last_event_id IS NOT NULL)
    ), earlier_tenure AS MATERIALIZED (
      SELECT a.trajectory_id, a.lane, a.seq, coalesce(b.lane, o.lane) AS before_lane,
             coalesce(b.seq, o.seq) AS before_seq
      FROM tenure_start a
      JOIN tenure_start o ON o.trajectory_id = a.trajectory_id AND o.last_event_id IS NULL
      LEFT JOIN named_event e ON e.trajectory_id = a.trajectory_id AND e.event_id = a.last_event_id
      ASOF LEFT JOIN tenure_start b
        ON b.trajectory_id = e.trajectory_id AND b.lane = e.lane AND e.seq >= b.seq
      WHERE a.last_event_id IS NOT NULL
    ), tenure AS (
      SELECT trajectory_id, lane, seq, 0 AS rank FROM tenure_start WHERE last_event_id IS NULL
      UNION ALL
      SELECT e.trajectory_id, e.lane, e.seq, t.rank + 1
      FROM tenure t JOIN earlier_tenure e
        ON e.trajectory_id = t.trajectory_id AND e.before_lane = t.lane AND e.before_seq = t.seq
    ), moved AS MATERIALIZED (
      SELECT d.trajectory_id, d.turn_id, t.rank
      FROM (SELECT * FROM done WHERE trajectory_id IN (SELECT trajectory_id FROM tenure_start)) d
      ASOF LEFT JOIN tenure_start s
        ON s.trajectory_id = d.trajectory_id AND s.lane = d.lane AND d.seq >= s.seq
      LEFT JOIN tenure t ON t.trajectory_id = s.trajectory_id AND t.lane = s.lane AND t.seq = s.seq
    )"""
"""Turn order where lanes wrote a trajectory one after the other, as `fold.ownership` has it."""

_OWNER = """
    leaf AS MATERIALIZED (
      SELECT d.trajectory_id, d.turn_id, d.parent_turn_id,
             (coalesce(m.rank, 0), d.lane, d.seq) AS place
      FROM done d
      ANTI JOIN done c ON c.trajectory_id = d.trajectory_id AND c.parent_turn_id = d.turn_id
      LEFT JOIN moved m ON m.trajectory_id = d.trajectory_id AND m.turn_id = d.turn_id
    ), single AS MATERIALIZED (
      SELECT trajectory_id, any_value(turn_id) AS leaf_turn_id
      FROM leaf GROUP BY trajectory_id HAVING count(*) = 1
    ), inner_turn AS MATERIALIZED (
      SELECT trajectory_id, turn_id, parent_turn_id FROM done ANTI JOIN single USING (trajectory_id)
    ), climb AS (
      SELECT trajectory_id, turn_id AS leaf_turn_id, place, turn_id, parent_turn_id
      FROM leaf ANTI JOIN single USING (trajectory_id)
      UNION ALL
      SELECT c.trajectory_id, c.leaf_turn_id, c.place, t.turn_id, t.parent_turn_id
      FROM climb c JOIN inner_turn t
        ON t.trajectory_id = c.trajectory_id AND t.turn_id = c.parent_turn_id
    ), owner AS MATERIALIZED (
      SELECT trajectory_id, turn_id, arg_min(leaf_turn_id, place) AS leaf_turn_id
      FROM climb GROUP BY trajectory_id, turn_id
    )"""
"""A trajectory's only leaf owns all its turns (`single`); of several, `owner` says which."""

_RULE = "coalesce(min(rule) FILTER (rule <> 'other_path'), min(rule))"
"""What a sample was dropped by, if by several rules: it being on another path says least."""

_TAKEN = f"""
    opening AS MATERIALIZED (
      SELECT lane, seq, run, TRY_CAST({text("config.demand.group_size")} AS BIGINT) AS size
      FROM internal.mark_events WHERE kind = 'run.opened'
    ), grouping_attempt AS MATERIALIZED (
      SELECT a.run, a.policy, a.step, a.attempt, a.cut, a.lane, a.seq, o.seq AS opened, o.size,
             coalesce(a.batch, a.samples) AS refs
      FROM attempt a ASOF JOIN opening o ON o.lane = a.lane AND o.run = a.run AND a.seq >= o.seq
      WHERE o.size > 1 AND a.grouping
    ), taken AS MATERIALIZED (
      SELECT run, policy, size, ref.trajectory_id, ref.turn_id AS leaf_turn_id, cut
      FROM (SELECT *, unnest(refs) AS ref FROM grouping_attempt)
      UNION ALL
      SELECT g.run, g.policy, g.size, d.trajectory_id, d.turn_id,
             CASE WHEN d.rule IN ('not_finite', 'all_rejected') THEN '' ELSE coalesce(d.cut, g.cut) END
      FROM dropped d JOIN grouping_attempt g
        ON g.lane = d.lane AND g.run = d.run AND g.step = d.step AND g.attempt = d.attempt
       AND d.seq BETWEEN g.opened AND g.seq
    )"""
"""What attempts that take groups decided on, and the cut at which they did: samples of their rollout batches,
and drops since their training began (of skipped steps it is not known here when)."""


_BESIDE = """
    trajectory AS MATERIALIZED (
      SELECT run, trajectory_id, "group", split, opened, finished FROM internal.trajectory_scalars
    ), taken_of AS MATERIALIZED (
      SELECT k.run, k.policy, k.size, o.run AS of_run, o."group" AS named, k.trajectory_id
      FROM (SELECT DISTINCT run, policy, size, trajectory_id FROM taken) k
      LEFT JOIN trajectory o USING (trajectory_id)
    ), uneven AS MATERIALIZED (
      SELECT run, policy, size, of_run, named, any_value(size) - count(*) % any_value(size) AS missing
      FROM taken_of ANTI JOIN (SELECT run, policy FROM taken_of WHERE of_run IS NULL) USING (run, policy)
      WHERE named IS NOT NULL GROUP BY run, policy, size, of_run, named
      HAVING count(*) % any_value(size) <> 0
    ), beside AS MATERIALIZED (
      SELECT s.*, o.trajectory_id, o.split
      FROM uneven s JOIN trajectory o ON o.run = s.of_run AND o."group" = s.named
      ANTI JOIN taken k ON k.run = s.run AND k.policy = s.policy AND k.size = s.size
                       AND k.trajectory_id = o.trajectory_id
      WHERE o.finished IS NOT NULL AND o.split <> 'void'
    )"""
"""Groups of which the trajectories that were decided on do not make up whole ones, and the others in them."""


def _attempts(verdict: str) -> str:
    """Attempts at steps that have an event of this verdict. The view `steps` says the same, from manifests:
    here these are not read."""
    return f"""(SELECT run, policy, step, CAST({text("attempt")} AS BIGINT) AS attempt
                FROM internal.mark_events WHERE kind = 'step.{verdict}')"""


_USE = f"""
    attempt AS MATERIALIZED (
      SELECT * FROM internal.plans SEMI JOIN {_attempts("committed")} USING (run, policy, step, attempt)
      ANTI JOIN {_attempts("abandoned")} USING (run, policy, step, attempt)
    ), dropped AS MATERIALIZED (
      SELECT d.*, p.policy FROM (
        SELECT lane, seq, run, step, trajectory_id, turn_id, {text("rule")} AS rule,
               CAST(coalesce({text("attempt")}, '1') AS BIGINT) AS attempt, {text("cut")} AS cut
        FROM internal.mark_events WHERE kind = 'sample.dropped') d
      ASOF LEFT JOIN internal.plans p ON p.lane = d.lane AND p.run = d.run AND d.seq <= p.seq
    ), any_use AS MATERIALIZED (
      SELECT ref.trajectory_id, ref.turn_id AS leaf_turn_id, CAST(NULL AS VARCHAR) AS rule, cut,
             path_taken AS whole
      FROM (SELECT cut, path_taken, unnest(samples) AS ref FROM attempt)
      UNION ALL
      SELECT d.trajectory_id, d.turn_id, d.rule, a.cut, a.path_taken AND d.rule <> 'other_path'
      FROM dropped d JOIN attempt a ON a.run = d.run AND a.step = d.step AND a.attempt = d.attempt
                                   AND a.policy = coalesce(d.policy, a.policy)
    ), use AS MATERIALIZED (
      SELECT * FROM any_use ANTI JOIN internal.paths USING (trajectory_id)
    ), {_TAKEN}, held AS MATERIALIZED (
      SELECT cut, string_split(part, '=')[1] AS lane, TRY_CAST(string_split(part, '=')[2] AS BIGINT) AS count
      FROM (SELECT cut, unnest(string_split(cut, ',')) AS part
            FROM (SELECT cut FROM attempt UNION SELECT cut FROM taken))
    ), {_BESIDE}, looked_at AS MATERIALIZED (
      SELECT trajectory_id FROM use
      UNION SELECT trajectory_id FROM taken SEMI JOIN owner USING (trajectory_id)
      UNION SELECT trajectory_id FROM beside
    ), ending AS MATERIALIZED (
      SELECT trajectory_id, lane, seq FROM internal.mark_events JOIN looked_at USING (trajectory_id)
      WHERE kind = 'trajectory.finished'
    ), finish AS MATERIALIZED (
      SELECT u.trajectory_id, u.cut, f.lane, f.seq
      FROM (SELECT DISTINCT trajectory_id, cut FROM use) u JOIN ending f USING (trajectory_id)
    ), known AS MATERIALIZED (
      SELECT DISTINCT f.trajectory_id, f.cut
      FROM finish f JOIN held h ON h.cut = f.cut AND h.lane = f.lane AND f.seq < h.count
    ), delivery AS MATERIALIZED (
      SELECT trajectory_id, turn_id, lane, seq FROM internal.mark_events JOIN looked_at USING (trajectory_id)
      WHERE kind = 'turn.delivered'
    ), decided AS MATERIALIZED (
      SELECT v.trajectory_id, v.turn_id, coalesce(bool_or(x.rule IS NULL), false) AS trained,
             {_RULE} AS rule
      FROM (
        SELECT u.trajectory_id, NULL AS turn_id, u.cut, u.rule
        FROM use u
        JOIN single s ON s.trajectory_id = u.trajectory_id AND s.leaf_turn_id = u.leaf_turn_id
        UNION ALL
        SELECT u.trajectory_id, o.turn_id, u.cut, u.rule
        FROM use u
        JOIN owner o ON o.trajectory_id = u.trajectory_id AND o.leaf_turn_id = u.leaf_turn_id
        UNION ALL
        SELECT u.trajectory_id, c.turn_id, u.cut, u.rule
        FROM use u
        JOIN climb c ON c.trajectory_id = u.trajectory_id AND c.leaf_turn_id = u.leaf_turn_id
        WHERE u.whole) x
      JOIN delivery v
        ON v.trajectory_id = x.trajectory_id AND (x.turn_id IS NULL OR v.turn_id = x.turn_id)
      LEFT JOIN held h ON h.cut = x.cut AND h.lane = v.lane
      LEFT JOIN known k ON k.trajectory_id = x.trajectory_id AND k.cut = x.cut
      WHERE v.seq < h.count OR k.cut IS NULL
      GROUP BY v.trajectory_id, v.turn_id
    ), used AS (
      SELECT DISTINCT trajectory_id, leaf_turn_id FROM use
    ), used_whole AS (
      SELECT DISTINCT c.trajectory_id, c.turn_id
      FROM use u JOIN climb c ON c.trajectory_id = u.trajectory_id AND c.leaf_turn_id = u.leaf_turn_id
      WHERE u.whole
    )"""
"""What committed attempts consumed and dropped, at the cuts of their plans: what came later was masked.

Where a recipe takes one path of a trajectory (`whole`), its sample has all turns of the path, and what is
only on other paths was dropped by `other_path`.

`finish` is joined before `held`: every end with every cut would be a row for each pair of them. `ending` and
`delivery` are by trajectory alone, so that few trajectories let most of the log be passed over."""

_OMITTED = """
    decided_at AS MATERIALIZED (
      SELECT DISTINCT run, policy, size, of_run, named, cut
      FROM taken JOIN taken_of USING (run, policy, size, trajectory_id)
      SEMI JOIN uneven USING (run, policy, size, of_run, named)
    ), passed_by AS MATERIALIZED (
      SELECT DISTINCT m.run, m.policy, m.size, m.of_run, m.named, m.trajectory_id, f.lane, f.seq
      FROM beside m JOIN decided_at a USING (run, policy, size, of_run, named)
      JOIN ending f ON f.trajectory_id = m.trajectory_id
      JOIN held hf ON hf.cut = a.cut AND hf.lane = f.lane AND f.seq < hf.count
      JOIN delivery v ON v.trajectory_id = m.trajectory_id
      JOIN held hv ON hv.cut = a.cut AND hv.lane = v.lane AND v.seq < hv.count
      JOIN internal.turn_scalars t ON t.trajectory_id = v.trajectory_id AND t.turn_id = v.turn_id
       AND t.completion_length > 0 AND NOT coalesce(t.altered, false)
      ANTI JOIN any_use u ON u.trajectory_id = m.trajectory_id
      WHERE m.split = 'train'
    ), omitted AS MATERIALIZED (
      SELECT DISTINCT trajectory_id FROM (
        SELECT p.trajectory_id, s.missing - (b.there - count(*) OVER of_group) AS missing,
               row_number() OVER (of_group ORDER BY p.lane, p.seq) AS place
        FROM passed_by p JOIN uneven s USING (run, policy, size, of_run, named)
        JOIN (SELECT run, policy, size, of_run, named, count(*) AS there FROM beside GROUP BY ALL) b
          USING (run, policy, size, of_run, named)
        WINDOW of_group AS (PARTITION BY p.run, p.policy, p.size, p.of_run, p.named))
      WHERE place <= missing
    ), omitted_turn AS MATERIALIZED (
      SELECT DISTINCT o.trajectory_id, o.turn_id
      FROM owner o JOIN (SELECT DISTINCT trajectory_id, cut FROM taken) k USING (trajectory_id)
      ANTI JOIN taken n ON n.trajectory_id = o.trajectory_id AND n.leaf_turn_id = o.leaf_turn_id
      JOIN delivery v ON v.trajectory_id = o.trajectory_id AND v.turn_id = o.turn_id
      JOIN held h ON h.cut = k.cut AND h.lane = v.lane AND v.seq < h.count
    )"""
"""What attempts that take groups had to decide on, and neither took nor dropped: a further leaf of a
trajectory that they decided on; and of a group of which the trajectories that were decided on do not make up
whole groups, those that are missing, where there are trajectories that were passed by. Such a one may have
been of no use then: it counts as missing in the place of one that was not."""

_TURN = """
    spoiled AS MATERIALIZED (
      SELECT l.trajectory_id, l.leaf_turn_id
      FROM done d JOIN single l ON l.trajectory_id = d.trajectory_id WHERE d.erased
      UNION
      SELECT c.trajectory_id, c.leaf_turn_id
      FROM done d JOIN climb c ON c.trajectory_id = d.trajectory_id AND c.turn_id = d.turn_id WHERE d.erased
    ), turn AS MATERIALIZED (
      SELECT d.*, CASE WHEN d.tokens = 0 THEN 'kept out'
                       WHEN t.opened IS NULL OR NOT d.asked THEN 'in flight'
                       WHEN d.altered THEN 'kept out'
                       WHEN g.trained THEN 'trained'
                       WHEN g.rule IS NOT NULL THEN 'dropped'
                       WHEN t.split <> 'train' OR s.leaf_turn_id IS NOT NULL THEN 'kept out'
                       WHEN t.finished IS NULL THEN 'in flight'
                       WHEN d.delivered IS NULL OR u.leaf_turn_id IS NOT NULL OR w.turn_id IS NOT NULL
                         OR m.trajectory_id IS NOT NULL OR n.turn_id IS NOT NULL THEN 'kept out'
                       ELSE 'waiting' END AS term,
             CASE WHEN d.tokens = 0 THEN 'text only'
                  WHEN t.opened IS NULL OR NOT d.asked THEN NULL
                  WHEN d.altered THEN 'altered'
                  WHEN g.trained THEN NULL
                  WHEN g.rule IS NOT NULL THEN g.rule
                  WHEN t.split <> 'train' THEN t.split
                  WHEN s.leaf_turn_id IS NOT NULL THEN 'erased'
                  WHEN t.finished IS NULL THEN NULL
                  WHEN d.delivered IS NULL THEN 'undelivered'
                  WHEN u.leaf_turn_id IS NOT NULL OR w.turn_id IS NOT NULL THEN 'late'
                  WHEN m.trajectory_id IS NOT NULL OR n.turn_id IS NOT NULL THEN 'omitted' END AS rule
      FROM done d
      LEFT JOIN single l ON l.trajectory_id = d.trajectory_id
      LEFT JOIN owner o ON o.trajectory_id = d.trajectory_id AND o.turn_id = d.turn_id
      LEFT JOIN trajectory t ON t.trajectory_id = d.trajectory_id
      LEFT JOIN decided g ON g.trajectory_id = d.trajectory_id AND g.turn_id = d.turn_id
      LEFT JOIN spoiled s ON s.trajectory_id = d.trajectory_id
        AND s.leaf_turn_id = coalesce(l.leaf_turn_id, o.leaf_turn_id)
      LEFT JOIN used u ON u.trajectory_id = d.trajectory_id
        AND u.leaf_turn_id = coalesce(l.leaf_turn_id, o.leaf_turn_id)
      LEFT JOIN used_whole w ON w.trajectory_id = d.trajectory_id AND w.turn_id = d.turn_id
      LEFT JOIN omitted m ON m.trajectory_id = d.trajectory_id
      LEFT JOIN omitted_turn n ON n.trajectory_id = d.trajectory_id AND n.turn_id = d.turn_id
    )"""

_PATH = f"""
    path AS MATERIALIZED (
      SELECT p.*, u.trajectory_id IS NOT NULL AS used, u.rule AS dropped_by,
             coalesce(u.trained, false) AS trained, m.trajectory_id IS NOT NULL AS omitted
      FROM (SELECT * FROM internal.paths WHERE {{of}}) p
      LEFT JOIN omitted m ON m.trajectory_id = p.trajectory_id
      LEFT JOIN (
        SELECT trajectory_id, leaf_turn_id, {_RULE} AS rule, bool_or(rule IS NULL) AS trained
        FROM any_use GROUP BY trajectory_id, leaf_turn_id
      ) u ON u.trajectory_id = p.trajectory_id AND u.leaf_turn_id = p.leaf_turn_id
    ), path_share AS (
      SELECT run, trajectory_id, turns, policy, policy_version, tokens,
             CASE WHEN trained THEN 'trained' WHEN used THEN 'dropped'
                  WHEN split <> 'train' OR omitted THEN 'kept out' ELSE 'waiting' END AS term,
             CASE WHEN trained THEN NULL WHEN used THEN dropped_by
                  WHEN split <> 'train' THEN split WHEN omitted THEN 'omitted' END AS rule
      FROM path
    )"""
"""All turns of a path were delivered before its end, so that each is in whatever step used its sample."""

_SPAN = f"""
    span AS MATERIALIZED (
      SELECT trajectory_id, turn_id, span.policy, span.version, span."end" - span.start AS tokens
      FROM (SELECT trajectory_id, turn_id, unnest(version_spans) AS span FROM internal.several_turns
            WHERE kind = 'turn.completed' AND NOT {ONE_VERSION} AND ({{of}}))
    )"""

_UNDECIDED = "(term IN ('in flight', 'waiting') OR (term = 'kept out' AND rule IN ('undelivered', 'late')))"


def shares(condition: str = "true") -> str:
    """Where sampled tokens went, and by which rule: a row per completed turn and version that
    sampled tokens of it, or per path and version, without a turn, for its number of `turns`.

    Args:
        condition: on `trajectory_id`: only the turns of these trajectories are looked at.
    """
    parts = [
        _DONE.format(of=condition),
        _ORDER,
        _OWNER,
        _USE,
        _OMITTED,
        _TURN,
        _PATH.format(of=condition),
        _SPAN.format(of=condition),
    ]
    return f"""
    WITH RECURSIVE {", ".join(parts)}, share AS (
      SELECT run, trajectory_id, NULL AS turn_id, turns, policy, policy_version, term, rule, tokens
      FROM path_share
      UNION ALL
      SELECT run, trajectory_id, turn_id, 1, policy, policy_version, term, rule, tokens
      FROM turn WHERE one_version AND tokens > 0
      UNION ALL
      SELECT run, trajectory_id, turn_id, 1, span.policy, span.version, term, rule, span.tokens
      FROM turn JOIN span USING (trajectory_id, turn_id) WHERE NOT one_version AND turn.tokens > 0
      UNION ALL
      SELECT run, trajectory_id, turn_id, 1, NULL, NULL, term, rule, turn.tokens - coalesce(s.tokens, 0)
      FROM turn LEFT JOIN (SELECT trajectory_id, turn_id, sum(tokens) AS tokens FROM span GROUP BY ALL) s
        USING (trajectory_id, turn_id) WHERE NOT one_version OR turn.tokens = 0
    )
    SELECT run, trajectory_id, turn_id, turns, policy, policy_version,
           CASE WHEN policy_version IS NULL AND {_UNDECIDED} THEN 'kept out' ELSE term END AS term,
           CASE WHEN policy_version IS NULL AND {_UNDECIDED} THEN 'no version' ELSE rule END AS rule,
           CAST(tokens AS BIGINT) AS tokens
    FROM share WHERE tokens <> 0 OR rule = 'text only'
    """


SHARES = shares()
"""Of all trajectories."""

TURNS = """CAST(count(DISTINCT (trajectory_id, turn_id)) FILTER (turn_id IS NOT NULL)
      + coalesce(sum(turns) FILTER (turn_id IS NULL), 0) AS BIGINT)"""
"""How many turns rows of `SHARES` are of; those of one turn count once."""

LEDGER = View(
    "ledger",
    "Where the sampled tokens of each policy version went; over all terms they are all that were sampled.",
    f"""
    SELECT run, policy, policy_version, term, rule, {TURNS} AS turns,
           CAST(sum(tokens) AS BIGINT) AS tokens
    FROM ({SHARES}) GROUP BY run, policy, policy_version, term, rule
    """,
    columns.LEDGER,
)
