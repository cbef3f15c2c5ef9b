"""The log of agent rollouts: append, recover, read, query. Imports no other layer, and never torch."""

from rollbook.store.cut import format_cut, parse_cut
from rollbook.store.events import Event
from rollbook.store.log.store import Store
from rollbook.store.open import open_store as open
from rollbook.store.sql.query import connect

__all__ = ["Event", "Store", "connect", "format_cut", "open", "parse_cut"]
