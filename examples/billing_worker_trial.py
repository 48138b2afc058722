"""A trial of billing_worker.py: the role changes its holder three times, and the log is judged.

    $ python examples/billing_worker_trial.py

1. SIGKILL during the work. The next worker gets all parts of the role, and continues.
2. SIGSTOP for longer than `keepalive`. When the worker resumes, it has lost all parts of the role.
3. A planned hand-over to the waiter with the lowest priority, which no election would choose.

In the end the parent reads the log, and checks that each order is billed exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Generator
from multiprocessing.context import SpawnProcess
from typing import Any

from billing_worker import INVOICES, LOSSES, ORDERS, PAUSE, PAYMENTS, work
from processes import PATIENCE, Start, directory, processes, run, until, verdict

import exclusivelog as xl

BILLS = 20  # until a worker is killed, stopped or replaced


class Story:
    """What happens to the workers, printed as it happens."""

    def __init__(self, engine: xl.Engine) -> None:
        self._engine, self._begun = engine, time.monotonic()

    def say(self, what: str) -> None:
        """Print a line."""
        print(f"{time.monotonic() - self._begun:6.3f} s  {what}", flush=True)

    def await_biller(self, epoch: int, patience: float = PATIENCE) -> xl.OwnerInfo:
        """Wait until the holder with this epoch has billed some orders; return the holder."""
        billing = f"a worker bills under epoch {epoch}"
        until(billing, lambda: self._count(epoch) >= BILLS, patience)
        [role] = self._engine.roles()
        assert role.holder is not None
        self.say(f"{role.holder.engine_name} bills, epoch {role.epoch}")
        return role.holder

    def _count(self, epoch: int) -> int:
        reader = self._engine.topic(INVOICES).reader(deserializer="json")
        return sum(message.value["epoch"] == epoch for message in reader)

    def stop(self, worker: xl.OwnerInfo) -> None:
        """SIGSTOP, but not inside the ledger's critical section (see leader_election_trial.py)."""

        def stopped_outside() -> bool:
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
            inside = self._engine.inside()
            if inside is not None and inside.pid == worker.pid:
                os.kill(worker.pid, signal.SIGCONT)
                return False
            return True

        until(f"{worker.engine_name} is stopped", stopped_outside)
        self.say(f"{worker.engine_name} is stopped")


def judge(engine: xl.Engine, number: int, losses: list[dict[str, Any]]) -> dict[str, bool]:
    """Check the claims against the log."""
    invoices, payments = (
        [message.value for message in engine.topic(name).reader(deserializer="json")]
        for name in (INVOICES, PAYMENTS)
    )
    epochs = [invoice["epoch"] for invoice in invoices]
    print("\nepoch  worker    orders")
    for epoch in sorted(set(epochs)):
        billed = [invoice["order"] for invoice in invoices if invoice["epoch"] == epoch]
        worker = next(i["worker"] for i in invoices if i["epoch"] == epoch)
        print(f"{epoch:5}  {worker:8}  {billed[0]}-{billed[-1]}")
    print()
    return {
        "each order has one invoice, in order": [i["order"] for i in invoices]
        == list(range(number)),
        "each invoice has its payment, by the same worker": invoices
        == [{key: payment[key] for key in invoices[0]} for payment in payments],
        "no former holder wrote after its successor": epochs == sorted(epochs),
        "the stopped worker and the former holder know their loss": [
            (loss["epoch"], loss["state"]) for loss in losses
        ]
        == [(2, "fenced"), (3, "moved")],
    }


@contextlib.contextmanager
def orders(engine: xl.Engine) -> Generator[None]:
    """Send orders, in a thread, until the block ends."""
    enough = threading.Event()

    def send() -> None:
        with engine.topic(ORDERS).producer(serializer="json") as producer:
            for number in itertools.count():
                producer.send({"number": number, "amount": number % 90 + 10})
                if enough.wait(PAUSE):
                    return

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(PATIENCE)


def main() -> int:
    """Run the example, and check the log."""
    parser = argparse.ArgumentParser(description="Billing with failover.")
    parser.add_argument(
        "--keepalive",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="of silence until a waiter takes over (default: 1)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="to wait for the next worker (default: %(default)g)",
    )
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    with directory(options.path) as path, xl.open(path, "parent") as engine, processes() as start:
        with orders(engine):
            told = tell(engine, workers_of(path, start, options.keepalive), options.patience)
        number, bills = engine.topic(ORDERS).next_offset, engine.topic(PAYMENTS)
        until("all orders are billed", lambda: bills.next_offset >= number)
        return verdict(judge(engine, number, told))


def workers_of(path: str, start: Start, keepalive: float) -> dict[str, SpawnProcess]:
    """Four workers, the first with the highest priority."""
    return {
        name: start(name, work, path, name, priority, keepalive)
        for name, priority in {f"worker-{4 - n}": n for n in range(4)}.items()
    }


def tell(
    engine: xl.Engine, workers: dict[str, SpawnProcess], patience: float
) -> list[dict[str, Any]]:
    """Change the holder three times; return what the workers that lost the role have reported."""
    losses = engine.topic(LOSSES).reader(deserializer="json")
    story = Story(engine)
    first = story.await_biller(1)
    until("the others wait", lambda: len(engine.roles()[0].waiters) == 3)
    workers[first.engine_name].kill()
    story.say(f"{first.engine_name} is killed")
    second = story.await_biller(2)
    story.stop(second)
    third = story.await_biller(3, patience)
    os.kill(second.pid, signal.SIGCONT)
    story.say(f"{second.engine_name} resumes")
    told = [losses.read_next(PATIENCE).value]
    last = engine.roles()[0].waiters[-1]
    [move] = engine.unload(INVOICES, to=last.engine_id)
    story.say(f"{third.engine_name} hands over to {move.target.name}")
    told.append(losses.read_next(PATIENCE).value)
    story.await_biller(4)
    return told


if __name__ == "__main__":
    run(main)
