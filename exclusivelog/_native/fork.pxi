# Forked children must not use objects of their parent (rule C5).

# Counts the forks that lead to this process, to recognise objects of a parent.
cdef int _generation = 0


def _count_fork():
    global _generation
    _generation += 1


_os.register_at_fork(after_in_child=_count_fork)


# Python's part of the library gives the core these errors (see errors.py).
cdef object _engine_closed = RuntimeError
cdef object _wait_timeout = TimeoutError
cdef object _undeserialised = None


def use_errors(*, closed, timeout, undeserialised):
    """Set the errors that the core raises: `closed` for objects that were closed or inherited
    through fork(), `timeout` for waits, and the result of `undeserialised(topic, offset, part, raw,
    cause)` for values and keys that cannot be deserialised."""
    global _engine_closed, _wait_timeout, _undeserialised
    _engine_closed, _wait_timeout, _undeserialised = closed, timeout, undeserialised


def _inherited():
    return _engine_closed(
        "this object is of an engine that was inherited through fork(); open an engine of your own in "
        "the child")
