"""Instruments that are test files: how many of their cases hold, what was skipped and why."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from testing.children import ROOT

SECONDS = 1800.0


@dataclass
class Ran:
    """What came of a test file."""

    cases: int = 0
    skipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def run(file: str) -> Ran:
    """Run it, and count."""
    with tempfile.TemporaryDirectory(prefix="suite-") as where:
        report = Path(where) / "report.xml"
        words = ["-m", "pytest", "-q", f"--junitxml={report}", file]
        subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, timeout=SECONDS, check=False
        )
        return read(report)


def read(report: Path) -> Ran:
    """What a report of pytest says."""
    ran = Ran()
    for case in ElementTree.parse(report).iter("testcase"):
        ran.cases += 1
        for end in case:
            if end.tag == "skipped":
                ran.skipped.append(f"{case.get('name')}: {end.get('message')}")
            elif end.tag in ("failure", "error"):
                ran.broken.append(f"{case.get('name')}: {end.get('message', '')[:200]}")
    return ran
