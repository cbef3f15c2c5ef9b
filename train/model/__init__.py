"""The model in training.

In: a Hugging Face folder. Out: Megatron-core's model under the same names of tensors, with its low-rank
factors, optimizer and memory.
"""
