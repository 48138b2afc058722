# The queue of a topic: settle delays, and the selection of the next waiter.
#
# The queue is a table whose keys sort in the order of rule D1, a B+tree that all processes share;
# the commit of a promotion removes the winner. The code here reads it from the best waiter on, and
# makes no Python objects of waiters that it passes over, except to check their liveness.
#
#   key     topic (u64), 2^63-1 - priority (u64), creation (u64, ns), tie (u32), session (u64); all
#           big-endian
#   data    msgpack: an array of a session's fields, these among them:
cdef enum:
    W_ENGINE = 2            # its id, 16 hexadecimal digits
    W_SLOT = 3              # of it in the lock file
    W_CLAIM = 12            # the epoch that it claims, or nil
    W_SETTLE = 15           # ns
    WAITER_KEY = 36
    DEEPEST = 16            # of arrays and maps in one another

cdef extern from "_native/fraction.h":
    uint64_t xl_fraction(uint64_t, uint64_t, uint64_t) noexcept nogil


cdef uint64_t _selections = 0
cdef uint64_t _comparisons = 0


def passed():
    """Counters of this process: promotions that were selected, and epochs that were compared with a
    row. Tests use them to check that the ledger decides by this code."""
    return {"selections": _selections, "comparisons": _comparisons}


# ---- how long ----------------------------------------------------------------------------

cdef uint64_t _delay(int64_t priority, uint64_t settle, bint known, int64_t best,
                     int64_t lowest) noexcept nogil:
    cdef uint64_t span
    if not known or best <= lowest or priority <= lowest:
        return settle
    if priority >= best:
        return 0
    span = <uint64_t>best - <uint64_t>lowest
    return xl_fraction(settle, <uint64_t>best - <uint64_t>priority, span)


cdef uint64_t _eligible_at(uint64_t created, uint64_t delay, uint64_t freed) noexcept nogil:
    if created <= freed and delay <= freed - created:
        return freed
    return freed + delay if delay <= UINT64_MAX - freed else UINT64_MAX


def delay(int64_t priority, uint64_t settle, known):
    """The settle delay of a new waiter: 0 for the best priority of `known`, all of `settle` for the
    lowest, in proportion in between; all of it if these are equal, or `known` is None.

    >>> [delay(priority, 900, (3, 0)) for priority in (4, 3, 2, 1, 0, -1)]
    [0, 0, 300, 600, 900, 900]
    >>> delay(3, 900, None), delay(3, 900, (3, 3))
    (900, 900)
    """
    best, lowest = (0, 0) if known is None else known
    return _delay(priority, settle, known is not None, best, lowest)


def eligible_at(uint64_t created, uint64_t delay, uint64_t freed):
    """The time from which a waiter may own a topic that has been free since `freed`: at once if it
    had waited in the queue for its delay by then.

    >>> eligible_at(100, 900, freed=1000), eligible_at(101, 900, freed=1000)
    (1000, 1900)
    """
    return _eligible_at(created, delay, freed)


# ---- which waiter ------------------------------------------------------------------------

cdef struct Waiter:
    int64_t priority
    uint64_t created
    const char* engine
    Py_ssize_t engine_length
    uint64_t slot
    bint claims
    uint64_t claim
    uint64_t settle


cdef inline uint64_t _big64(const uint8_t* at) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(8):
        value = value << 8 | at[i]
    return value


cdef const uint8_t* _skip(const uint8_t* at, const uint8_t* end, int depth) noexcept nogil:
    """The end of one msgpack value; NULL if it is invalid or cut off."""
    cdef uint8_t kind
    cdef size_t size = 0
    cdef size_t items = 0
    cdef size_t width = 0
    cdef size_t i
    if at == NULL or at >= end or depth > DEEPEST:
        return NULL
    kind = at[0]
    at += 1
    if kind < 0x80 or kind >= 0xE0 or kind == 0xC0 or kind == 0xC2 or kind == 0xC3:
        return at
    if kind < 0x90:
        items = 2 * (kind & 0x0F)
    elif kind < 0xA0:
        items = kind & 0x0F
    elif kind < 0xC0:
        size = kind & 0x1F
    elif 0xC4 <= kind <= 0xC6:
        width = <size_t>1 << (kind - 0xC4)
    elif 0xC7 <= kind <= 0xC9:
        width = <size_t>1 << (kind - 0xC7)
        size = 1
    elif kind == 0xCA or kind == 0xCB:
        size = 4 if kind == 0xCA else 8
    elif 0xCC <= kind <= 0xCF:
        size = <size_t>1 << (kind - 0xCC)
    elif 0xD0 <= kind <= 0xD3:
        size = <size_t>1 << (kind - 0xD0)
    elif 0xD4 <= kind <= 0xD8:
        size = 1 + (<size_t>1 << (kind - 0xD4))
    elif 0xD9 <= kind <= 0xDB:
        width = <size_t>1 << (kind - 0xD9)
    elif 0xDC <= kind <= 0xDF:
        width = 2 if kind in (0xDC, 0xDE) else 4
    else:
        return NULL
    if width:
        if <size_t>(end - at) < width:
            return NULL
        for i in range(width):
            items = items << 8 | at[i]
        at += width
        if kind < 0xDC:
            size += items
            items = 0
        elif kind >= 0xDE:
            items *= 2
    if <size_t>(end - at) < size or items > <size_t>(end - at):
        return NULL
    at += size
    for i in range(items):
        at = _skip(at, end, depth + 1)
        if at == NULL:
            return NULL
    return at


cdef const uint8_t* _take_number(const uint8_t* at, const uint8_t* end,
                                 uint64_t* number) noexcept nogil:
    """The same for an unsigned number, which is stored."""
    cdef const uint8_t* behind = _skip(at, end, 0)
    cdef int i
    if behind == NULL:
        return NULL
    if at[0] < 0x80:
        number[0] = at[0]
        return behind
    if not 0xCC <= at[0] <= 0xCF:
        return NULL
    number[0] = 0
    for i in range(1, <int>(behind - at)):
        number[0] = number[0] << 8 | at[i]
    return behind


cdef const uint8_t* _take_text(const uint8_t* at, const uint8_t* end, const char** text,
                               Py_ssize_t* length) noexcept nogil:
    """The same for a short text."""
    cdef const uint8_t* behind = _skip(at, end, 0)
    if behind == NULL or not 0xA0 <= at[0] < 0xC0:
        return NULL
    text[0] = <const char*>(at + 1)
    length[0] = behind - at - 1
    return behind


cdef bint _read_waiter(const char* key, const uint8_t* at, Py_ssize_t size,
                       Waiter* waiter) noexcept nogil:
    """Is this the row of a waiter?"""
    cdef const uint8_t* end = at + size
    cdef int field
    if size < 3 or at[0] != 0xDC or (<int>at[1] << 8 | at[2]) <= W_SETTLE:
        return False
    waiter.priority = <int64_t>(<uint64_t>INT64_MAX - _big64(<const uint8_t*>key + 8))
    waiter.created = _big64(<const uint8_t*>key + 16)
    at += 3
    for field in range(W_SETTLE + 1):
        if field == W_ENGINE:
            at = _take_text(at, end, &waiter.engine, &waiter.engine_length)
        elif field == W_SLOT:
            at = _take_number(at, end, &waiter.slot)
        elif field == W_SETTLE:
            at = _take_number(at, end, &waiter.settle)
        elif field == W_CLAIM:
            waiter.claims = at != NULL and at < end and at[0] != 0xC0
            at = _take_number(at, end, &waiter.claim) if waiter.claims else _skip(at, end, 0)
        else:
            at = _skip(at, end, 0)
        if at == NULL:
            return False
    return True


@cython.final
cdef class Selection:
    """The result of `select`, as rows of the queue: the `winner` (None: none yet), and the waiters
    that were passed over as `dead` or `stale`. `retry_waiter` may have the topic at the time
    `retry_at`."""

    cdef readonly bytes winner
    cdef readonly list dead
    cdef readonly list stale
    cdef readonly bytes retry_waiter
    cdef readonly uint64_t retry_at


def select(rows, uint64_t topic, uint64_t epoch, alive, *, uint64_t now, uint64_t freed, known,
           bytes target, uint64_t until):
    """Select the first waiter, in the order of the queue, that may own a free topic now.

    - `rows`: (key, data) of the queue's table from the topic's first row on, in the order of the
      keys; read up to the winner, or past the topic's last row.
    - `alive`: called with (slot, id) of the engine of each waiter that is considered, once for each
      engine.
    - `epoch`: a waiter that claims another epoch is stale.
    - `now`, `freed`, `known`: as for `eligible_at` and `delay`. The best waiter decides for all.
    - `target`: if the topic is in transit (until `until`), only waiters of this engine count.

    Raises ValueError for an invalid or misplaced row.
    """
    global _selections
    cdef Selection found = Selection.__new__(Selection)
    cdef Waiter waiter
    cdef uint64_t at
    cdef bint is_known = known is not None
    cdef int64_t best = 0
    cdef int64_t lowest = 0
    cdef bytes key, data
    cdef bytes before = None
    cdef tuple party
    cdef dict lives = {}  # by engine: a dead one may have thousands of waiters
    if is_known:
        best, lowest = known
    _selections += 1
    found.dead, found.stale = [], []
    for key, data in rows:
        if PyBytes_GET_SIZE(key) < 8 or _big64(<const uint8_t*>PyBytes_AS_STRING(key)) != topic:
            break
        if (PyBytes_GET_SIZE(key) != WAITER_KEY
                or not _read_waiter(PyBytes_AS_STRING(key),
                                    <const uint8_t*>PyBytes_AS_STRING(data),
                                    PyBytes_GET_SIZE(data), &waiter)):
            raise ValueError("it is no waiter")
        if before is not None and memcmp(PyBytes_AS_STRING(before), PyBytes_AS_STRING(key),
                                         WAITER_KEY) >= 0:
            raise ValueError("it is not in its place")
        before = key
        party = waiter.slot, waiter.engine[:waiter.engine_length]
        if party not in lives:
            lives[party] = alive(waiter.slot, party[1].decode("ascii"))
        if not lives[party]:
            found.dead.append(data)
        elif waiter.claims and waiter.claim != epoch:
            found.stale.append(data)
        elif target is not None:
            if (waiter.engine_length == PyBytes_GET_SIZE(target)
                    and memcmp(waiter.engine, PyBytes_AS_STRING(target),
                               waiter.engine_length) == 0):
                found.winner = data
                break
            if found.retry_waiter is None:
                found.retry_waiter, found.retry_at = data, until
        else:
            at = _eligible_at(
                waiter.created,
                _delay(waiter.priority, waiter.settle, is_known, best, lowest), freed)
            if now < at:
                found.retry_waiter, found.retry_at = data, at
            else:
                found.winner = data
            break
    if found.winner is not None:
        found.retry_waiter, found.retry_at = None, 0
    return found
