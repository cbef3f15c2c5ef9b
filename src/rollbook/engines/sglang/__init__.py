"""SGLang behind HTTP: sampling, its servers, and which weights they hold."""
