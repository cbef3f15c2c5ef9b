"""Models of clients that share base models: what is sent, what it does to a model, and the fold of it."""
