"""The model's building blocks: each layer owns its weights and calls public ops of ``kernels``."""
