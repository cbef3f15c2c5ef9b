"""What a reply says: content, reasoning and tool calls, by model family.

In: sampled text, or a message that somebody wrote. Out: an assistant message, or the ids that the family's
model would have sampled for it.
"""
