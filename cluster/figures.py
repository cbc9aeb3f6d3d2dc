"""How every bench, check and experiment command reports: figures beside their targets.

A command makes a `Report`; `finish` prints it, writes `--json FILE`, and with `--assert` turns
figures short of their targets into exit code 1, each by name.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, and the bound that its issue set for it, if any."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def short(self) -> bool:
        """Whether the value misses its bound."""
        low = self.at_least is not None and not self.value >= self.at_least
        high = self.at_most is not None and not self.value <= self.at_most
        return low or high

    @property
    def target(self) -> str:
        """The bound in words, empty when there is none."""
        bounds = [f">= {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"<= {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(bounds)


@dataclass(slots=True)
class Report:
    """What a command found. `details` is anything JSON can hold, for `--json` only."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--assert`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--assert",
        dest="assert_targets",
        action="store_true",
        help="exit 1, naming each figure short of its target",
    )


def finish(report: Report, args: argparse.Namespace, console: Console | None = None) -> int:
    """Print and write the report; return the exit code."""
    console = console or Console()
    table = Table(title=report.title, title_justify="left")
    for heading, justify in (("figure", "left"), ("value", "right"), ("unit", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("target")
    table.add_column("")
    for figure in report.figures:
        verdict = "" if not figure.target else "[red]short" if figure.short else "[green]holds"
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, figure.target, verdict)
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False, highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
    short = [figure for figure in report.figures if figure.short]
    if args.assert_targets:
        for figure in short:
            console.print(f"short of target: {figure.name} = {figure.value:.4g} {figure.unit}, "
                          f"target {figure.target}", markup=False)  # fmt: skip
        return 1 if short else 0
    return 0
