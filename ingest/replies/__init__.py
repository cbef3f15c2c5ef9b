"""From sampled text to an assistant message: tool calls and reasoning, by model family."""
