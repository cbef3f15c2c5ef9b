"""One optimizer step: `step` says in order what happens.

In: a rollout batch's experience and settings. Out: new weights, metrics, and a digest of each stage.
"""
