from kernels.peer_rows.op import InboxLayout, send_rows
from kernels.peer_rows.reference import send_rows_reference

__all__ = [
    "InboxLayout",
    "send_rows",
    "send_rows_reference",
]
