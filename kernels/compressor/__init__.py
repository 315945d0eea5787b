from kernels.compressor.reference import pool_groups_reference

__all__ = ["pool_groups_reference"]
