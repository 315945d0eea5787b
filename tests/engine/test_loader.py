"""Loading a checkpoint: every tensor is used, ignored for a reason, or stops the load by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import weight_stream
from engine.checkpoint import INDEX_NAME, read_checkpoint
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.llm_engine import LLMEngine
from engine.loader import WeightReader
from engine.models.deepseek_v41_config import load_model_config
from kernels.linear import Fp8Weight
from kernels.moe import Mxfp4Weight
from kernels.number_formats import dequantise_mxfp4_weight
from tests.engine.golden_harness import load_model
from tests.random_model import RandomModel, write_model, write_tokenizer

SMALL = RandomModel(
    text={
        "num_hidden_layers": 2,
        "compress_ratios": [2, 1],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [1],
        "n_routed_experts": 2,
    }
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), SMALL)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quantised"), SMALL, is_quantised=True)


def changed(folder: Path, target: Path, changes: dict[str, Tensor | None]) -> Path:
    """A copy of a model folder with some tensors replaced, added, or (None) left out."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, target / name)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, target / "model.safetensors"
    )
    return target


def build(folder: Path) -> LLMEngine:
    return LLMEngine.build(EngineConfig(model=str(folder), device="cpu"))


def test_both_layouts_load(plain: Path, quantised: Path) -> None:
    assert build(plain).resolved.activation_quantisation == "none"
    assert build(quantised).resolved.activation_quantisation == "release"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("head.weight", [96, 64]),
        ("layers.0.attn.attn_sink", [4]),
        ("layers.0.attn.compressor.wgate.weight", [32, 64]),
        ("layers.1.ffn.experts.1.w2.weight", [64, 32]),
        ("layers.1.engram.embed.weight", [420, 32]),
        ("layers.1.ffn.gate.bias_vl", [2]),
        ("layers.1.hc_ffn_scale", [3]),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(
    plain: Path, tmp_path: Path, name: str, shape: list[int]
) -> None:
    with pytest.raises(ConfigError, match=f"tensor {name} is missing") as refused:
        build(changed(plain, tmp_path / "m", {name: None}))
    assert str(shape) in str(refused.value)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.scale", "layers.1.ffn.experts.0.w1.scale"])
def test_a_missing_scale_stops_the_load(quantised: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name.removesuffix(".scale")):
        build(changed(quantised, tmp_path / "m", {name: None}))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("embed.weight", (96, 32), "[96, 64]"),
        ("layers.0.attn.wq_b.weight", (128, 64), "[128, 32]"),
        ("layers.1.attn.indexer.k_norm.weight", (64,), "[32]"),
        ("layers.0.hc_attn_fn", (24, 128), "[24, 256]"),
    ],
)
def test_a_wrong_shape_is_named_with_both(
    plain: Path, tmp_path: Path, name: str, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        build(changed(plain, tmp_path / "m", {name: torch.zeros(shape)}))
    assert f"has shape {list(shape)}, expected {expected}" in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["layers.1.ffn.gate.weight", "layers.0.hc_ffn_fn"])
def test_a_weight_that_must_be_finite_is_named_where_it_is_not(
    plain: Path, tmp_path: Path, name: str, value: float
) -> None:
    broken = load_file(plain / "model.safetensors")[name].clone()
    broken.view(-1)[3] = value
    with pytest.raises(ConfigError, match=f"tensor {name} has values that are not finite"):
        build(changed(plain, tmp_path / "m", {name: broken}))


def test_a_wrong_scale_shape_is_named_with_both(quantised: Path, tmp_path: Path) -> None:
    name = "layers.0.ffn.experts.0.w2.scale"
    wrong = torch.zeros(64, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ConfigError, match=name) as refused:
        build(changed(quantised, tmp_path / "m", {name: wrong}))
    assert "has shape [64, 2], expected [64, 1]" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["layers.2.attn_norm.weight", "layers.1.attn.compressor.wgate.weight", "lm_head.weight"]
)
def test_an_unexpected_tensor_stops_the_load(plain: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor {name} in the checkpoint is not part of this model"):
        build(changed(plain, tmp_path / "m", {name: torch.zeros(4)}))


def test_unexpected_tensors_are_counted(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor a and 1 more"):
        build(changed(plain, tmp_path / "m", {"a": torch.zeros(1), "b": torch.zeros(1)}))


def test_draft_and_vision_tensors_are_ignored(plain: Path, tmp_path: Path) -> None:
    extra = ("mtp.0.main_proj.weight", "vision.blocks.0.w", "aligner.w", "image_start", "image_newline")
    build(changed(plain, tmp_path / "m", {name: torch.zeros(3) for name in extra}))


def test_a_plain_weight_of_the_wrong_type_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor norm\.weight is stored as torch\.int8"):
        build(changed(plain, tmp_path / "m", {"norm.weight": torch.zeros(64, dtype=torch.int8)}))


def test_a_tensor_in_two_files_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    save_file({"norm.weight": torch.ones(64)}, folder / "more.safetensors")
    with pytest.raises(ConfigError, match=r"tensor norm\.weight is in two files"):
        build(folder)


def test_a_checkpoint_may_have_many_files(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for part in range(3):
        save_file({name: tensors[name] for name in names[part::3]}, folder / f"model-{part}.safetensors")
    (folder / "model.safetensors").unlink()
    whole, cut = load_model(plain), load_model(folder)
    assert torch.equal(whole.model._embed, cut.model._embed)


def test_a_folder_without_or_with_broken_weights_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    (folder / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file"):
        build(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        build(folder)


def test_a_truncated_file_is_named_with_its_tensor(plain: Path, tmp_path: Path) -> None:
    """Cut before it is opened, and cut while it is read."""
    folder = changed(plain, tmp_path / "m", {})
    path = folder / "model.safetensors"
    reader = WeightReader(folder, dtype=torch.float32, device=torch.device("cpu"))
    last = max(read_checkpoint(folder).values(), key=lambda tensor: tensor.offset)
    os.truncate(path, path.stat().st_size - 1)
    for read in (lambda: reader.raw(last.name, last.shape), lambda: build(folder)):
        with pytest.raises(ConfigError, match=re.escape(f"{path} is truncated: tensor {last.name}")):
            read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_offsets": [8, 4]}, "tensor norm.weight lies at 8..4"),
        ({"dtype": "F32"}, "tensor norm.weight has 128 bytes, not those of F32 [64]"),
        ({"shape": [63]}, "tensor norm.weight has 128 bytes, not those of BF16 [63]"),
        ({"shape": 64}, "is no readable safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    plain: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = changed(plain, tmp_path / "m", {})
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["norm.weight"] |= changes
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        build(folder)
    assert str(path) in str(refused.value)


def test_an_index_is_checked_where_there_is_one(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")

    def load(weight_map: dict[str, str]) -> None:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        build(folder)

    load(names)
    with pytest.raises(ConfigError, match=r"tensor lost is missing: .* it is in model-2\.safetensors"):
        load(names | {"lost": "model-2.safetensors"})
    with pytest.raises(ConfigError, match=r"tensor norm\.weight is in model\.safetensors, .* says other"):
        load(names | {"norm.weight": "other"})
    with pytest.raises(ConfigError, match=r"tensor norm\.weight of .* is not in"):
        load({name: file for name, file in names.items() if name != "norm.weight"})
    (folder / INDEX_NAME).write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        build(folder)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "widened"])
def test_a_rank_reads_its_own_experts_only(quantised: Path, tmp_path: Path, kept: bool) -> None:
    """Another rank's may even be missing; together the ranks have what one rank has."""
    config = load_model_config(quantised)
    names = [f"layers.1.ffn.experts.{expert}" for expert in range(config.n_routed_experts)]

    def read(folder: Path, local: range | None) -> list[Tensor]:
        reader = WeightReader(
            folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            keeps_quantised=kept,
            local_experts=local,
        )
        found = reader.experts(names, ("w1", "w3"), config.moe_intermediate_size, config.hidden_size)
        return list(found) if isinstance(found, Mxfp4Weight) else [found]

    all_of_them = read(quantised, None)
    parts = [read(quantised, range(first, first + 1)) for first in range(2)]
    for whole, *cut in zip(all_of_them, *parts, strict=True):
        assert torch.equal(whole, torch.cat(cut))
    without = {name: None for name in load_file(quantised / "model.safetensors") if ".experts.1." in name}
    assert torch.equal(read(changed(quantised, tmp_path / "m", without), range(1))[0], parts[0][0])


def test_large_tensors_are_read_in_pieces(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a size that divides nothing, by several threads: every byte is in its place."""
    monkeypatch.setattr(weight_stream, "PIECE_BYTES", 1000)
    wide = torch.arange(96 * 64, dtype=torch.float32).view(96, 64)
    folder = changed(plain, tmp_path / "m", {"embed.weight": wide})
    reader = WeightReader(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(reader.tensor("embed.weight", (96, 64)), wide)


@pytest.mark.gpu
def test_a_gpu_gets_the_bytes_that_a_cpu_gets(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "PIECE_BYTES", 1000)
    for name, stored in read_checkpoint(quantised).items():
        on_cpu, on_gpu = (
            WeightReader(quantised, dtype=torch.float32, device=torch.device(kind)).raw(name, stored.shape)
            for kind in ("cpu", "cuda")
        )
        assert torch.equal(on_cpu.view(torch.uint8), on_gpu.cpu().view(torch.uint8)), name


def test_a_tokenizer_of_another_size_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    write_tokenizer(folder / "tokenizer.json", 90)
    with pytest.raises(ConfigError, match="90 token classes, engram_compressed_vocab_size is 96"):
        build(folder)


def test_quantised_weights_are_read_exactly(quantised: Path) -> None:
    """Both packed layouts against the bf16 layout of the same numbers."""
    packed = WeightReader(quantised, dtype=torch.float32, device=torch.device("cpu"))
    exact = load_file(quantised / "dequantised" / "model.safetensors")
    for name, out, inner in (("layers.0.attn.wo_a", 64, 64), ("layers.1.ffn.experts.1.w3", 32, 64)):
        assert torch.equal(packed.linear(name, out, inner), exact[f"{name}.weight"].float())


def test_what_stays_quantised_has_the_values_of_what_is_widened(quantised: Path) -> None:
    """fp8 linears, two of them one below the other, and mxfp4 experts."""
    config = load_model_config(quantised)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    names = ["layers.0.ffn.shared_experts.w1", "layers.0.ffn.shared_experts.w3"]
    experts = [f"layers.1.ffn.experts.{expert}" for expert in range(config.n_routed_experts)]
    readers = [
        WeightReader(quantised, dtype=torch.float32, device=torch.device("cpu"), keeps_quantised=kept)
        for kept in (True, False)
    ]
    kept, wide = (reader.quantised(names, width, hidden) for reader in readers)
    assert isinstance(kept, Fp8Weight)
    assert torch.equal(kept.widened(), wide)
    kept, wide = (reader.experts(experts, ("w1", "w3"), width, hidden) for reader in readers)
    assert isinstance(kept, Mxfp4Weight)
    assert torch.equal(dequantise_mxfp4_weight(*kept), wide)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e8m0fnu])
@pytest.mark.parametrize("has_scale", [True, False])
def test_an_ngram_table_of_the_wrong_type_is_refused(
    plain: Path, quantised: Path, tmp_path: Path, dtype: torch.dtype, has_scale: bool
) -> None:
    """It is looked up as stored, so that nothing later would notice."""
    name = "layers.1.engram.embed.weight"
    wrong = torch.zeros(420, 32).to(dtype) if dtype.itemsize > 1 else torch.zeros(420, 32).char().view(dtype)
    folder = changed(quantised if has_scale else plain, tmp_path / "m", {name: wrong})
    with pytest.raises(ConfigError, match=rf"tensor {name} is stored as {dtype}, expected"):
        build(folder)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"[" * 100_000, b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [9, 2]}}'],
)
def test_a_damaged_header_is_named_once(plain: Path, tmp_path: Path, header: bytes) -> None:
    folder = changed(plain, tmp_path / "m", {})
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="no readable safetensors file") as refused:
        build(folder)
    assert str(refused.value).count(str(path)) == 1


def test_a_file_that_was_cut_off_is_named_once(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "m", {})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"is truncated: tensor \S+ ends at byte") as refused:
        build(folder)
    assert str(refused.value).count(str(path)) == 1
