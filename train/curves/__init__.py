"""The course of trainings for TensorBoard and Weights & Biases, from the log."""
