"""For tests in projects of users: the fold of the ledger as plain Python, and pytest's plugin of cassettes.

It imports nothing: pytest loads the plugin from here in every run.
"""
