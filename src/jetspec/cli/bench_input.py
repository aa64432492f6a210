"""What `jetspec bench` is asked for: prompts, heads, and lists between commas, read from its options."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec.cli.screen import Screen
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.bench.prompts import Question
    from jetspec.bench.run import Settings


def find_questions(
    screen: Screen,
    sets: str | None,
    data: str | None,
    files: list[Path],
    prompts: int,
    settings: Settings,
) -> list[Question]:
    """The prompts of the chosen sets or files; those of the package where there is neither."""
    from jetspec.bench.prompts import SETS, builtin, find_data, read_file, read_questions

    if prompts < 1:
        raise OptionError(f"--prompts must be at least 1, got {prompts}")
    count = settings.prompts_for(prompts)
    if count != prompts:
        screen.note(f"jetspec: {count} prompts per set instead of {prompts}, to fill the largest batch")
    if files:
        if sets is not None or data is not None:
            raise OptionError("--prompt-file takes the place of --sets and --data; give one or the other")
        _check_stems(files)
        return [question for path in files for question in read_file(path, count)]
    folder = find_data(data)
    if folder is None:
        if sets is not None and sets != "builtin":
            raise OptionError("the evaluation sets were not found; give their folder with --data")
        screen.note(
            "jetspec: no evaluation sets (see --data): measuring the few prompts that come with the package",
            style="",
        )
        return builtin(count)
    if sets == "builtin":
        return builtin(count)
    names = list(SETS) if sets is None else list(dict.fromkeys(names_of(sets, "--sets")))
    if sets is None:
        names = [name for name in names if (folder / f"{name}.jsonl").is_file()]
        if not names:
            raise OptionError(
                f"{folder} holds none of {', '.join(SETS)} as NAME.jsonl; name files with --sets"
            )
    for name in names:
        if not (folder / f"{name}.jsonl").is_file():
            found = sorted(path.stem for path in folder.glob("*.jsonl"))
            raise OptionError(
                f"--sets names {name!r}, which {folder} lacks; valid: {', '.join(found)}, builtin"
            )
    return read_questions(folder, names, count)


def _check_stems(files: Many[Path]) -> None:
    """Sets are named after their files. Raises OptionError if two have one name."""
    by_stem: dict[str, Path] = {}
    for path in files:
        other = by_stem.setdefault(path.stem, path)
        if other is not path:
            raise OptionError(
                f"--prompt-file gives two sets the name {path.stem!r}: {other} and {path}; rename one of them"
            )


def given_heads(values: list[str]) -> dict[str, str]:
    """METHOD=FOLDER as a mapping; a folder alone belongs to its own family. Raises OptionError, and HeadError
    for a folder whose head cannot be read.
    """
    from jetspec.storage import user_path

    found: dict[str, str] = {}
    for value in values:
        name, sign, place = value.partition("=")
        if not sign and user_path(value).is_dir():
            name, place = _family_of(user_path(value)), value
        if not name or not place:
            raise OptionError(
                f"--head is {value!r}; give METHOD=FOLDER, for example dflash=heads/dflash, "
                "or the folder of a head alone"
            )
        if name in found:
            raise OptionError(
                f"--head names two heads for {name}: {found[name]} and {place}; measure one after the other, "
                "or give each to a method of its own, for example dflash=FOLDER ddtree=FOLDER"
            )
        found[name] = place
    return found


def _family_of(folder: Path) -> str:
    from jetspec.draft.loading import head_family

    return head_family(folder)


def names_of(text: str, option: str) -> list[str]:
    """Names between commas. Raises OptionError if there is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError(f"{option} is empty; give names separated by commas")
    return names


def budgets_of(text: str) -> tuple[int | str, ...]:
    """Budgets between commas, each once: whole numbers or `auto`. Raises OptionError if one is neither."""
    from jetspec.budget.choose import AUTO

    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    try:
        return tuple(dict.fromkeys(piece if piece == AUTO else int(piece) for piece in pieces))
    except ValueError:
        raise OptionError(
            f"--budgets is {text!r}; give whole numbers or {AUTO!r}, separated by commas"
        ) from None


def numbers_of(text: str, option: str, kind: Any) -> tuple[Any, ...]:
    """Numbers between commas, each once. Raises OptionError if one is none."""
    try:
        return tuple(dict.fromkeys(kind(piece) for piece in text.split(",") if piece.strip()))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise OptionError(f"{option} is {text!r}; give {what} separated by commas") from None
