/* The sections of an entry: the one description that writer, reader, packer and verifier use.

   An entry is a run of consecutive messages of one producer in one topic. Columnar, so that Arrow
   can wrap a column where it lies; little-endian; every section starts at a multiple of 8, and is
   there only if its flag says so. Behind the last one stands the footer (layout.pxi).

   Sizes are those of n messages: BITS ceil(n / 8); OFFSETS 4 * (n + 1), rising from 0; BYTES as
   many as the last of those offsets says; EIGHTS 8 * n; FOURS 4 * n; GROWING 4 * n, strictly rising
   from 0: the offsets of a compacted entry, which lacks some, after its first one. The footer says
   how long the producer's name is. */
#ifndef EXCLUSIVELOG_SECTIONS_H
#define EXCLUSIVELOG_SECTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XE_ALWAYS 0
#define XE_VALUE_NULLS 1
#define XE_KEYS 2
#define XE_EVENT_TIMES 4
#define XE_SEQUENCES 8
#define XE_PROPERTIES 16
#define XE_TIMES 32
#define XE_GAPS 64
#define XE_KNOWN_FLAGS 127

/*      section           of        there when      size     whose bytes */
#define XE_SECTIONS(X)                                                                            \
    X(value_valid,      uint8_t,  XE_VALUE_NULLS, BITS,    none)  /* bit clear: no value */       \
    X(value_offsets,    uint32_t, XE_ALWAYS,      OFFSETS, values)                                \
    X(values,           char,     XE_ALWAYS,      BYTES,   values)                                \
    X(key_valid,        uint8_t,  XE_KEYS,        BITS,    none)                                  \
    X(key_offsets,      uint32_t, XE_KEYS,        OFFSETS, keys)                                  \
    X(keys,             char,     XE_KEYS,        BYTES,   keys)                                  \
    X(event_valid,      uint8_t,  XE_EVENT_TIMES, BITS,    none)                                  \
    X(events,           int64_t,  XE_EVENT_TIMES, EIGHTS,  none)  /* ms since 1970 */             \
    X(sequences,        int64_t,  XE_SEQUENCES,   EIGHTS,  none)  /* else base_sequence + i */    \
    X(property_offsets, uint32_t, XE_PROPERTIES,  OFFSETS, properties)                            \
    X(properties,       char,     XE_PROPERTIES,  BYTES,   properties)  /* msgpack; empty: none */\
    X(times,            uint32_t, XE_TIMES,       FOURS,   none)  /* ms after the first */        \
    X(gaps,             uint32_t, XE_GAPS,        GROWING, none)  /* offsets; else 0, 1, 2 ... */ \
    X(name,             char,     XE_ALWAYS,      BYTES,   name)  /* UTF-8 */

#define XE_FOOTER 64

/* Bytes of the sections whose size does not follow from the number of messages. */
typedef struct { size_t values, keys, properties, name, none; } xe_sizes;

#define XE_POINTER(section, type, flag, size, bytes) type *section;
#define XE_CONST_POINTER(section, type, flag, size, bytes) const type *section;

/* Where the sections of an entry that is being written lie; NULL: it has none. */
typedef struct { XE_SECTIONS(XE_POINTER) } xe_space;

/* An entry as it is read. */
typedef struct {
    const char *start;
    size_t size;
    uint64_t topic, base_offset, epoch, session;
    int64_t base_sequence, publish_time;
    uint32_t count;
    uint16_t flags, name_length;
    XE_SECTIONS(XE_CONST_POINTER)
} xe_laid;

#undef XE_POINTER
#undef XE_CONST_POINTER

enum {
    XE_WHOLE, XE_NO_ENTRY, XE_NO_FOOTER, XE_UNKNOWN_SECTIONS, XE_TOO_LONG, XE_NOT_RISING,
    XE_LEFT_OVER, XE_NO_MESSAGES
};

static inline size_t xe_padded(size_t size) { return (size + 7) & ~(size_t)7; }

#define XE_BITS(n, bytes) (((n) + 7) / 8)
#define XE_OFFSETS(n, bytes) (4 * ((n) + 1))
#define XE_BYTES(n, bytes) (bytes)
#define XE_EIGHTS(n, bytes) (8 * (n))
#define XE_FOURS(n, bytes) (4 * (n))
#define XE_GROWING(n, bytes) (4 * (n))
#define XE_IS_THERE(flag) ((flag) == XE_ALWAYS || (flags & (flag)))

/* ---- writing --------------------------------------------------------------------------- */

/* Bytes of an entry of n messages, footer included. */
static inline size_t xe_entry_size(uint16_t flags, size_t n, const xe_sizes *sizes) {
    size_t size = XE_FOOTER;
#define XE_ADD(section, type, flag, kind, bytes) \
    if (XE_IS_THERE(flag)) size += xe_padded(XE_##kind(n, sizes->bytes));
    XE_SECTIONS(XE_ADD)
#undef XE_ADD
    return size;
}

/* Where each of its sections goes. */
static inline void xe_place(char *start, uint16_t flags, size_t n, const xe_sizes *sizes,
                            xe_space *space) {
#define XE_PUT(section, type, flag, kind, bytes)        \
    space->section = NULL;                              \
    if (XE_IS_THERE(flag)) {                            \
        space->section = (type *)(void *)start;         \
        start += xe_padded(XE_##kind(n, sizes->bytes)); \
    }
    XE_SECTIONS(XE_PUT)
#undef XE_PUT
}

/* ---- reading --------------------------------------------------------------------------- */

/* The section at *at, which moves behind it; NULL if it is longer than what is left. */
static inline const void *xe_take(const char **at, const char *end, size_t size) {
    const char *here = *at;
    size = xe_padded(size);
    if (size > (size_t)(end - here)) return NULL;
    *at = here + size;
    return here;
}

static inline int xe_rises(const uint32_t *numbers, size_t n) {
    int rising = numbers[0] == 0;
    for (size_t i = 0; i < n; i++) rising &= numbers[i] <= numbers[i + 1];
    return rising;
}

static inline int xe_grows(const uint32_t *numbers, size_t n) {
    int rising = numbers[0] == 0;
    for (size_t i = 1; i < n; i++) rising &= numbers[i - 1] < numbers[i];
    return rising;
}

#define XE_CHECK_BITS(section, bytes)
#define XE_CHECK_BYTES(section, bytes)
#define XE_CHECK_EIGHTS(section, bytes)
#define XE_CHECK_FOURS(section, bytes)
#define XE_CHECK_OFFSETS(section, bytes)               \
    if (!xe_rises(laid->section, n)) return XE_NOT_RISING; \
    sizes.bytes = laid->section[n];
#define XE_CHECK_GROWING(section, bytes) \
    if (!xe_grows(laid->section, n)) return XE_NOT_RISING;

/* Find the sections of an entry whose footer was read into `laid`: XE_WHOLE, or what is wrong.
   Nothing behind the entry is looked at, whatever the flags and the offsets say. */
static inline int xe_find(xe_laid *laid) {
    const char *at = laid->start, *end = laid->start + laid->size - XE_FOOTER;
    const uint16_t flags = laid->flags;
    const size_t n = laid->count;
    xe_sizes sizes = {0, 0, 0, laid->name_length, 0};
    if (flags & ~XE_KNOWN_FLAGS) return XE_UNKNOWN_SECTIONS;
    if (n == 0) return XE_NO_MESSAGES;  /* there is no last one to ask for its offset */
#define XE_FIND(section, type, flag, kind, bytes)                   \
    if (XE_IS_THERE(flag)) {                                        \
        laid->section = xe_take(&at, end, XE_##kind(n, sizes.bytes)); \
        if (laid->section == NULL) return XE_TOO_LONG;              \
        XE_CHECK_##kind(section, bytes)                             \
    }
    XE_SECTIONS(XE_FIND)
#undef XE_FIND
    return at == end ? XE_WHOLE : XE_LEFT_OVER;
}

#endif
