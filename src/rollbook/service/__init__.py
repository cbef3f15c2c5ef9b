"""A training service: clients own data, rewards and the loop, and Rollbook trains and remembers.

In come requests of the Tinker API; each becomes an event before it is answered. Out go the results of
futures, and a log from which every model is a fold: it survives any crash with the same bits.
"""
