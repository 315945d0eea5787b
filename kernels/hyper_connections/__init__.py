from kernels.hyper_connections.op import (
    NUM_STREAMS,
    choose_config,
    choose_part,
    collapse_norm,
    expand_streams,
    mix_streams,
    read_streams,
    update_streams,
)
from kernels.hyper_connections.reference import (
    SiteInput,
    StreamMix,
    collapse_norm_reference,
    collapse_streams_reference,
    expand_streams_reference,
    mix_streams_reference,
    read_streams_reference,
    update_streams_reference,
)

__all__ = [
    "NUM_STREAMS",
    "SiteInput",
    "StreamMix",
    "choose_config",
    "choose_part",
    "collapse_norm",
    "collapse_norm_reference",
    "collapse_streams_reference",
    "expand_streams",
    "expand_streams_reference",
    "mix_streams",
    "mix_streams_reference",
    "read_streams",
    "read_streams_reference",
    "update_streams",
    "update_streams_reference",
]
