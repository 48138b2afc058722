/* Figures of a ledger in shared memory: counters, and histograms whose buckets are powers of two. Any
   process adds to them at any time, without a lock; a concurrent reader may see an event in a count
   and not yet in a sum. If a process is killed, at most the event that it was about to count is
   missing, so nothing has to be repaired. */
#ifndef EXCLUSIVELOG_FIGURES_H
#define EXCLUSIVELOG_FIGURES_H

#include <stdint.h>

#define XF_BUCKETS 32
#define XF_TIME 8               /* the first bucket of a time is below 2**8 ns */
#define XF_SAMPLE 256           /* one in so many appends of a process is timed */

typedef struct {
    uint64_t sum;
    uint64_t counts[XF_BUCKETS];    /* [0]: below 1 unit; [i]: from 2**(i-1) to below 2**i units */
} xf_histogram;

typedef struct {
    xf_histogram append;        /* ns until the frame is in the journal; one append in XF_SAMPLE */
    xf_histogram wait;          /* ns from then until it is durable; each append that waits for it */
    xf_histogram flush;         /* ns of each flush of the journal */
    xf_histogram batch;         /* messages that each flush made durable */
    xf_histogram wake;          /* ns from an append until the first reader that it woke runs */
    xf_histogram promotion;     /* ns from a grant to a waiter until its process has the producer */
    xf_histogram checkpoint;    /* ns of each checkpoint that moved anything */
    uint64_t checkpoint_bytes;  /* bytes of the journal that checkpoints moved */
    uint64_t table_messages;    /* appended to the tables directly: large ones, transactions */
    uint64_t table_bytes;
    uint64_t flushed_messages;  /* `messages` of the header at the last flush */
} xf_figures;

static inline void xf_add(uint64_t *w, uint64_t v) { __atomic_fetch_add(w, v, __ATOMIC_RELAXED); }

static inline unsigned xf_bucket(uint64_t value, unsigned unit) {
    uint64_t units = value >> unit;
    unsigned bucket = units ? 64 - __builtin_clzll(units) : 0;
    return bucket < XF_BUCKETS ? bucket : XF_BUCKETS - 1;
}

/* `unit`: buckets are in units of 2**unit */
static inline void xf_note(xf_histogram *h, int64_t value, unsigned unit) {
    uint64_t v = value > 0 ? (uint64_t)value : 0;
    xf_add(&h->counts[xf_bucket(v, unit)], 1);
    xf_add(&h->sum, v);
}

/* How much was appended since the last call, which every flush makes. */
static inline uint64_t xf_since(uint64_t *w, uint64_t now) {
    uint64_t before = __atomic_exchange_n(w, now, __ATOMIC_RELAXED);
    return now > before ? now - before : 0;
}

#endif
