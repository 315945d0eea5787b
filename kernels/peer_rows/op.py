"""Rows to the ranks of their experts, stored straight into those ranks' memory.

Owns the layout of an inbox, checks and launches. Where the memory is, who may write to it and when what was
written may be read is the caller's: a launch only copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.argument_checks import FLOATS, expect_tensor
from kernels.moe import ALIGNMENT, Routes
from kernels.number_formats import QuantisedRows
from kernels.peer_rows.kernel import send_rows_kernel

_VALUES = (*FLOATS, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class InboxLayout:
    """What ``size`` ranks send to one: part after part, each [size * most, width], row by row of every rank.

    Parts lie dense, so that each is read where it is.
    """

    size: int
    most: int
    value_bytes: int
    top_k: int
    num_scales: int

    @classmethod
    def of(cls, rows: QuantisedRows | Tensor, top_k: int, *, size: int, most: int) -> InboxLayout:
        """For such rows."""
        values = rows.values if isinstance(rows, QuantisedRows) else rows
        num_scales = rows.scales.shape[1] if isinstance(rows, QuantisedRows) else 0
        return cls(size, most, values.shape[1] * values.element_size(), top_k, num_scales)

    @property
    def ids_at(self) -> int:
        """Where expert ids begin, in bytes."""
        return self.size * self.most * self.value_bytes

    @property
    def weights_at(self) -> int:
        """Where slot weights begin."""
        return self.ids_at + self.size * self.most * self.top_k * 8

    @property
    def scales_at(self) -> int:
        """Where the rows' scales begin."""
        return self.weights_at + self.size * self.most * self.top_k * 4

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return self.scales_at + self.size * self.most * self.num_scales

    def rows(self, inbox: Tensor, dtype: torch.dtype) -> QuantisedRows | Tensor:
        """Values [size * most, width], with their scales if they have any: views of the inbox."""
        values = self._part(inbox, 0, self.value_bytes, dtype)
        if not self.num_scales:
            return values
        return QuantisedRows(values, self._part(inbox, self.scales_at, self.num_scales, torch.uint8))

    def routes(self, inbox: Tensor) -> Routes:
        """Expert ids and weights, each [size * most, top_k]: views of the inbox."""
        ids = self._part(inbox, self.ids_at, 8 * self.top_k, torch.int64)
        return Routes(ids, self._part(inbox, self.weights_at, 4 * self.top_k, torch.float32))

    def _part(self, inbox: Tensor, start: int, width: int, dtype: torch.dtype) -> Tensor:
        num_rows = self.size * self.most
        return inbox[start : start + num_rows * width].view(dtype).view(num_rows, -1)


def send_rows(
    rows: QuantisedRows | Tensor, routes: Routes, inboxes: Tensor, layout: InboxLayout, *,
    rank: int, num_own: int,
) -> None:  # fmt: skip
    """Write own rows into the inbox of every rank, where they are row ``rank * most`` and those behind it.

    A rank that has no expert of a row is sent -1 for its ids and nothing else of it, and so are all ranks for
    places behind the last row.

    Args:
        rows: [num_rows, width], dense, rows of whole ``ALIGNMENT``s; or what ``quantise_activations`` makes
            of them.
        routes: expert ids [num_rows, top_k] int64 among all ranks' experts, weights [num_rows, top_k] fp32.
            Rank r has ``num_own`` experts from ``r * num_own`` on; it is sent numbers from 0.
        inboxes: [size] int64, addresses of inboxes, this rank's own one among them.
        layout: of every inbox; ``layout.most`` is at least ``num_rows``.
        rank: this rank's number.

    Raises:
        ValueError: an argument is not as described.
    """
    values = rows.values if isinstance(rows, QuantisedRows) else rows
    expect_tensor("rows", values, (None, None), _VALUES)
    num_rows = values.shape[0]
    expect_tensor("routes.expert_ids", routes.expert_ids, (num_rows, None), (torch.int64,), like=values)
    top_k = routes.expert_ids.shape[1]
    expect_tensor("routes.weights", routes.weights, (num_rows, top_k), (torch.float32,), like=values)
    expect_tensor("inboxes", inboxes, (layout.size,), (torch.int64,), like=values)
    scales = values
    if isinstance(rows, QuantisedRows):
        scales = rows.scales
        expect_tensor("rows.scales", scales, (num_rows, None), (torch.uint8,), like=values)
    if layout != InboxLayout.of(rows, top_k, size=layout.size, most=layout.most) or num_rows > layout.most:
        raise ValueError(f"layout: expected one of these {num_rows} rows, got {layout}")
    if layout.value_bytes % ALIGNMENT:
        raise ValueError(f"rows: expected whole {ALIGNMENT} bytes a row, got {layout.value_bytes}")
    if not 0 <= rank < layout.size:
        raise ValueError(f"rank: expected 0 to {layout.size - 1}, got {rank}")
    if layout.most == 0:
        return
    num_words = layout.value_bytes // 8
    send_rows_kernel[(layout.size * layout.most,)](
        values.view(torch.int64), routes.expert_ids, routes.weights, scales.view(torch.uint8), inboxes,
        num_rows, layout.most, rank, layout.ids_at, layout.weights_at, layout.scales_at,
        SIZE=layout.size, NUM_OWN=num_own, TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k),
        WORDS=num_words, BLOCK=min(1024, triton.next_power_of_2(num_words)), SCALES=layout.num_scales,
        BLOCK_SCALES=triton.next_power_of_2(max(1, layout.num_scales)), num_warps=4,
    )  # fmt: skip
