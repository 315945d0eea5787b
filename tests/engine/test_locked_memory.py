"""Page-locked host memory on its way out; the device is simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.locked_memory import locked_zeros


@pytest.mark.parametrize("has_failed", [False, True])
def test_memory_is_unlocked_when_the_device_has_done_its_work(
    monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    """Of the device that it was locked for, whoever frees it; one that failed holds nothing up."""
    calls: list[object] = []

    def synchronize(device: int) -> None:
        calls.append(f"wait for {device}")
        if has_failed:
            raise RuntimeError("CUDA error")

    def unregister(address: int) -> int:
        calls.append(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    memory = locked_zeros((4, 2), torch.int64, "a test")
    part, address = memory[1:], memory.data_ptr()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    del memory
    assert calls == [], "a view holds it"
    del part
    assert calls == ["wait for 3", address]
