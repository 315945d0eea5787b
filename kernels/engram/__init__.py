from kernels.engram.reference import engram_gate_reference, engram_hash_reference

__all__ = ["engram_gate_reference", "engram_hash_reference"]
