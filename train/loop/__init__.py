"""The training loop: plan, run, commit, publish; and running a step again."""
