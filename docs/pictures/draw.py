"""The diagrams and charts of the documentation, as SVG: `python docs/pictures/draw.py` writes them
here. The charts show tables of docs/performance.md.

A test compares the files with what this program draws.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, GREY, PALE, RED = "#1f2933", "#5f6b78", "#e4e7eb", "#c62828"
EPOCHS = {1: "#2f6fb3", 2: "#a65f00", 3: "#2e7d4f"}
DRAINING, BAR = "#9dbbdb", "#9aa5b1"
LETTER = 6.3  # pixels that a letter takes at 12 px, about

# What each colour becomes where the reader prefers dark pages. White text stays white: it is on
# the colour of an epoch.
DARK = {
    "rect": {"#ffffff": "#131416", PALE: "#2b3036", DRAINING: "#35557a"},
    "text": {INK: "#e4e7eb", GREY: "#9aa5b1", RED: "#ff8a80"},
    "path": {INK: "#e4e7eb", RED: "#ff8a80"},
}
DARK_EDGES = {
    INK: "#e4e7eb",
    GREY: "#9aa5b1",
    RED: "#ff8a80",
    EPOCHS[1]: "#5c9bdd",
    EPOCHS[2]: "#d98a1f",
}


class Drawing:
    """Shapes and texts on a white ground, in pixels from the top left."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._size = width, height
        self._parts = [f"<title>{escape(title)}</title>"]
        self.box(0, 0, width, height, fill="#ffffff", edge="none", radius=0)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = "#ffffff",
        edge: str = INK,
        ink: str = INK,
        radius: float = 4,
        dash: str = "",
    ) -> None:
        """A rectangle, with lines of text in its middle."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{edge}"{dashed}/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - 8 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, ink=ink, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        ink: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """One line of text; `y` is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{ink}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, *, ink: str = INK, dash: str = ""
    ) -> None:
        """A line that ends in an arrow."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{ink}" '
            f'stroke-width="1.5"{dashed} marker-end="url(#{"red" if ink == RED else "ink"})"/>'
        )

    def cross(self, x: float, y: float) -> None:
        """A red cross: the process dies, or its message is refused."""
        for dx, dy in ((6, 6), (6, -6)):
            self._parts.append(
                f'<line x1="{x - dx:g}" y1="{y - dy:g}" x2="{x + dx:g}" y2="{y + dy:g}" '
                f'stroke="{RED}" stroke-width="3"/>'
            )

    def svg(self) -> str:
        """The whole file."""
        width, height = self._size
        arrows = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{ink}"/></marker>'
            for name, ink in (("ink", INK), ("red", RED))
        )
        body = "\n".join(self._parts)
        style = f"<style>@media (prefers-color-scheme: dark) {{{_dark()}}}</style>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            f'font-size="12">\n{style}\n<defs>{arrows}</defs>\n{body}\n</svg>\n'
        )


def _dark() -> str:
    """Rules that replace the colours of the attributes."""
    fills = [
        f'{shape}[fill="{light}"]{{fill:{dark}}}'
        for shape, colours in DARK.items()
        for light, dark in colours.items()
    ]
    edges = [f'[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK_EDGES.items()]
    return "".join([*fills, *edges])


def failover() -> Drawing:
    """A leader dies, the next one is paused; each is replaced, and a late message is refused."""
    d = Drawing("Three workers, one leader at a time", 760, 312)
    for number, y in ((1, 44), (2, 104), (3, 164)):
        d.text(12, y + 20, f"worker-{number}", bold=True)
    bar, left = 32, 86
    d.box(left, 44, 164, bar, "owns the topic, epoch 1", fill=EPOCHS[1], edge="none", ink="#ffffff")
    d.cross(258, 60)
    d.text(270, 64, "killed", ink=RED)
    d.box(left, 104, 176, bar, "waits in the queue", fill=PALE, edge="none")
    d.box(266, 104, 164, bar, "owns, epoch 2", fill=EPOCHS[2], edge="none", ink="#ffffff")
    d.box(432, 104, 148, bar, "paused", edge=GREY, dash="4 3", ink=GREY)
    d.box(left, 164, 428, bar, "waits in the queue", fill=PALE, edge="none")
    d.box(518, 164, 228, bar, "owns, epoch 3", fill=EPOCHS[3], edge="none", ink="#ffffff")
    d.text(274, 98, "some milliseconds later", ink=GREY)
    d.text(524, 158, "after its keepalive", ink=GREY)
    d.arrow(584, 120, 640, 120, ink=RED)
    d.cross(652, 120)
    d.text(748, 98, "resumes: its send is refused", ink=RED, anchor="end")
    d.arrow(left, 214, 748, 214, ink=GREY)
    d.text(748, 208, "time", ink=GREY, anchor="end")
    d.text(12, 260, "the log", bold=True)
    cells = [1] * 5 + [2] * 5 + [3] * 6
    for offset, epoch in enumerate(cells):
        d.box(
            left + 40 * offset,
            238,
            36,
            34,
            str(offset),
            fill=EPOCHS[epoch],
            edge="none",
            ink="#ffffff",
        )
    d.text(left, 296, "epochs never go back and never mix: one writer at a time", ink=GREY)
    return d


def one_writer() -> Drawing:
    """What a send passes: the check of session and epoch is inside the mutex."""
    d = Drawing("The way of a message", 760, 330)
    d.box(216, 22, 300, 190, "", edge=INK, dash="5 3")
    for number, (name, epoch) in enumerate((("owner", 2), ("former owner", 1))):
        y = 40 + 110 * number
        d.box(12, y, 130, 56, f"{name}\nepoch {epoch}", edge=EPOCHS[epoch])
        d.arrow(144, y + 28, 238, y + 28 + (36 if number == 0 else -44))
    d.text(154, 62, "send", ink=GREY)
    d.text(154, 198, "send", ink=GREY)
    d.text(228, 40, "critical section, about a microsecond", ink=GREY)
    d.box(240, 74, 120, 84, "1. is this session\nstill the owner,\nwith this epoch?", edge=INK)
    d.arrow(362, 116, 398, 116)
    d.text(368, 108, "yes", ink=GREY)
    d.box(400, 86, 104, 60, "2. append\nto the journal", edge=INK)
    d.arrow(300, 160, 300, 236, ink=RED)
    d.text(308, 234, "no: ProducerFencedError, nothing is written", ink=RED)
    d.arrow(506, 116, 566, 116)
    d.box(568, 88, 180, 56, "3. one flush for all\nthat wait: offset returned", edge=INK)
    d.arrow(658, 146, 658, 262)
    d.text(666, 206, "4. wakes", ink=GREY)
    d.box(568, 264, 180, 46, "readers of all processes", fill=PALE, edge="none")
    d.box(
        216,
        264,
        300,
        46,
        "owners.lock, in shared memory:\nwho owns each topic, who waits",
        fill=PALE,
        edge="none",
    )
    d.arrow(230, 264, 230, 214, dash="3 3", ink=GREY)
    return d


def files() -> Drawing:
    """Processes, and the files of a ledger."""
    d = Drawing("Processes and the files of one ledger", 760, 300)
    for number in range(3):
        x = 40 + 240 * number
        d.box(
            x, 20, 200, 56, f"process {number + 1}\nan engine, its threads", edge=EPOCHS[number + 1]
        )
        d.arrow(x + 100, 78, x + 100, 116, ink=GREY)
    d.box(12, 118, 736, 168, "", edge=INK, dash="5 3")
    d.text(24, 138, "the ledger: one directory on a local disk", bold=True)
    told = (
        ("owners.lock", "mapped by all:\nsessions, epochs,\nfutexes, heartbeats"),
        ("journal", "what was sent last;\none flush per group\nof waiting senders"),
        ("data.mdb", "LMDB: topics, epochs,\nqueues, positions,\nsmall entries"),
        ("segments/", "large entries,\nmapped by readers"),
    )
    for number, (name, text) in enumerate(told):
        x = 28 + 180 * number
        d.box(x, 152, 160, 116, f"{name}\n\n{text}", fill=PALE, edge="none")
    d.arrow(370, 246, 386, 246)
    d.arrow(550, 246, 566, 246)
    return d


def hand_over() -> Drawing:
    """What a planned move does, step by step."""
    d = Drawing("A planned hand-over", 760, 236)
    d.text(12, 64, "worker-1", bold=True)
    d.text(12, 134, "worker-2", bold=True)
    d.box(86, 44, 200, 32, "owns the topic, epoch 1", fill=EPOCHS[1], edge="none", ink="#ffffff")
    d.box(288, 44, 150, 32, "finishes its sends", fill=DRAINING, edge="none")
    d.box(86, 114, 352, 32, "waits, or asks later", fill=PALE, edge="none")
    d.box(442, 114, 306, 32, "owns the topic, epoch 2", fill=EPOCHS[2], edge="none", ink="#ffffff")
    d.arrow(440, 78, 440, 112)
    d.text(288, 34, 'unload("jobs-", to=worker-2)')
    d.text(450, 64, "ProducerMovedError names worker-2", ink=GREY)
    d.text(450, 100, "one transaction: no gap, no other engine gets it", ink=GREY)
    d.arrow(86, 180, 748, 180, ink=GREY)
    d.text(748, 174, "time", ink=GREY, anchor="end")
    d.text(86, 212, "If the deadline passes or worker-2 dies, worker-1 keeps the topic.", ink=GREY)
    return d


# ---- charts ------------------------------------------------------------------------------

SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3}


def table(head: str) -> list[list[str]]:
    """The rows of the table of docs/performance.md whose head begins so, without Markdown."""
    page = (HERE.parent / "performance.md").read_text()
    lines = page[page.index(f"| {head}") :].split("\n\n")[0].splitlines()[2:]
    return [[re.sub(r"[*`]", "", cell).strip() for cell in line.split("|")[1:-1]] for line in lines]


def seconds(cell: str) -> float:
    """The time in a cell, such as 91 µs."""
    number, unit = cell.split()
    return float(number) * SECONDS[unit]


def amount(cell: str) -> float:
    """The first number of a cell, such as 46.6 k/s; the middle of a range, such as 40 to 46 M/s."""
    told = re.match(r"([\d.]+)(?: to ([\d.]+))?", cell)
    assert told is not None, cell
    return (float(told[1]) + float(told[2] or told[1])) / 2


def bars(
    title: str,
    rows: list[tuple[str, str, float]],
    least: float | None = None,
    ours: str = "exclusivelog",
) -> Drawing:
    """A bar for each row (name, what is written beside it, value), ours in another colour.

    - `least`: where a logarithmic scale begins. None: a linear one from 0.
    - `ours`: a pattern of the beginning of our names.
    """
    left, long, height = 320, 340, 26
    d = Drawing(title, 760, 44 + height * len(rows))
    d.text(12, 24, title, bold=True)
    most = max(number for _, _, number in rows)
    for at, (name, told, number) in enumerate(rows):
        share = number / most
        if least is not None:
            share = math.log(number / least) / math.log(most / least)
        y, own = 38 + height * at, re.match(ours, name) is not None
        d.text(left - 8, y + 14, name, anchor="end", bold=own)
        fill = EPOCHS[1] if own else BAR
        d.box(left, y, max(2.0, round(long * share, 1)), 18, radius=2, edge="none", fill=fill)
        d.text(left + long * share + 8, y + 14, told, ink=GREY)
    return d


def durable_sends() -> Drawing:
    """P1."""
    rows = [(name, told, seconds(told)) for name, told, _ in table("durable `send`")]
    return bars("A durable send (p50; shorter is better)", rows)


def process_sends() -> Drawing:
    """P2."""
    rows = [(name, told, seconds(told)) for name, told, _ in table("`process` `send`")]
    return bars("A send in process (p50, logarithmic; shorter is better)", rows, least=1e-7)


def shared_flush() -> Drawing:
    """P5; without the row of the bound, which has three figures."""
    rows = [
        (f"exclusivelog, {name}" if name[0].isdigit() and "bare" not in name else name, told)
        for name, told, _ in table("durable senders")
        if not name.startswith("bound")
    ]
    title = "Durable sends of several threads or processes (sum; longer is better)"
    return bars(title, [(name, told, amount(told)) for name, told in rows])


def reads() -> Drawing:
    """P6, as multiples of the rate of py-lmdb's cursor."""
    rows = [("py-lmdb's cursor", "1 x", 1.0)]
    for name, _, ratio in table("| rate | against"):
        if name.startswith(("for ", "read_arrow")):
            told = ratio.partition(" x")[0] + " x"
            rows.append((name, told, amount(told)))
    return bars("Messages read each second (longer is better)", rows, ours="for|read_arrow")


PICTURES = {
    "failover": failover,
    "one-writer": one_writer,
    "files": files,
    "hand-over": hand_over,
    "durable-sends": durable_sends,
    "process-sends": process_sends,
    "shared-flush": shared_flush,
    "reads": reads,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        HERE.joinpath(f"{name}.svg").write_text(draw().svg())
