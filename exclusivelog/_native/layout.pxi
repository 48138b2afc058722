# The footer of an entry, and opening an entry. (_native/sections.h has the sections before it.)
#
# The footer is last because only it depends on the entry's offset: the sections are written and
# checksummed before the critical section, in which only these 64 bytes are filled in.
#
#   offset  size  field
cdef enum:
    F_TOPIC = 0                             # u64
    F_BASE_OFFSET = F_TOPIC + 8             # u64
    F_EPOCH = F_BASE_OFFSET + 8             # u64
    F_SESSION = F_EPOCH + 8                 # u64
    F_BASE_SEQUENCE = F_SESSION + 8         # i64
    F_PUBLISH_TIME = F_BASE_SEQUENCE + 8    # i64, ms since 1970, of the first message
    F_COUNT = F_PUBLISH_TIME + 8            # u32
    F_FLAGS = F_COUNT + 4                   # u16
    F_NAME_LENGTH = F_FLAGS + 2             # u16
    F_MAGIC = F_NAME_LENGTH + 2             # u32, b"XLE" and the version
    F_CRC = F_MAGIC + 4                     # u32, CRC-32C with this field 0: of the whole entry, or of
                                            # what follows its blocks
    FOOTER = F_CRC + 4

cdef extern from "_native/sections.h":
    int VALUE_NULLS "XE_VALUE_NULLS"
    int KEYS "XE_KEYS"
    int EVENT_TIMES "XE_EVENT_TIMES"
    int SEQUENCES "XE_SEQUENCES"
    int PROPERTIES "XE_PROPERTIES"
    int TIMES "XE_TIMES"
    int GAPS "XE_GAPS"
    int WHOLE "XE_WHOLE"
    int NO_ENTRY "XE_NO_ENTRY"
    int NO_FOOTER "XE_NO_FOOTER"
    int UNKNOWN_SECTIONS "XE_UNKNOWN_SECTIONS"
    int TOO_LONG "XE_TOO_LONG"
    int NOT_RISING "XE_NOT_RISING"
    int LEFT_OVER "XE_LEFT_OVER"
    int NO_MESSAGES "XE_NO_MESSAGES"
    int BAD_CHUNKS "XE_BAD_CHUNKS"
    int CHUNK_BITS "XE_CHUNK_BITS"
    size_t MOST_COMPRESSED "XE_MOST_COMPRESSED"
    ctypedef struct Summary "xe_summary":
        uint32_t values
        uint32_t keys
        uint32_t properties
        uint32_t last_gap
        uint32_t last_time
        uint32_t compression
    ctypedef struct Chunk "xe_chunk":
        uint32_t size
        uint32_t sum
    ctypedef struct Sizes "xe_sizes":
        size_t values
        size_t keys
        size_t properties
        size_t name
    ctypedef struct Space "xe_space":
        uint8_t* value_valid
        uint32_t* value_offsets
        char* values
        uint8_t* key_valid
        uint32_t* key_offsets
        char* keys
        uint8_t* event_valid
        int64_t* events
        int64_t* sequences
        uint32_t* property_offsets
        char* properties
        uint32_t* times
        uint32_t* gaps
        char* name
    size_t xe_plain_size(uint16_t, size_t, const Sizes*) noexcept nogil
    size_t xe_entry_size(uint16_t, size_t, const Sizes*) noexcept nogil
    void xe_place(char*, uint16_t, size_t, const Sizes*, Space*) noexcept nogil
    int xe_find(Laid*) noexcept nogil
    size_t xe_padded(size_t) noexcept nogil
    size_t xe_in_blocks(size_t, size_t) noexcept nogil
    bint xe_place_chunks(const Laid*, ChunkPlace*) noexcept nogil
    void xe_pass_decompressed(Laid*, const char*) noexcept nogil

cdef extern from "_native/blocks.h":
    uint8_t XB_SOUND
    uint8_t XB_DAMAGED
    uint8_t XB_REQUESTED
    size_t xb_seal(char*, size_t, uint16_t, size_t, const Sizes*,
                   const Space*) noexcept nogil
    bint xb_tail_is_sound(const Laid*) noexcept nogil
    bint xb_sums_hold(const Laid*) noexcept nogil
    bint xb_section_is_sound(const Laid*, uint8_t*, const void*) noexcept nogil
    bint xb_grow(const uint32_t*, size_t, size_t, size_t, uint32_t) noexcept nogil
    bint xb_messages_are_sound(const Laid*, uint8_t*, size_t, size_t, bint) noexcept nogil
    void xb_prefetch_like(const Laid*, const char*, size_t, size_t, size_t) noexcept nogil
    void xb_prefetch_message(const Laid*, uint8_t*, size_t) noexcept nogil

cdef enum:
    MAGIC = 0x00454C58          # b"XLE", and the version
    VERSION = 1 << 24
    PLAIN = 1                   # the versions of an entry
    BLOCKED = 2
    COMPRESSED = 3              # in the tables and segments alone, never in the journal

FOOTER_BYTES = FOOTER

_DAMAGE = {
    NO_ENTRY: "its size is no entry's",
    NO_FOOTER: "it does not end as an entry does",
    UNKNOWN_SECTIONS: "it has sections that this version does not know",
    TOO_LONG: "its sections are longer than the entry",
    NOT_RISING: "its offsets do not rise from 0",
    LEFT_OVER: "it has bytes that belong to no section",
    NO_MESSAGES: "it has no messages",
    BAD_CHUNKS: "its compressed blocks are not as long as it says",
}


cdef int _read_footer(const char* start, size_t size, Laid* laid) noexcept nogil:
    cdef const char* footer = start + size - FOOTER
    memset(laid, 0, sizeof(Laid))
    if size < FOOTER or size & 7:
        return NO_ENTRY
    laid.start = start
    laid.size = size
    laid.topic = (<uint64_t*>(footer + F_TOPIC))[0]
    laid.base_offset = (<uint64_t*>(footer + F_BASE_OFFSET))[0]
    laid.epoch = (<uint64_t*>(footer + F_EPOCH))[0]
    laid.session = (<uint64_t*>(footer + F_SESSION))[0]
    laid.base_sequence = (<int64_t*>(footer + F_BASE_SEQUENCE))[0]
    laid.publish_time = (<int64_t*>(footer + F_PUBLISH_TIME))[0]
    laid.count = (<uint32_t*>(footer + F_COUNT))[0]
    laid.flags = (<uint16_t*>(footer + F_FLAGS))[0]
    laid.name_length = (<uint16_t*>(footer + F_NAME_LENGTH))[0]
    laid.last_gap = laid.count - 1
    laid.version = (<uint32_t*>(footer + F_MAGIC))[0] // VERSION
    if (<uint32_t*>(footer + F_MAGIC))[0] % VERSION != MAGIC:
        return NO_FOOTER
    return WHOLE if PLAIN <= laid.version <= COMPRESSED else NO_FOOTER


cdef int _lay_out(const char* start, size_t size, Laid* laid) noexcept nogil:
    """Find the sections of an uncompressed entry, and verify all of its checksums."""
    cdef int damage = _read_footer(start, size, laid)
    if damage == WHOLE and laid.version == COMPRESSED:
        return NO_FOOTER
    if damage == WHOLE:
        damage = xe_find(laid)
    if damage == WHOLE and laid.sums != NULL and (
            not xb_messages_are_sound(laid, NULL, 0, laid.count, False)):
        damage = NOT_RISING
    return damage


cdef bint _is_sound(const char* entry, size_t size) noexcept nogil:
    """Do all checksums of an uncompressed entry hold?"""
    cdef Laid laid
    if _read_footer(entry, size, &laid) != WHOLE or laid.version == COMPRESSED:
        return False
    if laid.version == BLOCKED and xe_find(&laid) != WHOLE:
        return False
    return xb_tail_is_sound(&laid) and xb_sums_hold(&laid)


cdef bint _lay_out_sound(const char* entry, size_t size, Laid* laid) noexcept nogil:
    """Do all checksums of an uncompressed entry hold, and its sections fill it? Fills in `laid`."""
    if _read_footer(entry, size, laid) != WHOLE or laid.version == COMPRESSED:
        return False
    if laid.version == PLAIN:
        return xb_tail_is_sound(laid) and xe_find(laid) == WHOLE
    return (xe_find(laid) == WHOLE and xb_tail_is_sound(laid)
            and xb_sums_hold(laid) and xb_messages_are_sound(laid, NULL, 0, laid.count, False))


cdef inline uint64_t _end_of(const Laid* laid) noexcept nogil:
    """The offset behind the last message."""
    return laid.base_offset + laid.last_gap + 1


cdef inline bint _bit(const uint8_t* bits, uint32_t i) noexcept nogil:
    return (bits[i >> 3] >> (i & 7)) & 1
