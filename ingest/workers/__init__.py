"""Several processes that are one proxy: who owns which trajectory, and how they speak with each other."""
