from kernels.rms_norm.op import choose_config, rms_norm
from kernels.rms_norm.reference import inverse_rms, rms_norm_reference

__all__ = ["choose_config", "inverse_rms", "rms_norm", "rms_norm_reference"]
