/* The blocks of an entry, each with its own checksum; sections.h describes their layout.

   Reading a message verifies the blocks that contain a part of it, each block once: `seen` has a
   byte for each block, initially XB_UNSEEN. If a block of a mapped entry is read out of order, it is
   prefetched from the disk.

   In a compressed entry, a block is a chunk, and `seen` says whether it was decompressed. */
#ifndef EXCLUSIVELOG_BLOCKS_H
#define EXCLUSIVELOG_BLOCKS_H

#include "crc32c.h"
#include "prefetch.h"
#include "sections.h"

#define XB_UNSEEN 0
#define XB_SOUND 1
#define XB_DAMAGED 2
#define XB_REQUESTED 3                  /* unseen, but prefetched, or (a chunk) to be decompressed */
#define XB_CRC (XE_FOOTER - 4)          /* offset of the checksum in the footer */

/* ---- writing --------------------------------------------------------------------------- */

/* Write the blocks' checksums and the summary of an entry of `plain` bytes whose sections are
   written. Returns the offset from which on the footer's checksum counts. An entry that is too
   short for blocks is not changed. */
static inline size_t xb_seal(char *start, size_t plain, uint16_t flags, size_t n,
                             const xe_sizes *given, const xe_space *space) {
    if (plain < XE_BLOCKED_FROM) return 0;
    const xe_summary summary = {
        (uint32_t)given->values, (uint32_t)given->keys, (uint32_t)given->properties,
        space->gaps != NULL ? space->gaps[n - 1] : (uint32_t)(n - 1),
        space->times != NULL ? space->times[n - 1] : 0, 0,
    };
    char *sums = start + plain - XE_FOOTER, *const first = sums;
    xe_sizes sizes = *given;
    sizes.name = 0;
#define XB_SUM(section, type, flag, kind, bytes)                                            \
    if (XE_IS_THERE(flag)) {                                                                \
        const size_t size = xe_padded(XE_##kind(n, sizes.bytes));                           \
        for (size_t at = 0; at < size; at += XE_BLOCK_##kind) {                             \
            const size_t left = size - at;                                                  \
            const uint32_t sum = xl_crc32c((const char *)space->section + at,               \
                                           left < XE_BLOCK_##kind ? left : XE_BLOCK_##kind); \
            memcpy(sums, &sum, sizeof sum);                                                 \
            sums += sizeof sum;                                                             \
        }                                                                                   \
    }
    XE_SECTIONS(XB_SUM)
#undef XB_SUM
    memcpy(first + xe_padded((size_t)(sums - first)), &summary, sizeof summary);
    return plain - XE_FOOTER - xe_padded(given->name);
}

/* ---- reading --------------------------------------------------------------------------- */

/* Is the footer's checksum correct? It covers the whole entry, or what follows its blocks. */
static inline int xb_tail_is_sound(const xe_laid *laid) {
    const char *end = laid->start + laid->size;
    uint32_t wanted, sum = xl_crc32c(laid->start + laid->body, laid->size - laid->body);
    memcpy(&wanted, end - XE_FOOTER + XB_CRC, sizeof wanted);
    return (sum ^ xl_crc_fold(0, end - XE_FOOTER + XB_CRC, sizeof wanted)) == wanted;
}

/* A section, as blocks. `first`: the number of its first block among all blocks of the entry. */
typedef struct { const char *start; size_t size, block, first; } xb_section;

/* Is the block's checksum correct? `more`: the bytes behind it are read next. */
static inline int xb_sum_holds(const xe_laid *laid, const xb_section *in, size_t number, int more) {
    const size_t from = number * in->block;
    const size_t to = in->size - from < in->block ? in->size : from + in->block;
    const uint32_t crc = xl_crc_fold_on(UINT32_MAX, in->start + from, to - from, more ? XC_AHEAD : 0);
    return ~crc == laid->sums[in->first + number];
}

/* Are the chunks of a compressed entry that contain these bytes of the section decompressed? Marks
   the others as XB_REQUESTED, unless they are damaged: the caller decompresses them and calls this
   again. */
static inline int xb_are_decompressed(const xe_laid *laid, uint8_t *seen, const xb_section *in,
                                      size_t from, size_t size) {
    const size_t start = (size_t)(in->start - laid->start) + from;
    int all = 1;
    for (size_t number = start / laid->chunk; number <= (start + size - 1) / laid->chunk; number++) {
        if (seen[number] == XB_UNSEEN) seen[number] = XB_REQUESTED;
        all &= seen[number] == XB_SOUND;
    }
    return all;
}

/* Are the blocks that contain these bytes of the section undamaged? `seen` NULL: this is known. */
static inline int xb_are_sound(const xe_laid *laid, uint8_t *seen, const xb_section *in,
                               size_t from, size_t size) {
    if (size == 0 || seen == NULL) return 1;
    if (laid->chunk) return xb_are_decompressed(laid, seen, in, from, size);
    const size_t last = (from + size - 1) / in->block;
    for (size_t number = from / in->block; number <= last; number++) {
        uint8_t *known = seen + in->first + number;
        if (*known == XB_UNSEEN || *known == XB_REQUESTED)
            *known = xb_sum_holds(laid, in, number, number < last) ? XB_SOUND : XB_DAMAGED;
        if (*known != XB_SOUND) return 0;
    }
    return 1;
}

/* Prefetch the blocks with these bytes of the section that were not verified yet. */
static inline void xb_prefetch(uint8_t *seen, const xb_section *in, size_t from, size_t size) {
    if (size == 0) return;
    for (size_t number = from / in->block; number <= (from + size - 1) / in->block; number++) {
        uint8_t *known = seen + in->first + number;
        const size_t at = number * in->block;
        if (*known != XB_UNSEEN) continue;
        *known = XB_REQUESTED;
        xl_prefetch(in->start + at, in->size - at < in->block ? in->size - at : in->block);
    }
}

/* Do offsets i to j of the n + 1 never decrease, and stay within a section of `size` bytes? */
static inline int xb_rise(const uint32_t *offsets, size_t i, size_t j, size_t n, size_t size) {
    int rising = (i > 0 || offsets[0] == 0) & (j < n ? offsets[j] <= size : offsets[j] == size);
    for (size_t at = i; at < j; at++) rising &= offsets[at] <= offsets[at + 1];
    return rising;
}

static inline int xb_grow(const uint32_t *numbers, size_t i, size_t j, size_t n, uint32_t last) {
    int rising = (i > 0 || numbers[0] == 0) & (j < n || numbers[n - 1] == last);
    for (size_t at = i > 0 ? i : 1; at < j; at++) rising &= numbers[at - 1] < numbers[at];
    return rising;
}

/* The sizes that were read when the entry was opened, without the name. They are not read again from
   the mapped summary, which may have been changed on the disk meanwhile. */
static inline xe_sizes xb_sizes(const xe_laid *laid) {
    xe_sizes sizes = laid->sizes;
    sizes.name = 0;     /* the name is in no block */
    return sizes;
}

/* For each section that has blocks; `in` is the section. */
#define XB_EACH(then)                                                                 \
    const uint16_t flags = laid->flags;                                               \
    const size_t n = laid->count;                                                     \
    const xe_sizes sizes = xb_sizes(laid);                                            \
    xb_section in = {NULL, 0, 1, 0};                                                  \
    XE_SECTIONS(then)

#define XB_ENTER(section_, kind, bytes)                                               \
    in.first += xe_in_blocks(in.size, in.block);                                      \
    in.start = (const char *)laid->section_, in.block = XE_BLOCK_##kind;              \
    in.size = xe_padded(XE_##kind(n, sizes.bytes));

#define XB_CHECK(from, size)                                      \
    if (out_of_order) xb_prefetch(seen, &in, (from), (size));          \
    if (!xb_are_sound(laid, seen, &in, (from), (size))) return 0;

#define XB_BITS(section, bytes) XB_CHECK(i / 8, (j + 7) / 8 - i / 8)
#define XB_EIGHTS(section, bytes) XB_CHECK(8 * i, 8 * (j - i))
#define XB_FOURS(section, bytes) XB_CHECK(4 * i, 4 * (j - i))
#define XB_GROWING(section, bytes)                                          \
    XB_CHECK(4 * (i > 0 ? i - 1 : 0), 4 * (j - (i > 0 ? i - 1 : 0)))        \
    if (!xb_grow(laid->section, i, j, n, laid->last_gap)) return 0;
#define XB_OFFSETS(section, bytes)                                          \
    XB_CHECK(4 * i, 4 * (j - i + 1))                                        \
    if (!xb_rise(laid->section, i, j, n, sizes.bytes)) return 0;            \
    from.bytes = laid->section[i], to.bytes = laid->section[j];
#define XB_BYTES(section, bytes) XB_CHECK(from.bytes, to.bytes - from.bytes)

/* Is all of the messages i to j - 1 sound, in an entry whose tail is? Verifies the blocks that they
   are in, and that their offsets rise. 0 <= i < j <= n. */
static inline int xb_messages_are_sound(const xe_laid *laid, uint8_t *seen, size_t i, size_t j,
                                        int out_of_order) {
    xe_sizes from = {0, 0, 0, 0, 0}, to = {0, 0, 0, 0, 0};
#define XB_VERIFY(section, type, flag, kind, bytes) \
    if (XE_IS_THERE(flag)) {                        \
        XB_ENTER(section, kind, bytes)              \
        XB_##kind(section, bytes)                   \
    }
    XB_EACH(XB_VERIFY)
#undef XB_VERIFY
    return 1;
}

#define XB_PREFETCH_BITS xb_prefetch(seen, &in, i / 8, 1);
#define XB_PREFETCH_OFFSETS xb_prefetch(seen, &in, 4 * i, 8);
#define XB_PREFETCH_EIGHTS xb_prefetch(seen, &in, 8 * i, 8);
#define XB_PREFETCH_FOURS xb_prefetch(seen, &in, 4 * i, 4);
#define XB_PREFETCH_GROWING xb_prefetch(seen, &in, 4 * i, 4);
/* The estimated place, as if all values had the same size. */
#define XB_PREFETCH_BYTES if (in.size) xb_prefetch(seen, &in, (size_t)((double)(in.size - 8) / n * i), 1);

/* Prefetch all blocks of message i before waiting for the first. */
static inline void xb_prefetch_message(const xe_laid *laid, uint8_t *seen, size_t i) {
#define XB_VERIFY(section, type, flag, kind, bytes) \
    if (XE_IS_THERE(flag)) {                        \
        XB_ENTER(section, kind, bytes)              \
        XB_PREFETCH_##kind                               \
    }
    XB_EACH(XB_VERIFY)
#undef XB_VERIFY
}

#define XB_LIKE_BITS (i / 8)
#define XB_LIKE_OFFSETS (4 * i)
#define XB_LIKE_EIGHTS (8 * i)
#define XB_LIKE_FOURS (4 * i)
#define XB_LIKE_GROWING (4 * i)
#define XB_LIKE_BYTES ((size_t)((double)in.size / n * i))

/* Prefetch the blocks of message i of n in an entry of `size` bytes whose summary was not read yet.
   The estimate assumes that it has the same sections as entry `other`, with the same mean sizes. So
   the disk reads summary and blocks at the same time, not one after the other. */
static inline void xb_prefetch_like(const xe_laid *other, const char *start, size_t size, size_t i,
                               size_t n) {
    const uint16_t flags = other->flags;
    const double times = (double)n / other->count;
    const xe_sizes known = xb_sizes(other);
    xe_sizes sizes = {0, (size_t)((double)known.keys * times),
                      (size_t)((double)known.properties * times), other->name_length, 0};
    size_t rest = xe_plain_size(flags, n, &sizes);
    if (rest >= size || i >= n) return;
    sizes.values = size - rest;
    rest += xe_trailer_size(xe_blocks(flags, n, &sizes));
    if (rest >= size) return;
    sizes.values = size - rest;
    sizes.name = 0;
    xb_section in = {start, 0, 1, 0};
#define XB_GUESS(section, type, flag, kind, bytes)                                        \
    if (XE_IS_THERE(flag)) {                                                              \
        in.start += in.size, in.size = xe_padded(XE_##kind(n, sizes.bytes));              \
        const size_t at = XB_LIKE_##kind / XE_BLOCK_##kind * XE_BLOCK_##kind;             \
        const size_t left = in.size > at ? in.size - at : 0;                              \
        if (left && (size_t)(in.start - start) + in.size <= size)                         \
            xl_prefetch(in.start + at, left < XE_BLOCK_##kind ? left : XE_BLOCK_##kind);       \
    }
    XE_SECTIONS(XB_GUESS)
#undef XB_GUESS
}

/* Are all blocks of the section that begins at `wanted` undamaged? */
static inline int xb_section_is_sound(const xe_laid *laid, uint8_t *seen, const void *wanted) {
#define XB_VERIFY(section, type, flag, kind, bytes)                                   \
    if (XE_IS_THERE(flag)) {                                                          \
        XB_ENTER(section, kind, bytes)                                                \
        if (in.start == wanted && !xb_are_sound(laid, seen, &in, 0, in.size)) return 0; \
    }
    XB_EACH(XB_VERIFY)
#undef XB_VERIFY
    return 1;
}

/* Are the checksums of all blocks correct? */
static inline int xb_sums_hold(const xe_laid *laid) {
    if (laid->blocks == 0) return 1;
#define XB_VERIFY(section, type, flag, kind, bytes)                                 \
    if (XE_IS_THERE(flag)) {                                                        \
        XB_ENTER(section, kind, bytes)                                              \
        for (size_t number = 0; number * in.block < in.size; number++)              \
            if (!xb_sum_holds(laid, &in, number, (number + 1) * in.block < in.size)) return 0; \
    }
    XB_EACH(XB_VERIFY)
#undef XB_VERIFY
    return 1;
}

#endif
