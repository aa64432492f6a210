"""Tiny random models and tokenizers on disk, made by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = (
    "the quick brown fox jumps over 12 lazy dogs, isn't it?\n"
    "  naïve café ☕ — 日本語 \U0001f600 def f(x): return x + 1"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # the compiled decoder takes multiples of 16
    "intermediate_size": 24,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers configuration of the family with three small layers."""
    from transformers import AutoConfig

    sizes = {**_SIZES, **(_MOE if family == "qwen3_moe" else {}), **changes}
    return AutoConfig.for_model(family, **sizes)


def tiny_model(family: str, **changes: Any) -> Any:
    """A random transformers model of the family."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


def per_expert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers state dict with fused experts written out one by one, as on the hub."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        base, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            half = tensor.shape[1] // 2
            for expert in range(tensor.shape[0]):
                result[f"{base}.experts.{expert}.gate_proj.weight"] = tensor[expert, :half].clone()
                result[f"{base}.experts.{expert}.up_proj.weight"] = tensor[expert, half:].clone()
        elif kind == "down_proj":
            for expert in range(tensor.shape[0]):
                result[f"{base}.experts.{expert}.down_proj.weight"] = tensor[expert].clone()
        else:
            result[name] = tensor
    return result


def tiny_backend() -> Tokenizer:
    """A byte-level BPE tokenizer with ChatML's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def save_tokenizer(
    folder: Path, template: str | None = CHATML, *, start_token: bool = False, **kwargs: Any
) -> None:
    """Write the tiny tokenizer as transformers does; start_token puts <|im_start|> before every text."""
    from transformers import PreTrainedTokenizerFast

    backend = tiny_backend()
    if start_token:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        **kwargs,
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_gguf(path: Path, *, pre: str = "smollm") -> dict[str, np.ndarray]:
    """A tiny Llama and its tokenizer as a float32 GGUF file; returns the tensors under Hugging Face names."""
    import json

    from gguf import GGUFWriter, TokenType

    vocabulary = json.loads(tiny_backend().to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    hidden, inner, heads, kv_heads, layers = 16, 24, 4, 2, 2
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    expected: dict[str, np.ndarray] = {}

    def add(gguf_name: str, name: str, *shape: int, rotary_heads: int = 0) -> None:
        tensor = random.standard_normal(shape).astype(np.float32)
        expected[name] = tensor
        if rotary_heads:  # GGUF interleaves the two halves of every rotary head
            halves = tensor.reshape(rotary_heads, 2, shape[0] // rotary_heads // 2, shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))
        writer.add_tensor(gguf_name, tensor)

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), hidden)
    add("output_norm.weight", "model.norm.weight", hidden)
    for layer in range(layers):
        gguf_base, base = f"blk.{layer}", f"model.layers.{layer}"
        kv = hidden // heads * kv_heads
        add(
            f"{gguf_base}.attn_q.weight",
            f"{base}.self_attn.q_proj.weight",
            hidden,
            hidden,
            rotary_heads=heads,
        )
        add(
            f"{gguf_base}.attn_k.weight", f"{base}.self_attn.k_proj.weight", kv, hidden, rotary_heads=kv_heads
        )
        add(f"{gguf_base}.attn_v.weight", f"{base}.self_attn.v_proj.weight", kv, hidden)
        add(f"{gguf_base}.attn_output.weight", f"{base}.self_attn.o_proj.weight", hidden, hidden)
        add(f"{gguf_base}.ffn_gate.weight", f"{base}.mlp.gate_proj.weight", inner, hidden)
        add(f"{gguf_base}.ffn_up.weight", f"{base}.mlp.up_proj.weight", inner, hidden)
        add(f"{gguf_base}.ffn_down.weight", f"{base}.mlp.down_proj.weight", hidden, inner)
        add(f"{gguf_base}.attn_norm.weight", f"{base}.input_layernorm.weight", hidden)
        add(f"{gguf_base}.ffn_norm.weight", f"{base}.post_attention_layernorm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
