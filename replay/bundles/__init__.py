"""One step in one file.

In: a store and a step's number. Out: an excerpt with all that the step's replay reads, which opens as a store
elsewhere.
"""
