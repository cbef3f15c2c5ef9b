"""The model: Megatron-core under Hugging Face names."""
