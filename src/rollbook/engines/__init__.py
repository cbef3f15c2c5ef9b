"""What samples tokens.

In: prompt ids and sampling parameters. Out: ids, their logprobs, and which policy version made each.
"""
