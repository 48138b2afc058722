"""A headless Chromium, as tools/chromium installs it, and what its pages must satisfy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testing.patience import PATIENCE

FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
    --disable-dev-shm-usage --hide-scrollbars
""".split()

# Text that is shown: its size, its contrast to what is behind it, and whether it leaves the page.
TEXTS = """
const rgba = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const over = (top, below) => {
  const a = top.length > 3 ? top[3] : 1;
  return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a));
};
const behind = (node) => {
  const layers = [];
  for (let at = node; at instanceof Element; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    layers.push(colour);
    if (colour.length < 4 || colour[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
};
const light = (colour) => {
  const [r, g, b] = colour.map((value) => value / 255).map(
    (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode, node = text.parentElement;
  if (!text.data.trim() || node.closest("script, style, noscript")) continue;
  const range = document.createRange();
  range.selectNodeContents(text);
  const box = range.getBoundingClientRect();
  const visible = node.checkVisibility({ visibilityProperty: true });
  if (!box.width || !box.height || !visible) continue;
  const style = getComputedStyle(node), svg = node.closest("svg");
  const colour = rgba(svg ? style.fill : style.color);
  const back = behind(svg ? svg.parentElement : node), scrolls = node.closest(".wide");
  const edge = document.documentElement.clientWidth + 0.5;
  found.push({
    text: text.data.trim().slice(0, 60), size: parseFloat(style.fontSize),
    contrast: contrast(over(colour, back), back),
    outside: !scrolls && (box.left < -0.5 || box.right > edge), left: box.left, right: box.right,
  });
}
return found;
"""


@contextmanager
def browser(width: int, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A browser whose page is `width` CSS pixels wide; skips the test where none is installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver (tools/chromium)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        page = webdriver.Chrome(options, webdriver.ChromeService(driver))
        page.set_script_timeout(PATIENCE)
        try:
            resize(page, width, height)
            scheme = "dark" if dark else "light"
            page.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            yield page
        finally:
            page.quit()


def resize(page: Any, width: int, height: int) -> None:
    """Set the size of the page, which may be smaller than a window can be."""
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )


def problems(page: Any) -> list[str]:
    """What is wrong with the page as it is shown: text that is too small, pale or outside."""
    found = []
    for text in page.execute_script(TEXTS):
        if text["size"] < 11:
            found.append(f"{text['size']} px: {text['text']}")
        if text["contrast"] < 4.5:
            found.append(f"contrast {text['contrast']:.2f}: {text['text']}")
        if text["outside"]:
            found.append(f"outside, {text['left']:.0f} to {text['right']:.0f}: {text['text']}")
    wide = page.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return [*found, f"the page overflows by {wide} px"] if wide > 0 else found


def complaints(page: Any) -> list[str]:
    """What the page has written to the console."""
    return [f"{line['level']}: {line['message']}" for line in page.get_log("browser")]
