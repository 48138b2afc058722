/* A file lock that no forked child inherits.

   A lock of an open file lives until the last process has closed that file. A child that C code forks
   keeps it open for as long as it lives. A POSIX lock is not inherited, but is lost when the process
   closes any descriptor of the file. So a thread with a table of descriptors of its own opens the file
   and locks it: a fork copies the table of the thread that forks, and no close in another thread has
   an effect on this one. The kernel drops the lock when the process ends. */
#ifndef EXCLUSIVELOG_PRIVATE_LOCK_H
#define EXCLUSIVELOG_PRIVATE_LOCK_H

#include "futex.h"
#include "identity.h"
#include "threads.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2
#endif
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

typedef struct {
    char path[64];          /* of the file, through the descriptors of the thread that asks */
    int64_t at;             /* the byte that is locked */
    uint32_t phase;         /* 0 starting, 1 locked, 2 failed, 3 to be released */
    int failed;             /* an errno */
    uint32_t process;       /* the one that has the thread */
    pthread_t thread;
} xp_lock;

static inline void xp_phase(xp_lock *lock, uint32_t phase) {
    xl_store(&lock->phase, phase);
    syscall(SYS_futex, &lock->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Wait for the end of this phase. */
static inline void xp_await(xp_lock *lock, uint32_t phase) {
    while (xl_load(&lock->phase) == phase)
        syscall(SYS_futex, &lock->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
}

static inline void *xp_hold(void *arg) {
    xp_lock *lock = arg;
    struct flock shared = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 1};
    int fd = -1;
    shared.l_start = lock->at;
    /* A table of its own, without the descriptors of the others: it would keep pipes open. */
    if (syscall(SYS_close_range, 0u, ~0u, CLOSE_RANGE_UNSHARE) == 0)
        fd = open(lock->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fcntl(fd, F_OFD_SETLK, &shared) != 0) {
        lock->failed = errno;
        xp_phase(lock, 2);
    } else {
        xp_phase(lock, 1);
        xp_await(lock, 1);
    }
    if (fd >= 0) close(fd);     /* the thread may end later than it is joined */
    return NULL;
}

/* Lock the byte at `at` of this open file, shared. NULL, and an errno, if that is impossible. */
static inline xp_lock *xp_take(int fd, int64_t at) {
    xp_lock *lock = calloc(1, sizeof *lock);
    int failed;
    if (lock == NULL) return NULL;
    snprintf(lock->path, sizeof lock->path, "/proc/self/task/%d/fd/%d", (int)syscall(SYS_gettid), fd);
    lock->at = at;
    lock->process = xi_here();
    failed = xt_start(&lock->thread, xp_hold, lock, 0);
    if (!failed) {
        xp_await(lock, 0);
        if (xl_load(&lock->phase) == 1) return lock;
        pthread_join(lock->thread, NULL);
        failed = lock->failed;
    }
    free(lock);
    errno = failed;
    return NULL;
}

/* A forked child has neither the thread nor the lock. */
static inline void xp_release(xp_lock *lock) {
    if (lock->process != xi_here()) return;
    xp_phase(lock, 3);
    pthread_join(lock->thread, NULL);
    free(lock);
}

#endif
