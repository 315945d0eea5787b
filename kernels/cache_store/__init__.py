from kernels.cache_store.op import compress_and_store, copy_rows, store_index_keys, store_window_kv
from kernels.cache_store.reference import (
    compress_and_store_reference,
    copy_rows_reference,
    store_index_keys_reference,
    store_window_kv_reference,
)

__all__ = [
    "compress_and_store",
    "compress_and_store_reference",
    "copy_rows",
    "copy_rows_reference",
    "store_index_keys",
    "store_index_keys_reference",
    "store_window_kv",
    "store_window_kv_reference",
]
