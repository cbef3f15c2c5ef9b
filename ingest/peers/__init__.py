"""Several proxies of one run, on several hosts: who owns which trajectory, and who takes over for whom."""
