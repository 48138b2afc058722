"""Plots of the saved figures: `python -m bench.plots [RESULTS]` draws them again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.measure import Figure, Series
from bench.report import human, load

DISTRIBUTION = 8  # latencies from which on a distribution says more than a bar
OURS, THEIRS = "tab:blue", "tab:orange"
LABELS = {
    "s": "seconds",
    "/s": "per second",
    "B/s": "bytes per second",
    "B": "bytes",
    "%": "per cent",
}


def draw(figure: Figure, results: Path) -> list[Path]:
    """One picture for every unit of the figure: medians as bars, or distributions.

    Ours are blue or solid; those of the peers are orange or dashed.
    """
    import matplotlib

    matplotlib.use("Agg")
    drawn = [series for series in figure.series if series.unit and series.drawn]
    units = {series.unit for series in drawn}
    paths = []
    for unit in sorted(units):
        series = [one for one in drawn if one.unit == unit]
        suffix = "" if len(units) == 1 else "-" + LABELS[unit].replace(" ", "-")
        path = results / f"{figure.id}{suffix}.png"
        many = unit == "s" and all(len(one.samples) >= DISTRIBUTION for one in series)
        (_distributions if many else _bars)(figure, series, unit, path)
        paths.append(path)
    return paths


def _bars(figure: Figure, series: list[Series], unit: str, path: Path) -> None:
    axes, save = _axes(figure, unit, 1.5 + 0.4 * len(series))
    shown = [value for one in series for value in (*one.samples, one.median) if value > 0] or [1.0]
    # Room for the labels, also where all are equal; before any zero asks for a scale of its own.
    axes.set_xlim(min(shown) / 2, max(shown) * 3)
    for at, one in enumerate(reversed(series)):
        low, high = min(one.samples), max(one.samples)
        spread = [[max(0.0, one.median - low)], [max(0.0, high - one.median)]]
        color = THEIRS if one.rival else OURS
        axes.barh(at, one.median, xerr=spread, color=color, alpha=0.7, capsize=3)
        axes.annotate(
            f" {human(one.median, unit)}", (max(one.median, high), at), va="center", fontsize=8
        )
    axes.set_yticks(range(len(series)), [one.name for one in reversed(series)], fontsize=8)
    axes.set_xlabel(f"{LABELS[unit]}: median, smallest and largest of the rounds")
    save(path)


def _distributions(figure: Figure, series: list[Series], unit: str, path: Path) -> None:
    axes, save = _axes(figure, unit, 5.0)
    for one in series:
        ordered = sorted(one.samples)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        label = f"{one.name}: {human(one.median, unit)}"
        axes.step(ordered, shares, "--" if one.rival else "-", where="post", label=label)
    if any(sample <= 0 for one in series for sample in one.samples):
        axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_xlabel(LABELS[unit])
    axes.set_ylabel("share of the samples that are not above")
    axes.legend(fontsize=7, loc="lower right")
    save(path)


def _axes(figure: Figure, unit: str, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    axes.set_title(f"{figure.id}: {figure.title}", fontsize=10)
    axes.set_xscale("log")
    axes.grid(axis="x", which="both", alpha=0.3)

    def save(path: Path) -> None:
        picture.savefig(path, dpi=120)
        pyplot.close(picture)

    return axes, save


def main() -> None:
    results = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")
    for _, figure in load(results):
        for path in draw(figure, results):
            print(path)


if __name__ == "__main__":
    main()
