"""Figures as files: raw numbers as JSON, one file each, and the table of all of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Figure, Row, Series, Target

HEAD = ("figure", "what", "ours", "peer", "ratio", "target", "holds?")
BESIDE_OTHERS = ("P26", "P27", "P28", "P29", "P30", "P31", "P35", "P36")
EXPLANATION = (
    "ratio is ours divided by the peer's: above 1 is good for a rate (/s), below 1 for a time. "
    "A row without a target is for information."
)


# ---- numbers for people ------------------------------------------------------------------


def human(value: float, unit: str) -> str:
    """
    >>> human(1_523_000, "/s"), human(0.000123, "s"), human(6.1e8, "B/s"), human(2100, "B")
    ('1.52 M/s', '123 µs', '610 MB/s', '2.1 kB')
    """
    if unit == "s":
        for factor, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value / 1e-9:.3g} ns"
    for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {name}{unit}"
    return f"{value:.3g} {unit}".strip()


def target_text(target: Target, unit: str) -> str:
    """
    >>> target_text(Target(least=1.5e6, least_ratio=1.5), "/s")
    '≥ 1.5 M/s, ≥ 1.5 x'
    """
    if target.least is not None and target.least == target.most:
        return f"= {human(target.least, unit)}"
    bounds = []
    if target.least is not None:
        bounds.append(f"≥ {human(target.least, unit)}")
    if target.most is not None:
        bounds.append(f"≤ {human(target.most, unit)}")
    if target.least_ratio is not None:
        bounds.append(f"≥ {target.least_ratio:g} x")
    if target.most_ratio is not None:
        bounds.append(f"≤ {target.most_ratio:g} x")
    return ", ".join(bounds)


def cells(figure: Figure, row: Row) -> tuple[str, ...]:
    """One line of the table."""
    peer = "" if row.peer is None else f"{human(row.peer, row.unit)} ({row.peer_name})"
    return (
        figure.id,
        row.what,
        human(row.ours, row.unit),
        peer,
        "" if row.ratio is None else f"{row.ratio:.2f} x",
        "" if row.target is None else target_text(row.target, row.unit),
        "" if row.holds is None else ("yes" if row.holds else "**no**"),
    )


def plain(figure: Figure) -> str:
    """The figure's part of the table, in columns, for a terminal."""
    lines = [HEAD, *(cells(figure, row) for row in figure.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*text, *(f"  note: {note}" for note in figure.notes)])


# ---- files -------------------------------------------------------------------------------


def save(figure: Figure, facts: dict[str, str], results: Path) -> None:
    """All measurements, as in `P3.json`."""
    path = results / f"{figure.id}.json"
    path.write_text(json.dumps({"facts": facts, **asdict(figure)}, indent=1, ensure_ascii=False))


def load(results: Path) -> list[tuple[dict[str, str], Figure]]:
    """All figures that are saved there, each with its facts, in order."""
    paths = sorted(results.glob("P*.json"), key=lambda path: int(path.stem[1:]))
    return [_figure(json.loads(path.read_text())) for path in paths]


def _figure(data: dict[str, Any]) -> tuple[dict[str, str], Figure]:
    rows = []
    for row in data["rows"]:
        target = row.pop("target")
        rows.append(Row(**row, target=None if target is None else Target(**target)))
    series = [Series(**series) for series in data["series"]]
    return data["facts"], Figure(data["id"], data["title"], series, rows, data["notes"])


def write_table(results: Path) -> Path:
    """`table.md`, of all figures that are saved there."""
    saved = load(results)
    lines = ["# exclusivelog and its peers", "", *_facts(saved), "", EXPLANATION, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(cells(figure, row))} |" for _, figure in saved for row in figure.rows]
    lines += ["", *_remarks(saved), *_losses(saved), *_durabilities(saved)]
    path = results / "table.md"
    path.write_text("\n".join(lines) + "\n")
    _write_beside_others(results, [figure for _, figure in saved if figure.id in BESIDE_OTHERS])
    return path


def _write_beside_others(results: Path, figures: list[Figure]) -> None:
    """`beside-others.md`, the section of that name for docs/performance.md."""
    lines = ["## Beside others", ""]
    for figure in figures:
        lines += [f"| {figure.title} ({figure.id}) | measured | against | ratio |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| {' | '.join(_told(row))} |" for row in figure.rows]
        lines += ["", *(f"- {note}" for note in figure.notes)]
        lines += [""] * bool(figure.notes)
    (results / "beside-others.md").write_text("\n".join(lines).rstrip() + "\n")


def _told(row: Row) -> tuple[str, ...]:
    """The cells of a row, with the target behind the number that it is about.

    >>> _told(Row("put", 0.2, "s", 0.01, "alone", Target(most=0.15)))
    ('put', '200 ms (target: ≤ 150 ms, **missed**)', '10 ms (alone)', '20.00 x')
    """
    ours = human(row.ours, row.unit)
    peer = "" if row.peer is None else f"{human(row.peer, row.unit)} ({row.peer_name})"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
    if row.target is not None:
        missed = "" if row.holds else ", **missed**"
        told = f" (target: {target_text(row.target, row.unit)}{missed})"
        ours, ratio = (ours, ratio + told) if row.target.of_ratio else (ours + told, ratio)
    return row.what, ours, peer, ratio


def _facts(saved: list[tuple[dict[str, str], Figure]]) -> list[str]:
    """The facts that all figures have in common, and the time of each measurement."""
    last = saved[-1][0]
    common = [
        f"- {name}: {value}"
        for name, value in last.items()
        if all(facts.get(name) == value for facts, _ in saved)
    ]
    own = [
        name for name, value in last.items() if any(facts.get(name) != value for facts, _ in saved)
    ]
    each = [
        f"- {figure.id}: " + "; ".join(f"{name} {facts.get(name, '?')}" for name in own)
        for facts, figure in saved
        if own
    ]
    return common + each


def _remarks(saved: list[tuple[dict[str, str], Figure]]) -> list[str]:
    notes = [f"- {figure.id}: {note}" for _, figure in saved for note in figure.notes]
    return ["## Remarks", "", *notes, ""] if notes else []


def _losses(saved: list[tuple[dict[str, str], Figure]]) -> list[str]:
    lost = [
        f"- {figure.id}, {row.what}: {row.ratio:.2f} x {row.peer_name}"
        for _, figure in saved
        for row in figure.rows
        if row.loses
    ]
    missed = [
        f"- {figure.id}, {row.what}: {human(row.ours, row.unit)}, "
        f"target {target_text(row.target, row.unit)}"
        for _, figure in saved
        for row in figure.rows
        if row.holds is False and row.target is not None
    ]
    return [
        "## Where a peer is better",
        "",
        *(lost or ["- nowhere"]),
        "",
        "## Targets missed",
        "",
        *(missed or ["- none"]),
        "",
    ]


def _durabilities(saved: list[tuple[dict[str, str], Figure]]) -> list[str]:
    arms: dict[str, set[str]] = {}
    for _, figure in saved:
        for series in figure.series:
            if series.durability:
                arms.setdefault(series.durability, set()).add(series.name)
    lines = [f"- {what}: {'; '.join(sorted(names))}" for what, names in arms.items()]
    return ["## Durability of the arms", "", *lines]
