/* The sections of an entry: the single description that writer, reader, packer and verifier use.

   An entry is a run of consecutive messages of one producer in one topic. It is columnar, so that
   Arrow can wrap a column without a copy, and little-endian. Every section starts at a multiple of 8,
   and exists only if its flag is set. The footer follows the last section (layout.pxi).

   Sizes for n messages: BITS ceil(n / 8); OFFSETS 4 * (n + 1), increasing from 0; BYTES: the last of
   those offsets; EIGHTS 8 * n; FOURS 4 * n; GROWING 4 * n, strictly increasing from 0: the offsets of
   the messages of a compacted entry, which has gaps, relative to the first. The footer has the length
   of the producer's name.

   An entry of version 2, from XE_BLOCKED_FROM bytes on, has checksums of its blocks between the name
   and the footer: each section before the name is cut into blocks. A block has 16 KiB of BYTES, or the
   part of any other section that belongs to 1,024 messages. The footer's checksum covers what follows
   the blocks. An xe_summary has the facts that would otherwise have to be read from the sections, so
   that a message is found by reading only its own blocks. (blocks.h verifies blocks.)

   An entry of version 3 is compressed: the sections before the name are together cut into chunks, and
   each chunk is compressed separately. After the name come an xe_chunk for each, and the summary,
   which has the method. A chunk whose stored size is its decompressed size is not compressed. Sections
   are read in the memory that chunks are decompressed into; each chunk is decompressed when needed. */
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

/*      section           type      exists with     size     size field */
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
#define XE_COMPRESSED 3                 /* the version of a compressed entry */
/* Bytes of a block. */
#define XE_BLOCK_BITS ((size_t)128)
#define XE_BLOCK_OFFSETS ((size_t)4096)
#define XE_BLOCK_BYTES ((size_t)16384)
#define XE_BLOCK_EIGHTS ((size_t)8192)
#define XE_BLOCK_FOURS ((size_t)4096)
#define XE_BLOCK_GROWING ((size_t)4096)
#define XE_BLOCKED_FROM ((size_t)65536) /* bytes of sections and footer */

/* Lies right before the footer of an entry with blocks. */
typedef struct {
    uint32_t values, keys, properties;  /* bytes of these sections */
    uint32_t last_gap;                  /* of the last message: its offset after the first one's */
    uint32_t last_time;                 /* of the last message: ms after the first one's */
    uint32_t compression;               /* 0, or the method + 256 * log2(bytes of a chunk) */
} xe_summary;

/* A compressed chunk: its bytes, and their CRC-32C. */
typedef struct { uint32_t size, sum; } xe_chunk;

#define XE_CHUNK_BITS 16                /* chunks of 64 KiB are written */
#define XE_LEAST_CHUNK_BITS 12
#define XE_MOST_CHUNK_BITS 20
/* Bytes of sections: a larger entry is not compressed, so that a reader's memory is bounded. */
#define XE_MOST_COMPRESSED ((size_t)256 << 20)

/* Bytes of the sections whose size does not follow from the number of messages. */
typedef struct { size_t values, keys, properties, name, none; } xe_sizes;

#define XE_POINTER(section, type, flag, size, bytes) type *section;
#define XE_CONST_POINTER(section, type, flag, size, bytes) const type *section;

/* The sections of an entry that is being written; NULL: it does not have this section. */
typedef struct { XE_SECTIONS(XE_POINTER) } xe_space;

/* An entry as it is read. */
typedef struct {
    const char *start;
    size_t size;
    uint64_t topic, base_offset, epoch, session;
    int64_t base_sequence, publish_time;
    uint32_t count;
    uint16_t flags, name_length;
    uint32_t last_gap, last_time;   /* of the last message, after the first one's */
    uint8_t version;
    size_t body, blocks;            /* bytes in blocks, and number of blocks; 0: it has none */
    const uint32_t *sums;           /* checksums of the blocks */
    /* In a compressed entry, `body` is the bytes of its chunks, and `blocks` their number. */
    size_t chunk, sections;         /* bytes of a chunk (0: not compressed), and of all sections */
    const char *chunks;             /* an xe_chunk for each chunk */
    uint8_t method;
    xe_sizes sizes;                 /* of an entry with blocks, as read once: the file may change */
    XE_SECTIONS(XE_CONST_POINTER)
} xe_laid;

#undef XE_POINTER
#undef XE_CONST_POINTER

enum {
    XE_WHOLE, XE_NO_ENTRY, XE_NO_FOOTER, XE_UNKNOWN_SECTIONS, XE_TOO_LONG, XE_NOT_RISING,
    XE_LEFT_OVER, XE_NO_MESSAGES, XE_BAD_CHUNKS
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

/* Bytes of the sections of n messages, and of the footer. */
static inline size_t xe_plain_size(uint16_t flags, size_t n, const xe_sizes *sizes) {
    size_t size = XE_FOOTER;
#define XE_ADD(section, type, flag, kind, bytes) \
    if (XE_IS_THERE(flag)) size += xe_padded(XE_##kind(n, sizes->bytes));
    XE_SECTIONS(XE_ADD)
#undef XE_ADD
    return size;
}

static inline size_t xe_in_blocks(size_t size, size_t block) { return (size + block - 1) / block; }

/* The number of blocks. */
static inline size_t xe_blocks(uint16_t flags, size_t n, const xe_sizes *given) {
    size_t blocks = 0;
    xe_sizes sizes = *given;
    sizes.name = 0;
#define XE_COUNT(section, type, flag, kind, bytes) \
    if (XE_IS_THERE(flag))                         \
        blocks += xe_in_blocks(xe_padded(XE_##kind(n, sizes.bytes)), XE_BLOCK_##kind);
    XE_SECTIONS(XE_COUNT)
#undef XE_COUNT
    return blocks;
}

/* Bytes of the blocks' sums and the summary. */
static inline size_t xe_trailer_size(size_t blocks) {
    return xe_padded(4 * blocks) + sizeof(xe_summary);
}

/* Bytes of an entry of n messages, with everything. */
static inline size_t xe_entry_size(uint16_t flags, size_t n, const xe_sizes *sizes) {
    const size_t size = xe_plain_size(flags, n, sizes);
    if (size < XE_BLOCKED_FROM) return size;
    return size + xe_trailer_size(xe_blocks(flags, n, sizes));
}

/* Compute the place of each section. */
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

/* The section at *at, and move *at behind it; NULL if fewer bytes remain. */
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

/* Set the sections, with the sizes in `laid`, from `at` on; return where they end. */
static inline const char *xe_pass(xe_laid *laid, const char *at) {
    const uint16_t flags = laid->flags;
    const size_t n = laid->count;
    const xe_sizes sizes = laid->sizes;
#define XE_PASS(section, type, flag, kind, bytes)          \
    if (XE_IS_THERE(flag)) {                               \
        laid->section = (const void *)at;                  \
        at += xe_padded(XE_##kind(n, sizes.bytes));        \
    }
    XE_SECTIONS(XE_PASS)
#undef XE_PASS
    return at;
}

/* The same for a compressed entry, whose sections, but not its name, are decompressed to `at`. */
static inline void xe_pass_decompressed(xe_laid *laid, const char *at) {
    const char *name = laid->name;
    xe_pass(laid, at);
    laid->start = at, laid->size = laid->sections, laid->name = name;
}

/* Find the name and the chunks of a compressed entry, whose sections have `sections` bytes. */
static inline int xe_find_chunks(xe_laid *laid, const xe_summary *summary, size_t sections) {
    const uint32_t bits = summary->compression >> 8;
    const size_t name = xe_padded(laid->name_length);
    if (sections > XE_MOST_COMPRESSED || bits < XE_LEAST_CHUNK_BITS || bits > XE_MOST_CHUNK_BITS)
        return XE_BAD_CHUNKS;
    laid->method = (uint8_t)summary->compression;
    laid->chunk = (size_t)1 << bits;
    laid->sections = sections;
    laid->blocks = xe_in_blocks(sections, laid->chunk);
    const size_t tail = name + laid->blocks * sizeof(xe_chunk) + sizeof *summary + XE_FOOTER;
    if (tail > laid->size) return XE_TOO_LONG;
    laid->body = laid->size - tail;
    laid->name = laid->start + laid->body;
    laid->chunks = laid->name + name;
    return XE_WHOLE;
}

/* The place of a chunk in the entry, and its decompressed size. */
typedef struct { size_t at, decompressed; uint32_t size, sum; } xe_place_of_chunk;

/* Find the chunks of a compressed entry whose tail is undamaged. Returns 0 if they do not exactly fill
   their part of the entry. */
static inline int xe_place_chunks(const xe_laid *laid, xe_place_of_chunk *places) {
    size_t at = 0;
    for (size_t i = 0; i < laid->blocks; i++) {
        const size_t left = laid->sections - i * laid->chunk;
        const size_t decompressed = left < laid->chunk ? left : laid->chunk;
        xe_chunk chunk;
        memcpy(&chunk, laid->chunks + i * sizeof chunk, sizeof chunk);
        if (chunk.size == 0 || chunk.size > decompressed || chunk.size > laid->body - at) return 0;
        places[i] = (xe_place_of_chunk){at, decompressed, chunk.size, chunk.sum};
        at += chunk.size;
    }
    if (xe_padded(at) != laid->body) return 0;
    while (at < laid->body && laid->start[at] == 0) at++;
    return at == laid->body;    /* no checksum covers the padding between the chunks and the name */
}

/* Find the sections of an entry with blocks from its summary, without reading the sections. */
static inline int xe_find_by_summary(xe_laid *laid) {
    const uint16_t flags = laid->flags;
    const size_t n = laid->count;
    xe_summary summary;
    if (laid->size < XE_FOOTER + sizeof summary) return XE_NO_ENTRY;
    memcpy(&summary, laid->start + laid->size - XE_FOOTER - sizeof summary, sizeof summary);
    const xe_sizes sizes = {summary.values, summary.keys, summary.properties, laid->name_length, 0};
    const size_t plain = xe_plain_size(flags, n, &sizes);
    const size_t blocks = xe_blocks(flags, n, &sizes);
    const size_t sections = plain - XE_FOOTER - xe_padded(laid->name_length);
    if (flags & ~XE_KNOWN_FLAGS) return XE_UNKNOWN_SECTIONS;
    if (n == 0) return XE_NO_MESSAGES;
    laid->sizes = sizes;
    laid->last_time = summary.last_time;
    if (flags & XE_GAPS) laid->last_gap = summary.last_gap;
    if (laid->version == XE_COMPRESSED) return xe_find_chunks(laid, &summary, sections);
    if (plain + xe_trailer_size(blocks) > laid->size) return XE_TOO_LONG;
    if (plain + xe_trailer_size(blocks) < laid->size) return XE_LEFT_OVER;
    laid->sums = (const void *)xe_pass(laid, laid->start);
    laid->body = sections;
    laid->blocks = blocks;
    return XE_WHOLE;
}

/* Find the sections of an entry whose footer was read into `laid`: XE_WHOLE, or what is wrong.
   Nothing outside of the entry is read, whatever flags and offsets it has. In an entry with blocks,
   the content of the sections still has to be verified. */
static inline int xe_find(xe_laid *laid) {
    if (laid->version > 1) return xe_find_by_summary(laid);
    const char *at = laid->start, *end = laid->start + laid->size - XE_FOOTER;
    const uint16_t flags = laid->flags;
    const size_t n = laid->count;
    xe_sizes sizes = {0, 0, 0, laid->name_length, 0};
    if (flags & ~XE_KNOWN_FLAGS) return XE_UNKNOWN_SECTIONS;
    if (n == 0) return XE_NO_MESSAGES;  /* the code below reads the last message's offset */
#define XE_FIND(section, type, flag, kind, bytes)                   \
    if (XE_IS_THERE(flag)) {                                        \
        laid->section = xe_take(&at, end, XE_##kind(n, sizes.bytes)); \
        if (laid->section == NULL) return XE_TOO_LONG;              \
        XE_CHECK_##kind(section, bytes)                             \
    }
    XE_SECTIONS(XE_FIND)
#undef XE_FIND
    if (laid->gaps != NULL) laid->last_gap = laid->gaps[n - 1];
    if (laid->times != NULL) laid->last_time = laid->times[n - 1];
    return at == end ? XE_WHOLE : XE_LEFT_OVER;
}

#endif
