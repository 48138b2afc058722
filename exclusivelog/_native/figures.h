/* Figures of a ledger in shared memory: counts, and histograms in buckets of powers of two. Any
   process may add to them at any time, without a lock; who reads them while others write may see an
   event in a count and not yet in a sum. A process that is killed leaves out the event that it was
   about to count, and nothing else: there is nothing to repair. */
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
    xf_histogram append;        /* ns, one append in XF_SAMPLE: until its frame is in the journal */
    xf_histogram wait;          /* ns from there until it is durable, each that waits for that */
    xf_histogram flush;         /* ns, each flush of the journal */
    xf_histogram batch;         /* messages, of each flush */
    xf_histogram wake;          /* ns from an append to the first reader that it woke */
    xf_histogram promotion;     /* ns from a grant to a waiter until its process has the producer */
    xf_histogram checkpoint;    /* ns, each that had something to move */
    uint64_t checkpoint_bytes;  /* of the journal, that they moved */
    uint64_t table_messages;    /* that went into the tables at once: large ones, transactions */
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

/* What was appended since the last flush: another one counts from here on. */
static inline uint64_t xf_since(uint64_t *w, uint64_t now) {
    uint64_t before = __atomic_exchange_n(w, now, __ATOMIC_RELAXED);
    return now > before ? now - before : 0;
}

#endif
