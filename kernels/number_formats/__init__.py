from kernels.number_formats.reference import (
    ENTRY_BLOCK,
    SCALE_BLOCK,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    e8m0_to_float,
    pack_fp4_entry,
    pack_fp4_index,
    pack_fp8,
    quantise_activations_reference,
    unpack_fp4_entry,
    unpack_fp4_index,
    unpack_fp8,
)

__all__ = [
    "ENTRY_BLOCK",
    "SCALE_BLOCK",
    "dequantise_fp8_weight",
    "dequantise_mxfp4_weight",
    "e8m0_to_float",
    "pack_fp4_entry",
    "pack_fp4_index",
    "pack_fp8",
    "quantise_activations_reference",
    "unpack_fp4_entry",
    "unpack_fp4_index",
    "unpack_fp8",
]
