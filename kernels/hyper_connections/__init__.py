from kernels.hyper_connections.op import (
    NUM_STREAMS,
    choose_config,
    collapse_norm,
    expand_streams,
    mix_streams,
    read_streams,
    split_mix_weight,
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
    "collapse_norm",
    "collapse_norm_reference",
    "collapse_streams_reference",
    "expand_streams",
    "expand_streams_reference",
    "mix_streams",
    "mix_streams_reference",
    "read_streams",
    "read_streams_reference",
    "split_mix_weight",
    "update_streams",
    "update_streams_reference",
]
