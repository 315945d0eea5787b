from kernels.rope.reference import YarnScaling, apply_rope_reference, rope_frequencies, rope_tables

__all__ = ["YarnScaling", "apply_rope_reference", "rope_frequencies", "rope_tables"]
