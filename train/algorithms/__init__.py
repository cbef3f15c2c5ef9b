"""Advantages and losses.

In: a batch's rewards, logprobs and values. Out: advantages, token losses and their normalization, with the
paper that each formula is from. Pure.
"""
