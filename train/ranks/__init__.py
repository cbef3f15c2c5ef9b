"""A policy over several processes.

In: what rank 0 asks of all. Out: what each rank does of it, on this host, under a launcher, or
on a Ray cluster; a secret proves who may join.
"""
