/* The journal's file: the header of a frame, and how frames are written.

   A position counts the bytes of all frames since the ledger was created; a new generation continues
   at the position applied. The file is a ring buffer: position p is stored at p modulo the capacity.
   A frame is a header and one entry, padded to 16 bytes. If less space than a header remains at the
   end of the ring, it stays empty.

   offset  size  field
   0       4     magic, b"XLJ" and the version
   4       4     bytes of the entry; bit 31: no entry, continue at the beginning of the file;
                 bit 30: this frame and the next one are valid together, or neither is
   8       8     position of this frame
   16      8     generation
   24      8     topic of the entry
   32      8     first offset of the entry
   40      8     `version` when it was written. If this is lower than that of the frame before, a
                 process wrote the frame and died, or was refused, before it moved `tail`
   48      8     the position up to which its writer knew the journal to be durable
   56      4     number of messages in the entry
   60      4     CRC-32C of the 60 bytes before

   Up to ledger format 7 a frame has version 1 and a header of 56 bytes: the number of messages at 48,
   the CRC-32C of the 52 bytes before at 52. */
#ifndef EXCLUSIVELOG_JOURNAL_FILE_H
#define EXCLUSIVELOG_JOURNAL_FILE_H

#include "futex.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>

typedef struct {
    uint32_t magic, size;
    uint64_t position, generation, topic, base_offset, version, durable;
    uint32_t count, crc;
} xj_frame;

/* A header of version 1 as one of version 2. Returns its checksum. */
static inline uint32_t xj_renew_header(xj_frame *frame) {
    const uint64_t last = frame->durable;
    frame->durable = 0;
    frame->count = (uint32_t)last;
    return (uint32_t)(last >> 32);
}

static inline int64_t xj_wall_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Another process may overwrite a header during this copy: check and use only the copy. */
static inline void xj_copy_header(xj_frame *to, const void *from) {
    memcpy(to, from, sizeof *to);
    __asm__ __volatile__("" : : "r"(to) : "memory");
}

typedef struct { uint64_t device, inode; } xj_file;

/* Do not read the times of a file that is flushed: from Linux 6.13 on, after an fstat the next write
   stores the exact time, and the next fdatasync writes the inode, too, which takes 1.5 times as long. */
static inline int xj_identify(int fd, xj_file *file) {
    struct stat facts;
    *file = (xj_file){0, 0};
#ifdef STATX_INO
    struct statx some;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_INO, &some) == 0) {
        *file = (xj_file){makedev(some.stx_dev_major, some.stx_dev_minor), some.stx_ino};
        return 0;
    }
#endif
    if (fstat(fd, &facts)) return errno;  /* a kernel or a sandbox without statx */
    *file = (xj_file){facts.st_dev, facts.st_ino};
    return 0;
}

/* Does `fd` still refer to that file? A program may close all descriptors, and open others with the
   same numbers. */
static inline int xj_is(int fd, const xj_file *file) {
    xj_file now;
    return xj_identify(fd, &now) == 0 && now.device == file->device
        && now.inode == file->inode;
}

/* Write header and entry at an offset; 0 or an errno. */
static inline int xj_write(int fd, int64_t at, const void *header, size_t head,
                    const void *data, size_t size) {
    struct iovec v[2] = {{(void *)header, head}, {(void *)data, size}};
    while (v[0].iov_len + v[1].iov_len) {
        ssize_t n = pwritev(fd, v, 2, at);
        if (n < 0) { if (errno == EINTR) continue; return errno; }
        if (n == 0) return ENOSPC;
        at += n;
        for (int i = 0; i < 2; i++) {
            size_t k = (size_t)n < v[i].iov_len ? (size_t)n : v[i].iov_len;
            v[i].iov_base = (char *)v[i].iov_base + k;
            v[i].iov_len -= k;
            n -= k;
        }
    }
    return 0;
}

#endif
