"""Which device this process computes on, told apart from every other in the cluster.

Owns that one question; it must not know what is done with the answer.
"""

from __future__ import annotations


def device_uuid() -> str:
    """The UUID of the first CUDA device that this process sees; empty where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
