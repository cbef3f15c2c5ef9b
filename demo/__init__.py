"""The demo: a tiny model, a task it can learn, and an agent that knows nothing of Rollbook."""
