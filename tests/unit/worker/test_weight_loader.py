"""Every tensor of a checkpoint is used, known to be needless, or refused by its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import runner_rig, tiny_llama
from worker_service.load_errors import CheckpointInvalid
from worker_service.model.accounting import account_for
from worker_service.model.loader import WeightLoader
from worker_service.model.registry import describe
from worker_service.model.spec import TensorSpec
from worker_service.weights.checkpoint import Checkpoint

Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.2"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama.llama(tie_word_embeddings=True)
    return tiny_llama.save(model, tmp_path_factory.mktemp("tied"))


def changed(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the folder, its tensors changed."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def load(folder: Path) -> WeightLoader:
    """Everything that an executor would take."""
    with Checkpoint(folder) as checkpoint:
        spec = account_for(checkpoint, describe(checkpoint.config))
        loader = WeightLoader(checkpoint, spec, torch.float32, torch.device("cpu"))
        for tensor in spec.tensors():
            loader.tensor(tensor)
        loader.finish()
        return loader


MODULES = (
    f"{LAYER}.self_attn.q_proj",
    f"{LAYER}.self_attn.o_proj",
    f"{LAYER}.mlp.down_proj",
    "lm_head",
)
SUFFIXES = (
    "bias",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_packed",
    "weight_shape",
    "weight.absmax",
    "weight.quant_state.bitsandbytes__nf4",
    "input_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "SCB",
    "lora_A.weight",
    "lora_B.default.weight",
    "lora_magnitude_vector",
    "base_layer.weight",
)
OTHERS = (
    f"{LAYER}.self_attn.q_norm.weight",
    f"{LAYER}.self_attn.sinks",
    f"{LAYER}.self_attn.k_scale",
    f"{LAYER}.input_layernorm.bias",
    f"{LAYER}.post_feedforward_layernorm.weight",
    f"{LAYER}.block_sparse_moe.gate.weight",
    "model.layers.3.input_layernorm.weight",
    "model.layers.3.self_attn.rotary_emb.inv_freq",
    "model.norm.bias",
    "model.embed_positions.weight",
    "model.embed_tokens.lora_embedding_A",
    "layers.0.self_attn.q_proj.weight",
    "language_model.model.norm.weight",
    "model.model.norm.weight",
    "base_model.model.model.norm.weight",
    "_orig_mod.model.norm.weight",
    "score.weight",
    "vision_tower.patch_embed.weight",
    "",
)


@pytest.mark.parametrize(
    "name", [*(f"{module}.{suffix}" for module in MODULES for suffix in SUFFIXES), *OTHERS]
)
@pytest.mark.parametrize("data_type", [torch.float32, torch.uint8])
def test_a_tensor_that_the_config_does_not_mention_is_refused(
    name: str, data_type: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    """Whatever it holds, be it all zeros or nothing."""
    tensor = torch.zeros(0 if name.endswith("bias") else 8, dtype=data_type)
    extra = changed(folder, tmp_path, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(CheckpointInvalid, match=rf"account for the tensor {re.escape(name)};"):
        load(extra)


@pytest.mark.parametrize("prefix", ["language_model.", "module.", "base_model.model.", "-model."])
def test_another_prefix_is_refused_by_name(prefix: str, folder: Path, tmp_path: Path) -> None:
    """A minus takes it away."""

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            taken = name.removeprefix(prefix[1:]) if prefix[0] == "-" else prefix + name
            tensors[taken] = tensors.pop(name)

    shown = prefix if prefix[0] != "-" else "embed_tokens"
    with pytest.raises(CheckpointInvalid, match=rf"account for the tensors {shown}"):
        load(changed(folder, tmp_path, rename))


def in_shards(source: Path, target: Path, unlisted: Tensors) -> Path:
    """The folder as two files with an index, which does not list the tensors in `unlisted`."""
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    weight_map = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        held = {name: tensors[name] for name in part}
        save_file({**held, **unlisted} if file[0] == "t" else held, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_a_tensor_that_only_a_shard_mentions_is_refused_too(folder: Path, tmp_path: Path) -> None:
    load(in_shards(folder, tmp_path, {"model.rotary_emb.inv_freq": torch.ones(4)}))
    name = f"{LAYER}.self_attn.o_proj.bias"
    with pytest.raises(CheckpointInvalid, match=rf"account for the tensor {name};"):
        load(in_shards(folder, tmp_path, {name: torch.ones(48)}))


def test_the_first_of_many_are_named(folder: Path, tmp_path: Path) -> None:
    """One layer fewer in config.json than in the weights."""
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = (folder / "config.json").read_text()
    assert '"num_hidden_layers": 3' in config
    (tmp_path / "config.json").write_text(
        config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    words = r"the tensors model\.layers\.2\.input_layernorm\.weight, .* and 5 more;"
    with pytest.raises(CheckpointInvalid, match=words):
        runner_rig.build(tmp_path)


def test_wavelengths_of_old_checkpoints_are_left_alone(folder: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(3)]
    names.append("model.rotary_emb.inv_freq")
    load(
        changed(folder, tmp_path, lambda tensors: tensors.update({n: torch.ones(4) for n in names}))
    )


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    partial = changed(folder, tmp_path, lambda tensors: tensors.pop(f"{LAYER}.mlp.up_proj.weight"))
    with pytest.raises(CheckpointInvalid, match=rf"lack the tensor {LAYER}\.mlp\.up_proj\.weight"):
        load(partial)


KINDS_OF_TENSOR = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
)


@pytest.mark.parametrize("name", KINDS_OF_TENSOR)
@pytest.mark.parametrize(
    ("data_type", "stored"),
    [
        (torch.int64, "I64"),
        (torch.int32, "I32"),
        (torch.int16, "I16"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
    ],
)
def test_a_format_that_is_no_weight_is_refused(
    name: str, data_type: torch.dtype, stored: str, folder: Path, tmp_path: Path
) -> None:
    def convert(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(data_type)
        if "F8" in stored or data_type is torch.int8:
            tensors[f"{name}_scale"] = torch.ones(1)

    with pytest.raises(
        CheckpointInvalid, match=rf"the tensor {name} is stored as {stored}\b"
    ) as caught:
        load(changed(folder, tmp_path, convert))
    if stored != "F8_E8M0":
        assert str(data_type).removeprefix("torch.") in str(caught.value)


@pytest.mark.parametrize("name", KINDS_OF_TENSOR)
@pytest.mark.parametrize("shape", ["transposed", "longer", "flat", "empty", "more dimensions"])
def test_another_shape_is_refused(name: str, shape: str, folder: Path, tmp_path: Path) -> None:
    def reshape(tensors: Tensors) -> None:
        tensor = tensors[name]
        tensors[name] = {
            "transposed": tensor[..., None].transpose(0, -1).contiguous(),
            "longer": torch.cat([tensor, tensor]),
            "flat": tensor.flatten()[:-1].clone(),
            "empty": tensor[:0].clone(),
            "more dimensions": tensor[None].clone(),
        }[shape]

    with pytest.raises(CheckpointInvalid, match=rf"the tensor {name} has shape"):
        load(changed(folder, tmp_path, reshape))


@pytest.mark.parametrize("data_type", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_that_the_format_cannot_hold_are_refused(
    data_type: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    """Numbers that are infinite in the file are the model's own: its rows fault when they meet."""
    name = f"{LAYER}.mlp.up_proj.weight"

    def enlarge(tensors: Tensors) -> None:
        tensors[name] = tensors[name].double()
        tensors[name][3, 4] = 1e300

    large = changed(folder, tmp_path, enlarge)
    with Checkpoint(large) as checkpoint:
        spec = account_for(checkpoint, describe(checkpoint.config))
        loader = WeightLoader(checkpoint, spec, data_type, torch.device("cpu"))
        kind = str(data_type).removeprefix("torch.")
        with pytest.raises(CheckpointInvalid, match=rf"{name} holds numbers .* large for {kind}"):
            loader.projection(spec.layers[2].feed_forward.up)
    large = changed(large, tmp_path, lambda tensors: tensors[name][3, 4].fill_(math.inf))
    load(large)


@pytest.mark.parametrize("data_type", [torch.float64, torch.bfloat16, torch.float16])
def test_every_format_of_weights_is_converted(
    data_type: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj.weight"
    other = changed(
        folder, tmp_path, lambda tensors: tensors.update({name: tensors[name].to(data_type)})
    )
    with Checkpoint(other) as checkpoint:
        spec = account_for(checkpoint, describe(checkpoint.config))
        loader = WeightLoader(checkpoint, spec, torch.float32, torch.device("cpu"))
        up = spec.layers[2].feed_forward.up
        stacked, _ = loader.projection(up)
        expected = load_file(folder / "model.safetensors")[name].to(data_type).float()
        assert torch.equal(stacked[up.weights[0].shape[0] :], expected)


def test_a_tied_model_may_hold_its_head_again(tied: Path, tmp_path: Path) -> None:
    load(
        changed(tied, tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    )


def test_a_head_copied_in_another_format_is_compared_by_value(tied: Path, tmp_path: Path) -> None:
    """Equal only if the conversion lost nothing."""

    def change(tensors: Tensors) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].to(torch.bfloat16)
        tensors[HEAD] = tensors[EMBEDDING].float()

    load(changed(tied, tmp_path, change))


def test_an_executor_that_leaves_a_tensor_out_is_a_bug_of_ours(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        spec = account_for(checkpoint, describe(checkpoint.config))
        loader = WeightLoader(checkpoint, spec, torch.float32, torch.device("cpu"))
        for tensor in spec.tensors() - {TensorSpec("model.norm.weight", (48,))}:
            loader.tensor(tensor)
        with pytest.raises(AssertionError, match=r"not loaded: the tensor model\.norm\.weight"):
            loader.finish()
