"""How Sphinx makes the site of the documentation: `make docs`.

The source directory is the project's root, so that pages link README.md, CONTRIBUTING.md and the
examples by the same relative paths as on any web view of the repository.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Generic, get_origin
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402

import exclusivelog.cli  # noqa: E402
from exclusivelog import aio  # noqa: E402
from exclusivelog.version import __version__  # noqa: E402

project, author, copyright = "exclusivelog", "the exclusivelog developers", "the developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = """
    docs/**.md README.md CHANGELOG.md CONTRIBUTING.md examples/*.md tests/storage/ledgers/README.md
""".split()
exclude_patterns = [".venv", "build", "dist", "exclusivelog", "proof", "bench"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A page may skip a size of heading; annotations name classes that both interfaces have.
suppress_warnings = ["myst.header", "ref.python"]

default_role = "py:obj"  # `name` in a docstring: a link if there is such a name, else code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as they are written: `serde.str`, `0o700`
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = ["pyspark"]
python_use_unqualified_type_names = True
maximum_signature_line_length = 80  # a longer signature has a line for each parameter

copybutton_prompt_text = r">>> |\.\.\. |\$ "  # copies what is typed, not what is printed
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"exclusivelog {version}"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
pygments_style, pygments_dark_style = "default", "monokai"

exclusivelog.cli.load()

ANCHOR = re.compile(r'<a id="([^"]+)">')
END = re.compile(r"[.:;](?=\s)")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|approx)\.$")
OPAQUE = "x"  # code or a link, of a sentence: no full stop in it ends that
OPENING, CLOSING = "([{", ")]}"
MEMBERS = re.compile(r'<table class="[^"]*\bmembers\b.*?</table>', re.DOTALL)
ROW = re.compile(r"<tr[^>]*><td>(.*?)</td>\s*<td>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
LISTED = 4  # members from which on a class has a table of them
PAGE = re.compile(r"(?<![/`\w])(docs/[\w/-]+)\.md\b")  # named in a docstring
PARTS = "aio metrics once tracing testing cluster spark".split()
MODULES = ("exclusivelog", *(f"exclusivelog.{name}" for name in PARTS))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def as_restructured(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Docstrings are Markdown: turn fenced blocks into directives, and pages' names into links."""

    def block(found: re.Match[str]) -> str:
        margin, language, body = found.groups()
        code = "".join(f"   {line}\n" for line in body.splitlines())
        return f"\n{margin}.. code-block:: {language or 'text'}\n\n{code}\n"

    parts = "\n".join(lines).split("\n\n")
    text = "\n\n".join(part if ">>> " in part else PAGE.sub(_page, part) for part in parts)
    lines[:] = FENCE.sub(block, text).split("\n")


def _page(found: re.Match[str]) -> str:
    """A link to a page, by the beginning of its title."""
    title = (ROOT / found[0]).read_text().partition("\n")[0]
    return f":doc:`{title.removeprefix('# ').partition(':')[0]} </{found[1]}>`"


def know_anchors(app: Any, docname: str, source: list[str]) -> None:
    """Let links lead to `<a id="b3"></a>`, which MyST takes for plain HTML."""
    found = app.env.metadata[docname]["html_anchors"] = ANCHOR.findall(source[0])
    here = f"]({Path(app.env.doc2path(docname)).name}#"
    for name in found:
        source[0] = source[0].replace(f"](#{name})", f"{here}{name})")


def add_anchors(app: Any, _env: Any) -> None:
    """Enter them beside the headings that MyST has found."""
    for metadata in app.env.metadata.values():
        slugs = metadata.setdefault("myst_slugs", {})
        for name in metadata.get("html_anchors", ()):
            slugs.setdefault(name, (0, name, name.upper()))


def skip_internals(
    _app: Any, _what: str, _name: str, found: Any, skip: bool, _options: Any
) -> bool | None:
    """Leave out what the library's modules use of one another's objects: aio has none of it."""
    owner, _, name = getattr(found, "__qualname__", "").rpartition(".")
    if isinstance(found, property):
        owner, _, name = found.fget.__qualname__.rpartition(".")
    public = getattr(exclusivelog, owner, None) if owner in exclusivelog.__all__ else None
    awaitable = getattr(aio, owner, public)
    if public is not None and awaitable is not public and not hasattr(awaitable, name):
        return True
    return skip or None


def name_public_bases(_app: Any, _name: str, _object: Any, _options: Any, bases: list[Any]) -> None:
    """Replace each base class that is not public by its own base classes."""
    bases[:] = list(dict.fromkeys(_public(bases))) or [object]


def _public(bases: Iterable[Any]) -> Iterator[Any]:
    for base in bases:
        found = get_origin(base) or base
        if found.__module__.split(".")[0] == "exclusivelog" and not _is_public(found):
            yield from _public(found.__bases__)
        elif found not in (object, Generic):
            yield base


def _is_public(found: type) -> bool:
    return any(
        found.__name__ in module.__all__ and getattr(module, found.__name__) is found
        for module in map(importlib.import_module, MODULES)
    )


def list_members(_app: Any, page: nodes.document) -> None:
    """Put a table of its methods and properties below the summary of each class, and leave out the
    line about base classes where there are none."""
    for line in list(page.findall(nodes.paragraph)):
        if line.astext() == "Bases: object":
            line.parent.remove(line)
    for described in page.findall(addnodes.desc):
        content = described[-1]
        members = [node for node in content if isinstance(node, addnodes.desc)]
        if described["objtype"] == "class" and len(members) >= LISTED:
            texts = [
                at
                for at, node in enumerate(content)
                if isinstance(node, nodes.paragraph) and not node.astext().startswith("Bases:")
            ]
            content.insert(texts[0] + 1 if texts else 0, _table(map(_row, members)))


def _row(member: addnodes.desc) -> nodes.row:
    """A link to the member, and the first sentence about it."""
    signature = member[0]
    called = "()" if member["objtype"] == "method" else ""
    name = signature["fullname"].rpartition(".")[2] + called
    link = nodes.reference("", "", nodes.literal("", name), internal=True)
    link["refid"] = signature["ids"][0]
    summary = next(member[-1].findall(nodes.paragraph), nodes.paragraph())
    cells = (nodes.paragraph("", "", link), nodes.paragraph("", "", *_first_sentence(summary)))
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def _first_sentence(paragraph: nodes.paragraph) -> list[nodes.Node]:
    """Its parts up to the end of the sentence, which is in none of the others."""
    found: list[nodes.Node] = []
    before = ""
    for part in paragraph:
        end = end_of_sentence(before, part) if isinstance(part, nodes.Text) else None
        if end is not None:
            return [*found, nodes.Text(part[:end] + ".")]
        before += part.astext() if isinstance(part, nodes.Text) else OPAQUE
        found.append(part.deepcopy())
    return found


def end_of_sentence(before: str, text: str) -> int | None:
    """Where the sentence ends that begins with `before`, if it does in `text`: not inside brackets,
    and not at an abbreviation."""
    whole = before + text
    for end in END.finditer(whole, len(before)):
        sentence = whole[: end.end()]
        if _depth(sentence) <= 0 and not ABBREVIATION.search(sentence):
            return end.start() - len(before)
    return None


def _depth(text: str) -> int:
    """How many brackets of the text are open."""
    return sum(map(text.count, OPENING)) - sum(map(text.count, CLOSING))


def _table(rows: Iterable[nodes.row]) -> nodes.table:
    widths = [nodes.colspec(colwidth=width) for width in (30, 70)]
    group = nodes.tgroup("", *widths, nodes.tbody("", *rows), cols=2)
    return nodes.table("", group, classes=["members"])


class _Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        link = found.get("href") if tag == "a" else found.get("src")
        if link:
            self.links.append(link)


def broken_links(site: Path) -> list[str]:
    """Every link of the finished site that leads to no file or no anchor of it."""
    pages = {file.resolve(): _Page(file) for file in sorted(site.rglob("*.html"))}
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in anchors
            ):
                broken.append(f"{file.relative_to(site)}: {link} leads nowhere")
    return broken


def cut_summaries(site: Path) -> list[str]:
    """Every summary of a member that is no whole sentence."""
    cut = []
    for file in sorted(site.rglob("*.html")):
        for table in MEMBERS.findall(file.read_text()):
            for name, shown in ROW.findall(table):
                text = unescape(TAG.sub("", shown)).strip()
                if not text.endswith((".", "?")) or _depth(text):
                    member = unescape(TAG.sub("", name)).strip()
                    cut.append(f"{file.relative_to(site)}: {member} is summarised as {text!r}")
    return cut


def undocumented(app: Any) -> list[str]:
    """Public names that no page of the reference has."""
    there = set(app.env.get_domain("py").objects)
    return [
        f"docs/reference/ has no {module}.{name}"
        for module in MODULES
        if module != "exclusivelog.aio"  # it has the names of exclusivelog
        for name in importlib.import_module(module).__all__
        if f"{module}.{name}" not in there and name not in ("__version__", "serde")
    ]


def check_links(app: Any, error: Exception | None) -> None:
    """Fail the build for a broken link, a cut summary, and a public name that is not documented."""
    if error is not None or app.builder.format != "html":
        return
    site = Path(app.outdir).resolve()
    if wrong := broken_links(site) + cut_summaries(site) + undocumented(app):
        raise SystemExit("\n".join(wrong))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", skip_internals)
    app.connect("autodoc-process-docstring", as_restructured)
    app.connect("autodoc-process-bases", name_public_bases)
    app.connect("source-read", know_anchors)
    app.connect("doctree-read", list_members)
    app.connect("env-updated", add_anchors)
    app.connect("build-finished", check_links)
