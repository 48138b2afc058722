"""A web service with several workers, of which one at a time does the work that only one may do.

    $ pip install fastapi uvicorn
    $ cd examples; LEDGER=data/log uvicorn --workers 3 web_service:app

Any worker takes orders: each is on the disk when it is answered. Invoices need consecutive numbers
without a gap, so one worker writes them: the one that owns the topic "invoices". If it dies, hangs
or is restarted, another one goes on. An invoice, what its customer owes, and the position after its
order are committed together, so each order has one invoice, and is owed once.

    POST /orders            {"customer": "ann", "cents": 250} -> {"order": 17}
    GET  /invoices          the last hundred
    GET  /owed/{customer}   the sum of a customer's invoices
    GET  /leader            who writes invoices
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from exclusivelog import Message
from exclusivelog import aio as xl

ORDERS, INVOICES, OWED = "orders", "invoices", "owed"


class Order(BaseModel):
    """What a customer orders."""

    customer: str
    cents: int


async def lead(engine: xl.Engine, owed: xl.SharedMap[str, int]) -> None:
    """Write invoices whenever this worker owns their topic; the next one goes on where it stops."""
    async for term in engine.topic(INVOICES).terms(serializer="json"):
        orders = engine.topic(ORDERS).reader(group="invoicing", deserializer="json")
        async with term as invoices, orders:
            async for order in orders.follow():
                async with engine.transaction() as txn:
                    await write(order, invoices, owed, txn)
                    txn.commit_cursor(orders)


async def write(
    order: Message, invoices: xl.Producer, owed: xl.SharedMap[str, int], txn: xl.Transaction
) -> None:
    """Write an order's invoice. Its number is its offset: there are no gaps."""
    customer, cents = order.value["customer"], order.value["cents"]
    await invoices.send({"order": order.offset, **order.value}, transaction=txn)
    await owed.update(customer, lambda before: (before or 0) + cents, transaction=txn)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Open the engine in the worker's own process, and wait to write invoices."""
    path = os.environ.get("LEDGER", "data/log")
    async with xl.open(path, f"web-{os.getpid()}", keepalive=5.0) as engine:
        async with engine.topic(ORDERS).producer(serializer=Order) as app.state.orders:
            app.state.invoices = await engine.topic(INVOICES)
            async with xl.SharedMap[str, int](engine.topic(OWED)) as app.state.owed:
                leading = asyncio.create_task(lead(engine, app.state.owed))
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
    reader = request.app.state.invoices.reader(start=-100, deserializer="json")
    return [{"invoice": message.offset, **message.value} async for message in reader]


@app.get("/owed/{customer}")
async def owed(customer: str, request: Request) -> int:
    """What a customer owes, in cents."""
    cents: int = await request.app.state.owed.get_or_default(customer, 0, latest=True)
    return cents


@app.get("/leader")
async def leader(request: Request) -> dict[str, Any]:
    """Who writes invoices now."""
    owner = request.app.state.invoices.owner
    return {"pid": owner.pid, "epoch": owner.epoch} if owner else {}
