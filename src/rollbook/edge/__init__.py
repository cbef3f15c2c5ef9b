"""The front of any HTTP service.

In: connections from anywhere. Out: requests within bounds, by known callers, whose bodies are whole;
everybody else gets an error in the form of the API that was asked. Knows nothing of trajectories or of the
log.
"""
