"""An engine inside the proxy's process: transformers, batching, and its weights."""
