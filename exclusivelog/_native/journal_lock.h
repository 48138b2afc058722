/* The journal's shared header, and its mutexes. They are robust: if a process dies while it holds
   one, the next process that takes it is told so. */
#ifndef EXCLUSIVELOG_JOURNAL_LOCK_H
#define EXCLUSIVELOG_JOURNAL_LOCK_H

#include "futex.h"

#include <pthread.h>
#include <string.h>

typedef struct {
    union { pthread_mutex_t mutex; char room[64]; } write, flush, writer;
    uint64_t tail;          /* position of the next frame */
    uint64_t synced;        /* position up to which the journal is durable */
    uint64_t applied;       /* position up to which the tables have the frames: free space before it */
    uint64_t generation;    /* changes when a new sequence of frames begins */
    uint64_t version;       /* grows with each event that may change who may write, on any topic */
    uint64_t messages;      /* appended since this header was initialised; under the append mutex */
    uint32_t ready;         /* 0: must be recovered before use, for example after a boot */
    uint32_t failed;        /* errno of a flush or write that failed */
    uint32_t flushes;       /* a futex that changes with each flush */
    uint32_t sleepers;      /* threads that sleep on `flushes` */
    uint32_t arrivals;      /* counts the threads that began to wait for a flush */
    uint32_t batch_start;   /* `arrivals` when the last flush began */
    uint32_t batch_size;    /* threads that the last flush served, or that arrived during it */
    uint32_t unsettled;     /* LMDB may not show the last transaction of a process that died */
    uint64_t inode;         /* of the journal's file */
    uint64_t begun;         /* `tail` when this generation began */
    uint64_t bytes;         /* of frames in earlier generations, since this header was initialised */
    uint64_t everything;    /* `version` of the last event that may concern all topics and claims */
    uint32_t fencing;       /* words may be fenced: by the holder of the writer lock, or by a dead one */
    uint32_t changing;      /* the holder of the append mutex is inside a transaction of LMDB */
} xj_header;

/* In a version: nobody may append to these topics, or rely on these claims, until the transaction of
   the process that has set it has ended. No session and no requirement has such a version. */
#define XJ_FENCED ((uint64_t)1 << 62)  /* callers keep versions as int64_t */

#define XJ_READY offsetof(xj_header, ready)

static inline int xj_start_mutex(pthread_mutex_t *m) {
    pthread_mutexattr_t attr;
    int failed;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK);
    failed = pthread_mutex_init(m, &attr);
    pthread_mutexattr_destroy(&attr);
    return failed;
}

/* Another life of the header gets other versions: what a reader has compared with one must not seem
   current. Not too large a version, as the file may hold anything after a power cut. */
static inline int xj_start(xj_header *w) {
    const uint64_t version = w->version & (UINT64_MAX >> 2);
    memset(w, 0, sizeof *w);
    w->version = w->everything = version;
    return xj_start_mutex(&w->write.mutex) || xj_start_mutex(&w->flush.mutex)
        || xj_start_mutex(&w->writer.mutex);
}

/* A new version. Before it is stored anywhere: a repair after a death in between gives another one. */
static inline uint64_t xj_next_version(xj_header *w) {
    return __atomic_add_fetch(&w->version, 1, __ATOMIC_ACQ_REL);
}

/* What anybody remembers is out of date from now on: of every topic and every claim. Under the append
   mutex. */
static inline void xj_change_everything(xj_header *w) {
    xl_store64(&w->everything, xj_next_version(w));
}

static inline uint32_t *xj_word(pthread_mutex_t *m) { return (uint32_t *)((char *)m + XL_WORD); }

/* The words of its mutexes: of appends, flushes and writers. */
#define XJ_LOCKS 3
static inline void xj_words(xj_header *w, uint32_t **words) {
    words[0] = xj_word(&w->write.mutex);
    words[1] = xj_word(&w->flush.mutex);
    words[2] = xj_word(&w->writer.mutex);
}

/* The holder of the append mutex has died. Its append is complete (`tail` has moved) or will be
   overwritten. A change of everything handles two other cases: the holder committed a change of
   ownership, but died before it stored the versions of the topics; or remains of its frames lie behind
   a shorter frame that overwrote them (these have a lower version).

   If the holder died inside an LMDB transaction, LMDB's readers may not see its commit before the next
   write transaction, so `unsettled` tells all processes not to trust the tables until then. */
static inline int xj_repair(xj_header *w) {
    if (xl_load(&w->changing)) {
        xl_store(&w->unsettled, 1);
        xl_store(&w->changing, 0);
    }
    xj_change_everything(w);
    return pthread_mutex_consistent(&w->write.mutex);
}

/* ETIMEDOUT after half a second, so that the caller can handle signals and report what it waits
   for. It uses the monotonic clock if possible, so that a jump of the wall clock does not prolong it.
   (ThreadSanitizer does not know pthread_mutex_clocklock.) */
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 30)
#define XJ_CLOCK CLOCK_MONOTONIC
#define xj_lock_until(m, t) pthread_mutex_clocklock(m, XJ_CLOCK, t)
#endif
#endif
#ifndef XJ_CLOCK
#define XJ_CLOCK CLOCK_REALTIME
#define xj_lock_until(m, t) pthread_mutex_timedlock(m, t)
#endif

static inline int xj_wait_for(pthread_mutex_t *m) {
    struct timespec t;
    xl_read_clock(XJ_CLOCK, &t);
    t.tv_nsec += 500000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return xj_lock_until(m, &t);
}

static inline int xj_lock(xj_header *w) {
    int r = xj_wait_for(&w->write.mutex);
    return r == EOWNERDEAD ? xj_repair(w) : r;
}

/* The writer lock. LMDB itself repairs the tables after the death of a writer. */
static inline int xj_take_writer_lock(xj_header *w, int wait) {
    int r = wait ? xj_wait_for(&w->writer.mutex) : pthread_mutex_trylock(&w->writer.mutex);
    return r == EOWNERDEAD ? pthread_mutex_consistent(&w->writer.mutex) : r;
}

static inline void xj_leave_writer_lock(xj_header *w) { pthread_mutex_unlock(&w->writer.mutex); }

/* The id of the thread that holds a robust mutex, from the word that the kernel reads. */
static inline uint32_t xj_holder(pthread_mutex_t *m) {
    return xl_load(xj_word(m)) & FUTEX_TID_MASK;
}
static inline uint32_t xj_appending(xj_header *w) { return xj_holder(&w->write.mutex); }
static inline uint32_t xj_writing(xj_header *w) { return xj_holder(&w->writer.mutex); }

static inline int xj_try_lock(xj_header *w) {
    int r = pthread_mutex_trylock(&w->write.mutex);
    return r == EOWNERDEAD ? xj_repair(w) : r;
}

static inline void xj_unlock(xj_header *w) { pthread_mutex_unlock(&w->write.mutex); }

static inline int xj_try_flush_lock(xj_header *w) {
    int r = pthread_mutex_trylock(&w->flush.mutex);
    return r == EOWNERDEAD ? pthread_mutex_consistent(&w->flush.mutex) : r;
}

static inline void xj_flush_unlock(xj_header *w) { pthread_mutex_unlock(&w->flush.mutex); }

static inline void xj_raise(uint64_t *w, uint64_t v) {     /* *w = max(*w, v) */
    uint64_t now = __atomic_load_n(w, __ATOMIC_ACQUIRE);
    while (now < v && !__atomic_compare_exchange_n(
        w, &now, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) {}
}

#endif
