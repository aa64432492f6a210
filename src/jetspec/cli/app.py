"""The verbs of `jetspec`, and which of them a command line means."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jetspec import __version__
from jetspec.cli import answers, bench, calibrate, demo, doctor, generate, prompts, serve, theory, train, tree

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
app.command("serve", short_help="Serve a model over HTTP as OpenAI's API.")(serve.serve)
app.command("tree")(tree.tree)
app.command("prompts")(prompts.prompts)
app.command("answers")(answers.answers)
app.command("train", short_help="Train a draft head for a target.")(train.train)
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("theory")(theory.theory)
app.add_typer(bench.app, name="bench")


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


def command() -> Any:
    """The verbs as typer's command, whose help pages do not show Python types behind arguments."""
    root = typer.main.get_command(app)
    waiting: list[Any] = [root]
    while waiting:
        found = waiting.pop()
        waiting += getattr(found, "commands", {}).values()
        for parameter in found.params:
            if parameter.param_type_name == "argument":  # typer has no option for it; others show a metavar
                parameter.display_type_rich = lambda ctx: None
    return root


def verbs() -> list[str]:
    """The verbs, in the order of the help page."""
    commands = [command.name for command in app.registered_commands]
    return [name for name in (*commands, *(group.name for group in app.registered_groups)) if name]


def arguments(argv: Sequence[str]) -> list[str]:
    """The arguments with the verb written out and in front of its options: where none stands before all other
    words they are for `generate`.

    Nothing at all on a terminal asks for help; with piped input it is a prompt.
    """
    if not argv:
        return ["--help"] if sys.stdin is None or sys.stdin.isatty() else ["generate"]
    if argv[0] in (*verbs(), "--help", "-h", "--version"):
        return list(argv)
    place = _first_word(argv)
    if place is not None and argv[place] in verbs():
        return [argv[place], *argv[:place], *argv[place + 1 :]]
    return ["generate", *argv]


def _first_word(argv: Sequence[str]) -> int | None:
    """The place of the first argument that is neither an option nor the value of one."""
    valued = _options_with_values()
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        if argv[place] in ("-", "--"):  # a prompt, or nothing but prompts behind it
            return None
        place += 2 if argv[place] in valued else 1
    return place if place < len(argv) else None


def _options_with_values() -> set[str]:
    """Of all verbs; none has a value at one verb and none at another."""
    waiting: list[Any] = [typer.main.get_command(app)]
    found: set[str] = set()
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.is_flag:
                found.update(parameter.opts)
    return found
