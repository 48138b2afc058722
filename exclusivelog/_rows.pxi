# The topic row, which every append reads, compares and writes back, and the heap that
# orders waiters.
#
#   offset  size  field
cdef enum:
    R_VERSION = 0                               # u32, 1
    R_FLAGS = R_VERSION + 4                     # u32: 1 terminated, 2 deleted
    R_ID = R_FLAGS + 4                          # u64
    R_EPOCH = R_ID + 8                          # u64
    R_FIRST_OFFSET = R_EPOCH + 8                # u64
    R_NEXT_OFFSET = R_FIRST_OFFSET + 8          # u64
    R_LAST_PUBLISH_TIME = R_NEXT_OFFSET + 8     # i64, ms since 1970
    R_OWNER = R_LAST_PUBLISH_TIME + 8           # u64, the owner's session; 0 = none
    R_SHARED = R_OWNER + 8                      # u32, how many shared sessions
    R_WAITING = R_SHARED + 4                    # u32, how many waiting sessions
    R_FREED = R_WAITING + 4                     # u64, ns of the monotonic clock: when the last
                                                # one left; 0 = there was none
    R_LATER = R_FREED + 8                       # u64, the waiter that was told when to come back,
    R_DUE = R_LATER + 8                         # u64, and when; 0 = nobody was
    R_CRC = R_DUE + 8                           # u32, CRC-32C of the row with this field 0
    R_NAME = R_CRC + 4                          # the topic's name, UTF-8, to the end

TERMINATED = 1
DELETED = 2
REBORN = 4      # made again after it was deleted; nobody has owned it since


@cython.final
cdef class TopicRow:
    """One topic's counters and owner. Mutable: read, change, write back in one transaction."""

    @staticmethod
    def unpack(bytes data not None):
        """The row from its bytes; ValueError if they are damaged."""
        cdef TopicRow row = TopicRow.__new__(TopicRow)
        cdef const char* at = PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        if size < R_NAME or (<uint32_t*>(at + R_VERSION))[0] != 1:
            raise ValueError("it is no topic row of format 1")
        if _row_sum(at, size) != (<uint32_t*>(at + R_CRC))[0]:
            raise ValueError("its checksum does not hold")
        row.flags = (<uint32_t*>(at + R_FLAGS))[0]
        row.id = (<uint64_t*>(at + R_ID))[0]
        row.epoch = (<uint64_t*>(at + R_EPOCH))[0]
        row.first_offset = (<uint64_t*>(at + R_FIRST_OFFSET))[0]
        row.next_offset = (<uint64_t*>(at + R_NEXT_OFFSET))[0]
        row.last_publish_time = (<int64_t*>(at + R_LAST_PUBLISH_TIME))[0]
        row.owner = (<uint64_t*>(at + R_OWNER))[0]
        row.shared = (<uint32_t*>(at + R_SHARED))[0]
        row.waiting = (<uint32_t*>(at + R_WAITING))[0]
        row.freed = (<uint64_t*>(at + R_FREED))[0]
        row.later = (<uint64_t*>(at + R_LATER))[0]
        row.due = (<uint64_t*>(at + R_DUE))[0]
        row.name = at[R_NAME:size].decode("utf-8")
        return row

    def pack(self):
        """The row as bytes."""
        cdef bytes name = self.name.encode("utf-8")
        cdef Py_ssize_t size = R_NAME + PyBytes_GET_SIZE(name)
        cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
        cdef char* at = PyBytes_AS_STRING(data)
        (<uint32_t*>(at + R_VERSION))[0] = 1
        (<uint32_t*>(at + R_FLAGS))[0] = self.flags
        (<uint64_t*>(at + R_ID))[0] = self.id
        (<uint64_t*>(at + R_EPOCH))[0] = self.epoch
        (<uint64_t*>(at + R_FIRST_OFFSET))[0] = self.first_offset
        (<uint64_t*>(at + R_NEXT_OFFSET))[0] = self.next_offset
        (<int64_t*>(at + R_LAST_PUBLISH_TIME))[0] = self.last_publish_time
        (<uint64_t*>(at + R_OWNER))[0] = self.owner
        (<uint32_t*>(at + R_SHARED))[0] = self.shared
        (<uint32_t*>(at + R_WAITING))[0] = self.waiting
        (<uint64_t*>(at + R_FREED))[0] = self.freed
        (<uint64_t*>(at + R_LATER))[0] = self.later
        (<uint64_t*>(at + R_DUE))[0] = self.due
        memcpy(at + R_NAME, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        (<uint32_t*>(at + R_CRC))[0] = _row_sum(at, size)
        return data

    def admits(self, uint64_t session, uint64_t epoch):
        """The fencing check of an exclusive append (rule B2)."""
        return self.owner == session and self.epoch == epoch


cdef uint32_t _row_sum(const char* at, Py_ssize_t size):
    cdef uint32_t crc = 0xFFFFFFFF
    cdef Py_ssize_t i
    for i in range(size):
        crc = (crc >> 8) ^ _crc_table[
            (crc ^ (0 if R_CRC <= i < R_NAME else <uint8_t>at[i])) & 0xFF]
    return ~crc


# ---- heap --------------------------------------------------------------------------------

cdef struct Place:
    int64_t priority
    uint64_t created
    uint64_t tie
    uint64_t item


cdef inline bint _before(const Place* a, const Place* b) noexcept nogil:
    if a.priority != b.priority:
        return a.priority > b.priority
    if a.created != b.created:
        return a.created < b.created
    return a.tie < b.tie


@cython.final
cdef class WaiterHeap:
    """Waiters in the order of rule D1: highest priority, then earliest, then by a random tie.

    >>> heap = WaiterHeap()
    >>> heap.push(0, 100, 7, 1); heap.push(5, 200, 7, 2); heap.push(5, 150, 7, 3)
    >>> [heap.pop() for _ in range(len(heap))]
    [3, 2, 1]
    """

    cdef Place* places
    cdef Py_ssize_t used
    cdef Py_ssize_t room

    def __dealloc__(self):
        free(self.places)

    def __len__(self):
        return self.used

    def push(self, int64_t priority, uint64_t created, uint64_t tie, uint64_t item):
        """Add `item`; `created` in ns of any one clock."""
        cdef Place* grown
        cdef Place new
        cdef Py_ssize_t at, parent
        if self.used == self.room:
            grown = <Place*>realloc(self.places, (2 * self.room + 16) * sizeof(Place))
            if grown == NULL:
                raise MemoryError
            self.places = grown
            self.room = 2 * self.room + 16
        new.priority, new.created, new.tie, new.item = priority, created, tie, item
        at = self.used
        self.used += 1
        while at > 0:
            parent = (at - 1) >> 1
            if not _before(&new, &self.places[parent]):
                break
            self.places[at] = self.places[parent]
            at = parent
        self.places[at] = new

    def pop(self):
        """Remove and return the first item; IndexError if there is none."""
        cdef uint64_t item
        cdef Place last
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t child
        if self.used == 0:
            raise IndexError("pop from an empty heap")
        item = self.places[0].item
        self.used -= 1
        last = self.places[self.used]
        while True:
            child = 2 * at + 1
            if child >= self.used:
                break
            if child + 1 < self.used and _before(&self.places[child + 1], &self.places[child]):
                child += 1
            if not _before(&self.places[child], &last):
                break
            self.places[at] = self.places[child]
            at = child
        self.places[at] = last
        return item
