# Receipts: the futures of sent messages, and the callbacks of those that are done.

def _forget_callbacks():
    global _calling_back, _due_first, _due_last
    _calling_back = _threading.Lock()   # a parent's lock may be held by one of its threads
    _due_first = _due_last = None


in_forked_child(_forget_callbacks)

# The delay before a retry after a failure in the background, and the maximum number of retries of
# notifying a task's event loop.
cdef int64_t RETRY_NS = 250_000_000
cdef int NOTIFY_TRIES = 240

cdef Batch _due_first = None    # batches whose callbacks are to be called
cdef Batch _due_last = None
_calling_back = _threading.Lock()


def callbacks_due():
    """Are there batches whose callbacks are to be called?"""
    return _due_first is not None


def run_callbacks():
    """Run the callbacks of batches whose outcomes are known.

    A thread that settles batches calls this once it holds no lock: a callback may send again. One
    thread at a time calls back, so that callbacks run in the order of the outcomes.
    """
    cdef list callbacks
    cdef Py_ssize_t i
    interrupt = None
    while _due_first is not None and _calling_back.acquire(False):
        try:
            while _due_first is not None:
                callbacks = _take_callbacks()
                for i in range(PyList_GET_SIZE(callbacks)):
                    due = <tuple>callbacks[i]
                    try:
                        _call_back(due[1], due[0])
                    except BaseException as error:  # Ctrl-C, or sys.exit() in a callback
                        interrupt = error
        finally:
            _calling_back.release()
    if interrupt is not None:
        raise interrupt


cdef list _take_callbacks():
    global _due_first, _due_last
    cdef Batch batch = _due_first
    cdef list callbacks = batch.callbacks
    _due_first = batch.next_due
    if _due_first is None:
        _due_last = None
    batch.next_due = batch.callbacks = None
    return callbacks


cdef _call_back(callback, receipt):
    # An error in a callback must neither prevent the next one nor end the committing thread.
    try:
        callback(receipt)
    except Exception:
        import logging
        logging.getLogger("exclusivelog").exception("a send_async callback failed")


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Receipt:
    """The outcome of one `send_async`: a future with one message's offset (rule B9).

    It can be waited for (`result`), polled (`done`), given callbacks, and awaited.

    >>> receipt = producer.send_async(b"hello")
    >>> receipt.result(timeout=10), receipt.done(), receipt.exception()
    (0, True, None)
    >>> import queue
    >>> durable = queue.SimpleQueue()
    >>> producer.send_async(b"hello again").add_done_callback(durable.put)
    >>> durable.get(timeout=10).result()
    1
    """

    def __init__(self):
        raise TypeError("a Receipt is made by Producer.send_async")

    cdef Batch batch
    cdef Py_ssize_t index

    def done(self):
        """True if the outcome is known."""
        return self.batch.state >= DONE

    def exception(self, timeout=None):
        """Return the error, or None if the message is in the log. Waits as `result` does."""
        _check_timeout(timeout)
        if not self.batch.wait(timeout):
            raise _no_outcome(timeout)
        _tell(self.batch)
        return self.batch.error

    def result(self, timeout=None):
        """Return the message's offset once the message is durable; raise its error if it failed.

        - `timeout`: seconds until WaitTimeoutError; the message may still be committed then. None,
          the default: without limit.
        """
        _check_timeout(timeout)
        if self.batch.state < DONE and not self.batch.wait(timeout):
            raise _no_outcome(timeout)
        if self.batch.state == FAILED:
            _tell(self.batch)
            raise self.batch.error
        return self.batch.base_offset + self.index

    def _wait(self, timeout):
        """True when the outcome is known. Unlike `exception`, it tells nobody of an error."""
        return self.batch.wait(timeout)

    def add_done_callback(self, callback):
        """Call `callback(receipt)` when the outcome is known; at once if it is already known.

        The callback runs in the thread that commits, so it should be brief.
        """
        cdef list fresh = []
        due = (self, callback)  # allocated first, so that no other thread runs from here on
        if self.batch.state >= DONE:
            _call_back(callback, self)
        else:
            if self.batch.callbacks is None:
                self.batch.callbacks = fresh
            self.batch.callbacks.append(due)

    def __await__(self):
        return self._future(True).__await__()

    def _future(self, bint tells):
        """A future of the running loop: with the outcome if it `tells`, else with None once the
        outcome is known."""
        import asyncio
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle():
            if future.done():
                return
            error = self.exception() if tells else None
            if error is None:
                future.set_result(self.result() if tells else None)
            else:
                future.set_exception(error)

        def tell(receipt):
            for _ in range(NOTIFY_TRIES):
                try:
                    loop.call_soon_threadsafe(settle)
                except MemoryError:
                    # Temporary, so retry: a task that is not notified never ends its wait.
                    _time.sleep(RETRY_NS / 1e9)
                    continue
                except RuntimeError:
                    pass  # the loop was closed meanwhile: no task waits
                return

        self.add_done_callback(tell)
        return future

    def __repr__(self):
        if self.batch.state < DONE:
            return "<Receipt pending>"
        if self.batch.state == FAILED:
            return f"<Receipt failed: {self.batch.error!r}>"
        return f"<Receipt offset={self.batch.base_offset + self.index}>"


# No method: a receipt is made for each message, and would be larger by the pointer to its methods.
cdef _tell(Batch batch):
    """A receipt gives its caller the error: no flush raises it again."""
    if batch.untold is not None:
        batch.untold.clear()


cdef _check_timeout(timeout):
    # As check_timeout in waits.py.
    if timeout is None:
        return
    if (isinstance(timeout, bool)
            or not (isinstance(timeout, float) or hasattr(type(timeout), "__index__"))):
        raise TypeError(f"timeout={timeout!r}: it takes seconds from 0 on, or None")
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: it takes seconds from 0 on, or None")


def _no_outcome(timeout):
    return _wait_timeout(
        f"no outcome within timeout={timeout} s; the message is still on its way")


cdef Receipt _receipt(Batch batch, Py_ssize_t index):
    cdef Receipt receipt = Receipt.__new__(Receipt)
    receipt.batch = batch
    receipt.index = index
    return receipt
