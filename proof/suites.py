"""Instruments that are test files: how many of their cases hold, what was skipped and why; and
which rules have tests that carry their number."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from tests.children import ROOT

SECONDS = 1800.0
# How many rules each section of the semantics has; H6 (damage costs a block) is yet to come.
SECTIONS = {"a": 6, "b": 10, "c": 7, "d": 8, "e": 5, "f": 6, "g": 9, "h": 5, "i": 7}
NAMED = re.compile(r"^ *def test_([a-i]\d+)_", re.M)


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
        words = ["-m", "pytest", "-q", f"--junitxml={report}", f"tests/{file}"]
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


def rules_with_tests(texts: list[str]) -> set[str]:
    """The rules that tests are named by."""
    return {rule for text in texts for rule in NAMED.findall(text)}


def all_rules() -> list[str]:
    """Every rule, by its number."""
    return [f"{s}{number}" for s, count in SECTIONS.items() for number in range(1, count + 1)]


def sources() -> list[str]:
    """The text of every test file."""
    return [path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))]
