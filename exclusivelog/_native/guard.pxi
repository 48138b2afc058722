# Stores that cannot reach the disk must not kill the process (rule H2).
#
# A store into a shared mapping raises SIGBUS if the file has a hole on a full disk, was cut off, or
# is on a file system that was shut down. The handler here replaces the page by a private copy, so
# that the store succeeds, and sets the region's `lost` word: from then on every call on that ledger
# fails. Faults in other regions go to the previous handler.
#
# Where SIGBUS is blocked, the kernel ends the process instead. So each thread that uses a mapping unblocks
# it first (`xg_ready`), and every thread of the core has it unblocked.

cdef extern from "_native/fault_guard.h":
    int xg_guard(void*, size_t, uint64_t) noexcept nogil
    void xg_let_go(int) noexcept nogil
    uint32_t xg_lost(int) noexcept nogil
    void xg_ready() noexcept nogil


cdef class FileGuard:
    """Protects mappings of the file with this inode number, which other libraries made: while this
    object exists, a store that cannot reach the file sets `lost` instead of killing the process."""

    cdef int index

    def __cinit__(self, uint64_t inode):
        self.index = xg_guard(<void*>2, 0, inode)

    def __dealloc__(self):
        xg_let_go(self.index)

    @property
    def lost(self):
        """Has a store failed to reach the file?"""
        return xg_lost(self.index) != 0
