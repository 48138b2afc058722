/* CRC-32C (Castagnoli; the polynomial of iSCSI, reflected: 0x82F63B78).

   A register is folded over bytes: xl_crc_fold(register, bytes, size). The checksum is the
   complement of the register, which begins as ~0. Folding is linear over XOR, so a register that
   begins as 0 is unchanged by leading zeros.

   A CRC instruction of the processor processes 8 bytes, but has a latency of three cycles. So three
   consecutive blocks are folded in parallel; then the first two registers are shifted over the
   blocks that follow theirs (as if these were zeros), by four table lookups each. Without such
   instructions, 8 bytes take eight table lookups.

   If the processor has carry-less multiplication in 64-byte registers, 256 bytes are folded at once:
   they are multiplied by a power of x that moves them onto the next 256 bytes. That takes half the
   time. (16-byte registers would take twice the time of the three blocks, so they are not used.) */
#ifndef EXCLUSIVELOG_CRC32C_H
#define EXCLUSIVELOG_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XC_POLYNOMIAL 0x82F63B78u
#define XC_LONG 2720        /* bytes of a block; three blocks fill two pages except for 32 bytes */
#define XC_SHORT 168
#define XC_WIDE 256         /* from this size on, 64-byte registers are faster */
#define XC_LINE 64          /* bytes of a cache line */
/* The distance of prefetches into the cache: the processor's own prefetcher stops at the end of a
   page. */
#define XC_AHEAD 4096

#define XC_TABLES 0
#define XC_SSE42 1
#define XC_ARMV8 2
#define XC_AVX512 3         /* with XC_SSE42 for short runs */

typedef struct { uint32_t at[4][256]; } xc_shift;   /* shifts a register over a number of zeros */

static uint32_t xc_table[8][256];   /* [k][b]: byte b followed by k zeros */
static xc_shift xc_long, xc_short;
static int xc_kind;                 /* the method used on this processor */

/* ---- tables ---------------------------------------------------------------------------- */

static inline uint32_t xc_little32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint32_t xc_fold_by_tables(uint32_t c, const void *data, size_t size) {
    const unsigned char *p = data;
    for (; size >= 8; p += 8, size -= 8) {
        uint32_t low = c ^ xc_little32(p), high = xc_little32(p + 4);
        c = xc_table[7][low & 255] ^ xc_table[6][low >> 8 & 255]
            ^ xc_table[5][low >> 16 & 255] ^ xc_table[4][low >> 24]
            ^ xc_table[3][high & 255] ^ xc_table[2][high >> 8 & 255]
            ^ xc_table[1][high >> 16 & 255] ^ xc_table[0][high >> 24];
    }
    for (; size; p++, size--) c = c >> 8 ^ xc_table[0][(c ^ *p) & 255];
    return c;
}

static inline void xc_fill_table(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t c = b;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? XC_POLYNOMIAL : 0);
        xc_table[0][b] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++) {
            uint32_t c = xc_table[k - 1][b];
            xc_table[k][b] = c >> 8 ^ xc_table[0][c & 255];
        }
}

static inline void xc_fill_shift(xc_shift *shift, size_t zeros) {
    static const unsigned char nothing[8];
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        of_bit[bit] = (uint32_t)1 << bit;
        for (size_t done = 0; done < zeros; done += sizeof nothing)
            of_bit[bit] = xc_fold_by_tables(of_bit[bit], nothing, sizeof nothing);
    }
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            uint32_t c = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1) c ^= of_bit[8 * byte + bit];
            shift->at[byte][value] = c;
        }
}

static inline uint32_t xc_shifted(const xc_shift *shift, uint32_t c) {
    return shift->at[0][c & 255] ^ shift->at[1][c >> 8 & 255] ^ shift->at[2][c >> 16 & 255]
        ^ shift->at[3][c >> 24];
}

/* ---- instructions ---------------------------------------------------------------------- */

#if defined(__x86_64__)
#include <immintrin.h>
#define XC_INSTRUCTIONS XC_SSE42
#define XC_WIDE_INSTRUCTIONS XC_AVX512
#if defined(__clang__) && __clang_major__ >= 14
#define XC_SSE "sse4.2,crc32"       /* Clang does not count crc32 among SSE 4.2; others name no crc32 */
#else
#define XC_SSE "sse4.2"
#endif
#define XC_TARGET __attribute__((target(XC_SSE)))
#define xc_step8(c, value) ((uint32_t)__builtin_ia32_crc32di((c), (value)))
#define xc_step1(c, value) ((uint32_t)__builtin_ia32_crc32qi((c), (value)))

static inline int xc_has_instructions(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
}

#elif defined(__aarch64__) && defined(__linux__) && !defined(__AARCH64EB__)
#include <sys/auxv.h>
#define XC_INSTRUCTIONS XC_ARMV8
#define XC_TARGET

static inline uint32_t xc_step8(uint32_t c, uint64_t value) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(c) : "r"(value));
    return c;
}

static inline uint32_t xc_step1(uint32_t c, unsigned char value) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(c) : "r"((uint32_t)value));
    return c;
}

static inline int xc_has_instructions(void) {
    return (getauxval(AT_HWCAP) >> 7 & 1) != 0;     /* HWCAP_CRC32 */
}
#endif

#ifdef XC_INSTRUCTIONS
static inline uint64_t xc_load8(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Fold three blocks of `block` bytes in parallel, and prefetch the bytes at `next`. */
XC_TARGET static inline uint32_t xc_fold_three(uint32_t c, const unsigned char *p, size_t block,
                                               const xc_shift *shift, const unsigned char *next) {
    uint32_t second = 0, third = 0;
    for (size_t at = 0; at < block; at += 8) {
        if (next != NULL && at % XC_LINE == 0)
            for (int line = 0; line < 3; line++)
                __builtin_prefetch(next + 3 * at + line * XC_LINE, 0, 2);
        c = xc_step8(c, xc_load8(p + at));
        second = xc_step8(second, xc_load8(p + block + at));
        third = xc_step8(third, xc_load8(p + 2 * block + at));
    }
    return xc_shifted(shift, xc_shifted(shift, c) ^ second) ^ third;
}

XC_TARGET static inline uint32_t xc_fold_by_steps(uint32_t c, const unsigned char *p, size_t size) {
    for (; size >= 8; p += 8, size -= 8) c = xc_step8(c, xc_load8(p));
    for (; size; p++, size--) c = xc_step1(c, *p);
    return c;
}

XC_TARGET static inline uint32_t xc_fold_by_instructions(uint32_t c, const void *data, size_t size,
                                                         size_t more) {
    const unsigned char *p = data, *const end = p + size + more;
    for (; size >= 3 * XC_LONG; p += 3 * XC_LONG, size -= 3 * XC_LONG) {
        const size_t left = (size_t)(end - p) - 3 * XC_LONG;
        c = xc_fold_three(c, p, XC_LONG, &xc_long, left >= XC_AHEAD ? p + 3 * XC_LONG : NULL);
    }
    for (; size >= 3 * XC_SHORT; p += 3 * XC_SHORT, size -= 3 * XC_SHORT)
        c = xc_fold_three(c, p, XC_SHORT, &xc_short, NULL);
    return xc_fold_by_steps(c, p, size);
}
#endif

/* ---- wide instructions ----------------------------------------------------------------- */

#ifdef XC_WIDE_INSTRUCTIONS
#define XC_WIDE_TARGET __attribute__((target("avx512f,vpclmulqdq," XC_SSE)))

/* Multipliers that move 16 bytes over a number of others: for their first and last 8 bytes. */
typedef struct { uint64_t first, last; } xc_move;

static xc_move xc_over256, xc_over64;

/* x to the power of n modulo the polynomial, in the register's bit order (the highest bit is x^0), as
   the upper half of a multiplier. The product of two such halves is too high by a factor of x. */
static inline uint64_t xc_power(unsigned n) {
    uint32_t c = (uint32_t)1 << 31;
    while (n--) c = c >> 1 ^ (c & 1 ? XC_POLYNOMIAL : 0);
    return (uint64_t)c << 32;
}

/* The first 8 of 16 bytes are 64 bits more significant than the last 8. */
static inline void xc_fill_move(xc_move *move, unsigned bytes) {
    move->first = xc_power(8 * bytes + 64 - 1);
    move->last = xc_power(8 * bytes - 1);
}

XC_WIDE_TARGET static inline __m512i xc_load_move(const xc_move *move) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)move));
}

XC_WIDE_TARGET static inline __m512i xc_load64(const unsigned char *p) {
    return _mm512_loadu_si512(p);
}

XC_WIDE_TARGET static inline __m512i xc_moved(__m512i a, __m512i move, __m512i onto) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, move, 0x00),
                                     _mm512_clmulepi64_epi128(a, move, 0x11), onto, 0x96);
}

/* `size` is at least XC_WIDE. All bytes are reduced to 64 bytes with the same remainder, and these are
   folded by steps. */
XC_WIDE_TARGET static uint32_t xc_fold_wide(uint32_t c, const void *data, size_t size, size_t more) {
    const unsigned char *p = data, *const end = p + size + more;
    unsigned char rest[64];
    __m512i move = xc_load_move(&xc_over256);
    __m512i a0 = _mm512_xor_si512(xc_load64(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)c)));
    __m512i a1 = xc_load64(p + 64), a2 = xc_load64(p + 128), a3 = xc_load64(p + 192);
    for (p += 256, size -= 256; size >= 256; p += 256, size -= 256) {
        const unsigned char *next = (size_t)(end - p) > XC_AHEAD ? p + XC_AHEAD : p;
        for (int line = 0; line < 4; line++) __builtin_prefetch(next + XC_LINE * line, 0, 2);
        a0 = xc_moved(a0, move, xc_load64(p));
        a1 = xc_moved(a1, move, xc_load64(p + 64));
        a2 = xc_moved(a2, move, xc_load64(p + 128));
        a3 = xc_moved(a3, move, xc_load64(p + 192));
    }
    move = xc_load_move(&xc_over64);
    a3 = xc_moved(xc_moved(xc_moved(a0, move, a1), move, a2), move, a3);
    for (; size >= 64; p += 64, size -= 64) a3 = xc_moved(a3, move, xc_load64(p));
    _mm512_storeu_si512(rest, a3);
    return xc_fold_by_steps(xc_fold_by_steps(0, rest, sizeof rest), p, size);
}

static inline int xc_has_wide_instructions(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}
#endif

/* ---- interface ------------------------------------------------------------------------- */

/* Call this once, before anything else. Returns the method used on this processor: XC_AVX512,
   XC_SSE42, XC_ARMV8 or XC_TABLES. */
static inline int xl_crc_start(void) {
    xc_fill_table();
    xc_fill_shift(&xc_long, XC_LONG);
    xc_fill_shift(&xc_short, XC_SHORT);
    xc_kind = XC_TABLES;
#ifdef XC_INSTRUCTIONS
    if (xc_has_instructions()) xc_kind = XC_INSTRUCTIONS;
#endif
#ifdef XC_WIDE_INSTRUCTIONS
    xc_fill_move(&xc_over256, 256);
    xc_fill_move(&xc_over64, 64);
    if (xc_kind == XC_INSTRUCTIONS && xc_has_wide_instructions()) xc_kind = XC_WIDE_INSTRUCTIONS;
#endif
    return xc_kind;
}

/* `more`: the number of bytes behind these that are read next; they are prefetched. */
static inline uint32_t xl_crc_fold_on(uint32_t c, const void *data, size_t size, size_t more) {
#ifdef XC_WIDE_INSTRUCTIONS
    if (xc_kind == XC_WIDE_INSTRUCTIONS && size >= XC_WIDE) return xc_fold_wide(c, data, size, more);
#endif
#ifdef XC_INSTRUCTIONS
    if (xc_kind != XC_TABLES) return xc_fold_by_instructions(c, data, size, more);
#endif
    (void)more;
    return xc_fold_by_tables(c, data, size);
}

static inline uint32_t xl_crc_fold(uint32_t c, const void *data, size_t size) {
    return xl_crc_fold_on(c, data, size, 0);
}

static inline uint32_t xl_crc32c(const void *data, size_t size) {
    return ~xl_crc_fold(UINT32_MAX, data, size);
}

#endif
