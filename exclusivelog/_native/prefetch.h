/* Reading ahead in a mapped file. */
#ifndef EXCLUSIVELOG_PREFETCH_H
#define EXCLUSIVELOG_PREFETCH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Read only these bytes from the disk into memory, without waiting. A page fault would also read the
   pages around them, which are megabytes on some machines. */
static inline void xl_prefetch(const char *from, size_t size) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t start = (uintptr_t)from & ~(page - 1);
    (void)madvise((void *)start, (uintptr_t)from + size - start, MADV_WILLNEED);
}

#endif
