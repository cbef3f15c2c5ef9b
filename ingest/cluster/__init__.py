"""Several processes that record one run: workers of a proxy on one host, and proxies on several.

In: a request or a connection that any of them received. Out: the same request at the process that
owns its trajectory, and one answer about all of them.
"""
