"""The write-ahead log of a lane.

In: encoded events. Out: checksummed, chained frames in segments, acknowledged once the disk has them.
"""
