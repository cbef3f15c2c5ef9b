"""Rollbook, the ledger of agent rollouts: record, query, train, replay."""

__version__ = "0.1.0"
