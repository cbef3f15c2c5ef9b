"""Data that is not traffic: files of prompts and completions, preferences and chats.

In: rows in the shapes that people have. Out: chats with the token ids that a model would have read and
sampled, as trajectories of the log.
"""
