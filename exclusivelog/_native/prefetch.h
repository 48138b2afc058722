/* Reading ahead in a mapped file. */
#ifndef EXCLUSIVELOG_PREFETCH_H
#define EXCLUSIVELOG_PREFETCH_H

#include <stddef.h>

static inline void xl_fetch(const char *from, size_t size) {
    for (size_t at = 0; at < size; at += 64)
        __builtin_prefetch(from + at, 0, 2);
}

#endif
