"""The estimate from headers against what a built engine really holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import ConfigError, EngineConfig, estimate_memory
from engine.llm_engine import LLMEngine
from tests.conftest import ROOT

FOLDERS = [ROOT / "tests" / "data" / "tiny", ROOT / "tests" / "data" / "tiny-quant"]


def tensors_of(found: object, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that an object of ours reaches, each storage once."""
    if id(found) in seen:
        return []
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, list | tuple):
        values = list(found)
    elif isinstance(found, dict):
        values = list(found.values())
    elif type(found).__module__.startswith("engine"):
        slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
        names = {*getattr(found, "__dict__", {}), *slots}
        values = [getattr(found, name) for name in names if hasattr(found, name)]
    else:
        return []
    return [tensor for value in values for tensor in tensors_of(value, seen)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_weights_and_cache_take_what_was_estimated(folder: Path, dtype: str) -> None:
    config = EngineConfig(
        model=str(folder), dtype=dtype, device="cpu", max_num_seqs=3, num_kv_blocks=70, host_memory_bytes=0
    )
    found = estimate_memory(config)
    runner = LLMEngine.build(config).runner
    assert found.num_bytes_per_block == runner.layout.num_bytes_per_block
    assert found.num_state_bytes == 3 * runner.layout.num_bytes_per_state
    weights = sum(t.untyped_storage().nbytes() for t in tensors_of(runner.model, set()))
    assert found.num_weight_bytes == pytest.approx(weights, rel=0.1)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found.num_checkpoint_bytes == pytest.approx(stored, rel=0.1)


def test_blocks_that_fit_a_device_are_counted_or_refused() -> None:
    config = EngineConfig(model=str(FOLDERS[0]), max_num_seqs=2, gpu_memory_utilization=0.5)
    found = estimate_memory(config)
    assert found.num_kv_blocks(config, 2 * found.num_least_bytes + 2) == found.num_blocks_per_longest
    with pytest.raises(ConfigError, match=r"max_model_len"):
        found.num_kv_blocks(config, 2 * found.num_least_bytes - 2)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDERS[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        estimate_memory(EngineConfig(model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="no readable"):
        estimate_memory(EngineConfig(model=str(tmp_path)))
