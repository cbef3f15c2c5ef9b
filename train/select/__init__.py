"""Which samples of a log are trained on.

In: turns at a cut, and a recipe. Out: references to samples, and the rule that dropped each of the others.
"""
