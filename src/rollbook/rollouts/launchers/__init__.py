"""How agents are started, and how nothing of them is left.

In: a command, limits, and how far it is to be kept from others. Out: how it ended, what it took, and what it
printed; on this host, in containers, or on the nodes of a Ray cluster.
"""
