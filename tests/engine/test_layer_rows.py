"""``layer_rows`` against the dependencies themselves, on every small shape."""

from __future__ import annotations

from itertools import product

import pytest

from engine.layer_rows import DecoderPrefill, LayerRows, ModelShape, layer_rows, num_row_layers, replay_start

SMALL = [
    (ModelShape(num_layers=layers, window=window, decoder_start=start), end, cached)
    for layers, window in product((1, 2, 3, 5), (1, 2, 4))
    for start in range(layers)
    for end in (1, 2, 7, 20)
    for cached in (0, 1, 6, 15, 20)
    if cached <= end
]


def needed_outputs(shape: ModelShape, mode: DecoderPrefill, end: int, cached: int) -> list[set[int]]:
    """By closure: the rows whose output each layer must produce, from what reads what."""
    reach, num_layers = shape.window - 1, shape.num_layers
    wanted: list[set[int]] = [set() for _ in range(num_layers + 1)]
    wanted[num_layers] = {end - 1}
    if mode == "full":
        wanted[num_layers] |= set(range(cached, end))
    # wanted[l] holds the rows that layer l must output as wanted[l + 1]: its readers are one layer up.
    inputs: set[int] = wanted[num_layers]
    outputs: list[set[int]] = []
    for layer in reversed(range(num_layers)):
        rows = inputs
        outputs.append(rows)
        # A row reads its window; the continuation at ``end`` reads the last rows of every layer's input.
        inputs = {read for row in rows for read in range(max(0, row - reach), row + 1)}
        inputs |= set(range(max(0, end - reach), end))
        if layer == shape.decoder_start:
            inputs |= set(range(cached, end))
    return outputs[::-1]


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_rows_are_exactly_those_something_reads(mode: DecoderPrefill) -> None:
    for shape, end, cached in SMALL:
        rows = layer_rows(shape, mode, tail_end=end, cached_until=cached)
        needed = needed_outputs(shape, mode, end, cached)
        for layer in range(shape.num_layers):
            first = max(0, rows.first_output[layer])
            assert set(range(first, end)) == needed[layer], (shape, end, cached, layer)


def missing_reads(shape: ModelShape, rows: LayerRows, end: int, cached: int, start: int) -> list[str]:
    """Run the rows forwards; what a row, the compressor or the continuation finds absent."""
    missing = []
    present = set(range(start, end))
    for layer in range(shape.num_layers):
        window = {row for row in present if row >= rows.first_window[layer]}
        output = {row for row in range(start, end) if row >= rows.first_output[layer]}
        reads = {read for row in output for read in range(max(0, row - shape.window + 1), row + 1)}
        reads |= set(range(max(0, end - shape.window + 1), end))
        missing += [f"layer {layer} window {row}" for row in sorted(reads - window)]
        if layer == shape.decoder_start:
            missing += [f"layer {layer} entry {row}" for row in range(cached, end) if row not in present]
        present = output
    return missing if end - 1 in present else [*missing, "the last row"]


def test_one_row_fewer_misses_a_dependency() -> None:
    for shape, end, cached in SMALL:
        rows = layer_rows(shape, "exact", tail_end=end, cached_until=cached)
        start = replay_start(shape, "exact", tail_end=end, cached_until=cached)
        assert not missing_reads(shape, rows, end, cached, start)
        for layer in range(shape.num_layers):
            if rows.first_output[layer] < start:
                continue
            outputs = list(rows.first_output)
            outputs[layer] += 1
            fewer = LayerRows(tuple(outputs), rows.first_window, rows.first_input)
            assert missing_reads(shape, fewer, end, cached, start), (shape, end, cached, layer)
        if 0 < start < end:
            assert missing_reads(shape, rows, end, cached, start + 1)


def test_the_published_row_counts() -> None:
    """The Flash model: 2,414 rows at layer 20, one at layer 39; a hit far from the end replays 20 windows."""
    shape = ModelShape(num_layers=40, window=128, decoder_start=20)
    rows = layer_rows(shape, "exact", tail_end=65_536, cached_until=0)
    counts = [65_536 - max(0, first) for first in rows.first_output]
    assert counts[20:] == [1 + 127 * (39 - layer) for layer in range(20, 40)]
    assert counts[:20] == [65_536] * 20
    assert replay_start(shape, "exact", tail_end=65_536, cached_until=32_768) == 32_768 - 127 * 20
    assert replay_start(shape, "exact", tail_end=32_770, cached_until=32_768) == 32_769 - 127 * 40
    assert replay_start(shape, "full", tail_end=65_536, cached_until=32_768) == 32_768 - 127 * 40
    assert replay_start(shape, "exact", tail_end=300, cached_until=256) == 0


def test_bounded_runs_the_decoder_on_one_window() -> None:
    shape = ModelShape(num_layers=6, window=8, decoder_start=3)
    rows = layer_rows(shape, "bounded", tail_end=100, cached_until=64)
    assert rows.first_output == (64 - 7 * 1 - 7, 64 - 7, 64, 92, 92, 92)
    assert rows.first_window == (64 - 7 * 3, 64 - 7 * 2, 64 - 7, 85, 92, 92)


def test_a_decoded_row_runs_in_every_layer() -> None:
    for shape, end, cached in SMALL:
        for mode in ("exact", "full", "bounded"):
            rows = layer_rows(shape, mode, tail_end=end, cached_until=cached)
            assert max(rows.first_output) <= end - 1


def test_the_cost_counts_rows_times_layers() -> None:
    shape = ModelShape(num_layers=4, window=3, decoder_start=1)
    tail = 1 + 3 + 5
    assert num_row_layers(shape, "exact", start=0, wanted_ends=[100], cached_until=0) == 100 + tail
    assert num_row_layers(shape, "exact", start=0, wanted_ends=[50, 100], cached_until=0) == 100 + 2 * tail
    assert num_row_layers(shape, "full", start=0, wanted_ends=[100], cached_until=0) == 400
    assert num_row_layers(shape, "exact", start=90, wanted_ends=[50, 100], cached_until=90) == 10 + tail
    start = replay_start(shape, "exact", tail_end=100, cached_until=64)
    assert start == 62
    assert num_row_layers(shape, "exact", start=start, wanted_ends=[100], cached_until=64) == 36 + tail


@pytest.mark.parametrize(("layers", "window", "start"), [(0, 1, 0), (2, 0, 0), (2, 2, 2), (2, 2, -1)])
def test_an_impossible_shape_is_refused(layers: int, window: int, start: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        ModelShape(num_layers=layers, window=window, decoder_start=start)
