"""Samples become arrays.

In: references that a recipe kept. Out: batches of one optimizer step: tokens, masks, logprobs, versions,
advantages, partitioned into micro-batches.
"""
