"""No memory, for a moment and at any place: every send has its outcome all the same (rule B9)."""

from __future__ import annotations

import pytest

from testing.children import finish, script
from testing.patience import PATIENCE

try:
    import _testcapi  # noqa: F401
except ImportError:
    pytest.skip(
        "this Python has no _testcapi, which makes allocations fail", allow_module_level=True
    )

# One child for many failures: `strike(n)` lets the n-th allocation from there on fail, or the
# n-th line of the library's own code.
SETUP = """
    import logging, sys
    import _testcapi
    import exclusivelog as xl
    from exclusivelog.local.log import appending
    from testing.patience import PATIENCE

    logging.getLogger("exclusivelog").addHandler(logging.NullHandler())
    logging.raiseExceptions = False
    path, size, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def outcome(receipt):
        try:
            return receipt.result(PATIENCE)
        except xl.WaitTimeoutError:
            print("no outcome", flush=True)
            raise
        except xl.LedgerError as error:
            assert not error.maybe_written, error
            return None

    def check(topic, told):
        found = {m.offset: m.value for m in topic.reader()}
        acknowledged = {offset: value for value, offset in told if offset is not None}
        assert acknowledged.items() <= found.items(), "an acknowledged message is missing"
        refused = {value for value, offset in told if offset is None}
        assert not refused & set(found.values()), "a refused message is in the log"
        return len(acknowledged), len(refused), len(found)
"""

ALLOCATIONS = """
    # Else the main thread may go on in the middle of a commit, and one of its allocations fail.
    sys.setswitchinterval(PATIENCE)
    armed = []
    lead = appending.Committer._commit

    def failing(self):
        if not armed:
            return lead(self)
        number = armed.pop()
        _testcapi.set_nomemory(number, number + 1)
        try:
            return lead(self)
        finally:
            _testcapi.remove_mem_hooks()

    appending.Committer._commit = failing
    if len(sys.argv) > 4:  # not in one call of the compiled core
        appending.append_together = lambda ledger, waiting: waiting
    with xl.open(path) as engine:
        topic = engine.topic("t")
        told = []
        with topic.producer(name="a") as a, topic.producer(name="b", linger=60) as b:
            for number in range(last):
                values = [b"a %d " % number + bytes(size), b"b %d " % number + bytes(size)]
                waiting = [b.send_async(values[1])]
                armed.append(number)
                waiting.insert(0, a.send_async(values[0]))
                told += zip(values, map(outcome, waiting))
            assert not armed
            print(*check(topic, told), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("size", "apart"), [(10, ()), (10, ("apart",)), (200_000, ())])
def test_b9_an_allocation_that_fails_in_a_commit_costs_no_call_its_outcome(
    path, size, apart
) -> None:
    """The n-th allocation of a commit in the background fails, for every n: two producers have
    messages in it, small ones or large ones."""
    printed = finish(script(SETUP, ALLOCATIONS), path, size, 250, *apart, timeout=PATIENCE)
    acknowledged, refused, found = map(int, printed.split())
    assert acknowledged + refused == 500
    assert found >= acknowledged > 20


CALLS = """
    left, struck = [0], set()
    FILES = (appending.__file__,)

    def strike(frame, event, argument):
        caller = frame.f_back if event == "call" else frame
        if event not in ("call", "c_call") or caller.f_code.co_filename not in FILES:
            return
        if not left[0] or getattr(argument, "__name__", "") in ("__exit__", "append"):
            return  # what gives back needs no memory
        left[0] -= 1
        if not left[0]:
            struck.add((caller.f_code.co_name, caller.f_lineno))
            raise MemoryError("struck")

    take_writer_lock = appending.Committer._commit_alone

    def profiled(self):
        sys.setprofile(strike)  # anew: Python ends it where it has raised
        try:
            take_writer_lock(self)
        finally:
            sys.setprofile(None)

    appending.Committer._commit_alone = profiled
    if len(sys.argv) > 4:
        appending.append_together = lambda ledger, waiting: waiting
    with xl.open(path) as engine:
        topic = engine.topic("t")
        told = []
        with topic.producer(name="a") as a, topic.producer(name="b", linger=60) as b:
            for number in range(1, last):
                values = [b"a %d " % number + bytes(size), b"b %d " % number + bytes(size)]
                waiting = [b.send_async(values[1])]
                left[0] = number
                waiting.insert(0, a.send_async(values[0]))
                told += zip(values, map(outcome, waiting))
                left[0] = 0
            print(*check(topic, told), len(struck), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "apart", "least"), [(10, (), 4), (10, ("apart",), 11), (200_000, (), 11)]
)
def test_b9_a_call_that_fails_in_a_commit_costs_no_call_its_outcome(
    path, size, apart, least
) -> None:
    """The n-th call that the background's commit makes raises, for every n."""
    printed = finish(script(SETUP, CALLS), path, size, 90, *apart, timeout=PATIENCE)
    acknowledged, refused, found, places = map(int, printed.split())
    assert acknowledged + refused == 178
    assert found >= acknowledged > 50
    assert places >= least


ADDING = """
    with xl.open(path) as engine:
        topic = engine.topic("t")
        sent, refused = [], []
        with topic.producer(linger=60, max_batch_messages=7) as producer:
            for number in range(last):
                for n in range(12):
                    value = b"%d %d" % (number, n)
                    key = b"k" + value if n % 3 else None
                    properties = {"p": value.decode()} if n % 2 else None
                    _testcapi.set_nomemory(number, number + 1)
                    try:
                        receipt = producer.send_async(value, key=key, properties=properties)
                    except MemoryError:
                        _testcapi.remove_mem_hooks()
                        refused.append(value)
                    else:
                        _testcapi.remove_mem_hooks()
                        sent.append((receipt, (value, key, properties or {})))
            producer.flush()
        found = [(m.value, None if m.key is None else bytes(m.key), dict(m.properties))
                 for m in topic.reader()]
        # It may also strike the commit of those that are queued, which then says so.
        assert found == [message for receipt, message in sent if outcome(receipt) is not None]
        assert not set(refused) & {value for value, _, _ in found}
        print(len(sent), len(refused))
"""


def test_b9_a_message_that_finds_no_memory_is_not_queued(path) -> None:
    """The n-th allocation of the call that queues it fails: it raises, and the message is not in
    the log, nor is any part of it taken for the next one's."""
    sent, refused = map(int, finish(script(SETUP, ADDING), path, 10, 60, timeout=PATIENCE).split())
    assert sent + refused == 720
    assert min(sent, refused) > 100
