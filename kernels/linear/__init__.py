from kernels.linear.reference import linear_reference

__all__ = ["linear_reference"]
