"""Tiny random targets with a tokenizer stand-in, random heads for them, and answers to train on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head
from jetspec.draft.config import HeadConfig
from jetspec.target.config import ModelConfig
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer
from jetspec.target.weights import expected_tensors
from jetspec.train.data import Corpus
from jetspec.train.model import HeadModule
from jetspec.train.prompts import Prompt
from jetspec.train.responses import AnswerOptions, answer_prompts

VOCAB = 200
TAPS = (0, 1, 2)
MASK = 1


class TinyTokenizer:
    """Every id is one character; 0 ends a text and 1 is a special token."""

    hash = "tokenizer-hash"
    template_hash = "template-hash"
    has_template = True
    eos_ids = frozenset({0})
    special_ids = frozenset({0, MASK})
    vocab_size = VOCAB

    def decode(self, ids: Many[int]) -> str:
        """One character per id."""
        return "".join(chr(0x4E00 + i) for i in ids)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids that `decode` made a text of; other letters as in `chat`, behind a start token."""
        ids = [ord(c) - 0x4E00 if "\u4e00" <= c < chr(0x4E00 + VOCAB) else 2 + ord(c) % 30 for c in text]
        return [MASK, *ids] if special else ids

    def chat(self, messages: Many[Mapping[str, Any]]) -> list[int]:
        """A start token and one id per character."""
        text = "".join(message["content"] for message in messages)
        return [MASK, *(2 + ord(letter) % 30 for letter in text)]


def tiny_target(dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    """A random Llama of hidden size 64. Weights are of order one, so attention and the root both matter."""
    sizes = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
    }
    config = ModelConfig.from_dict({**sizes, **changes})
    dice = torch.Generator().manual_seed(3)
    weights = {name: _noise(name, shape, dice) for name, shape in expected_tensors(config).items()}
    return Target("tiny", config, weights, cast(Tokenizer, TinyTokenizer()), dtype)


def _noise(name: str, shape: tuple[int, ...], dice: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=dice)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if len(shape) == 1 or "embed" in name or "markov_w" in name:
        return noise
    return noise * (1.2 / shape[-1] ** 0.5)


def random_head(target: Target, *, vocab: Tensor | None = None, seed: int = 5, **options: Any) -> Head:
    """A head with random weights and all parts that `options` of `HeadConfig.for_target` do not leave out."""
    settings = {"layers": 2, "block_size": 5, "taps": TAPS, "rank": 8, **options}
    config = HeadConfig.for_target(target.config, mask_token_id=MASK, **settings)
    dice = torch.Generator().manual_seed(seed)
    weights = {name: _noise(name, shape, dice) for name, shape in config.shapes().items()}
    return Head(config, weights, vocab)


PLAIN_PARTS: dict[str, Any] = {"direct": False, "slot_embedding": False, "scorer": "none", "rank": 0}


def module_of(head: Head, target: Target) -> HeadModule:
    """The training form of a head."""
    module = HeadModule(head.config, target.transformer.embedding.float())
    with torch.no_grad():
        for name in module.names:
            module.weight(name).copy_(head.weights[name])
    return module


class MemoryCorpus:
    """What `make_batch` reads of a corpus, from memory: random tokens and features of given lengths."""

    def __init__(self, lengths: Many[int], taps: int, hidden: int, seed: int = 0) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(2, VOCAB, (n,), generator=dice) for n in lengths]
        scale = 10.0 ** torch.arange(taps).repeat_interleave(hidden)  # taps differ in size as in real targets
        self.features = [torch.randn(n, taps * hidden, generator=dice) * scale for n in lengths]
        self.states = [torch.randn(n, hidden, generator=dice) for n in lengths]

    def tokens(self, entry: Any) -> Tensor:
        """Token ids of answer number `entry.start`."""
        return self.ids[entry.start]

    def stored_taps(self, entry: Any) -> Tensor:
        """Its taps."""
        return self.features[entry.start]

    def stored_hidden(self, entry: Any) -> Tensor:
        """Its final states."""
        return self.states[entry.start]


def tiny_prompts(count: int) -> list[Prompt]:
    """Prompts of one to nine letters."""
    letters = "the quick brown fox jumps over the lazy dog"
    texts = [letters[n % 20 : n % 20 + 1 + n % 9] + chr(97 + n % 26) for n in range(count)]
    return [Prompt(f"p{n}", ({"role": "user", "content": text},)) for n, text in enumerate(texts)]


def tiny_answers(target: Target, folder: Path, prompts: int = 12, tokens: int = 24, **options: Any) -> Corpus:
    """Answers of the target with its features, and every fourth held out."""
    options = {"temperatures": ((0.0, 1.0),), "batch": 8, "max_tokens": tokens, "tokens": 10**6, **options}
    answer_prompts(target, tiny_prompts(prompts), folder, TAPS, AnswerOptions(**options))
    return Corpus([folder], holdout=4)
