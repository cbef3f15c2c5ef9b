"""The training loop: plan, run, commit and publish steps, and rerun recorded ones."""
