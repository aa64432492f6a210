"""What the heads reached: `results.json`, and a table."""

from __future__ import annotations

import json
from typing import Any

from gpu_kit.state import Kit

# What results.json takes over from a head's manifest.
KEPT = ("steps", "training_seconds", "supervised_blocks", "validation", "data", "products", "torch")


def report(kit: Kit) -> None:
    """tau of every head that is done, as a table."""
    for line in table(collect(kit)["heads"]):
        print(line, flush=True)


def collect(kit: Kit) -> dict[str, Any]:
    """What all heads reached so far; kept in OUT/results.json."""
    import torch

    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "plan": kit.plan(),
        "heads": {},
    }
    for method in kit.methods:
        path = kit.work / method / "head" / "config.json"
        if (kit.work / method / "done").exists():
            results["heads"][method] = manifest_of(json.loads(path.read_text()))
    kit.options.out.mkdir(parents=True, exist_ok=True)
    (kit.options.out / "results.json").write_text(json.dumps(results, indent=2))
    return results


def manifest_of(config: Any) -> dict[str, Any]:
    """The manifest in a head's config.json: the object that holds `validation`, wherever it is."""
    if isinstance(config, dict):
        if "validation" in config and "steps" in config:
            return {key: config.get(key) for key in KEPT}
        for value in config.values():
            found = manifest_of(value)
            if found:
                return found
    return {}


def tau_of(found: dict[str, Any]) -> dict[str, str]:
    """tau by tree; chains of all depths in one column, with the depth. Empty if no answer was held out."""
    tau = (found.get("validation") or {}).get("tau", {})
    row = {}
    for name, value in tau.items():
        tree, _, budget = name.rpartition("-")
        row["chain" if tree == "chain" else name] = f"{value:.2f}" + f" ({budget})" * (tree == "chain")
    return row


def table(heads: dict[str, Any]) -> list[str]:
    """tau by head and budget as a Markdown table."""
    if not heads:
        return ["no head is done yet"]
    rows = {method: tau_of(found) for method, found in heads.items()}
    budgets = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| head | steps | seconds | {' | '.join(budgets)} |", "|---|---|---|" + "---|" * len(budgets)]
    for method, found in heads.items():
        taus = " | ".join(rows[method].get(name, "-") for name in budgets)
        lines.append(f"| {method} | {found['steps']} | {found['training_seconds']} | {taus} |")
    return lines
