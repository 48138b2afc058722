"""The commands by what they are for, and examples of each, as the help texts show them."""

from __future__ import annotations

_SECTIONS = {
    "Look": "topics info owners claims roles groups stats metrics top serve",
    "Lead": "run unload",
    "Messages": "tail get send export import",
    "Maintain": "trim retention compact compression terminate delete backup restore upgrade",
    "Check": "check verify audit report",
    "Many machines": "mirror",
    "Other": "demo completion",
}
SECTIONS = {heading: commands.split() for heading, commands in _SECTIONS.items()}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "topics": ("topics data/log", "topics data/log --json"),
    "info": ("info data/log", "info data/log orders"),
    "owners": ("owners data/log", "owners data/log orders --history"),
    "claims": ("claims data/log", "claims data/log shards --history"),
    "roles": ("roles data/log", "roles data/log nightly --history"),
    "groups": ("groups data/log", "groups data/log billing --delete"),
    "stats": ("stats data/log", "stats data/log orders --json"),
    "metrics": ("metrics data/log", "metrics data/log --no-topics --openmetrics"),
    "top": ("top data/log", "top data/log --sort lag --filter orders", "top data/log -n 10 --json"),
    "serve": ("serve data/log", "serve data/log --port 8000", "serve data/log --socket page.sock"),
    "run": (
        "run data/log nightly -- ./nightly.sh --all",
        "run data/log nightly --timeout 0 -- ./nightly.sh  # or not",
    ),
    "unload": (
        "unload data/log orders --to worker-2",
        "unload data/log jobs- --to worker-2 --group billing",
    ),
    "tail": (
        "tail data/log orders -f",
        "tail data/log orders --since 1h --json",
        "tail data/log orders --from 4711 -n 1",
    ),
    "get": (
        "get data/log orders 4711",
        "get data/log orders -1 --json",
        "get data/log orders 4711 --raw > value",
    ),
    "send": (
        "send data/log orders hello --key 4711",
        "echo hello | exclusivelog send data/log orders",
        "send data/log orders --json < messages.jsonl",
    ),
    "export": (
        "export data/log orders orders.parquet",
        "export data/log orders orders.csv --from 7d --to 1d",
        "export data/log orders --key 4711 | gzip > orders.jsonl.gz",
    ),
    "import": (
        "import data/log orders orders.parquet",
        "import data/log orders orders.csv --name second-copy",
        "zcat orders.jsonl.gz | exclusivelog import data/log orders --name january",
    ),
    "trim": (
        "trim data/log orders --before 7d",
        "trim data/log orders --before 4711 --yes",
        "trim data/log orders --max-bytes 10GB",
    ),
    "retention": (
        "retention data/log orders",
        "retention data/log orders --max-age 7d --max-bytes 10GB",
        "retention data/log orders --off",
    ),
    "compact": ("compact data/log settings",),
    "compression": ("compression data/log orders", "compression data/log orders zstd"),
    "terminate": ("terminate data/log orders --yes",),
    "delete": ("delete data/log orders",),
    "backup": ("backup data/log /backup/log",),
    "restore": ("restore /backup/log data/new",),
    "upgrade": ("upgrade data/log", "upgrade data/log --backup /backup/log"),
    "check": ("check data/log", "check data/log --strict --json"),
    "verify": ("verify data/log",),
    "audit": ("audit data/log", "audit data/log orders --json"),
    "report": ("report data/log page.html", "report data/log page.html orders"),
    "mirror": (
        "mirror data/log --to pulsar://broker:6650/tenant/logs --follow",
        "mirror data/new --from pulsar://broker:6650/tenant/logs",
    ),
    "demo": ("demo", "demo --kills 3 --events 2000 --path data/demo"),
    "completion": ('eval "$(exclusivelog completion bash)"    # in ~/.bashrc',),
}

PROGRAM = "exclusivelog"
NOT_FOLDED = "\b\n"  # to click, and to the documentation


def examples_of(name: str) -> str:
    """The end of a command's help text."""
    shown = (each if PROGRAM in each else f"{PROGRAM} {each}" for each in EXAMPLES[name])
    return f"{NOT_FOLDED}Examples:\n" + "\n".join(f"  {each}" for each in shown)
