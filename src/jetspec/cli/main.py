"""`jetspec`: finds the verb, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 a check failed, 2 the input is at fault, 130 interrupted, 141 the reader of a pipe left.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, TextIO, cast

import typer

from jetspec import __version__
from jetspec.cli import demo, doctor, generate, train, tree
from jetspec.errors import UserError

app = typer.Typer(
    name="jetspec",
    help='Lossless speculative decoding with draft trees. `jetspec "your prompt"` is short for'
    ' `jetspec generate "your prompt"`.',
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("generate")(generate.generate)
app.command("tree")(tree.tree)
app.command("answers")(train.answers)
app.command("train", short_help="Train a draft head for a target.")(train.train)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)

INPUT_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
# ClickException, the base of usage errors: newer releases of typer carry their own copy of click.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[2])


def _version(wanted: bool) -> None:
    if wanted:
        print(f"jetspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def verbs() -> list[str]:
    """The verbs, in the order of the help page."""
    return [command.name for command in app.registered_commands if command.name]


def arguments(argv: Sequence[str]) -> list[str]:
    """The arguments with the verb written out: what does not begin with one is for `generate`.

    Nothing at all on a terminal asks for help; with piped input it is a prompt.
    """
    if not argv:
        return ["--help"] if sys.stdin is None or sys.stdin.isatty() else ["generate"]
    if argv[0] in (*verbs(), "--help", "-h", "--version"):
        return list(argv)
    return ["generate", *argv]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _use_utf8()
    try:
        given = arguments(sys.argv[1:] if argv is None else argv)
        code = app(args=given, prog_name="jetspec", standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk can still be reported
    except UserError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(f"{error.format_message()} (see jetspec --help)")  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        return _fail(f"cannot read or write {error.filename or 'the output'}: {error.strerror or error}")
    except MemoryError:
        return _fail("not enough memory; choose a smaller model, --dtype bfloat16, or a shorter prompt")
    if code == INTERRUPTED:
        _discard_output()
        line_break = "\n" if sys.stderr.isatty() else ""  # after the ^C that the terminal shows
        with contextlib.suppress(OSError):
            print(f"{line_break}jetspec: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    """One line on standard error, whatever the message holds."""
    from jetspec.cli.screen import printable

    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(f"jetspec: error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return INPUT_ERROR


def _use_utf8() -> None:
    """Write UTF-8 whatever the locale says, and never fail on a character."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


def _discard_output() -> None:
    """Make the interpreter's last flush harmless; what could not be written is lost."""
    with contextlib.suppress(OSError, ValueError):
        stdout: TextIO = sys.stdout
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stdout.fileno())
        os.close(null)
