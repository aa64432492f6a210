from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jetspec.errors import ModelError, PromptError
from jetspec.storage import cache_dir
from jetspec.target.tokenizer import Tokenizer
from tests.target.tiny import CHATML, TEXT, save_tokenizer, tiny_backend

TEXTS = [
    "",
    " ",
    "the quick",
    TEXT,
    "<|im_start|>user\nhi<|im_end|>",
    "a\u0301\r\n\t\x00",
    "🤷🏽‍♀️ 北京 \ufeff",
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2+2? <b>&amp;</b> 'q' \"d\" "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "naïve ☕?"},
]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": (
        "{%- if messages[0].role == 'system' %}\n"
        "    {{- bos_token + messages[0].content | trim }}\n{%- endif %}\n"
        "{%- set ns = namespace(last=-1) %}\n"
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n"
        "    {% set ns.last = loop.index0 %}\n  {% endif %}\n{% endfor %}\n"
        "{% for m in messages[::-1] %}{% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ m.role.title() }}] {{ m.content.split('?')[0] }}{{ eos_token }}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ ns.last }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}A: {{ m['content'] }}"
        "{% endgeneration %}{% else %}U: {{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    ),
    "helpers": (
        "{{ messages | tojson }}|{{ {'b': 1, 'a': 'é<'} | tojson(indent=2, sort_keys=True) }}|"
        "{{ strftime_now('%Y') }}"
        "{% if tools is none and documents is none %}none{% endif %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
        "{% if pad_token is defined %}{{ pad_token }}{% endif %}"
    ),
}


def reference(folder: Path) -> Any:
    """transformers' tokenizer of the folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def reference_chat(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    """What transformers makes of a conversation."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)


@pytest.mark.parametrize("start_token", [False, True])
def test_encode_and_decode_match_transformers(tmp_path: Path, start_token: bool) -> None:
    """A start token forgotten or doubled, or a special token left as text, shifts every later token."""
    save_tokenizer(tmp_path, start_token=start_token)
    own, other = Tokenizer(tmp_path), reference(tmp_path)
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == other.encode(text)
        assert own.decode(ids) == other.decode(ids, skip_special_tokens=True)
        assert own.decode(ids, skip_special=False) == other.decode(ids, skip_special_tokens=False)
    assert (own.encode("the")[0] == 1) is start_token
    assert own.vocab_size == len(other)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [None, False, True])
def test_chat_matches_transformers(tmp_path: Path, name: str, thinking: bool | None) -> None:
    """White space, loop controls, JSON escapes or a second start token off by one makes another prompt."""
    save_tokenizer(tmp_path, TEMPLATES[name], start_token=True)
    own, other = Tokenizer(tmp_path), reference(tmp_path)
    switches = {} if thinking is None else {"enable_thinking": thinking}
    for messages in (TALK, TALK[1:2]):
        assert own.chat(messages, thinking=thinking) == reference_chat(other, messages, **switches)


def test_null_fields_are_absent(tmp_path: Path) -> None:
    """Clients send null for fields they do not use; a template would print them as the text None."""
    save_tokenizer(
        tmp_path,
        "{% for m in messages %}{{ m.content }}{% if 'name' in m %}{{ m.name }}{% endif %}{% endfor %}",
    )
    assert Tokenizer(tmp_path).render([{"role": "user", "content": "hi", "name": None}]) == "hi"


def test_text_parts_are_one_text(tmp_path: Path) -> None:
    """Guards the other way in which clients write a content: a list of parts, at which most templates ended
    in "can only concatenate str"."""
    save_tokenizer(tmp_path)
    own = Tokenizer(tmp_path)
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": " fox"}]
    texts = [[{"role": "user", "content": content}] for content in (parts, "the quick fox")]
    assert own.render(texts[0]) == own.render(texts[1])
    assert own.render([{"role": "user", "content": []}]) == own.render([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text", "text": "hi"}},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a\nb"}}]},
        {"role": ["user"], "content": "hi"},
        {"content": "hi"},
    ],
)
def test_messages_without_a_text_are_named(tmp_path: Path, message: dict[str, Any]) -> None:
    """Guards the reason: Jinja's own was "'dict object' has no attribute 'content'", for no message by
    number; a content that is no text could even be rendered, as Python writes it."""
    save_tokenizer(tmp_path)
    key = "content" if message.get("role") == "user" else "role"
    with pytest.raises(PromptError, match=f"^message 2 has no {key} that is a text") as caught:
        Tokenizer(tmp_path).render([{"role": "user", "content": "hi"}, message])
    assert "\n" not in str(caught.value)


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    """Guards conversations in which an assistant's message holds calls alone."""
    save_tokenizer(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].name }}{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert Tokenizer(tmp_path).render([call]) == "f"


def test_template_errors(tmp_path: Path) -> None:
    """A template's own complaint, a broken template and an escape from the sandbox each become one line."""
    user = [{"role": "user", "content": "hi"}]
    for number, (template, error, part) in enumerate(
        [
            ("{{ raise_exception('roles must\nalternate') }}", PromptError, "roles must alternate"),
            ("{{ messages[0].content.foo.bar }}", PromptError, "refuses"),
            ("{{ ''.__class__.__mro__ }}", PromptError, "refuses"),
            ("{{ messages.append(1) }}", PromptError, "refuses"),
            ("{{ 1 / 0 }}", PromptError, "division by zero"),
            ("{{ range(10**9) }}", PromptError, "Range too big"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", PromptError, "recursion"),
            ("{% if %}", ModelError, "line 1"),
        ]
    ):
        folder = tmp_path / str(number)
        save_tokenizer(folder, template)
        with pytest.raises(error, match=part) as caught:
            Tokenizer(folder).chat(user)
        assert "\n" not in str(caught.value)


def test_no_template(tmp_path: Path) -> None:
    """A base model cannot chat; the message has to say what to do instead."""
    save_tokenizer(tmp_path, None)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_template
    assert tokenizer.template_hash == ""
    with pytest.raises(PromptError, match="--raw"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_template_sources(tmp_path: Path) -> None:
    """The template lies in its own file, or in tokenizer_config.json as text or as a list of named ones."""
    save_tokenizer(tmp_path, "own file")
    assert Tokenizer(tmp_path).render(TALK) == "own file"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def configure(template: object) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        return Tokenizer(tmp_path)

    assert configure("entry").render(TALK) == "own file"
    first = Tokenizer(tmp_path).template_hash
    (tmp_path / "chat_template.jinja").unlink()
    assert configure("entry").render(TALK) == "entry"
    assert Tokenizer(tmp_path).template_hash not in ("", first)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    assert configure(named).render(TALK) == "usual"
    assert not configure(named[:1]).has_template


def test_empty_conversation(tmp_path: Path) -> None:
    """Without a message most templates fail with an index error deep inside."""
    save_tokenizer(tmp_path)
    with pytest.raises(PromptError, match="at least one message"):
        Tokenizer(tmp_path).chat([])


def test_lone_surrogate(tmp_path: Path) -> None:
    """A JSON client can send half a surrogate pair, on which the tokenizer library raises a TypeError."""
    save_tokenizer(tmp_path)
    with pytest.raises(PromptError, match="surrogate"):
        Tokenizer(tmp_path).encode("a\ud800b")


def test_padding_and_truncation_are_off(tmp_path: Path) -> None:
    """A tokenizer.json saved after training may cut every text at 512 tokens or pad it."""
    save_tokenizer(tmp_path)
    backend = tiny_backend()
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode(TEXT)) > 4
    backend.no_truncation()
    backend.enable_padding(length=1000)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode(TEXT)) < 1000


def test_special_tokens_of_the_configuration(tmp_path: Path) -> None:
    """Fine-tunes add special tokens to tokenizer_config.json alone; as plain text they become many tokens."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    properties = {
        "content": "<tool>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    settings["added_tokens_decoder"] = {"340": {**properties, "special": True}}
    settings["extra_special_tokens"] = ["<more>"]
    settings["pad_token"] = {"__type": "AddedToken", **properties, "content": "<pad>"}
    path.write_text(json.dumps(settings))
    own, other = Tokenizer(tmp_path), reference(tmp_path)
    for text in ("a<tool>b", "a <more> b", "<pad>x"):
        assert own.encode(text) == other.encode(text)
    assert len(own.encode("<tool>")) == len(own.encode("<more>")) == len(own.encode("<pad>")) == 1
    assert own.decode(own.encode("a<tool>b")) == "ab"


def test_end_ids(tmp_path: Path) -> None:
    """Chat models often name the token that ends a turn in only one of three files."""
    save_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_ids == {2}
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert Tokenizer(tmp_path).eos_ids == {2, 5, 6, 7}


def test_hashes(tmp_path: Path) -> None:
    """A head for another vocabulary is recognised by the tokenizer's hash, whatever the template is."""
    save_tokenizer(tmp_path / "a")
    save_tokenizer(tmp_path / "b", "another template")
    a, b = Tokenizer(tmp_path / "a"), Tokenizer(tmp_path / "b")
    assert a.hash == b.hash
    assert a.template_hash != b.template_hash
    save_tokenizer(tmp_path / "c", start_token=True)
    assert Tokenizer(tmp_path / "c").hash != a.hash


def test_unknown_ids_decode_to_nothing(tmp_path: Path) -> None:
    """Output matrices are often padded beyond the vocabulary; such an id must not raise an exception."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("the fox")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]) == "the fox"


def test_without_tokenizer_json(tmp_path: Path) -> None:
    """Older folders hold vocab.json and merges.txt only."""
    vocabulary = json.loads(tiny_backend().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in vocabulary["merges"]))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    own, other = Tokenizer(tmp_path), reference(tmp_path)
    assert own.encode(TEXT) == other.encode(TEXT)
    assert own.chat(TALK) == reference_chat(other, TALK)


@pytest.mark.parametrize("content", ["{}", "{"])
def test_broken_tokenizer(tmp_path: Path, content: str) -> None:
    """A half-downloaded file must be named, not end in a traceback."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_broken_settings(tmp_path: Path) -> None:
    """Added tokens of another form, or a template in another encoding, must be named as well."""
    for added in ({"x": {"content": "a"}}, [1], {"1": {"content": 5}}):
        save_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        with pytest.raises(ModelError, match="added_tokens_decoder"):
            Tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Tokenizer(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    """A folder of weights alone cannot be a target."""
    with pytest.raises(ModelError, match="no tokenizer") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_default_model_matches_transformers() -> None:
    """The same for the real vocabulary of the default model, if it has been converted on this machine."""
    folder = cache_dir() / "models" / "smollm2-135m"
    if not folder.is_dir():
        pytest.skip("the default model is not in the cache")
    own, other = Tokenizer(folder), reference(folder)
    for text in [*TEXTS, "a  5 + 12345\n\n 10"]:
        assert own.encode(text) == other.encode(text)
    for messages in (TALK, TALK[1:2]):
        assert own.chat(messages) == reference_chat(other, messages)
    assert own.eos_ids == {2}
