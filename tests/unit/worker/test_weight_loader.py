"""Every tensor of a checkpoint is used, known to be needless, or refused by its name."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.self_attn.o_proj.bias",
        f"{LAYER}.self_attn.q_proj.bias",
        f"{LAYER}.self_attn.q_norm.weight",
        f"{LAYER}.mlp.down_proj.bias",
        "model.layers.3.input_layernorm.weight",
        f"{LAYER}.self_attn.q_proj.lora_A.weight",
        f"{LAYER}.self_attn.q_proj.weight_scale",
        "model.norm.bias",
        "lm_head.bias",
        "model.layers.3.self_attn.rotary_emb.inv_freq",
    ],
)
def test_a_tensor_that_the_config_does_not_mention_is_refused(
    name: str, folder: Path, tmp_path: Path
) -> None:
    extra = changed(folder, tmp_path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    with pytest.raises(CheckpointInvalid, match=rf"account for the tensor {name};"):
        load(extra)


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


@pytest.mark.parametrize(
    ("data_type", "stored"),
    [
        (torch.int64, "I64"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_a_format_that_is_no_weight_is_refused(
    data_type: torch.dtype, stored: str, folder: Path, tmp_path: Path
) -> None:
    name = f"{LAYER}.self_attn.q_proj.weight"
    other = changed(
        folder, tmp_path, lambda tensors: tensors.update({name: tensors[name].to(data_type)})
    )
    with pytest.raises(CheckpointInvalid, match=rf"the tensor {name} is stored as {stored};"):
        load(other)


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
