# Stores that cannot reach the disk must not kill the process (rule H2).
#
# A store into a shared mapping is a SIGBUS where the file has a hole on a full disk, was cut
# off, or is on a file system that was shut down. The handler here puts a private copy of the
# page in its place, so that the store goes on, and sets the region's `lost` word: from then on
# every call on that ledger fails. What is not in one of our regions goes to the handler that
# was there before.

cdef extern from "_native/fault_guard.h":
    int xg_guard(void*, size_t, uint64_t) noexcept nogil
    void xg_let_go(int) noexcept nogil
    uint32_t xg_lost(int) noexcept nogil


cdef class FileGuard:
    """While it lives, a store into any mapping of the file with this inode number that cannot
    reach the file does not kill the process, but sets `lost`. For files that others map."""

    cdef int index

    def __cinit__(self, uint64_t inode):
        self.index = xg_guard(<void*>2, 0, inode)

    def __dealloc__(self):
        xg_let_go(self.index)

    @property
    def lost(self):
        """Has a store failed to reach the file?"""
        return xg_lost(self.index) != 0
