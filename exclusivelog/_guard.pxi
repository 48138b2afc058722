# Stores that cannot reach the disk must not kill the process (rule H2).
#
# A store into a shared mapping is a SIGBUS where the file has a hole on a full disk, was cut
# off, or is on a file system that was shut down. The handler here puts a private copy of the
# page in its place, so that the store goes on, and sets the region's `lost` word: from then on
# every call on that ledger fails. What is not in one of our regions goes to the handler that
# was there before.

cdef extern from *:
    """
    #include <fcntl.h>
    #include <sys/mman.h>

    #define XG_REGIONS 256
    #define XG_LINE 4400        /* of /proc/self/maps: a path of 4096 bytes and what is before it */

    /* Known by its addresses, or, where another library has mapped the file, by its inode. */
    typedef struct { uintptr_t start, end; uint64_t inode; uint32_t lost; } xg_region;

    static xg_region xg_regions[XG_REGIONS];
    static struct sigaction xg_before;
    static uintptr_t xg_page;

    /* Async-signal-safe: system calls only. 0 if the page could be replaced. */
    static int xg_replace(uintptr_t page) {
        int copy = (int)syscall(SYS_memfd_create, "exclusivelog-lost", 1u /* MFD_CLOEXEC */);
        void *made = MAP_FAILED;
        if (copy >= 0) {
            if (ftruncate(copy, (off_t)xg_page) == 0) {
                /* Where the page can still be read, its words go on: mutexes that are held,
                   the kernel's lists. Where it cannot, this fails, and they are zeros. */
                ssize_t n = write(copy, (void *)page, xg_page);
                (void)n;
                made = mmap((void *)page, xg_page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_FIXED, copy, 0);
            }
            close(copy);
        }
        return made == MAP_FAILED;
    }

    static const char *xg_number(const char *at, int base, uint64_t *number) {
        for (*number = 0;; at++) {
            int digit = *at >= '0' && *at <= '9' ? *at - '0'
                : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : 99;
            if (digit >= base) return at;
            *number = *number * base + digit;
        }
    }

    /* The inode behind an address, by a line "start-end rights offset device inode path". */
    static int xg_inode_of(const char *line, uintptr_t at, uint64_t *inode) {
        uint64_t start, end;
        line = xg_number(line, 16, &start);
        line = xg_number(line + (*line == '-'), 16, &end);
        if (at < start || at >= end) return 0;
        for (int spaces = 0; *line && spaces < 4; line++) spaces += *line == ' ';
        xg_number(line, 10, inode);
        return 1;
    }

    /* 0 where it cannot be told. System calls only. */
    static uint64_t xg_inode_at(uintptr_t at) {
        char line[XG_LINE], read_ahead[512];
        size_t used = 0;
        uint64_t inode = 0;
        ssize_t n;
        int found = 0, maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
        if (maps < 0) return 0;
        while (!found && (n = read(maps, read_ahead, sizeof read_ahead)) > 0) {
            for (ssize_t i = 0; i < n && !found; i++) {
                if (read_ahead[i] == 10) {     /* the end of a line */
                    line[used] = 0;
                    found = xg_inode_of(line, at, &inode);
                    used = 0;
                } else if (used < XG_LINE - 1) {
                    line[used++] = read_ahead[i];
                }
            }
        }
        close(maps);
        return inode;
    }

    static int xg_is_in(const xg_region *r, uintptr_t at, uint64_t *inode) {
        uintptr_t start = __atomic_load_n(&r->start, __ATOMIC_ACQUIRE);
        if (start <= 1) return 0;
        if (!r->inode) return at >= start && at < r->end;
        if (!*inode) *inode = xg_inode_at(at);
        return *inode == r->inode;
    }

    static void xg_on_fault(int number, siginfo_t *info, void *context) {
        uintptr_t at = (uintptr_t)info->si_addr;
        uint64_t inode = 0;
        int kept = errno;
        if (info->si_code > 0) {
            for (int i = 0; i < XG_REGIONS; i++) {
                if (xg_is_in(&xg_regions[i], at, &inode)) {
                    xl_store(&xg_regions[i].lost, 1);
                    if (xg_replace(at & ~(xg_page - 1)) == 0) { errno = kept; return; }
                }
            }
        }
        errno = kept;
        if (info->si_code <= 0) {       /* sent; by a handler that we have called, say */
            signal(number, SIG_DFL);
            raise(number);
        } else if (xg_before.sa_flags & SA_SIGINFO) {
            xg_before.sa_sigaction(number, info, context);
        } else if (xg_before.sa_handler != SIG_DFL && xg_before.sa_handler != SIG_IGN) {
            xg_before.sa_handler(number);
        } else {
            signal(number, SIG_DFL);    /* the store faults once more, and kills */
        }
    }

    static void xg_install(void) {
        struct sigaction action, now;
        /* A program may have put another handler in our place since (faulthandler, say). */
        if (sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO)
            && now.sa_sigaction == xg_on_fault) return;
        xg_page = (uintptr_t)sysconf(_SC_PAGESIZE);
        memset(&action, 0, sizeof action);
        action.sa_sigaction = xg_on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, &xg_before);
    }

    /* The region's index, or -1 where all places are taken: then it is not guarded. */
    static int xg_guard(void *start, size_t size, uint64_t inode) {
        xg_install();
        for (int i = 0; i < XG_REGIONS; i++) {
            xg_region *r = &xg_regions[i];
            uintptr_t free = 0;
            /* 1: taken, and no address yet */
            if (__atomic_compare_exchange_n(&r->start, &free, 1, 0, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST)) {
                xl_store(&r->lost, 0);
                r->end = (uintptr_t)start + size;
                r->inode = inode;
                __atomic_store_n(&r->start, (uintptr_t)start, __ATOMIC_RELEASE);
                return i;
            }
        }
        return -1;
    }

    static void xg_let_go(int index) {
        if (index < 0) return;
        xg_regions[index].end = 0;
        __atomic_store_n(&xg_regions[index].start, 0, __ATOMIC_RELEASE);
    }

    static uint32_t xg_lost(int index) {
        return index < 0 ? 0 : xl_load(&xg_regions[index].lost);
    }
    """
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
