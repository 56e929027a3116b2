"""Models of HuggingFace, made from configs: two layers, a width of 32, no dropout."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from benchmarks.models.data import CLASSES, LENGTH, VOCABULARY

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
_CLASSIFIER: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return get_peft_model(llama(), adapters)  # type: ignore[arg-type]


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**_SMALL, **_CLASSIFIER, max_position_embeddings=LENGTH)
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    sizes = {name: value for name, value in _SMALL.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **_CLASSIFIER, image_size=16, patch_size=4)
    )


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, head_dim=8))


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(
        **_DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, pad_token_id=0
    )
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **_DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, pad_token_id=0
    )
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**_DECODER, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    )


def deepseek_v3() -> nn.Module:
    sizes = {**_DECODER, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(
        **sizes, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def mamba2() -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, expand=2, state_size=8,
        n_groups=1, chunk_size=4, use_cache=False, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def rwkv() -> nn.Module:
    config = transformers.RwkvConfig(
        vocab_size=VOCABULARY, context_length=16, hidden_size=32, attention_hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, rescale_every=1, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.RwkvForCausalLM(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
        pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=64, max_source_positions=16,
        max_target_positions=16, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)
