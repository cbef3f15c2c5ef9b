"""The proxy's HTTP routes.

In: requests that the guard let in. Out: turns, trajectories, launches and the log's events, as replies that
end only once what they say is durable.
"""
