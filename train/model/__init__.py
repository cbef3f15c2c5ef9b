"""The model in training: Megatron-core, with weights under Hugging Face names."""
