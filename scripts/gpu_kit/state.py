"""What all steps share: the target, the recipes, and what earlier calls left in `--work`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_kit.clock import Clock
from gpu_kit.parts import join_parts


class Kit:
    """The target and the state of all steps in `--work`."""

    def __init__(self, options: argparse.Namespace, clock: Clock) -> None:
        self.options, self.clock, self.work = options, clock, options.work
        self.methods = [name for name in options.methods.split(",") if name]
        self.work.mkdir(parents=True, exist_ok=True)
        self._target: Any = None

    @property
    def target(self) -> Any:
        """The target, loaded when it is needed."""
        if self._target is None:
            from jetspec.target.loading import load_target

            options = self.options
            if options.gguf_parts:
                name = str(join_parts(options.gguf_parts, self.work / "model.gguf"))
            else:
                name = str(options.gguf or options.model or "smollm2-135m")
            self._target = load_target(name, device=options.device)
            self.clock.say(f"target {name} on {options.device}")
        return self._target

    def settings(self, method: str) -> Any:
        """The recipe of a method; batches, schedule and validation are the same for all."""
        from jetspec.train.recipe import find_recipe

        options = self.options
        found = find_recipe(recipe_of(method, options.recipes), "")
        loop = replace(
            found.loop,
            epochs=None,
            steps=self.plan().get("steps", 10**6),
            answers=options.answers_per_batch,
            anchors=options.anchors,
            part=options.part,
            seed=options.seed,
            learning_rate=options.rate or found.loop.learning_rate,
            validate_minutes=1e6,
            validate_answers=options.validate_answers,
            checkpoint_minutes=2.0,
        )
        head = found.head
        if self.family(method).taps(self.target, head) is None:
            # It reads whatever layers the answers hold: here those of all heads, more than it needs.
            head = replace(head, taps=self.block_taps())
        return replace(found, loop=loop, head=head)

    def family(self, method: str) -> Any:
        """What trains heads of this method."""
        from jetspec.train.families import find_family

        return find_family(method)

    def block_taps(self) -> tuple[int, ...]:
        """The layers that block heads read."""
        from jetspec.draft.config import default_tap_layers

        return default_tap_layers(self.target.config.num_layers)

    def taps(self) -> tuple[int, ...]:
        """Every layer that some head reads."""
        wanted = set(self.block_taps())
        for method in self.methods:
            wanted.update(self.family(method).taps(self.target, self.settings(method).head) or ())
        return tuple(sorted(wanted))

    def texts(self) -> list[Path]:
        """The files that hold the answers."""
        return self.options.answers or sorted(self.work.glob("answers-*/answers.jsonl"))

    def plan(self) -> dict[str, Any]:
        """What the plan step left; empty before it."""
        path = self.work / "plan.json"
        return json.loads(path.read_text()) if path.exists() else {}


def recipe_of(method: str, recipes: str) -> str:
    """The file or the packaged recipe of a method. Raises SystemExit if there is none."""
    from jetspec.train.recipe import packaged_recipes

    if Path(recipes).is_dir():
        path = Path(recipes) / f"{method}.toml"
        if path.is_file():
            return str(path)
        raise SystemExit(f"--recipes {recipes} has no {method}.toml; write it, or change --methods")
    names, model = [path.stem for path in packaged_recipes()], recipes.rsplit("/", 1)[-1].lower()
    if f"{method}-{model}" in names:
        return f"{method}-{model}"
    valid = [name.removeprefix("mtp-") for name in names if name.startswith("mtp-")]
    raise SystemExit(
        f"--recipes {recipes!r} has no recipe for {method}; valid: a folder of METHOD.toml, "
        f"{', '.join(valid)}"
    )
