# The topic row, with which appends compare their session.
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
    R_RETRY_WAITER = R_FREED + 8            # u64, the waiter that was notified when to retry,
    R_RETRY_AT = R_RETRY_WAITER + 8         # u64, and when; 0 = none was
    R_CRC = R_RETRY_AT + 8                  # u32, CRC-32C of the row with this field 0
    R_NAME = R_CRC + 4                          # the topic's name, UTF-8, to the end


TERMINATED = 1
DELETED = 2
RECREATED = 4   # created again after a deletion, and not owned since
COMPRESSED_TOPIC = 8    # a row of the table `meta` has its compression setting


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
        row.retry_waiter = (<uint64_t*>(at + R_RETRY_WAITER))[0]
        row.retry_at = (<uint64_t*>(at + R_RETRY_AT))[0]
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
        (<uint64_t*>(at + R_RETRY_WAITER))[0] = self.retry_waiter
        (<uint64_t*>(at + R_RETRY_AT))[0] = self.retry_at
        memcpy(at + R_NAME, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        (<uint32_t*>(at + R_CRC))[0] = _row_sum(at, size)
        return data

    def admits(self, uint64_t session, uint64_t epoch):
        """The fencing check of an exclusive append (rule B2)."""
        global _comparisons
        _comparisons += 1
        return self.owner == session and self.epoch == epoch


cdef uint32_t _row_sum(const char* at, Py_ssize_t size) noexcept:
    cdef uint32_t crc = xl_crc_fold(UINT32_MAX, at, R_CRC)
    cdef uint32_t blank = 0
    crc = xl_crc_fold(crc, &blank, sizeof(blank))
    return ~xl_crc_fold(crc, at + R_NAME, size - R_NAME)
