"""Models of clients that share one base model: what is sent, what it does to a model, and the fold of it."""
