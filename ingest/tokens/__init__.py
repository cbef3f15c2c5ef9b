"""Exact token ids.

In: chat messages, and the turns that came before. Out: the ids to send, which extend an earlier turn's or
begin a new root; a sampled id is never made again by a tokenizer.
"""
