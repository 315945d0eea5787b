from kernels.rms_norm.reference import inverse_rms, rms_norm_reference

__all__ = ["inverse_rms", "rms_norm_reference"]
