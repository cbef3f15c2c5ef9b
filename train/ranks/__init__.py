"""A policy over processes.

In: what rank 0 asks of all. Out: what each rank does of it, on this host, under a launcher, or on a Ray
cluster; who may join is proven by a secret.
"""
