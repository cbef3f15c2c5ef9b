"""The write-ahead log of a lane: frames in segments, how they are written and made durable."""
