/* Decompresses LZ4 chunks of an entry without a copy: in the reader's thread and, ahead of it, in one
   thread of this process.

   It uses the system's liblz4. Each chunk is decompressed once, by the reader or by the thread. The
   thread works on one entry at a time; meanwhile other readers decompress by themselves. */
#ifndef EXCLUSIVELOG_AHEAD_H
#define EXCLUSIVELOG_AHEAD_H

#include "futex.h"
#include "blocks.h"
#include "identity.h"
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#define XA_LIBRARY "liblz4.so.1"
#define XA_MOST ((size_t)16)    /* chunks that are decompressed ahead of the reader */

enum { XA_FREE, XA_TAKEN, XA_MADE, XA_FAILED };

typedef int (*xa_function)(const char *from, char *to, int size, int room);

/* The chunks of one entry. */
typedef struct {
    const char *from;
    char *to;
    const xe_place_of_chunk *places;
    size_t chunk, first, end;   /* bytes of a chunk; the thread works on chunks first to end - 1 */
    uint32_t *states;
    uint32_t stop;
} xa_job;

static xa_function xa_decompress;
static uintptr_t xa_slot;       /* the job that waits for the thread; + 1: the thread works on it */
static uint32_t xa_wake_ups;        /* counts jobs: the thread sleeps on it */
static uint32_t xa_process;            /* the process that has the thread; a forked child has none */

/* Load the function; 0 if the system does not have the library. */
static inline int xa_load(void) {
    void *library = xa_decompress == NULL ? dlopen(XA_LIBRARY, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library != NULL) *(void **)&xa_decompress = dlsym(library, "LZ4_decompress_safe");
    return xa_decompress != NULL;
}

static inline int xa_make(const xa_job *job, size_t number) {
    const xe_place_of_chunk *place = &job->places[number];
    const char *from = job->from + place->at;
    char *to = job->to + number * job->chunk;
    if (xl_crc32c(from, place->size) != place->sum) return 0;
    if (place->size == place->decompressed) {
        memcpy(to, from, place->size);
        return 1;
    }
    return xa_decompress(from, to, (int)place->size, (int)place->decompressed)
        == (int)place->decompressed;
}

/* Decompress the chunk, unless another thread does or did. Returns the chunk's state. */
static inline uint32_t xa_try(xa_job *job, size_t number) {
    uint32_t *state = &job->states[number];
    if (xl_swap(state, XA_FREE, XA_TAKEN))
        xl_store(state, xa_make(job, number) ? XA_MADE : XA_FAILED);
    return xl_load(state);
}

/* Spin until the thread has made it: sleeping costs more than a chunk. */
static inline uint32_t xa_await(xa_job *job, size_t number) {
    uint32_t state;
    while ((state = xl_load(&job->states[number])) == XA_TAKEN)
        if (!xl_watch(&job->states[number], XA_TAKEN, 20000)) sched_yield();
    return state;
}

static inline void *xa_work(void *nothing) {
    for (;;) {
        const uint32_t seen = xl_load(&xa_wake_ups);
        uintptr_t slot = __atomic_load_n(&xa_slot, __ATOMIC_ACQUIRE);
        /* Only a thread at work on a job may read it, because its reader may withdraw it. */
        if (slot == 0 || !__atomic_compare_exchange_n(&xa_slot, &slot, slot + 1, 0,
                                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            xl_wait(&xa_wake_ups, seen, -1);
            continue;
        }
        xa_job *job = (xa_job *)slot;
        for (size_t number = job->first; number < job->end && !xl_load(&job->stop); number++)
            xa_try(job, number);
        __atomic_store_n(&xa_slot, (uintptr_t)0, __ATOMIC_RELEASE);
    }
    return nothing;
}

static inline int xa_start(void) {
    pthread_t thread;
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0 || CPU_COUNT(&cpus) < 2) return 0;
    return xt_start(&thread, xa_work, NULL, 1) == 0;
}

/* Let the thread decompress chunks first to end - 1. Callers hold the GIL. `job`, and all that it
   refers to, must stay valid until xa_withdraw. */
static inline void xa_request(xa_job *job, size_t first, size_t end) {
    uintptr_t none = 0;
    if (xa_process != xi_here()) {
        xa_slot = 0;        /* a forked child: the job belongs to the parent */
        if (!xa_start()) return;
        xa_process = xi_here();
    }
    if (__atomic_load_n(&xa_slot, __ATOMIC_ACQUIRE) != 0) return;
    job->first = first, job->end = end, job->stop = 0;
    if (!__atomic_compare_exchange_n(&xa_slot, &none, (uintptr_t)job, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) return;
    xl_add(&xa_wake_ups, 1);
    syscall(SYS_futex, &xa_wake_ups, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Wait until the thread no longer works on this job. */
static inline void xa_withdraw(xa_job *job) {
    uintptr_t waiting = (uintptr_t)job;
    if (xa_process != xi_here()) return;
    xl_store(&job->stop, 1);
    if (__atomic_compare_exchange_n(&xa_slot, &waiting, (uintptr_t)0, 0, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) return;
    while (__atomic_load_n(&xa_slot, __ATOMIC_ACQUIRE) == (uintptr_t)job + 1) sched_yield();
}

#endif
