"""Where a step's samples come from.

In: a log at a cut, or its tail. Out: samples in the order in which they are trained on, each as often as the
recipe says.
"""
