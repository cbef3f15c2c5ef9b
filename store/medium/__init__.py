"""What carries the log between hosts: numbered bytes in named sequences, each put only if it is not there.

In come addresses and bytes; out go the same bytes, in order, on any host. Object storage and NATS are two
media of one interface; the leases of processes and their claims are sequences as well.
"""
