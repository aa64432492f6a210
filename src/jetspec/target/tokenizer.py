"""Text to token ids and back, and the chat template, read straight from a model folder.

Uses the `tokenizers` library on `tokenizer.json`; transformers, whose import takes seconds, is needed only
for folders that have no such file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jetspec.errors import ModelError, PromptError
from jetspec.target.config import token_ids

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder.

    Attributes: eos_ids (ids that end an answer: the tokenizer's own and those of config.json and
    generation_config.json), vocab_size (ids it knows, added ones included), has_template, hash and
    template_hash (SHA-256, hexadecimal; template_hash is "" without a template).
    """

    def __init__(self, folder: Path | str) -> None:
        """Raises ModelError if the folder holds no tokenizer that can be read."""
        folder = Path(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        self._backend, self.hash = _read_backend(folder)
        # tokenizer.json may carry padding or truncation from training; a prompt is neither padded nor cut.
        self._backend.no_padding()
        self._backend.no_truncation()
        self._special = _special_tokens(folder, settings)
        _add_missing(self._backend, settings, self._special.values())
        self._template = _read_template(folder, settings)
        self.template_hash = hashlib.sha256(self._template.encode()).hexdigest() if self._template else ""
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids = self._end_ids(folder)

    @property
    def has_template(self) -> bool:
        """Whether `chat` can be used."""
        return self._template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are marked as special: text that a model writes does not show them."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens (such as a start token) that the tokenizer adds;
        without them if `special` is off, as for a text in the middle of a conversation.
        """
        return self._encode(text, special=special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token (padding rows of the vocabulary) give nothing.

        A character whose bytes are not all there shows as U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation, ending where the assistant's next answer begins.

        messages: dictionaries with "role" and "content"; a content is a text or a list of text parts,
        {"type": "text", "text": ...}.
        thinking: the template's `enable_thinking`; None leaves the template's default.
        Raises PromptError if there is no template, no message, a message without a text, or the template
        refuses the messages.
        """
        return self._encode(self.render(messages, thinking=thinking), special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None) -> str:
        """The text behind `chat`; the template writes its own special tokens."""
        from jetspec.target.template import render_chat

        if self._template is None:
            raise PromptError(
                "the target has no chat template, so it cannot hold a conversation;"
                " use --raw to send the prompt as it is"
            )
        if not messages:
            raise PromptError("the conversation is empty; give at least one message")
        variables: dict[str, Any] = {
            **self._special,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        if thinking is not None:
            variables["enable_thinking"] = thinking
        return render_chat(self._template, messages, variables)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            # As a batch: other threads go on meanwhile, and without offsets it takes a quarter of the time.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except (TypeError, UnicodeError) as error:
            raise PromptError("the prompt is not valid text: it holds half of a surrogate pair") from error

    def _end_ids(self, folder: Path) -> frozenset[int]:
        own = self._backend.token_to_id(self._special.get("eos_token", ""))
        ids = token_ids(own)
        for name in ("config.json", "generation_config.json"):
            ids |= token_ids(_read_json(folder / name).get("eos_token_id"))
        return ids


def _read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer and the SHA-256 of its definition."""
    path = folder / "tokenizer.json"
    if path.is_file():
        content = path.read_bytes()
        try:
            return tokenizers.Tokenizer.from_buffer(content), hashlib.sha256(content).hexdigest()
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # whatever is wrong with the folder, transformers has its own exception for it
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{folder} has no tokenizer.json and transformers cannot make one: {reason}"
        ) from error
    return backend, hashlib.sha256(backend.to_str().encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    return values if isinstance(values, dict) else {}


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens as text, for the template."""
    named = {**_read_json(folder / "special_tokens_map.json"), **settings}
    extra = named.get("model_specific_special_tokens") or named.get("extra_special_tokens")
    if isinstance(extra, Mapping):  # such as image_token; templates refer to them by name
        named |= extra
    names = (*_SPECIAL_NAMES, *(extra if isinstance(extra, Mapping) else ()))
    texts = {name: _token_text(named.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text}


def _token_text(value: Any) -> str:
    """A token's text, whether it is written as a string or as an object with its properties."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value or "")


def _add_missing(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Any) -> None:
    """Make special tokens of those that only tokenizer_config.json knows, as transformers does on loading."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = settings.get("added_tokens_decoder") or {}
    try:
        for _, properties in sorted(declared.items(), key=lambda item: int(item[0])):
            if isinstance(properties, Mapping) and properties.get("content") not in known:
                values = {key: value for key, value in properties.items() if key != "__type"}
                backend.add_tokens([tokenizers.AddedToken(**values)])
                known.add(values["content"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"added_tokens_decoder of tokenizer_config.json is damaged ({error!r})") from error
    lists = (settings.get("additional_special_tokens"), settings.get("extra_special_tokens"))
    listed = [_token_text(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    missing = [text for text in dict.fromkeys([*named, *listed]) if text and text not in known]
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in missing])


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The default chat template: its own file (newer folders) or an entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
