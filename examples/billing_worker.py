"""Billing with failover: one worker at a time holds a role, and with it all that billing needs.

    $ python examples/billing_worker.py data/log worker-1      # and others, in other terminals

Each worker requests the role "billing". The role binds two topics, "invoices" and "payments", and
the reader group "biller" of the topic "orders". Its holder bills one order after the other: an
invoice, a payment and the group's position are committed in one transaction, which requires the
role. So each order is billed once, whichever worker dies, hangs or is replaced, and at any moment.

billing_worker_trial.py kills, stops and moves workers, and judges the log.
"""

from __future__ import annotations

import argparse
import time

import exclusivelog as xl

ROLE, ORDERS, INVOICES, PAYMENTS, LOSSES = "billing", "orders", "invoices", "payments", "losses"
PAUSE = 0.005  # seconds between two orders


def work(path: str, name: str, priority: int, keepalive: float) -> None:
    """Wait for the role, bill, and wait again when it is lost."""
    with xl.open(path, name, keepalive=keepalive) as engine:
        while True:
            # The call returns when this process holds all of it: both topics, and the group.
            role = engine.role(
                ROLE, topics=[INVOICES, PAYMENTS], groups={"biller": [ORDERS]}, priority=priority
            )
            with role:
                try:
                    bill(engine, role)
                except (
                    xl.OwnershipLostError,
                    xl.ProducerFencedError,
                    xl.ReaderFencedError,
                ) as lost:
                    with engine.topic(LOSSES).producer(serializer="json") as losses:
                        losses.send(
                            {
                                "worker": name,
                                "epoch": role.epoch,
                                "state": role.state,
                                "error": type(lost).__name__,
                            }
                        )


def bill(engine: xl.Engine, role: xl.Role) -> None:
    """Bill orders, one transaction each, until the role is lost."""
    invoices = role.producer(INVOICES, serializer="json")
    payments = role.producer(PAYMENTS, serializer="json")
    with role.reader(ORDERS, deserializer="json") as orders:
        for order in orders.follow():
            bill = {"order": order.value["number"], "epoch": role.epoch, "worker": engine.name}
            with engine.transaction() as txn:
                invoices.send(bill, transaction=txn)
                payments.send({**bill, "amount": order.value["amount"]}, transaction=txn)
                txn.commit_cursor(orders)
                txn.require(role)
            time.sleep(PAUSE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker that bills if it holds the role.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("name", help="the worker's name")
    parser.add_argument("--priority", type=int, default=0, help="higher ones first (default: 0)")
    parser.add_argument(
        "--keepalive",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of silence until a waiter takes over (default: 30)",
    )
    work(**vars(parser.parse_args()))
