"""Recorded steps by another rule.

In: steps, and a recipe, algorithm, optimizer or reward function to put in place of theirs. Out:
both sides next to each other, from the same state.
"""
