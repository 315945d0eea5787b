"""Which GPU a thread computes on, by the names that schedulers give; no GPU is needed to tell."""

from __future__ import annotations

import pytest
import torch

from engine.device import choose_device


@pytest.mark.parametrize(
    ("visible", "name", "index"),
    [(None, "1", 1), ("", "2", 2), ("3,1", "1", 1), ("3,1", "3", 0), ("GPU-b,GPU-a", "GPU-a", 1)],
)
def test_a_device_is_counted_among_the_visible_ones(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    choose_device(name)
    assert chosen == [index]
