from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetspec.cli.app import arguments, command
from jetspec.cli.main import main
from tests.helpers import CONTEXT, changed_model, jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--budget", "-1"],
            "budget must be auto or a number of nodes from 0 (plain decoding) to 1024, got -1",
        ),
        (["--budget", "2000"], "the budget must be"),
        (["--budget", "9" * 5000], "the budget must be"),
        (["--budget", "many"], "the budget must be auto or a number of nodes from 0"),
        (["--grow", "worst"], "valid: best-first, beam, chain"),
        (["--temperature", "-1"], "temperature must be a number from 0 up to 1000, got -1"),
        (["--temperature", "nan"], "temperature must be a number"),
        (["--top-k", "-1"], "top_k must be an integer"),
        (["--top-p", "0"], "top_p must be a number above 0 up to 1"),
        (["--min-p", "2"], "min_p must be a number"),
        (["--repetition-penalty", "0"], "repetition_penalty must be"),
        (["--presence-penalty", "3"], "presence_penalty must be"),
        (["--frequency-penalty", "-3"], "frequency_penalty must be"),
        (["--seed", "-1"], "seed must be an integer"),
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1"),
        (["--stop", ""], "stop_strings must be texts of at least one character"),
        (["--stop"], "requires an argument"),
        (["--raw", "--system", "x"], "choose one of them"),
        (["--dtype", "int4"], "valid: float32, bfloat16, float16, float64"),
        (["--device", "toaster"], "device 'toaster' is unknown; valid: cpu"),
        (["--threads", "0"], "threads must be an integer of at least 1"),
        (["--threads", "99999999999"], "at most 1024"),
        (["--stop", "\udcff"], "--stop is not UTF-8 text"),
        (["--system", "\udcff"], "--system is not UTF-8 text"),
        (["--head", "~no-such-user/x"], "head '~no-such-user/x' was not found"),
        (["--head", "nowhere"], "head 'nowhere' was not found; valid: auto, default, off, random"),
        (["--colour"], "No such option: --colour"),
        (["another"], "unexpected extra argument"),
    ],
)
def test_a_bad_option_is_one_line(tiny_folder: Path, given: list[str], message: str) -> None:
    """Guards every option: code 2, one line that names the option and what is valid, nothing on stdout."""
    assert message in jetspec("Hello", "--model", tiny_folder, *given).error


@pytest.mark.parametrize("verb", ["tree", "demo", "doctor"])
def test_other_verbs_refuse_too(verb: str, tiny_folder: Path) -> None:
    """Guards verbs that read fewer options: what they do not know is an error, and bad values are one."""
    prompt = ["Hello"] if verb == "tree" else []
    assert "No such option" in jetspec(verb, *prompt, "--model", tiny_folder, "--colour").error
    assert "was not found" in jetspec(verb, *prompt, "--model", "no/where/at all").error
    assert "was not found" in jetspec(verb, *prompt, "--model", tiny_folder, "--head", "nowhere").error


@pytest.mark.parametrize("verb", [["generate"], ["tree"], ["bench", "plot"]])
def test_usage_errors_name_the_help_of_their_verb(verb: list[str]) -> None:
    """Guards the way out: the page of all verbs does not list the options of one."""
    line = jetspec(*verb, "--colour").error
    assert line.startswith("No such option: --colour") and line.endswith(
        f"(see jetspec {' '.join(verb)} --help)"
    )


def test_tree_counts_rounds_from_one(tiny_folder: Path) -> None:
    """Guards against a search for round 0 that decodes to the end in vain."""
    assert "round must be" in jetspec("tree", "Hello", "--round", "0", "--model", tiny_folder).error


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_prompt_is_refused_before_loading(text: str) -> None:
    """Guards the user's time: the model, which does not exist here, is not even looked for."""
    empty = "the prompt is empty: give at least one word"
    assert jetspec(text, "--model", "nowhere").error == f"{empty} ('-' reads it from standard input)"
    assert jetspec("-", "--model", "nowhere", stdin=text.encode()).error == empty
    assert jetspec("--model", "nowhere", stdin=text.encode()).error == empty


@pytest.mark.parametrize("given", [["-"], []])
def test_a_closed_standard_input_is_one_line(given: list[str]) -> None:
    """Guards `jetspec generate - <&-`, which ended in a traceback: there is no standard input to read."""
    assert "there is no prompt" in jetspec("generate", *given, "--model", "nowhere", stdin=None).error


def test_an_unknown_model_is_one_line() -> None:
    """Guards the most frequent typo of all."""
    assert "model 'nowhere' was not found; valid: smollm2-135m" in jetspec("Hi", "--model", "nowhere").error


def test_a_broken_model_is_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards against a traceback from a half-copied folder."""
    folder = changed_model(tiny_folder, tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in jetspec("Hi", "--model", folder).error


def test_a_prompt_longer_than_the_context_is_one_line(tiny_folder: Path) -> None:
    """Guards the context's end on the command line."""
    error = jetspec("a b " * CONTEXT, "--model", tiny_folder).error
    assert f"the context ends at {CONTEXT}" in error


def test_input_that_is_no_text_is_one_line(tiny_folder: Path) -> None:
    """Guards against a UnicodeDecodeError for bytes on standard input or on the command line."""
    assert "not UTF-8 text (byte 1)" in jetspec("-", "--model", tiny_folder, stdin=b"a\xff").error
    assert "is not UTF-8 text" in jetspec("a\udcff", "--model", tiny_folder).error


def test_messages_cannot_drive_the_terminal() -> None:
    """Guards error lines that quote the user: no line break and no escape sequence gets through."""
    assert jetspec("Hi", "--model", "no\x1b[2J").error.isprintable()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["Hello"], ["generate", "Hello"]),
        (["--raw", "Hello"], ["generate", "--raw", "Hello"]),
        (["-"], ["generate", "-"]),
        (["--", "--help"], ["generate", "--", "--help"]),
        (["generate", "Hello"], ["generate", "Hello"]),
        (["tree", "Hello"], ["tree", "Hello"]),
        (["--no-color", "tree", "Hello"], ["tree", "--no-color", "Hello"]),
        (
            ["-q", "--round", "2", "--model=x", "tree", "Hi"],
            ["tree", "-q", "--round", "2", "--model=x", "Hi"],
        ),
        (["--threads", "1", "bench", "table"], ["bench", "--threads", "1", "table"]),
        (["--stop", "tree", "Hello"], ["generate", "--stop", "tree", "Hello"]),
        (["-m", "tree", "Hello", "tree"], ["generate", "-m", "tree", "Hello", "tree"]),
        (["--raw", "--", "tree"], ["generate", "--raw", "--", "tree"]),
        (["--raw", "-", "tree"], ["generate", "--raw", "-", "tree"]),
        (["--version"], ["--version"]),
        (["-h"], ["-h"]),
    ],
)
def test_the_verb_may_be_left_out(given: list[str], expected: list[str]) -> None:
    """Guards the short form, the way to a prompt that looks like an option, and options that come before
    their verb, which made the verb a prompt and the prompt an extra argument.
    """
    assert arguments(given) == expected


def test_no_option_has_a_value_at_one_verb_alone() -> None:
    """Guards the search for the verb behind options: what a value is must not depend on the verb."""
    kinds: dict[str, set[bool]] = {}
    waiting = [command()]
    while waiting:
        found = waiting.pop()
        waiting += getattr(found, "commands", {}).values()
        for parameter in found.params:
            for name in parameter.opts if parameter.param_type_name == "option" else ():
                kinds.setdefault(name, set()).add(parameter.is_flag)
    assert kinds["--model"] == {False} and kinds["--quiet"] == {True}
    assert not [name for name, own in kinds.items() if len(own) > 1]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device", "/tmp/x"), 2, "cannot read or write /tmp/x: No space left"),
        (BrokenPipeError(), 141, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (KeyboardInterrupt(), 130, "jetspec: interrupted"),
        (MemoryError(), 2, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "not enough memory"),
    ],
)
def test_what_the_system_does_is_no_traceback(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    """Guards against tracebacks for a full disk, a closed pipe, Ctrl-C while loading, too large a model."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("jetspec.target.loading.load_target", fail)
    done = jetspec("Hello", "--model", tiny_folder)
    assert done.code == code and line in done.err and len(done.err.splitlines()) == bool(line)


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """Guards bug reports: only what a user can cause is put into one line."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("invariant")

    monkeypatch.setattr("jetspec.target.loading.load_target", fail)
    with pytest.raises(AssertionError, match="invariant"):
        main(["Hello", "--model", str(tiny_folder)])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(tiny_folder: Path, more: list[str]) -> None:
    """Guards the interpreter's last flush too, which would print 'Exception ignored' and exit with 120."""
    command = [sys.executable, "-m", "jetspec", "Hello", "--model", str(tiny_folder), "--quiet", *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == "jetspec: error: cannot read or write the output: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_left_is_a_code_of_its_own(tiny_folder: Path, more: list[str]) -> None:
    """Guards the code 141 where output is written at once: with --json it was 1, for typer took the system's
    error for its own."""
    command = [sys.executable, "-u", "-m", "jetspec", "Hello", "-n", "2", "--head", "off"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*command, "--model", str(tiny_folder), *more],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("closed", "code"), [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("2>&- --top-p 0", 2)]
)
def test_closed_streams_are_no_error(tiny_folder: Path, closed: str, code: int) -> None:
    """Guards daemons, which start programs without streams: no traceback, and no error line on stdout."""
    command = f"'{sys.executable}' -m jetspec Hello -n 2 --model '{tiny_folder}' --head off {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.returncode == code and "Traceback" not in done.stderr and "error" not in done.stdout


def test_an_interruption_while_the_verbs_are_loaded(tiny_folder: Path) -> None:
    """Guards Ctrl-C in the first moments: importing the command line is within what is caught."""
    code = (
        "import builtins, sys; from jetspec.cli.main import main; real = builtins.__import__\n"
        "def stop(name, *rest):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = stop; sys.exit(main(['Hello']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (130, "jetspec: interrupted\n")


@pytest.mark.parametrize(
    "given", [["Hello"], ["tree", "Hello"], ["doctor"], ["answers"], ["train", "--out", "x"]]
)
def test_numpy_is_loaded_before_torch(given: list[str]) -> None:
    """Guards Ctrl-C while torch is loaded: it imports numpy from C and takes an interruption for a missing
    numpy, so the program went on, and nothing else noticed (3 of 90 interruptions)."""
    code = (
        "import builtins, os, sys; from jetspec.cli.main import main; real = builtins.__import__\n"
        "def watch(name, *rest):\n"
        "    if name == 'torch': os._exit(40 + ('numpy' in sys.modules))\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = watch; main(sys.argv[1:])"
    )
    assert subprocess.run([sys.executable, "-c", code, *given], timeout=100).returncode == 41
