from kernels.peer_rows.op import ALIGNMENT, InboxLayout, return_slots, send_rows
from kernels.peer_rows.reference import return_slots_reference, send_rows_reference

__all__ = [
    "ALIGNMENT",
    "InboxLayout",
    "return_slots",
    "return_slots_reference",
    "send_rows",
    "send_rows_reference",
]
