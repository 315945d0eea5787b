from kernels.sparse_attention.reference import sparse_attention_reference

__all__ = ["sparse_attention_reference"]
