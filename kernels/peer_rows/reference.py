"""The same copies in plain torch, between memories that one process can all reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.moe import Routes
from kernels.number_formats import QuantisedRows
from kernels.peer_rows.op import InboxLayout


def send_rows_reference(
    rows: QuantisedRows | Tensor, routes: Routes, inboxes: Sequence[Tensor], layout: InboxLayout, *,
    rank: int, num_own: int,
) -> None:  # fmt: skip
    """As the op, but for inboxes as tensors of bytes."""
    values = rows.values if isinstance(rows, QuantisedRows) else rows
    start, end = rank * layout.most, rank * layout.most + len(values)
    for target, inbox in enumerate(inboxes):
        ids = routes.expert_ids - target * num_own
        ids = torch.where((ids >= 0) & (ids < num_own), ids, -1)
        is_sent = (ids >= 0).any(1)
        found, there = layout.rows(inbox, values.dtype), layout.routes(inbox)
        there.expert_ids[start : start + layout.most] = -1
        there.expert_ids[start:end] = ids
        there.weights[start:end][is_sent] = routes.weights[is_sent]
        if isinstance(rows, QuantisedRows) and isinstance(found, QuantisedRows):
            found.scales[start:end][is_sent] = rows.scales[is_sent]
            found = found.values
        assert isinstance(found, Tensor)
        found.view(torch.uint8)[start:end][is_sent] = values.view(torch.uint8)[is_sent]
