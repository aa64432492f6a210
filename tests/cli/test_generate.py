from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jetspec.api import Comparison, LanguageModel, load
from jetspec.cli import report
from jetspec.cli.screen import printable
from jetspec.draft.checkpoint import save_head
from jetspec.draft.eagle3 import eagle3_drafter
from jetspec.draft.mtp import mtp_drafter
from jetspec.draft.stubs import Decoy, Off
from jetspec.target.cache import KVCache
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer
from tests.draft.sequential_tiny import random_eagle3, random_mtp
from tests.draft.tiny import random_head
from tests.helpers import changed_model, jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> LanguageModel:
    """The tiny model without drafts, as the expected outcome."""
    return load(str(tiny_folder), "off", budget=0)


def test_the_text_alone_is_on_standard_output(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards pipes: text on stdout, ended by a line break, and speeds on stderr unless --quiet."""
    expected = printable(plain.generate("Hello", max_tokens=30).text) + "\n"
    # A fixed budget: whether drafting pays on a model this small, auto finds out anew on every machine.
    done = jetspec("Hello", "-n", 30, "--model", tiny_folder, "--head", "decoy", "--budget", 8)
    assert (done.code, done.out) == (0, expected)
    first, second = done.err.splitlines()
    assert re.search(r"^30 tokens · [\d.]+ tok/s · τ \d\.\d+ over \d+ rounds · \d+% of the tokens", first)
    for phase in ("draft", "build", "verify", "commit", "prefill"):
        assert re.search(rf"{phase} [\d.]+ ms", second)
    quiet = jetspec("generate", "Hello", "-n", 30, "--model", tiny_folder, "--head", "off", "--quiet")
    assert (quiet.out, quiet.err) == (expected, "")


def test_a_missing_head_is_said(tiny_folder: Path) -> None:
    """Guards against plain decoding without a word, which looks like a slow speculation."""
    assert "no draft head is packaged" in jetspec("Hello", "-n", 2, "--model", tiny_folder).err


def test_a_text_for_which_auto_never_drafted_says_so(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards the closing line: "plain decoding" alone looks as if the head had not been found."""
    chosen = LanguageModel(plain.target, Decoy(plain.target))
    short, long = (plain.generate("Hello", max_tokens=count, ignore_eos=True) for count in (10, 40))
    said = "plain decoding, 10 rounds: auto found drafting not worth it here (short text)"
    assert report.closing_lines(short, chosen)[0].endswith(said)
    assert report.closing_lines(long, chosen)[0].endswith("40 rounds: auto found drafting not worth it here")
    for model in (
        plain,
        LanguageModel(plain.target),
        LanguageModel(plain.target, Decoy(plain.target), budget=0),
    ):
        assert report.closing_lines(short, model)[0].endswith("plain decoding, 10 rounds")
    first, second, _ = report.comparison_lines(Comparison(short, short, None), chosen)
    assert first.endswith("plain decoding, 10 rounds") and second.endswith(said)


@pytest.mark.parametrize("given", [["-"], [], ["generate"], ["generate", "-"]])
def test_the_prompt_comes_from_standard_input(
    given: list[str], tiny_folder: Path, plain: LanguageModel
) -> None:
    """Guards every way to pipe a prompt in: UTF-8 whatever the locale, without the last line break."""
    done = jetspec(
        *given, "-n", 20, "--model", tiny_folder, "--head", "off", stdin="naïve café 日本\n".encode()
    )
    assert done.out == printable(plain.generate("naïve café 日本", max_tokens=20).text) + "\n"


@pytest.mark.parametrize(
    ("option", "shared"), [((), True), (("--shared-noise",), True), (("--no-shared-noise",), False)]
)
def test_shared_noise_reaches_the_head(
    option: tuple[str, ...], shared: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an option that changes no text, so that nobody would see it being lost on the way."""
    given: list[bool] = []

    def load_drafter(head: str, target: Target, *, shared_noise: bool, confidence_threshold: float) -> Off:
        given.append(shared_noise)
        return Off()

    monkeypatch.setattr("jetspec.draft.loading.load_drafter", load_drafter)
    assert jetspec("Hello", "-n", 2, "-t", 1, "--model", tiny_folder, *option).code == 0
    assert given == [shared]


def test_confidence_threshold_reaches_the_head(
    tiny_folder: Path, plain: LanguageModel, tmp_path: Path
) -> None:
    """Guards the option: it cuts a DSpark head's drafts without changing the text, and is an error where
    there is no confidence head to ask, instead of having no effect."""
    parts = {"alignment": "shifted", "confidence": True, "layout": "specforge", "taps": (0, 1)}
    save_head(tmp_path / "head", random_head(plain.target, **parts))  # type: ignore[arg-type]
    given = ["Hello", "-n", 20, "--model", tiny_folder, "--head", tmp_path / "head", "--budget", 4, "--json"]
    whole, cut = jetspec(*given).json, jetspec(*given, "--confidence-threshold", 1).json
    assert whole["text"] == cut["text"] and whole["settings"]["grow"] == "chain"
    assert whole["stats"]["nodes"] > 0 and cut["stats"]["nodes"] == 0
    error = jetspec("Hi", "--model", tiny_folder, "--head", "echo", "--confidence-threshold", 0.5).error
    assert error.startswith("the confidence threshold 0.5 needs a head with a confidence head, which echo")
    error = jetspec(*given[:-1], "--confidence-threshold", 2).error
    assert error == "the confidence threshold must be a number from 0 up to 1, got 2.0"


def test_trees_grow_as_the_head_was_published(
    tiny_folder: Path, plain: LanguageModel, tmp_path: Path
) -> None:
    """Guards the default of --grow: a DFlash head drafted trees where its paper has chains; what is given
    goes first, and a stub, which has no paper, grows the most probable paths."""
    save_head(tmp_path / "head", random_head(plain.target, taps=(0, 1), causal=False))
    given = ["Hello", "-n", 2, "--model", tiny_folder, "--json", "--head"]
    assert jetspec(*given, tmp_path / "head").json["settings"]["grow"] == "chain"
    assert jetspec(*given, tmp_path / "head", "--grow", "beam").json["settings"]["grow"] == "beam"
    assert jetspec(*given, "decoy").json["settings"]["grow"] == "best-first"
    drafters = [eagle3_drafter(random_eagle3(plain.target, taps=(0, 1)), plain.target)]
    drafters.append(mtp_drafter(random_mtp(plain.target), plain.target))
    assert [LanguageModel(plain.target, drafter).grow for drafter in drafters] == ["dynamic", "chain"]


def test_options_reach_the_sampler(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards each option's way to the model: the text is that of the library with the same options."""
    options = {
        "temperature": 1.2,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 11,
        "max_tokens": 25,
        "system": "Be brief.",
    }
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    settings = jetspec("Hi", *given, "--model", tiny_folder, "--head", "decoy", "--json").json
    expected = plain.generate("Hi", **options)  # type: ignore[call-overload]
    assert [token["id"] for token in settings["tokens"]] == expected.tokens
    shown = {**settings["settings"]["sampling"], **settings["settings"]}
    assert {name: shown[name] for name in options} == options


def test_raw_and_stop_reach_the_request(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards --raw, and that --stop may be repeated."""
    whole = plain.generate("Hello", raw=True, max_tokens=30).text
    stop = whole[10:12]
    done = jetspec(
        "Hello", "--raw", "-n", 30, "--stop", "never", "--stop", stop, "--model", tiny_folder, "--json"
    )
    assert done.json["text"] == whole[: whole.index(stop)] and done.json["finish"] == "stop"


def test_json_is_complete(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards programs that read it: one object, exact text, ids with kinds, counters, settings, versions."""
    done = jetspec("Hello", "-n", 30, "--model", tiny_folder, "--head", "decoy", "--budget", 12, "--json")
    values = done.json
    expected = plain.generate("Hello", max_tokens=30)
    assert values["text"] == expected.text and values["prompt"] == "Hello"
    assert [token["id"] for token in values["tokens"]] == expected.tokens
    assert {token["kind"] for token in values["tokens"]} == {"accepted", "bonus"}
    assert values["stats"]["tokens"] == 30 and values["stats"]["tau"] > 1.5
    assert set(values["stats"]["ms_per_round"]) == {"draft", "build", "verify", "commit"}
    assert values["settings"]["budget"] == 12 and values["settings"]["drafter"] == "decoy"
    assert {"jetspec", "torch", "transformers", "python"} <= set(values["versions"])


def test_threads_are_set(tiny_folder: Path) -> None:
    """Guards --threads against being read and forgotten."""
    done = jetspec("Hello", "-n", 1, "--threads", 1, "--model", tiny_folder, "--json")
    assert done.json["settings"]["threads"] == 1


def test_compare_says_identical(tiny_folder: Path) -> None:
    """Guards the comparison's report, as text and as JSON."""
    given = ["Hello", "-n", 20, "--model", tiny_folder, "--head", "decoy", "--budget", 8, "--compare"]
    done = jetspec(*given)
    assert done.code == 0
    assert re.search(r"^plain +20 tokens +[\d.]+ tok/s", done.out, re.M)
    assert re.search(r"^speculative +20 tokens +[\d.]+ tok/s +τ", done.out, re.M)
    assert re.search(r"speedup [\d.]+×; the texts are identical$", done.out.strip())
    # What was asked for is no note: --quiet leaves it, as its help says.
    assert re.search(r"speedup [\d.]+×; the texts are identical$", jetspec(*given, "--quiet").out.strip())
    assert "what --compare finds" in " ".join(jetspec("generate", "--help").out.split())
    values = jetspec(*given, "--json").json
    assert values["identical"] is True and values["divergence"] is None and values["speedup"] > 0
    assert values["plain"]["text"] == values["speculative"]["text"]


def test_compare_says_where_texts_differ(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the alarm: with mixed-up cache rows place and gap are named, and the exit code is 1."""
    keep = KVCache.keep

    def wrong(self: KVCache, key: int, path: list[int]) -> None:
        keep(self, key, range(len(path)))

    monkeypatch.setattr(KVCache, "keep", wrong)
    given = ["Hello", "-n", 40, "--model", tiny_folder, "--head", "decoy", "--budget", 8, "--compare"]
    done = jetspec(*given)
    assert done.code == 1
    assert re.search(r"the texts differ at token \d+: plain \".*NOT a numeric tie", done.out)


def test_model_text_is_never_markup_or_control(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the terminal: model text is shown literally, with escapes made visible; JSON is exact."""
    evil = "[red]x[/red] :smile: \x1b[2J\x9b1m\r\x07\n"
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, skip_special=True: evil * len(ids))
    given = ["Hello", "-n", 2, "--model", tiny_folder, "--quiet"]
    shown = "[red]x[/red] :smile: ␛[2J\ufffd1m␍␇\n"
    assert jetspec(*given).out == 2 * shown
    assert jetspec(*given, "--json").json["text"] == 2 * evil
    for verb in (["tree"], ["generate", "--compare"]):
        out = jetspec(*verb, *given[:1], "--model", tiny_folder, "--head", "decoy").out
        assert "[red]x[/red]" in out and not {"\x1b", "\x9b", "\r", "\x07"} & set(out)


def test_output_is_utf8_in_every_locale(tiny_folder: Path, plain: LanguageModel) -> None:
    """Guards against UnicodeEncodeError, and against question marks, where the locale is plain ASCII."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "jetspec", "日本", "-n", "30", "--model", str(tiny_folder), "-q"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=100)
    text = plain.generate("日本", max_tokens=30).text
    assert not text.isascii()
    assert done.stdout.decode("utf-8") == printable(text) + "\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("more", [[], ["--no-color"]])
def test_colours_are_for_terminals(tiny_folder: Path, more: list[str]) -> None:
    """Guards the colours: accepted green, bonus yellow on a terminal; no sequence at all with --no-color."""
    import pty

    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "jetspec", "Hello", "-n", "12", "--model", str(tiny_folder)]
    command += ["--head", "decoy", "--budget", "8", *more]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=subprocess.PIPE, env=environment
    )
    os.close(follower)
    output = b""
    try:
        while piece := os.read(leader, 4096):
            output += piece
    except OSError:  # Linux reports the closed other side so
        pass
    process.communicate(timeout=100)
    assert process.returncode == 0
    if more:
        assert b"\x1b" not in output
    else:
        assert b"\x1b[32m" in output and b"\x1b[33m" in output


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_ends_a_stream_cleanly(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards the interrupt in the middle of a text: exit code 130, one line, no traceback."""
    folder = changed_model(tiny_folder, tmp_path / "long", max_position_embeddings=1_000_000)
    command = [sys.executable, "-m", "jetspec", "Hello", "-n", "900000", "--model", str(folder)]
    command += ["--head", "off", "--quiet"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    begun = process.stdout.read(20)  # decoding has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert begun
    assert process.returncode == 130
    assert errors == b"jetspec: interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes")
def test_a_reader_that_leaves_is_no_error(tiny_folder: Path) -> None:
    """Guards `jetspec … | head`: no traceback and no complaint, whatever of the text is unread."""
    command = [sys.executable, "-m", "jetspec", "Hello", "-n", "200", "--model", str(tiny_folder), "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=100), errors) == (141, b"")
