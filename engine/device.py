"""Which device this process computes on, told apart from every other in the cluster.

Owns that one question; it must not know what is done with the answer.
"""

from __future__ import annotations

import os


def choose_device(name: str) -> None:
    """This thread computes on the GPU of that name from now on: a number, or a name listed as visible."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(visible.split(",").index(name) if visible else int(name))


def device_uuid() -> str:
    """The UUID of the CUDA device that this thread computes on; empty where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
