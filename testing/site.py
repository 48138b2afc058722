"""The finished site in a browser, as `make docs` checks it: `python -m testing.site build/site`.

Without Chromium or selenium it says so, and checks nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from testing.browser import browser, resize

# How far code and output go beyond their boxes, in CSS pixels.
CUT = """
const boxes = [...document.querySelectorAll("pre")];
return Math.max(0, ...boxes.map((box) => box.scrollWidth - box.clientWidth));
"""
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
# A page of each kind: tables, pictures, code, the reference.
PAGES = ("docs/index", "README", "docs/howto/choose", "docs/performance", "docs/reference/engine")


def problems(site: Path, page: Any) -> list[str]:
    """What a reader could not see: ends of code and output, or the edge of a page on a phone."""
    found = []
    resize(page, 1280, 900)
    for file in sorted(site.rglob("*.html")):
        page.get(file.as_uri())
        if cut := page.execute_script(CUT):
            name = file.relative_to(site).with_suffix("")
            found.append(f"{name}: code or output is cut by {cut} px at 1280 px")
    resize(page, 390, 800)
    for name in PAGES:
        page.get((site / f"{name}.html").as_uri())
        if wide := page.execute_script(WIDER):
            found.append(f"{name}: wider by {wide} px than a screen of 390 px")
    return found


def main() -> None:
    """Exit with the problems of the site at that path."""
    site = Path(sys.argv[1]).resolve()
    try:
        with browser(1280) as page:
            found = problems(site, page)
    except (pytest.skip.Exception, ImportError) as missing:
        print(f"the site was not looked at in a browser: {missing}", file=sys.stderr)
        return
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
