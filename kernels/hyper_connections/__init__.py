from kernels.hyper_connections.reference import (
    StreamMix,
    collapse_streams_reference,
    expand_streams_reference,
    mix_streams_reference,
)

__all__ = ["StreamMix", "collapse_streams_reference", "expand_streams_reference", "mix_streams_reference"]
