"""The write-ahead log of a lane: frames in segments, and how they are written durably."""
