/* A SIGBUS handler for stores into mapped files that the kernel cannot write to the file. If the region
   has spare room, it frees that, and the store succeeds (spare_room.h). Otherwise it replaces the page by
   a private copy, so that the store succeeds, and sets the region's `lost`; guard.pxi describes when this
   happens and what follows. Other faults go to the handler that was installed before. */
#ifndef EXCLUSIVELOG_FAULT_GUARD_H
#define EXCLUSIVELOG_FAULT_GUARD_H

#include "futex.h"
#include "identity.h"
#include "spare_room.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#define XG_REGIONS 4096    /* several for each open ledger */
#define XG_READINGS 50      /* of /proc/self/maps */
#define XG_LINE 4400        /* a line of /proc/self/maps: a path of 4096 bytes, and other fields */
#define XG_AHEAD (192 << 10)   /* bytes behind a fault that are stored at once: more than a frame */

/* A guarded mapping, identified by its addresses, or by the file's inode if another library has
   mapped it. `spare`: the index of its spare room, and 1; 0 if it has none. */
typedef struct { uintptr_t start, end; uint64_t inode; uint32_t lost, spare; } xg_region;

static xg_region xg_regions[XG_REGIONS];
static struct sigaction xg_before;
static uintptr_t xg_page;
static uint32_t xg_handling;    /* a lock: the stamp of the process whose handler deals with a page */

/* Async-signal-safe: only system calls. 0 if the page was replaced. */
static inline int xg_replace(uintptr_t page) {
    int copy = (int)syscall(SYS_memfd_create, "exclusivelog-lost", 1u /* MFD_CLOEXEC */);
    void *made = MAP_FAILED;
    if (copy >= 0) {
        if (ftruncate(copy, (off_t)xg_page) == 0) {
            /* If the page can still be read, the copy has its content, including held mutexes and
               robust lists. Otherwise the write fails, and the copy has zeros. */
            ssize_t n = write(copy, (void *)page, xg_page);
            (void)n;
            made = mmap((void *)page, xg_page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED, copy, 0);
        }
        close(copy);
    }
    return made == MAP_FAILED;
}

/* A forked child may inherit the lock from a thread that it does not have, so the lock names its
   process. */
static inline void xg_lock(void) {
    uint32_t me = xi_here(), by = 0;
    while (!xl_swap(&xg_handling, by, me)) {
        by = xl_load(&xg_handling);
        if (by == me) by = 0;
    }
}

/* Replace the page unless another thread has done so: a second copy would lose what was stored in
   the first one. */
static inline int xg_replace_once(uintptr_t page) {
    xg_lock();
    int failed = !xr_can_store(page) && xg_replace(page);
    xl_store(&xg_handling, 0);
    return failed;
}

/* Make room for stores to this page of the region; is there some now? */
static inline int xg_make_room(const xg_region *r, uintptr_t page) {
    uint32_t spare = xl_load((uint32_t *)&r->spare);
    uintptr_t end = page + (r->inode ? xg_page : XG_AHEAD);
    if (spare == 0) return 0;
    if (!r->inode && end > r->end) end = r->end;
    xg_lock();
    int made = xr_can_store(page) || xr_use(&xr_spares[spare - 1], page, end, xg_page);
    xl_store(&xg_handling, 0);
    return made;
}

static inline const char *xg_number(const char *at, int base, uint64_t *number) {
    for (*number = 0;; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0'
            : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : 99;
        if (digit >= base) return at;
        *number = *number * base + digit;
    }
}

/* The inode mapped at an address, from a line "start-end rights offset device inode path". */
static inline int xg_inode_of(const char *line, uintptr_t at, uint64_t *inode) {
    uint64_t start, end;
    line = xg_number(line, 16, &start);
    line = xg_number(line + (*line == '-'), 16, &end);
    if (at < start || at >= end) return 0;
    for (int spaces = 0; *line && spaces < 4; line++) spaces += *line == ' ';
    xg_number(line, 10, inode);
    return 1;
}

/* Reads the list once; 0 if the address was not in it. */
static inline int xg_find_inode(int maps, uintptr_t at, uint64_t *inode) {
    char line[XG_LINE], read_ahead[512];
    size_t used = 0;
    ssize_t n;
    while ((n = read(maps, read_ahead, sizeof read_ahead)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            if (read_ahead[i] == 10) {     /* the end of a line */
                line[used] = 0;
                if (xg_inode_of(line, at, inode)) return 1;
                used = 0;
            } else if (used < XG_LINE - 1) {
                line[used++] = read_ahead[i];
            }
        }
    }
    return 0;
}

/* 0 if it is unknown. System calls only. The address is mapped, but the list may lack it: it is read
   in pieces, while other threads map and unmap. So it is read again. */
static inline uint64_t xg_inode_at(uintptr_t at) {
    uint64_t inode = 0;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return 0;
    for (int tries = 0; tries < XG_READINGS && !xg_find_inode(maps, at, &inode); tries++)
        lseek(maps, 0, SEEK_SET);
    close(maps);
    return inode;
}

static inline int xg_is_in(const xg_region *r, uintptr_t at, uint64_t *inode) {
    uintptr_t start = __atomic_load_n(&r->start, __ATOMIC_ACQUIRE);
    if (start <= 1) return 0;
    if (!r->inode) return at >= start && at < r->end;
    if (!*inode) *inode = xg_inode_at(at);
    return *inode == r->inode;
}

static inline void xg_on_fault(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    uint64_t inode = 0;
    int kept = errno;
    if (info->si_code > 0) {
        uintptr_t page = at & ~(xg_page - 1);
        int ours = 0, saved = 0;
        for (int i = 0; i < XG_REGIONS && !saved; i++)
            saved = xg_is_in(&xg_regions[i], at, &inode) && xg_make_room(&xg_regions[i], page);
        /* Files of two file systems may have the same inode number. The devices in /proc and of stat
           may differ, so they cannot be told apart: fail all of them. */
        for (int i = 0; i < XG_REGIONS && !saved; i++) {
            if (xg_is_in(&xg_regions[i], at, &inode)) {
                xl_store(&xg_regions[i].lost, 1);
                ours = 1;
            }
        }
        if (saved || (ours && xg_replace_once(page) == 0)) { errno = kept; return; }
    }
    errno = kept;
    if (info->si_code <= 0) {       /* sent by kill() or raise(), for example by another handler */
        signal(number, SIG_DFL);
        raise(number);
    } else if (xg_before.sa_flags & SA_SIGINFO) {
        xg_before.sa_sigaction(number, info, context);
    } else if (xg_before.sa_handler != SIG_DFL && xg_before.sa_handler != SIG_IGN) {
        xg_before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);    /* the store faults again, which ends the process */
    }
}

static inline void xg_install(void) {
    struct sigaction action, now;
    /* A program may have installed another handler after ours, such as faulthandler. */
    if (sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO)
        && now.sa_sigaction == xg_on_fault) return;
    xg_page = (uintptr_t)sysconf(_SC_PAGESIZE);
    memset(&action, 0, sizeof action);
    action.sa_sigaction = xg_on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &xg_before);
}

/* The kernel runs no handler in a thread that has blocked SIGBUS: a fault ends the process there. Programs
   that take their signals by sigwait() block all of them, so threads unblock this one before they use a
   mapping. A program may block it again: they do so at every XG_CALLS-th use. */
#define XG_CALLS 64
static __thread uint32_t xg_calls_left;

static __attribute__((noinline, unused)) void xg_unblock(void) {
    sigset_t bus;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus, NULL);
    xg_calls_left = XG_CALLS;
}

/* Call it before a use of mapped files. */
static inline void xg_ready(void) {
    if (__builtin_expect(xg_calls_left == 0, 0)) xg_unblock();
    xg_calls_left--;
}

/* The region's index, or -1 if all entries are in use: then it is not guarded. */
static inline int xg_guard(void *start, size_t size, uint64_t inode) {
    xg_install();
    for (int i = 0; i < XG_REGIONS; i++) {
        xg_region *r = &xg_regions[i];
        uintptr_t free = 0;
        /* 1: in use, without an address yet */
        if (__atomic_compare_exchange_n(&r->start, &free, 1, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
            xl_store(&r->lost, 0);
            xl_store(&r->spare, 0);
            r->end = (uintptr_t)start + size;
            r->inode = inode;
            __atomic_store_n(&r->start, (uintptr_t)start, __ATOMIC_RELEASE);
            return i;
        }
    }
    return -1;
}

static inline void xg_let_go(int index) {
    if (index < 0) return;
    xg_regions[index].end = 0;
    __atomic_store_n(&xg_regions[index].start, 0, __ATOMIC_RELEASE);
}

/* Stores to this region may use the spare room of that index; -1: none, from now on. */
static inline void xg_set_spare(int index, int spare) {
    if (index >= 0) xl_store(&xg_regions[index].spare, (uint32_t)(spare + 1));
}

static inline uint32_t xg_lost(int index) {
    return index < 0 ? 0 : xl_load(&xg_regions[index].lost);
}

#endif
