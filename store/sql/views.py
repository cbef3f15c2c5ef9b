"""All SQL views over the log. Pure.

Each is a query over the relations of `store.sql.relations`: `turn_events` and `mark_events`, which together
are the log (its columns, see `events.schema`, with `lane` first), and what is derived from them.
`docs/sql.md` is generated from here.
"""

from __future__ import annotations

from rollbook.store.sql import agent_views, training_views
from rollbook.store.sql import training_views as metrics_view
from rollbook.store.sql.columns import View
from rollbook.store.sql.ledger_view import LEDGER

VIEWS: tuple[View, ...] = (
    agent_views.EVENTS,
    agent_views.RUNS,
    agent_views.REWARDS,
    agent_views.PREFERENCES,
    agent_views.TURNS,
    agent_views.TRAJECTORIES,
    agent_views.TOKENS,
    agent_views.OUTLIERS,
    agent_views.PATHS,
    agent_views.BODIES,
    agent_views.LAUNCHES,
    training_views.POLICIES,
    training_views.SYNCS,
    training_views.ACTIVATIONS,
    training_views.STEPS,
    training_views.EVALUATIONS,
    metrics_view.METRICS,
    training_views.SAMPLES,
    training_views.DROPS,
    training_views.LINEAGE,
    LEDGER,
)
"""All views, each after those it reads."""
