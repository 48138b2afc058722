"""A web service with several workers, of which one at a time does the work that only one may do.

    $ pip install fastapi uvicorn
    $ cd examples; LEDGER=data/log uvicorn --workers 3 web_service:app

Any worker takes orders: each is on the disk when it is answered. Invoices need consecutive numbers
without a gap, so one worker writes them: the one that holds the role "invoicing". If it dies, hangs
or is restarted, another one goes on. An invoice and the position after its order are committed
together, so each order has one invoice.

    POST /orders     {"customer": "ann", "cents": 250} -> {"order": 17}
    GET  /invoices   the last hundred
    GET  /leader     who writes invoices
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from exclusivelog import aio as xl

ROLE, ORDERS, INVOICES = "invoicing", "orders", "invoices"
LOST = (xl.OwnershipLostError, xl.ProducerFencedError, xl.ReaderFencedError)


class Order(BaseModel):
    """What a customer orders."""

    customer: str
    cents: int


async def lead(engine: xl.Engine) -> None:
    """Wait for the role, write invoices, and wait again if it is lost."""
    while True:
        async with engine.role(ROLE, topics=[INVOICES], groups={"invoicing": [ORDERS]}) as role:
            with contextlib.suppress(*LOST):
                await write_invoices(engine, role)


async def write_invoices(engine: xl.Engine, role: xl.Role) -> None:
    """One after the other; the number is the offset, which has no gaps."""
    invoices = await role.producer(INVOICES, serializer="json")
    orders = await role.reader(ORDERS, deserializer="json")
    async for order in orders.follow():
        async with engine.transaction() as txn:
            invoice = {"order": order.offset, **order.value}
            await invoices.send(invoice, transaction=txn)
            txn.commit_cursor(orders)
            txn.require(role)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the engine in the worker's own process, and compete for the role."""
    path = os.environ.get("LEDGER", "data/log")
    async with xl.open(path, f"web-{os.getpid()}", keepalive=5.0) as engine:
        async with engine.topic(ORDERS).producer(serializer=Order) as app.state.orders:
            await engine.topic(INVOICES)
            app.state.engine = engine
            leading = asyncio.create_task(lead(engine))
            yield
            leading.cancel()
            await asyncio.wait([leading])


app = FastAPI(lifespan=lifespan)


@app.post("/orders")
async def order(order: Order, request: Request) -> dict[str, int]:
    """Take an order. All requests that wait at the same time share a flush."""
    return {"order": await request.app.state.orders.send(order)}


@app.get("/invoices")
async def invoices(request: Request) -> list[dict[str, Any]]:
    """The last hundred."""
    topic = request.app.state.engine.topic(INVOICES)
    reader = topic.reader(start=-100, deserializer="json")
    return [{"invoice": message.offset, **message.value} async for message in reader]


@app.get("/leader")
async def leader(request: Request) -> dict[str, Any]:
    """Who writes invoices now."""
    [role] = request.app.state.engine.roles() or [None]
    holder = role and role.holder
    return {"pid": holder.pid, "epoch": role.epoch} if holder else {}
