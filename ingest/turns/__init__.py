"""One model call: what it asks, how it runs, and what it came to."""
