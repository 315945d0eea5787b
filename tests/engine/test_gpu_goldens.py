"""The goldens on a GPU, through the torch references and through the Triton kernels, in float32."""

from __future__ import annotations

import pytest
import torch

from tests.engine.golden_harness import (
    CHUNKS,
    MODEL_FOLDERS,
    PromptRun,
    load_goldens,
    load_model,
    run_prompts,
)
from tests.engine.test_goldens import PAIRS, check_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel_impl", ["torch", "triton"])
@pytest.mark.parametrize(("model", "mode"), PAIRS)
def test_prompts_alone_and_mixed(model: str, mode: str, kernel_impl: str) -> None:
    """One shot each; and all at once, every other prompt in chunks."""
    activations = "release" if mode == "actq" else "none"
    loaded = load_model(
        MODEL_FOLDERS[model], activations=activations, device=torch.device("cuda"), kernel_impl=kernel_impl
    )
    files = load_goldens(model, mode)
    for golden in files:
        (run,) = run_prompts(loaded, [PromptRun(golden.prompt)], is_quantised=mode != "noquant")
        check_close(run, golden, loaded, model, mode)
    runs = [PromptRun(golden.prompt, CHUNKS if i % 2 else None) for i, golden in enumerate(files)]
    run_prompts(loaded, runs, is_quantised=mode != "noquant")
    for run, golden in zip(runs, files, strict=True):
        check_close(run, golden, loaded, model, mode)
