"""Which rows of a prompt each layer has to run, and what that costs.

Pure functions of the model's shape: they know positions, not tokens, blocks or tensors. The scheduler
uses them to choose between replaying, restoring and recomputing; the runner to cut a chunk's rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

DecoderPrefill = Literal["exact", "bounded", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the host has to know of a model.

    ``window`` counts the query's own row. ``decoder_start`` is the index of the last KV-source layer
    (0 without sources): from it on, a layer owns no state that grows with the context, except that
    layer's own entries, which need only its input.
    """

    num_layers: int
    window: int
    decoder_start: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.window < 1:
            raise ValueError(f"num_layers and window must be >= 1, got {self.num_layers} and {self.window}")
        if not 0 <= self.decoder_start < self.num_layers:
            raise ValueError(f"decoder_start must be in [0, {self.num_layers}), got {self.decoder_start}")


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Per layer, the first row of its two kinds of work; each row from there up to the chunk's end does it.

    Layer l computes window KV for rows >= ``first_window[l]`` (their input has to exist) and its
    attention, MoE and output for rows >= ``first_output[l]``. Layer ``decoder_start`` moreover compresses
    every row >= the cached prefix, so its input has to exist from ``first_input`` on. Nothing is
    clipped: a value at or below the chunk's start means "the whole chunk". Only ``bounded`` leaves a
    row's window reaching below ``first_window[l]``; those positions must be masked there.
    """

    first_output: tuple[int, ...]
    first_window: tuple[int, ...]
    first_input: tuple[int, ...]


def layer_rows(shape: ModelShape, mode: DecoderPrefill, *, tail_end: int, cached_until: int) -> LayerRows:
    """The rows each layer runs so that the state at ``tail_end`` and the logits of its last row are right.

    ``tail_end`` (exclusive) is the next wanted end; ``cached_until``: rows below it are replayed, their
    global KV exists already. At ``tail_end`` every ring is complete, so that any continuation is right.
    """
    if tail_end < 1 or cached_until < 0:
        raise ValueError(f"tail_end must be >= 1 and cached_until >= 0, got {tail_end} and {cached_until}")
    # Every bound moves with tail_end, except where cached_until is the smaller; one table serves all decodes.
    relative = _relative_rows(shape, mode, min(cached_until - tail_end, 0))
    return LayerRows(*(tuple(tail_end + bound for bound in bounds) for bounds in relative))


@lru_cache(maxsize=4096)
def _relative_rows(
    shape: ModelShape, mode: DecoderPrefill, cached: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """``layer_rows`` relative to ``tail_end``; ``cached`` <= 0 is the cached prefix's end in those terms."""
    reach = shape.window - 1
    output, window, inputs = [], [], []
    first_output = min(cached, -1) if mode == "full" else -1
    for layer in reversed(range(shape.num_layers)):
        if mode == "bounded" and layer >= shape.decoder_start:
            first_output = -shape.window
        first_window = first_output - reach
        if mode == "bounded" and layer > shape.decoder_start:
            first_window = -shape.window
        first_input = min(first_window, cached) if layer == shape.decoder_start else first_window
        output.append(first_output)
        window.append(first_window)
        inputs.append(first_input)
        first_output = first_input
    return tuple(reversed(output)), tuple(reversed(window)), tuple(reversed(inputs))


def replay_start(shape: ModelShape, mode: DecoderPrefill, *, tail_end: int, cached_until: int) -> int:
    """First row to run when the global KV below ``cached_until`` exists but no rings do."""
    rows = layer_rows(shape, mode, tail_end=tail_end, cached_until=cached_until)
    return min(max(0, rows.first_input[0]), cached_until)


def num_row_layers(
    shape: ModelShape, mode: DecoderPrefill, *, start: int, wanted_ends: Iterable[int], cached_until: int
) -> int:
    """Rows times layers that running [start, last wanted end) takes, stopping at each of ``wanted_ends``."""
    total = 0
    for end in sorted(end for end in wanted_ends if end > start):
        rows = layer_rows(shape, mode, tail_end=end, cached_until=cached_until)
        total += sum(max(0, end - max(start, first)) for first in rows.first_output)
        start = end
    return total
