/* A fraction of a number; the product may exceed 64 bits. */
#ifndef EXCLUSIVELOG_FRACTION_H
#define EXCLUSIVELOG_FRACTION_H

#include <stdint.h>

__extension__ typedef unsigned __int128 xl_u128;

/* whole * part / of, rounded down; `part` is at most `of`, which is not 0. */
static inline uint64_t xl_fraction(uint64_t whole, uint64_t part, uint64_t of) {
    return (uint64_t)((xl_u128)whole * part / of);
}

#endif
