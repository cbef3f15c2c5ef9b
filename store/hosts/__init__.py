"""One log over several hosts: each ships its lanes to a medium and follows those of others.

In come the files of this host's lanes and the entries of a medium; out go replicas of other hosts' lanes,
which readers take for lanes like any, leases, and claims that hold between hosts.
"""
