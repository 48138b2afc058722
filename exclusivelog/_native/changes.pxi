# What has changed since somebody looked: a version for each topic and claim (rule K1).
#
# A *subject* is a topic or a claim session. Producers, readers and claims remember what they have read
# of their subject in the tables, with the subject's version at that time. An event that may concern
# it changes that version: to the header's `version`, which grows with each event. A version is a word
# of the lock file that several subjects share, or the header's `everything`, whichever is larger: so
# subjects whose words coincide look in vain now and then, and none looks too late.
#
# Whoever makes versions out of date, by a fence or by a new `everything`, holds the append mutex. After
# a commit, a process may die before it has stored the new versions. If it held the mutex, the next
# holder repairs that, and changes everything. If it had fenced the words, no append accepts them; the
# next transaction that fences gives them new versions.

cdef enum:
    WORDS_OF_COUNTER = 4
    SUBJECT_WORDS = WORDS_OF_COUNTER * COUNTERS_OF_TOPICS
    NOTED_WORDS = SUBJECT_WORDS // 64
    MOST_NOTED = SUBJECT_WORDS // 4     # words; of more, everything counts as changed


cdef inline uint64_t* _word_of(char* counters, uint64_t place) noexcept nogil:
    """The word at one of `SUBJECT_WORDS` places. Its counter is one that its topic uses anyway."""
    return <uint64_t*>(counters + place % COUNTERS_OF_TOPICS * COUNTER + COUNTER_CHANGED
                       + place // COUNTERS_OF_TOPICS * sizeof(uint64_t))


cdef inline uint64_t _place_of(uint64_t subject) noexcept nogil:
    return _spread(subject) % SUBJECT_WORDS


cdef inline uint64_t _as_subject(uint64_t claim) noexcept nogil:
    """The subject of a claim session: the numbers of claims are those of topics, too."""
    return ~claim


@cython.final
cdef class Changes:
    """The subjects that a transaction concerns, noted as their rows are written."""

    cdef uint64_t noted[NOTED_WORDS]    # one bit for each word
    cdef Py_ssize_t count
    cdef readonly bint everything

    cdef void _note(self, uint64_t subject) noexcept:
        cdef uint64_t place = _place_of(subject)
        cdef uint64_t bit = <uint64_t>1 << (place & 63)
        if not self.noted[place >> 6] & bit:
            self.noted[place >> 6] |= bit
            self.count += 1
            if self.count > MOST_NOTED:
                self.everything = True

    def note(self, bytes key not None):
        """Note the topic whose number the key begins with; everything if it is too short."""
        if PyBytes_GET_SIZE(key) < 8:
            self.everything = True
        else:
            self._note(_big64(<const uint8_t*>PyBytes_AS_STRING(key)))

    def note_claim(self, bytes key not None):
        """The same for a claim session."""
        if PyBytes_GET_SIZE(key) < 8:
            self.everything = True
        else:
            self._note(_as_subject(_big64(<const uint8_t*>PyBytes_AS_STRING(key))))

    def note_everything(self):
        """Note that the transaction may concern any subject."""
        self.everything = True

    def clear(self):
        """Forget what was noted."""
        memset(self.noted, 0, sizeof(self.noted))
        self.count = 0
        self.everything = False

    cdef bint _has(self, uint64_t subject) noexcept:
        cdef uint64_t place = _place_of(subject)
        return self.noted[place >> 6] >> (place & 63) & 1

    cdef bint _includes(self, Changes other) noexcept:
        cdef uint64_t i
        for i in range(NOTED_WORDS):
            if other.noted[i] & ~self.noted[i]:
                return False
        return not other.everything

    cdef void _include(self, Changes other) noexcept:
        cdef uint64_t i
        for i in range(NOTED_WORDS):
            self.noted[i] |= other.noted[i]

    cdef void _store(self, char* counters, uint64_t version) noexcept:
        """Give all noted subjects this version."""
        cdef uint64_t left
        cdef uint64_t i, bit
        for i in range(NOTED_WORDS):
            left = self.noted[i]
            for bit in range(64 if left else 0):
                if left >> bit & 1:
                    xl_store64(_word_of(counters, 64 * i + bit), version)


cdef void _end_all_fences(char* counters, uint64_t version) noexcept:
    cdef uint64_t* word
    cdef uint64_t i
    for i in range(SUBJECT_WORDS):
        word = _word_of(counters, i)
        if xl_load64(word) & XJ_FENCED:
            xl_store64(word, version)
