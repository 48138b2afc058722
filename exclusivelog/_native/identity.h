/* Which process is this? A stamp that no forked child shares with its parent (rule C8).

   The kernel fills a page with zeros in each forked child (MADV_WIPEONFORK, Linux 4.14), also in one
   that neither Python nor the C library knows of. A zero is replaced by a stamp above those of all
   ancestors. Where the kernel refuses that, each question costs a getpid(). A child that shares the
   memory of its parent (vfork, posix_spawn) is the parent until it executes another program. */
#ifndef EXCLUSIVELOG_IDENTITY_H
#define EXCLUSIVELOG_IDENTITY_H

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static uint64_t xi_unwiped;             /* used if the kernel does not wipe a page */
static const uint64_t xi_nothing = 0;
static uint64_t *xi_word = &xi_unwiped; /* the process id, then the stamp in the low half */
static const uint64_t *xi_read = &xi_nothing;   /* `xi_word`, or 0 if the process id must be compared */
static uint32_t xi_last;                /* the newest stamp of this process and its ancestors */

/* The stamp, where the page does not have one. Two threads may ask at the same time. */
static inline uint32_t xi_renew(void) {
    uint64_t seen = __atomic_load_n(xi_word, __ATOMIC_ACQUIRE), fresh;
    const uint32_t pid = (uint32_t)syscall(SYS_getpid);
    if ((uint32_t)seen != 0 && seen >> 32 == pid) return (uint32_t)seen;
    fresh = (uint64_t)pid << 32 | __atomic_add_fetch(&xi_last, 1, __ATOMIC_SEQ_CST);
    return (uint32_t)(__atomic_compare_exchange_n(xi_word, &seen, fresh, 0, __ATOMIC_SEQ_CST,
                                                  __ATOMIC_ACQUIRE) ? fresh : seen);
}

/* This process's stamp; never 0. */
static inline uint32_t xi_here(void) {
    const uint32_t stamp = (uint32_t)__atomic_load_n(xi_read, __ATOMIC_RELAXED);
    return __builtin_expect(stamp != 0, 1) ? stamp : xi_renew();
}

/* Emulators may ignore the advice: forget the stamp after a fork of the C library, too. */
static void xi_forked(void) { __atomic_store_n(xi_word, (uint64_t)0, __ATOMIC_SEQ_CST); }

/* Call it once, at the import. `wipe`: ask the kernel (a test does not). */
static inline void xi_start(int wipe) {
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = MAP_FAILED;
    if (wipe) page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, size, MADV_WIPEONFORK) == 0) {
        xi_word = page;
        xi_read = page;
    } else if (page != MAP_FAILED) {
        munmap(page, size);
    }
    pthread_atfork(NULL, NULL, xi_forked);
    xi_renew();
}

/* Does the C library know the id of this thread? Not in a child of a bare system call (fork, clone):
   there it takes mutexes in the name of the parent's thread. */
static inline int xi_thread_is_known(void) {
#ifdef __GLIBC__
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int owner;
    pthread_mutex_lock(&mutex);
    owner = mutex.__data.__owner;
    pthread_mutex_unlock(&mutex);
    return owner == (int)syscall(SYS_gettid);
#else
    return 1;
#endif
}

#endif
