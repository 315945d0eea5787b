"""The goldens on a GPU, through the torch references and through the Triton kernels, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.layers.ops import KernelImpl
from tests.engine.golden_harness import CHUNKS, LoadedModel, PromptRun, run_prompts
from tests.engine.test_goldens import PAIRS, check_prompts, goldens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel_impl", ["torch", "triton"])
@pytest.mark.parametrize(("model", "mode"), PAIRS)
def test_prompts_alone_and_mixed(model: str, mode: str, kernel_impl: KernelImpl) -> None:
    """One shot each; and all at once, every other prompt in chunks."""
    files = goldens(model, mode)

    def alone(loaded: LoadedModel) -> Sequence[PromptRun]:
        runs = [[PromptRun(golden.prompt)] for golden in files]
        return [run_prompts(loaded, run, is_quantised=mode != "noquant")[0] for run in runs]

    def mixed(loaded: LoadedModel) -> Sequence[PromptRun]:
        runs = [PromptRun(golden.prompt, CHUNKS if i % 2 else None) for i, golden in enumerate(files)]
        return run_prompts(loaded, runs, is_quantised=mode != "noquant")

    for attempt in (alone, mixed):
        check_prompts(model, mode, files, attempt, device="cuda", kernel_impl=kernel_impl)
