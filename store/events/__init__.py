"""The kinds of events, one frozen record each, and the envelope they travel in.

An event is one immutable fact. Its record says what happened; the envelope holds the run, the time and the
event id. The log assigns `lane` and `seq`, the event's position, on append.

Fields named in `events.schema.COLUMNS` become typed columns; all others go to the JSON column `extra`.
Token ids are int32 arrays and logprobs float32 arrays, one-dimensional.
"""

# ruff: noqa: F403  # a kind is listed by its class alone
from rollbook.store.events.about import RECORDS as RECORDS
from rollbook.store.events.about import Record as Record
from rollbook.store.events.event import Event as Event
from rollbook.store.events.rollouts import *
from rollbook.store.events.service import *
from rollbook.store.events.training import *
from rollbook.store.events.upkeep import *
