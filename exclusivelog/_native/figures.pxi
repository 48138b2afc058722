# Counters that all processes of a ledger share (_native/figures.h has the layout).

cdef extern from "_native/figures.h":
    enum:
        XF_BUCKETS
        XF_TIME
        XF_SAMPLE
    ctypedef struct xf_histogram:
        uint64_t sum
        uint64_t counts[32]
    ctypedef struct xf_figures:
        xf_histogram append
        xf_histogram wait
        xf_histogram flush
        xf_histogram batch
        xf_histogram wake
        xf_histogram promotion
        xf_histogram checkpoint
        uint64_t checkpoint_bytes
        uint64_t table_messages
        uint64_t table_bytes
        uint64_t flushed_messages
    void xf_add(uint64_t*, uint64_t) noexcept nogil
    void xf_note(xf_histogram*, int64_t, unsigned) noexcept nogil
    uint64_t xf_since(uint64_t*, uint64_t) noexcept nogil

FIGURES_SIZE = sizeof(xf_figures)
BUCKETS, TIME_UNIT = XF_BUCKETS, XF_TIME
SAMPLED = XF_SAMPLE


cdef tuple _histogram(xf_histogram* h):
    cdef int i
    return [h.counts[i] for i in range(XF_BUCKETS)], h.sum


@cython.final
cdef class Figures:
    """The figures of a ledger, at the offset `at` in `words`."""

    cdef SharedWords words
    cdef xf_figures* shared

    def __cinit__(self, SharedWords words not None, Py_ssize_t at):
        if at < 0 or at & 7 or at + <Py_ssize_t>sizeof(xf_figures) > words.view.len:
            raise IndexError(f"at={at}: the figures do not fit there")
        self.words = words
        self.shared = <xf_figures*>(<char*>words.view.buf + at)

    def note_wake(self, int64_t ns):
        """Count a reader that was woken `ns` after the append."""
        xf_note(&self.shared.wake, ns, XF_TIME)

    def note_promotion(self, int64_t ns):
        """Count a promotion: the process had the producer `ns` after the grant."""
        xf_note(&self.shared.promotion, ns, XF_TIME)

    def note_checkpoint(self, int64_t ns, uint64_t size):
        """Count a checkpoint that has moved so many bytes of the journal."""
        xf_note(&self.shared.checkpoint, ns, XF_TIME)
        xf_add(&self.shared.checkpoint_bytes, size)

    def note_tables(self, uint64_t messages, uint64_t size):
        """Count messages that went directly into the tables."""
        xf_add(&self.shared.table_messages, messages)
        xf_add(&self.shared.table_bytes, size)

    def read(self):
        """{name: value}; the value of a histogram is (counts of its buckets, sum)."""
        cdef xf_figures* f = self.shared
        return {
            "append": _histogram(&f.append), "wait": _histogram(&f.wait),
            "flush": _histogram(&f.flush), "batch": _histogram(&f.batch),
            "wake": _histogram(&f.wake), "promotion": _histogram(&f.promotion),
            "checkpoint": _histogram(&f.checkpoint), "checkpoint_bytes": f.checkpoint_bytes,
            "table_messages": f.table_messages, "table_bytes": f.table_bytes,
        }
