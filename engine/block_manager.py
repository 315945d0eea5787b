"""BlockManager: who owns which KV block, on the device and in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one block, or one state slot, from ``source`` on ``source_place`` to ``target``."""

    kind: Literal["block", "state"]
    source_place: Place
    target_place: Place
    source: int
    target: int
