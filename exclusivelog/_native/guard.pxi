# Stores that cannot reach the disk must not kill the process (rule H2).
#
# A store into a shared mapping raises SIGBUS if the file has a hole on a full disk, was cut off, or
# is on a file system that was shut down. The handler here replaces the page by a private copy, so
# that the store succeeds, and sets the region's `lost` word: from then on every call on that ledger
# fails. Faults in other regions go to the previous handler.
#
# A store also raises it if a copy or a snapshot shares the page's blocks, and the disk is full. Where that
# can happen, a ledger keeps some room for such stores (`SpareRoom`): they succeed then, and nothing is lost.
#
# Where SIGBUS is blocked, the kernel ends the process instead. So each thread that uses a mapping unblocks
# it first (`xg_ready`), and every thread of the core has it unblocked.

cdef extern from "_native/fault_guard.h":
    int xg_guard(void*, size_t, uint64_t) noexcept nogil
    void xg_let_go(int) noexcept nogil
    uint32_t xg_lost(int) noexcept nogil
    void xg_ready() noexcept nogil
    void xg_set_spare(int, int) noexcept nogil

cdef extern from "_native/spare_room.h":
    int xr_keep(int) noexcept nogil
    void xr_add_file(int, int) noexcept nogil
    void xr_forget(int) noexcept nogil
    uint32_t xr_is_spent(int) noexcept nogil
    int xr_fill(int, int64_t) noexcept nogil


cdef class SpareRoom:
    """`size` bytes of the disk, in the file `fd`, which has no name, for stores into mapped files on
    a full disk: those through `journal`'s mappings and those that `guards` protect. The first that needs
    them frees them for all pages of `files` (descriptors), and for the journal's next frame.

    OSError (ENOSPC) if there is no room. Close it before the files.
    """

    cdef int index
    cdef int64_t size
    cdef Journal journal
    cdef tuple guards

    def __cinit__(self, int fd, int64_t size, files, Journal journal not None, guards):
        self.index = xr_keep(fd)
        self.size, self.journal, self.guards = size, journal, tuple(guards)
        if self.index < 0:
            raise OSError(ENOSPC, "too many open ledgers")
        for each in files:
            xr_add_file(self.index, each)
        try:
            self.fill()
        except BaseException:
            xr_forget(self.index)
            self.index = -1
            raise
        self._protect(self.index)

    cdef _protect(self, int index):
        cdef FileGuard guard
        xg_set_spare(self.journal.guard, index)
        xg_set_spare(self.journal.words.guard, index)
        for guard in self.guards:
            xg_set_spare(guard.index, index)
        self.journal.spare = index

    def close(self):
        """Protect nothing any more."""
        self._protect(-1)
        xr_forget(self.index)
        self.index = -1

    @property
    def spent(self):
        """Has a store needed it? Then appends write to the journal, which may fail, until it is
        filled again."""
        return xr_is_spent(self.index) != 0

    def fill(self):
        """Allocate the bytes, again if they were needed. OSError if there is no room."""
        cdef int failed
        with nogil:
            failed = xr_fill(self.index, self.size)
        if failed:
            raise OSError(failed, _os.strerror(failed))



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
