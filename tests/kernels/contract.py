"""The kernel contract: five gates that every op passes, on a declarative description of the op.

An ``OpCase`` says how to build inputs, call the op into given outputs, and what the reference and its
tolerance are; the gates know nothing of any op. Tests and benchmarks share it: no speed on red.

Gate 1: the outputs equal the reference within a stated tolerance; the float64 error is printed (pytest -rP shows it).
Gate 2: every element of every valid row is written, and no byte of any other row.
Gate 3: a row's bytes do not depend on the rows beside it, their number or its offset.
Gate 4: a CUDA graph replayed on new inputs equals an eager launch.
Gate 5: launches that overlap on two streams give the bytes of lone ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

Inputs = Mapping[str, Any]
"""Tensors and plain options by name."""
Outputs = dict[str, Tensor]

SPARE_ROWS = 3
"""Output rows behind the last valid one, which nothing may touch."""
ROW_COUNTS = (1, 2, 3, 5, 16, 17, 64, 257)
NUM_CONCURRENT = 20
_POISONS = (0xFF, 0xA5)  # 0xFF is NaN in every float dtype; the second shows what only looked written


class ContractBroken(AssertionError):
    """A gate is red."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an output may be from the reference. Infinities and integers must be equal in any case.

    ``relative`` bounds ``|out - ref| / |ref|`` in the Euclidean norm over the output, ``worst`` bounds
    ``max |out - ref| / max |ref|``. Both 0 means equal bytes. ``reason`` says why not 0.
    """

    relative: float = 0.0
    worst: float = 0.0
    reason: str = "equal bytes"


EXACT = Tolerance()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One op on one kind of input.

    Args:
        build: (seed, device) -> inputs. Two seeds give equal shapes and equal plain options.
        row_inputs: names of the inputs whose first axis is the row axis; the others are shared by all rows.
        outputs: (inputs, n) -> uninitialised outputs with room for n rows.
        run: launch the op on the inputs, writing into the outputs (which have spare rows behind).
        reference: inputs -> the valid rows' expected values, in row order.
        tolerances: by output name.
        float64: the same as ``reference`` in float64 where one exists; its errors are printed.
        written_rows: inputs -> the output row that each row writes, -1 for none. Default: its own number.
        take: (inputs, rows) -> inputs of a launch of these rows (ascending) alone. Default: index ``row_inputs``.
        row_counts: launch sizes of gate 3.
        needs_gpu: False where Triton's interpreter computes the same (no bf16 products).
    """

    name: str
    build: Callable[[int, torch.device], Inputs]
    row_inputs: Sequence[str]
    outputs: Callable[[Inputs, int], Outputs]
    run: Callable[[Inputs, Outputs], object]
    reference: Callable[[Inputs], Outputs]
    tolerances: Mapping[str, Tolerance]
    float64: Callable[[Inputs], Outputs] | None = None
    written_rows: Callable[[Inputs], Tensor] | None = None
    take: Callable[[Inputs, Tensor], Inputs] | None = None
    row_counts: Sequence[int] = ROW_COUNTS
    needs_gpu: bool = True

    def num_rows(self, inputs: Inputs) -> int:
        """Rows of a launch."""
        return int(inputs[self.row_inputs[0]].shape[0])

    def rows_written(self, inputs: Inputs) -> Tensor:
        """[num_rows] int64 output rows, -1 for none."""
        if self.written_rows is not None:
            return self.written_rows(inputs).to(torch.int64)
        first: Tensor = inputs[self.row_inputs[0]]
        return torch.arange(self.num_rows(inputs), device=first.device)

    def taken(self, inputs: Inputs, rows: Tensor) -> Inputs:
        """Inputs of a launch of some rows only."""
        if self.take is not None:
            return self.take(inputs, rows)
        return {k: v[rows].contiguous() if k in self.row_inputs else v for k, v in inputs.items()}

    def launch(self, inputs: Inputs, poison: int = _POISONS[0]) -> Outputs:
        """Fresh poisoned outputs with spare rows, after one launch."""
        outputs = self.outputs(inputs, self.num_rows(inputs) + SPARE_ROWS)
        for output in outputs.values():
            fill_bytes(output, poison)
        with poisoned_allocations(poison):
            self.run(inputs, outputs)
        return outputs

    def valid(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        """The rows that the launch had to write, in row order."""
        rows = self.rows_written(inputs)
        return {name: output[rows[rows >= 0]] for name, output in outputs.items()}


def fill_bytes(x: Tensor, byte: int) -> None:
    """Set every byte of a tensor."""
    x.view(torch.uint8).fill_(byte) if x.is_contiguous() else x.copy_(_bytes_like(x, byte))


def _bytes_like(x: Tensor, byte: int) -> Tensor:
    raw = torch.full(
        (*x.shape[:-1], x.shape[-1] * x.element_size()), byte, dtype=torch.uint8, device=x.device
    )
    return raw.view(x.dtype)


@contextmanager
def poisoned_allocations(byte: int) -> Iterator[None]:
    """Fill what an op allocates itself, so that scratch read before it is written shows."""
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    new_empty = Tensor.new_empty

    def poisoned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            x = original(*args, **kwargs)
            if x.numel() and x.is_contiguous():
                fill_bytes(x, byte)
            return x

        return allocate

    try:
        for name, original in originals.items():
            setattr(torch, name, poisoned(original))
        Tensor.new_empty = poisoned(new_empty)  # type: ignore[method-assign]
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        Tensor.new_empty = new_empty  # type: ignore[method-assign]


def equal_bytes(a: Tensor, b: Tensor) -> bool:
    """Bit equality, NaN included."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _expect_equal(gate: int, case: OpCase, what: str, got: Outputs, expected: Outputs) -> None:
    for name, output in got.items():
        if not equal_bytes(output, expected[name]):
            differing = (output.float() != expected[name].float()).sum().item()
            raise ContractBroken(f"gate {gate}, {case.name}, {name}: {what}: {differing} elements differ")


def errors_of(output: Tensor, expected: Tensor) -> tuple[float, float]:
    """(relative, worst) over the finite elements; infinities that differ, and any NaN, give inf."""
    a, b = output.double(), expected.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite) or not torch.equal(a[~finite], b[~finite]):
        return float("inf"), float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0, 0.0
    tiny = torch.finfo(torch.float64).tiny
    relative = (a - b).norm() / b.norm().clamp_min(tiny)
    worst = (a - b).abs().max() / b.abs().max().clamp_min(tiny)
    return float(relative), float(worst)


def gate_1_reference(case: OpCase, device: torch.device) -> None:
    """Equals the reference within the stated tolerance."""
    inputs = case.build(0, device)
    got = case.valid(inputs, case.launch(inputs))
    expected = case.reference(inputs)
    wide = case.float64(inputs) if case.float64 is not None else None
    for name, output in got.items():
        tolerance = case.tolerances[name]
        relative, worst = errors_of(output, expected[name])
        measured = {"relative": relative, "worst": worst}
        if wide is not None:
            measured["to_float64"] = errors_of(output, wide[name])[0]
            measured["reference_to_float64"] = errors_of(expected[name], wide[name])[0]
        print(f"{case.name}, {name}: {measured}")
        if tolerance == EXACT:
            is_equal = equal_bytes(output, expected[name].to(output.dtype))
        else:
            is_equal = relative <= tolerance.relative and worst <= tolerance.worst
        if not is_equal:
            raise ContractBroken(f"gate 1, {case.name}, {name}: {measured} beyond {tolerance}")


def gate_2_writes(case: OpCase, device: torch.device) -> None:
    """All of the valid rows is written, whatever was there; nothing else is touched."""
    inputs = case.build(0, device)
    rows = case.rows_written(inputs)
    results = [case.launch(inputs, poison) for poison in _POISONS]
    _expect_equal(2, case, "not written", case.valid(inputs, results[0]), case.valid(inputs, results[1]))
    for outputs, poison in zip(results, _POISONS, strict=True):
        for name, output in outputs.items():
            is_sentinel = torch.ones(output.shape[0], dtype=torch.bool, device=device)
            is_sentinel[rows[rows >= 0]] = False
            sentinels = output[is_sentinel]
            if sentinels.shape[0] < SPARE_ROWS:
                raise ContractBroken(f"gate 2, {case.name}, {name}: the case leaves no sentinel rows")
            if not bool((sentinels.contiguous().view(torch.uint8) == poison).all()):
                raise ContractBroken(f"gate 2, {case.name}, {name}: wrote to rows that are not valid")


def _row_groups(num_rows: int, counts: Sequence[int]) -> Iterator[list[int]]:
    """Launches of gate 3: each size at the start, the end and an odd offset; and every third row."""
    for count in counts:
        if count < num_rows:
            for offset in sorted({0, num_rows - count, min(7, num_rows - count)}):
                yield list(range(offset, offset + count))
    yield list(range(1, num_rows, 3))


def gate_3_row_invariance(case: OpCase, device: torch.device) -> None:
    """The same row, in launches of many sizes and at many offsets: equal bytes."""
    inputs = case.build(0, device)
    num_rows = case.num_rows(inputs)
    is_written = case.rows_written(inputs) >= 0
    full = case.valid(inputs, case.launch(inputs))
    number_in_full = torch.cumsum(is_written, 0) - 1
    for group in _row_groups(num_rows, case.row_counts):
        rows = torch.tensor(group, device=device)
        taken = case.taken(inputs, rows)
        got = case.valid(taken, case.launch(taken))
        numbers = number_in_full[rows[is_written[rows]]]
        expected = {name: output[numbers] for name, output in full.items()}
        _expect_equal(3, case, f"{len(group)} rows from {group[0]} on", got, expected)


def _copy_inputs(target: Inputs, source: Inputs) -> None:
    for name, value in source.items():
        if isinstance(value, Tensor):
            target[name].copy_(value)


def _cloned(inputs: Inputs) -> Inputs:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def gate_4_cuda_graph(case: OpCase, device: torch.device) -> None:
    """A graph captured on one set of inputs and replayed on another equals eager on that other."""
    first, second = case.build(0, device), case.build(1, device)
    live = _cloned(first)
    case.launch(live)  # compiles outside of the capture
    outputs = case.outputs(live, case.num_rows(live) + SPARE_ROWS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            case.run(live, outputs)
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise ContractBroken(f"gate 4, {case.name}: cannot be captured: {error}") from error
    for inputs in (first, second):
        _copy_inputs(live, inputs)
        for output in outputs.values():
            fill_bytes(output, _POISONS[0])
        graph.replay()
        torch.cuda.synchronize()
        expected = case.valid(inputs, case.launch(inputs))
        _expect_equal(4, case, "replay differs from eager", case.valid(inputs, outputs), expected)


def gate_5_concurrency(case: OpCase, device: torch.device) -> None:
    """Launches on two different inputs, overlapping on two streams: the bytes of lone launches."""
    inputs = [case.build(seed, device) for seed in (0, 1)]
    expected = [case.valid(i, case.launch(i)) for i in inputs]
    outputs = [
        case.outputs(inputs[n % 2], case.num_rows(inputs[n % 2]) + SPARE_ROWS) for n in range(NUM_CONCURRENT)
    ]
    for output in outputs:
        for tensor in output.values():
            fill_bytes(tensor, _POISONS[0])
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    for number, output in enumerate(outputs):
        with torch.cuda.stream(streams[number % 2]):
            case.run(inputs[number % 2], output)
    torch.cuda.synchronize()
    for number, output in enumerate(outputs):
        got = case.valid(inputs[number % 2], output)
        _expect_equal(5, case, f"launch {number} of {NUM_CONCURRENT}", got, expected[number % 2])


Gate = Callable[[OpCase, torch.device], None]
GATES: tuple[Gate, ...] = (
    gate_1_reference,
    gate_2_writes,
    gate_3_row_invariance,
    gate_4_cuda_graph,
    gate_5_concurrency,
)
CUDA_GATES = (gate_4_cuda_graph, gate_5_concurrency)


def contract_device() -> torch.device:
    """A GPU where there is one, else the CPU (where Triton's interpreter runs the kernels)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def contract_params(cases: Sequence[OpCase]) -> list[Any]:
    """``pytest.param(case, gate)`` for every case and gate; what needs a GPU is marked ``gpu``."""
    # Who waits for a kernel that never ends cannot be interrupted: its process is ended, and that is a failure.
    on_gpu = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]
    return [
        pytest.param(
            case,
            gate,
            id=f"{case.name}-{gate.__name__}",
            marks=on_gpu if case.needs_gpu or gate in CUDA_GATES else [],
        )
        for case in cases
        for gate in GATES
    ]
