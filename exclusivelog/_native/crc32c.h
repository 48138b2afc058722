/* CRC-32C (Castagnoli; the polynomial of iSCSI, reflected: 0x82F63B78).

   A register is folded over bytes: xl_crc_fold(register, bytes, size). The checksum is the
   complement of the register, which begins as ~0. Folding is linear over XOR, so a register that
   begins as 0 is unchanged by leading zeros.

   With instructions of the processor one step takes 8 bytes, but waits three cycles for the step
   before. Three blocks that lie one behind the other are folded side by side instead; a register is
   then shifted over the zeros that stand for the blocks behind its own, by four table lookups.
   Without instructions, eight table lookups take 8 bytes. */
#ifndef EXCLUSIVELOG_CRC32C_H
#define EXCLUSIVELOG_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XC_POLYNOMIAL 0x82F63B78u
#define XC_LONG 2720        /* bytes of a block; three of them fill two pages but for 32 bytes */
#define XC_SHORT 168

#define XC_TABLES 0
#define XC_SSE42 1
#define XC_ARMV8 2

typedef struct { uint32_t at[4][256]; } xc_shift;   /* of a register, over some number of zeros */

static uint32_t xc_table[8][256];   /* [k][b]: byte b followed by k zeros */
static xc_shift xc_long, xc_short;
static int xc_kind;                 /* how it is done here */

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
#define XC_INSTRUCTIONS XC_SSE42
#define XC_TARGET __attribute__((target("sse4.2")))
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

/* Three blocks of `block` bytes, side by side. */
XC_TARGET static inline uint32_t xc_fold_three(uint32_t c, const unsigned char *p, size_t block,
                                               const xc_shift *shift) {
    uint32_t second = 0, third = 0;
    for (size_t at = 0; at < block; at += 8) {
        c = xc_step8(c, xc_load8(p + at));
        second = xc_step8(second, xc_load8(p + block + at));
        third = xc_step8(third, xc_load8(p + 2 * block + at));
    }
    return xc_shifted(shift, xc_shifted(shift, c) ^ second) ^ third;
}

XC_TARGET static inline uint32_t xc_fold_by_instructions(uint32_t c, const void *data,
                                                         size_t size) {
    const unsigned char *p = data;
    for (; size >= 3 * XC_LONG; p += 3 * XC_LONG, size -= 3 * XC_LONG)
        c = xc_fold_three(c, p, XC_LONG, &xc_long);
    for (; size >= 3 * XC_SHORT; p += 3 * XC_SHORT, size -= 3 * XC_SHORT)
        c = xc_fold_three(c, p, XC_SHORT, &xc_short);
    for (; size >= 8; p += 8, size -= 8) c = xc_step8(c, xc_load8(p));
    for (; size; p++, size--) c = xc_step1(c, *p);
    return c;
}
#endif

/* ---- what others call ------------------------------------------------------------------ */

/* Once, before anything else. Returns how it is done here: XC_SSE42, XC_ARMV8 or XC_TABLES. */
static inline int xl_crc_start(void) {
    xc_fill_table();
    xc_fill_shift(&xc_long, XC_LONG);
    xc_fill_shift(&xc_short, XC_SHORT);
    xc_kind = XC_TABLES;
#ifdef XC_INSTRUCTIONS
    if (xc_has_instructions()) xc_kind = XC_INSTRUCTIONS;
#endif
    return xc_kind;
}

static inline uint32_t xl_crc_fold(uint32_t c, const void *data, size_t size) {
#ifdef XC_INSTRUCTIONS
    if (xc_kind == XC_INSTRUCTIONS) return xc_fold_by_instructions(c, data, size);
#endif
    return xc_fold_by_tables(c, data, size);
}

static inline uint32_t xl_crc32c(const void *data, size_t size) {
    return ~xl_crc_fold(UINT32_MAX, data, size);
}

#endif
