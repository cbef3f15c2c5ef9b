"""An online run as one command: engines, proxy, training and rollouts, started, watched, stopped in order."""
