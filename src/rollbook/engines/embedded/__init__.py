"""An engine inside this process.

In: prompts, and SGLang's own control calls. Out: tokens from transformers' continuous batching, and weights
that change while it pauses.
"""
