"""`jetspec`: runs a command line, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 a check failed, 2 the input is at fault, 130 interrupted, 141 the reader of a pipe left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from jetspec.cli.interrupt import Interrupted
from jetspec.errors import OptionError, UserError, is_out_of_memory

INPUT_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
_NO_MEMORY = "not enough memory; choose a smaller model, --dtype bfloat16, or a shorter prompt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # once more, while the first one was being reported
        code = INTERRUPTED
    if argv is None:  # the process only has to end now, and Ctrl-C would end it with a traceback
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _main(argv: Sequence[str]) -> int:
    kept = ""
    try:
        _prepare_streams()
        code = _run(argv)
        sys.stdout.flush()  # here, where a full disk can still be reported
    except UserError as error:
        return _fail(str(error))
    except Interrupted as stop:
        code, kept = INTERRUPTED, f"; {stop}"
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        return _fail(f"cannot read or write {error.filename or 'the output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(_NO_MEMORY)
    if code == INTERRUPTED:
        _discard_output()
        line_break = "\n" if sys.stderr.isatty() else ""  # after the ^C that the terminal shows
        with contextlib.suppress(OSError):
            print(f"{line_break}jetspec: interrupted{kept}", file=sys.stderr)
    return code


def _run(argv: Sequence[str]) -> int:
    """Find the verb and run it; its modules are loaded here, where Ctrl-C is caught already."""
    import typer

    from jetspec.cli.app import arguments, command

    if not {"--help", "-h", "--version"}.intersection(argv):
        import numpy  # noqa: F401 (torch would import it from C, where Ctrl-C is swallowed)

    # ClickException, the base of usage errors: newer releases of typer carry their own copy of click.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[2])
    try:
        code = command()(args=arguments(argv), prog_name="jetspec", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as stop:  # typer ends the process itself for a closed pipe, with a code of its own
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    except usage_error as error:
        context = getattr(error, "ctx", None)
        verb = "jetspec" if context is None else context.command_path
        raise OptionError(f"{error.format_message()} (see {verb} --help)") from error  # type: ignore[attr-defined]
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    """One line on standard error, whatever the message holds."""
    from jetspec.cli.screen import printable

    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(f"jetspec: error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return INPUT_ERROR


def _prepare_streams() -> None:
    """Write UTF-8 whatever the locale says, and never fail on a character or on a stream that is closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
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
