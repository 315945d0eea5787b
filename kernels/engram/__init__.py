from kernels.engram.op import engram_gate, engram_gather
from kernels.engram.reference import engram_gate_reference, engram_gather_reference, engram_hash_reference

__all__ = [
    "engram_gate",
    "engram_gate_reference",
    "engram_gather",
    "engram_gather_reference",
    "engram_hash_reference",
]
