"""Models out: saved under every strategy and exported from checkpoints, then loaded by their own libraries."""

from __future__ import annotations

import json
import logging.handlers
import queue
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from tests.runs import change_meta
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2LMHeadModel,
    PreTrainedModel,
)  # fmt: skip

from lockstep.dist import get_rank, main_process_first
from lockstep.errors import ConfigError
from lockstep.model import checkpoint_activations
from lockstep.testing import run_ranks
from lockstep.weights import export_checkpoint

from .training import WORDS, Inside, logits, make, train_and_save, trained, with_state

ROWS = [
    ("gpt2", "ddp", 2),
    ("gpt2", "fsdp", 2),
    ("bert", "fsdp", 3),
    ("llama", {"type": "fsdp", "tensor_parallel": 2}, 4),
    ("mixtral", "fsdp", 2),
]
TIED = {
    "gpt2": "lm_head.weight",
    "bert": "cls.predictions.decoder.weight",
    "llama": "lm_head.weight",
    "mixtral": "lm_head.weight",
}


def loaded(folder: Path, kind: str) -> PreTrainedModel:
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def names_in(folder: Path) -> list[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


@pytest.mark.parametrize(("kind", "strategy", "size"), ROWS, ids=[f"{k}-{s}-{n}" for k, s, n in ROWS])
def test_what_is_saved_and_exported_is_loaded_and_computes_the_same(
    kind: str, strategy: Any, size: int, tmp_path: Path
) -> None:
    states = run_ranks(size, train_and_save, kind, strategy, tmp_path)
    export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    export_checkpoint(tmp_path / "work", tmp_path / "shards", max_shard_size="20KB")
    export_checkpoint(tmp_path / "work", tmp_path / "net.pth", "torch")
    expected = logits(with_state(kind, states[0]))
    assert not torch.equal(expected, logits(make(kind)))
    for folder in ("saved", "exported", "shards"):
        model = loaded(tmp_path / folder, kind)
        assert torch.equal(logits(model), expected)
        names = names_in(tmp_path / folder)
        assert len(names) == len(set(names))
        assert TIED[kind] not in names
        assert {*names} <= states[0].keys()
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    plain = torch.load(tmp_path / "net.pth", weights_only=True)
    assert plain.keys() == states[0].keys()
    assert plain[TIED[kind]].data_ptr() in {value.data_ptr() for name, value in plain.items() if name != TIED[kind]}
    assert torch.equal(logits(with_state(kind, plain)), expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_what_lies_beside_the_weights_is_what_the_library_writes(kind: str, tmp_path: Path) -> None:
    runner = trained(make(kind), tmp_path / "work")
    runner.save_pretrained(tmp_path / "saved")
    runner.model.save_pretrained(tmp_path / "theirs")
    assert {f.name for f in (tmp_path / "saved").iterdir()} == {f.name for f in (tmp_path / "theirs").iterdir()}
    for file in (tmp_path / "theirs").glob("*.json"):
        assert json.loads((tmp_path / "saved" / file.name).read_text()) == json.loads(file.read_text()), file.name
    assert sorted(names_in(tmp_path / "saved")) == sorted(names_in(tmp_path / "theirs"))


def test_another_dtype_is_written_into_the_config_too(tmp_path: Path) -> None:
    runner = trained(make("gpt2"), tmp_path / "work")
    runner.save_pretrained(tmp_path / "saved", dtype="bfloat16")
    model = loaded(tmp_path / "saved", "gpt2")
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(runner.model.bfloat16()))


@pytest.mark.parametrize(("kind", "part"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer")])
def test_activations_are_recomputed_without_a_cache_and_the_config_keeps_it(kind: str, part: str) -> None:
    plain, checkpointed = make(kind).eval(), make(kind).eval()  # without dropout
    checkpoint_activations(checkpointed, [part])
    outputs = [model(input_ids=WORDS, labels=WORDS) for model in (plain, checkpointed)]
    for output in outputs:
        output.loss.backward()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    assert outputs[1].cache is None
    with torch.no_grad():
        assert checkpointed(input_ids=WORDS).cache.get_seq_length() == WORDS.shape[1]
    assert checkpointed.config.to_dict() == plain.config.to_dict()


def adapted() -> PeftModel:
    with warnings.catch_warnings():  # peft asks transformers for what has another name by now
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(make("gpt2"), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def save_adapter(folder: Path, strategy: Any) -> None:
    runner = trained(adapted(), folder / "work", strategy)
    runner.save_pretrained(folder / "saved")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_a_model_of_peft_the_adapter_is_written(strategy: str, tmp_path: Path) -> None:
    run_ranks(2, save_adapter, tmp_path, strategy)
    export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    export_checkpoint(tmp_path / "work", tmp_path / "all")
    whole = adapted()
    from safetensors.torch import load_model

    load_model(whole, tmp_path / "all" / "model.safetensors")
    expected = logits(whole)
    assert not torch.equal(expected, logits(make("gpt2")))
    for folder in ("saved", "exported"):
        assert {f.name for f in (tmp_path / folder).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            reloaded = PeftModel.from_pretrained(make("gpt2"), tmp_path / folder)
        assert torch.equal(logits(reloaded), expected)
    whole.save_pretrained(tmp_path / "theirs")
    assert sorted(names_in(tmp_path / "saved")) == sorted(names_in(tmp_path / "theirs"))
    ours, theirs = (json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("saved", "theirs"))
    assert ours == theirs


SHARING = {  # adapters with tensors under several names
    "tied embeddings": LoraConfig(
        r=2,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
    ),
    "projections of all layers": VeraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("kind", SHARING)
def test_an_adapter_that_shares_tensors_has_all_names_that_peft_looks_for(kind: str, tmp_path: Path) -> None:
    runner = trained(get_peft_model(make("llama"), SHARING[kind]), tmp_path / "work")
    runner.save_pretrained(tmp_path / "saved")
    export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    runner.model.save_pretrained(tmp_path / "theirs")
    for folder in ("saved", "exported"):
        assert sorted(names_in(tmp_path / folder)) == sorted(names_in(tmp_path / "theirs"))
        reloaded = PeftModel.from_pretrained(make("llama"), tmp_path / folder)
        assert torch.equal(logits(reloaded), logits(runner.model))


def save_prompts(folder: Path) -> list[str]:
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    heard: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(heard)
    logger = logging.getLogger("lockstep.weights.description")
    logger.addHandler(handler)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trained(get_peft_model(make("gpt2"), config), folder / "work", "fsdp").save_pretrained(folder / "saved")
    logger.removeHandler(handler)
    return [heard.get().getMessage() for _ in range(heard.qsize())]


def test_prompts_are_written_among_all_weights_and_a_warning_says_why(tmp_path: Path) -> None:
    for messages in run_ranks(2, save_prompts, tmp_path):
        assert any("the prompts of PromptTuningConfig are computed when they are saved" in text for text in messages)
    assert "prompt_encoder.default.embedding.weight" in names_in(tmp_path / "saved")


def save_inside(folder: Path, strategy: Any) -> None:
    trained(Inside(), folder / "work", strategy).save_pretrained(folder / "saved")


def test_a_model_within_another_is_written_by_itself(tmp_path: Path) -> None:
    run_ranks(2, save_inside, tmp_path, "fsdp")
    done = export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    assert done.left_out == ["scale"]
    expected = logits(loaded(tmp_path / "exported", "gpt2"))
    assert not torch.equal(expected, logits(make("gpt2")))
    assert torch.equal(logits(loaded(tmp_path / "saved", "gpt2")), expected)
    export_checkpoint(tmp_path / "work", tmp_path / "all")
    assert {"scale", "backbone.transformer.wte.weight"} <= {*names_in(tmp_path / "all")}
    assert not (tmp_path / "all" / "config.json").exists()
    export_checkpoint(tmp_path / "work", tmp_path / "part.safetensors", prefix="backbone.transformer")
    with pytest.raises(
        ConfigError, match=r"`prefix` must be the name of a part of .*, out of backbone, scale, but is 'x'"
    ):
        export_checkpoint(tmp_path / "work", tmp_path / "none", prefix="x")
    with pytest.raises(ConfigError, match=r"has none under this prefix; it has under backbone. Write the weights"):
        export_checkpoint(tmp_path / "work", tmp_path / "none", "hf", prefix="scale")


def test_config_and_tokenizer_of_another_folder_are_copied(tmp_path: Path) -> None:
    trained(
        make("gpt2"), tmp_path / "work", default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False}}
    )
    make("gpt2").save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "notes.txt"):
        (tmp_path / "theirs" / name).write_text("{}")
    change_meta(next((tmp_path / "work").glob("*/*/manifest.json")).parent, without="weights")
    with pytest.raises(ConfigError, match=r"must have a config of HuggingFace's .* --files-from"):
        export_checkpoint(tmp_path / "work", tmp_path / "out", "hf")
    export_checkpoint(tmp_path / "work", tmp_path / "out", "hf", files_from=tmp_path / "theirs")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json", "vocab.json",
    }  # fmt: skip
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").lm_head.weight.shape == (64, 32)


def save_where_it_cannot(folder: Path) -> str:
    runner = trained(make("gpt2"), folder / "work", "fsdp")
    with main_process_first():
        if get_rank() == 0:
            (folder / "file").write_text("")
    with pytest.raises(Exception, match=r"cannot be written|cannot be reached|must be a new or empty folder") as caught:
        runner.save_pretrained(folder / "file" / "model")
    runner.save_pretrained(folder / "saved")  # the group is usable
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    assert all("file/model" in said for said in run_ranks(2, save_where_it_cannot, tmp_path))
    assert (tmp_path / "saved" / "config.json").is_file()
