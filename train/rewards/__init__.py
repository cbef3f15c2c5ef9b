"""Rewards that a model gives: `rollbook score`."""
