"""Which weights an engine holds.

In: model folders, tensors and engines' checksums. Out: digests, the checksums that an engine must give, and
the version that it serves by the log.
"""
