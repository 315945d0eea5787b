"""What Gluon calls by other names from one version of Triton to another, from 3.6 to 3.9."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_HAS_LOADS = hasattr(tma, "async_load")
tma_load = tma.async_load if _HAS_LOADS else tma.async_copy_global_to_shared
tma_store = tma.async_store if _HAS_LOADS else tma.async_copy_shared_to_global
copy_to_shared = async_copy.async_load if _HAS_LOADS else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_IS_PRIVATE = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def reinterpreted(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as another tensor."""
    if _IS_PRIVATE:
        return smem._reinterpret(dtype, shape, layout)
    else:
        return smem.reinterpret(dtype, shape, layout)
