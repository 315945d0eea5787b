"""The contract's negative controls: each gate passes a sound op and catches one that breaks its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.contract import (
    CUDA_GATES,
    EXACT,
    GATES,
    ContractBroken,
    Gate,
    Inputs,
    OpCase,
    Outputs,
    contract_device,
    gate_1_reference,
    gate_2_writes,
    gate_3_row_invariance,
    gate_4_cuda_graph,
    gate_5_concurrency,
)

NUM_ROWS, WIDTH = 65, 48


def build(seed: int, device: torch.device) -> Inputs:
    x = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x.to(device), "bias": torch.full((WIDTH,), float(seed), device=device)}


def outputs(inputs: Inputs, num_rows: int) -> Outputs:
    return {"y": torch.empty(num_rows, WIDTH, device=inputs["x"].device)}


def add(x: Tensor, bias: Tensor, y: Tensor) -> None:
    torch.add(x, bias, out=y[: x.shape[0]])


def sound(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])


def off_by_a_bit(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][7, 5] += 1e-6


def leaves_an_element(inputs: Inputs, out: Outputs) -> None:
    before = out["y"][-4, -1].clone()
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][-4, -1] = before


def writes_past_the_end(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][inputs["x"].shape[0]] = 0.0


def reads_unwritten_scratch(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][0, 0] = torch.empty(1, device=inputs["x"].device)[0]


def depends_on_the_row_count(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][: inputs["x"].shape[0]] *= 1.0 if inputs["x"].shape[0] > 16 else 1.0 + 2.0**-23


def depends_on_the_offset(inputs: Inputs, out: Outputs) -> None:
    add(inputs["x"], inputs["bias"], out["y"])
    out["y"][: inputs["x"].shape[0] : 2] *= 1.0 + 2.0**-23


def asks_the_device(inputs: Inputs, out: Outputs) -> None:
    torch.add(inputs["x"], inputs["bias"][0].item(), out=out["y"][: inputs["x"].shape[0]])


def remembers_the_first_bias(remembered: dict[int, Tensor]) -> Callable[[Inputs, Outputs], None]:
    """As an op would that caches a transformed weight by its address."""

    def run(inputs: Inputs, out: Outputs) -> None:
        bias = remembered.setdefault(inputs["bias"].data_ptr(), inputs["bias"].clone())
        add(inputs["x"], bias, out["y"])

    return run


def shares_scratch(scratch: list[Tensor]) -> Callable[[Inputs, Outputs], None]:
    """One workspace for all streams, written at the start of a launch and read at its end."""

    def run(inputs: Inputs, out: Outputs) -> None:
        if not scratch:
            scratch.append(torch.zeros(NUM_ROWS, WIDTH, device=inputs["x"].device))
        n = inputs["x"].shape[0]
        scratch[0][:n].copy_(inputs["x"])
        torch.cuda._sleep(200_000)
        add(scratch[0][:n], inputs["bias"], out["y"])

    return run


SOUND = OpCase(
    name="sound",
    build=build,
    row_inputs=("x",),
    outputs=outputs,
    run=sound,
    reference=lambda inputs: {"y": inputs["x"] + inputs["bias"]},
    float64=lambda inputs: {"y": inputs["x"].double() + inputs["bias"].double()},
    tolerances={"y": EXACT},
    needs_gpu=False,
)
BROKEN = [
    (gate_1_reference, "off_by_a_bit", lambda: off_by_a_bit),
    (gate_2_writes, "leaves_an_element", lambda: leaves_an_element),
    (gate_2_writes, "writes_past_the_end", lambda: writes_past_the_end),
    (gate_2_writes, "reads_unwritten_scratch", lambda: reads_unwritten_scratch),
    (gate_3_row_invariance, "depends_on_the_row_count", lambda: depends_on_the_row_count),
    (gate_3_row_invariance, "depends_on_the_offset", lambda: depends_on_the_offset),
    (gate_4_cuda_graph, "asks_the_device", lambda: asks_the_device),
    (gate_4_cuda_graph, "remembers_the_first_bias", lambda: remembers_the_first_bias({})),
    (gate_5_concurrency, "shares_scratch", lambda: shares_scratch([])),
]


def marks(gate: Gate) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if gate in CUDA_GATES else []


@pytest.mark.parametrize("gate", [pytest.param(g, id=g.__name__, marks=marks(g)) for g in GATES])
def test_a_sound_op_passes(gate: Gate) -> None:
    gate(SOUND, contract_device())


@pytest.mark.parametrize(
    ("gate", "make"),
    [pytest.param(g, make, id=f"{g.__name__}-{name}", marks=marks(g)) for g, name, make in BROKEN],
)
def test_a_broken_op_is_caught(gate: Gate, make: Callable[[], Callable[[Inputs, Outputs], None]]) -> None:
    with pytest.raises(ContractBroken):
        gate(replace(SOUND, run=make()), contract_device())


def test_sentinels_are_demanded() -> None:
    def no_spare(inputs: Inputs, num_rows: int) -> Outputs:
        return {"y": torch.empty(NUM_ROWS, WIDTH)}

    with pytest.raises(ContractBroken, match="no sentinel rows"):
        gate_2_writes(replace(SOUND, outputs=no_spare), torch.device("cpu"))
