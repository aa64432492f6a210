"""Recipes: everything that a training run needs to know beside its target, its prompts and where to write.

A recipe is a TOML file with a method and four tables, each of which may leave out what it does not change:

    method = "jetspec"            # jetspec, dflash, dspark, eagle3, mtp
    target = "smollm2-135m"       # what it was made for; another target may be given
    about = "one line"
    [head]                        # shape; the options of the method, see its family
    [loss]                        # see LossOptions
    [training]                    # see LoopOptions
    [answers]                     # see AnswerSettings

A key that is not known, or a value of another type, is refused by name.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jetspec.config import check_least
from jetspec.errors import OptionError
from jetspec.train.families import METHODS, find_family
from jetspec.train.loop_options import LoopOptions
from jetspec.train.weighting import LossOptions

T = TypeVar("T")

TABLES = ("head", "loss", "training", "answers")
_TOP = ("method", "target", "about", "products", *TABLES)


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers prompts, where there are no answers yet.

    tokens, max_tokens   answer tokens to make, and the longest answer
    batch                prompts answered at once
    """

    tokens: int = 650_000
    max_tokens: int = 192
    batch: int = 64

    def __post_init__(self) -> None:
        check_least(1, tokens=self.tokens, max_tokens=self.max_tokens, batch=self.batch)


@dataclass(frozen=True)
class Settings:
    """A recipe, read: the options of every part, all checked.

    head       the options of the method's family
    products   arithmetic of matrix products: "float32", "bfloat16" (float32 sums), or "auto", which takes
               bfloat16 where the processor has instructions for it
    """

    method: str
    head: Any
    loss: LossOptions
    loop: LoopOptions
    answers: AnswerSettings
    products: str = "auto"
    target: str | None = None
    about: str = ""


def default_settings(method: str) -> Settings:
    """The defaults of a method. Raises OptionError if there is no such method."""
    family = find_family(method)
    return Settings(method, family.options(), family.loss, LoopOptions(), AnswerSettings())


def read_recipe(values: Mapping[str, Any], where: str) -> Settings:
    """A recipe from its parsed TOML. Raises OptionError that names the key and `where` it was read."""
    _check_keys(values, _TOP, where)
    if "method" not in values:
        raise OptionError(f"{where} has no method; valid: {', '.join(METHODS)}")
    for name in ("method", "target", "about", "products"):
        if name in values and not isinstance(values[name], str):
            raise OptionError(f"{where}: {name} is {values[name]!r}; valid: a text")
    settings = default_settings(values["method"])
    texts = {name: values[name] for name in ("target", "about", "products") if name in values}
    return change(replace(settings, **texts), {name: values.get(name, {}) for name in TABLES}, where)


def change(settings: Settings, tables: Mapping[str, Any], where: str) -> Settings:
    """The settings with some keys of some tables changed; `where` they came from stands in error messages.

    Raises OptionError for an unknown table or key, and for a value of another type or out of range.
    """
    _check_keys(tables, TABLES, where)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise OptionError(f"{where}: {name} is {table!r}; valid: a table")
    places = {"head": "head", "loss": "loss", "training": "loop", "answers": "answers"}
    changed = {
        places[name]: _updated(getattr(settings, places[name]), table, f"{where}: [{name}]")
        for name, table in tables.items()
        if table
    }
    return replace(settings, **changed)


def parse_sets(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Tables from texts like "loss.temperature=2", whose values are TOML (a bare word is a text).

    Raises OptionError naming the text that is not of this form.
    """
    tables: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        table, dot, key = place.strip().partition(".")
        if not (equals and dot and table and key):
            raise OptionError(f"--set {text!r} is not TABLE.KEY=VALUE; tables: {', '.join(TABLES)}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value.strip()
        tables.setdefault(table, {})[key] = parsed
    return tables


def find_recipe(name: str | Path, model: str) -> Settings:
    """The recipe that `name` stands for: a TOML file, a packaged recipe such as "dflash-qwen3-8b", or a
    method, which takes the packaged recipe for `model` or, where there is none, the method's defaults.

    Raises OptionError if there is no such recipe, or if it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return _read_file(path)
    packaged = {file.stem: file for file in packaged_recipes()}
    for candidate in (str(name), f"{name}-{_slug(model)}"):
        if candidate in packaged:
            return _read_file(packaged[candidate])
    if str(name) in METHODS:
        return default_settings(str(name))
    raise OptionError(
        f"recipe {str(name)!r} was not found; valid: a .toml file, {', '.join(METHODS)}, "
        f"{', '.join(packaged)}"
    )


def stated_head(name: str | Path) -> dict[str, Any]:
    """What a recipe file of the user's own says in its [head] table; {} for a packaged recipe or a method.

    Raises OptionError if the file cannot be read.
    """
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        return {}
    return dict(_parsed(path).get("head", {}))


def packaged_recipes() -> list[Path]:
    """The recipe files that come with jetspec."""
    folder = Path(str(resources.files("jetspec"))) / "recipes"
    return sorted(folder.glob("*.toml"))


def _slug(model: str) -> str:
    """A model's name as recipes are named: "Qwen/Qwen3-8B" is qwen3-8b."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def _read_file(path: Path) -> Settings:
    return read_recipe(_parsed(path), path.name)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise OptionError(f"the recipe {path} cannot be read ({error.strerror}); give a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"the recipe {path} is not valid TOML ({error}); correct it") from None


def _check_keys(values: Mapping[str, Any], valid: Iterable[str], where: str) -> None:
    unknown = [key for key in values if key not in valid]
    if unknown:
        raise OptionError(f"{where}: unknown key {unknown[0]!r}; valid: {', '.join(valid)}")


def _updated(options: T, table: Mapping[str, Any], where: str) -> T:
    """A dataclass with some fields changed, after checking names and types."""
    _check_keys(table, [field.name for field in fields(options)], where)  # type: ignore[arg-type]
    hints = get_type_hints(type(options))
    given = {key: _typed(value, hints[key], f"{where} {key}") for key, value in table.items()}
    return replace(options, **given)  # type: ignore[type-var]


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value as a field's type wants it: lists become tuples, whole numbers floats. Raises OptionError."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = [kind for kind in inner if kind is not type(None)]
        return _typed(value, hint, where)
    if origin is tuple:
        many = len(inner) == 2 and inner[1] is Ellipsis
        if isinstance(value, list | tuple) and (many or len(value) == len(inner)):
            kinds = [inner[0]] * len(value) if many else inner
            return tuple(_typed(item, kind, where) for item, kind in zip(value, kinds, strict=True))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise OptionError(f"{where} is {value!r}; valid: {names.get(hint, 'a list of numbers')}")
