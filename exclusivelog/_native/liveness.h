/* A word that the kernel marks when the process that holds it dies.

   This uses the kernel's robust list (set_robust_list(2)): when a thread dies, before the memory of
   its process is released, the kernel walks the list, sets FUTEX_OWNER_DIED in each word that is still
   held, and wakes one sleeper. A dedicated thread, with its own list, holds the word, because in all
   other threads glibc uses the list for its robust mutexes (LMDB has one). A forked child has neither
   the thread nor the list. */
#ifndef EXCLUSIVELOG_LIVENESS_H
#define EXCLUSIVELOG_LIVENESS_H

#include "futex.h"
#include "identity.h"
#include "threads.h"

#include <stdlib.h>

typedef struct {
    struct robust_list_head head;
    uint32_t *word;
    uint32_t *presence;         /* the thread sleeps on it; being woken proves that memory is shared */
    struct robust_list *node;
    uint32_t phase;             /* 0 starting, 1 holding, 2 refused, 3 released */
    pid_t tid;
    uint32_t process;           /* the one that has the thread */
    pthread_t thread;
} xl_holder;

static inline void xl_phase(xl_holder *h, uint32_t phase) {
    xl_store(&h->phase, phase);
    syscall(SYS_futex, &h->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static inline void *xl_hold(void *arg) {
    xl_holder *h = arg;
    h->tid = (pid_t)syscall(SYS_gettid);
    h->head.list.next = &h->head.list;
    h->head.futex_offset = (char *)h->word - (char *)h->node;
    h->head.list_op_pending = NULL;
    /* Where it is refused, deaths.h finds out that the thread has ended. */
    syscall(SYS_set_robust_list, &h->head, sizeof h->head);
    /* Between taking the word and adding it to the list, list_op_pending refers to it. */
    h->head.list_op_pending = h->node;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (!xl_swap(h->word, 0, (uint32_t)h->tid)) {
        h->head.list_op_pending = NULL;
        xl_phase(h, 2);
        return NULL;
    }
    h->node->next = &h->head.list;
    h->head.list.next = h->node;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    h->head.list_op_pending = NULL;
    xl_phase(h, 1);
    for (uint32_t seen = xl_load(h->presence); xl_load(&h->phase) == 1;
         seen = xl_load(h->presence))
        xl_wait(h->presence, seen, 5000000000);
    h->head.list_op_pending = h->node;
    h->head.list.next = &h->head.list;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_exchange_n(h->word, 0, __ATOMIC_SEQ_CST);
    xl_wake(h->word, INT_MAX);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    h->head.list_op_pending = NULL;
    return NULL;
}

static inline xl_holder *xl_take_hold(uint32_t *word, void *node, uint32_t *presence) {
    xl_holder *h = calloc(1, sizeof *h);
    int failed;
    if (h == NULL) return NULL;
    h->word = word;
    h->node = node;
    h->presence = presence;
    h->process = xi_here();
    failed = xt_start(&h->thread, xl_hold, h, 0);
    if (failed) { free(h); errno = failed; return NULL; }
    while (xl_load(&h->phase) == 0)
        syscall(SYS_futex, &h->phase, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    if (xl_load(&h->phase) == 2) {
        pthread_join(h->thread, NULL);
        free(h);
        errno = EBUSY;
        return NULL;
    }
    return h;
}

static inline void xl_let_go(xl_holder *h) {
    if (h->process != xi_here()) return;     /* a forked child does not have the thread */
    xl_phase(h, 3);
    xl_add(h->presence, 1);
    xl_wake(h->presence, INT_MAX);
    pthread_join(h->thread, NULL);
    free(h);
}

#endif
