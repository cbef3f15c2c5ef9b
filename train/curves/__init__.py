"""Curves for TensorBoard and Weights & Biases.

In: steps and evaluations of the log. Out: points, each written once.
"""
