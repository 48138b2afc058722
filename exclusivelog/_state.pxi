# One key of a shared map is set without a step of Python, where nothing has to be waited for: the
# topic is ours, nobody else is inside, the journal has room. Anything else is replica.py's, which
# also says what is wrong. Under the interpreter's lock the threads of a process share the time
# that a write takes, so nothing but a shorter write makes many of them faster (rule I5).

_ANY = object()
ANY = _ANY  # a key may have any value, or none
cdef Py_ssize_t SET_AT_ONCE = 64 << 10  # bytes; as replica.py's own way for small messages


def usable(replica):
    """May this thread call the state? Where it is False, replica.py says why, or that it may."""
    engine = replica._engine
    if engine.closed or _threading.Lock is not engine._locks or replica._closed:
        return False
    if replica._inside or replica._failure is not None or replica._refused is not None:
        return False
    return not (replica._writing._is_owned() or replica._lock._is_owned())


def set_at_once(replica, bytes name not None, bytes data, expected, bint patient):
    """Set a key's value, or remove it: (was it done, value before, what is to be flushed before
    that is told). None where that cannot be done at once; then nothing has been done.

    - `name`, `data`: as bytes; None as `data` removes the key.
    - `expected`: the value that the key must have, as bytes, or None for none; `ANY`.
    - `patient`: it may wait for another process that appends at this moment.
    """
    writing, lock = replica._writing, replica._lock
    if not usable(replica) or replica._closing or not writing.acquire(False):
        return None
    try:
        if not lock.acquire(False):
            return None
        try:
            return _set_inside(replica, name, data, expected, patient)
        finally:
            lock.release()
    finally:
        writing.release()


cdef _set_inside(replica, bytes name, bytes data, expected, bint patient):
    cdef Appender appender
    cdef dict state = replica._map
    producer = replica._producer
    if producer is None or replica._asked is not None or replica._closed or replica._torn:
        return None
    appender = producer.appender
    if appender.journal is None or appender.journal.version != replica._checked:
        return None
    before = state.get(name)
    if (expected is not _ANY and before != expected) or (before is None and data is None):
        made = expected is _ANY or before == expected
        return made, before, replica._unflushed  # it rests on what was appended last
    if PyBytes_GET_SIZE(name) + (0 if data is None else PyBytes_GET_SIZE(data)) >= SET_AT_ONCE:
        return None
    if not _append_item(replica, producer, appender, state, name, data, patient):
        return None
    return True, before, replica._unflushed


cdef bint _append_item(replica, producer, Appender appender, dict state, bytes name, bytes data,
                       bint patient) except -1:
    """Append and apply; False if nothing was appended, for whatever reason."""
    cdef Piece piece
    cdef Placing placing
    cdef SealedEntry sealed = _seal_one(data, name, None, None, appender.name)
    if appender.error is not None or appender.generation != _generation:
        return False
    sealed.describe(&piece)
    try:
        if appender._place_now(&placing, &piece, 1, 1, -1, False, not patient) != PLACED:
            return False
        _apply_item(replica, producer, appender, &placing, state, name, data)
    except BaseException:
        replica._forget_producer()  # the next owner reads from the log what has come of it
        raise
    return True


cdef _apply_item(replica, producer, Appender appender, Placing* placing, dict state, bytes name,
                 bytes data):
    cdef uint64_t behind = placing.base_offset + 1
    if appender.durable:
        replica._unflushed = replica._appended(
            producer, placing.base_offset, placing.end, placing.generation)
    else:
        appender._announce()
    if replica._position != placing.base_offset:
        replica._catch_up()
        return
    if data is None:
        state.pop(name, None)
    else:
        state[name] = data
    replica._position = behind
    every = replica._snapshot_every
    if every is not None and behind - replica._snapshot_at >= every:
        replica._snapshot_if_due()
