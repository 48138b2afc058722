/* Room on the disk for stores into mapped files that need new blocks, because a copy or a snapshot shares
   theirs. A store cannot fail as a write does, so the blocks are kept in a file without a name, which no
   copy has, and freed in the handler of SIGBUS, before the store is tried again (fault_guard.h). */
#ifndef EXCLUSIVELOG_SPARE_ROOM_H
#define EXCLUSIVELOG_SPARE_ROOM_H

#include "futex.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define XR_SPARES 1024      /* one for each open ledger */
#define XR_FILLING 2
#define XR_FILES 2          /* mapped files that are given blocks of their own at once */

/* A program may close all descriptors, and open others with the same numbers. */
typedef struct { int fd; uint64_t device, inode, size; } xr_file;

/* `room`: the file without a name. `spent`: its blocks are freed, or (XR_FILLING) not allocated again yet;
   stores into the journal may fail. */
typedef struct { uint32_t used, spent; int count; xr_file room, files[XR_FILES]; } xr_spare;

static xr_spare xr_spares[XR_SPARES];

static inline int xr_identify(int fd, xr_file *file) {
    struct stat facts;
    if (fstat(fd, &facts)) return -1;
    *file = (xr_file){fd, facts.st_dev, facts.st_ino, (uint64_t)facts.st_size};
    return 0;
}

static inline int xr_is(const xr_file *file) {
    xr_file now = {-1, 0, 0, 0};
    return xr_identify(file->fd, &now) == 0 && now.device == file->device && now.inode == file->inode;
}

/* Can a store at this address succeed? The kernel adds 0 to the word there. */
static inline int xr_can_store(uintptr_t at) {
    static uint32_t unused;
    return syscall(SYS_futex, &unused, FUTEX_WAKE_OP_PRIVATE, 0, NULL, (uint32_t *)at,
                   FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_LT, 0)) >= 0;
}

/* A full btrfs takes seconds for each store that fails, so the first one is the last. */
static inline int xr_store_all(uintptr_t at, uintptr_t end, uintptr_t page) {
    while (at < end && xr_can_store(at)) at += page;
    return at >= end;
}

/* Give all pages of a file blocks of its own. */
static inline int xr_own(const xr_file *file, uintptr_t page) {
    void *at = MAP_FAILED;
    if (xr_is(file)) at = mmap(NULL, file->size, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
    if (at == MAP_FAILED) return 0;
    int own = xr_store_all((uintptr_t)at, (uintptr_t)at + file->size, page);
    fdatasync(file->fd);    /* on btrfs, only then the blocks count as the file's own */
    munmap(at, file->size);
    return own;
}

/* Free the room, and use it for the lock files, and for the pages from `at` to `end`. Async-signal-safe:
   only system calls. Can the first of them be stored now? */
static inline int xr_use(xr_spare *spare, uintptr_t at, uintptr_t end, uintptr_t page) {
    xl_store(&spare->spent, 1);
    if (!xr_is(&spare->room) || ftruncate(spare->room.fd, 0)) return 0;
    int own = xr_can_store(at);
    for (int i = 0; own && i < spare->count; i++) own = xr_own(&spare->files[i], page);
    return own && xr_store_all(at, end, page);
}

/* An index for the file without a name `fd`; -1 if there is none left. */
static inline int xr_keep(int fd) {
    for (int i = 0; i < XR_SPARES; i++) {
        if (!xl_swap(&xr_spares[i].used, 0, 1)) continue;
        xr_spares[i].count = 0;
        xl_store(&xr_spares[i].spent, 0);
        if (xr_identify(fd, &xr_spares[i].room) == 0) return i;
        xl_store(&xr_spares[i].used, 0);
        return -1;
    }
    return -1;
}

static inline void xr_add_file(int index, int fd) {
    xr_spare *spare = &xr_spares[index];
    if (spare->count < XR_FILES && xr_identify(fd, &spare->files[spare->count]) == 0) spare->count++;
}

static inline void xr_forget(int index) {
    if (index >= 0) xl_store(&xr_spares[index].used, 0);
}

static inline uint32_t xr_is_spent(int index) {
    return index < 0 ? 0 : xl_load(&xr_spares[index].spent);
}

/* Allocate the blocks, again if they were freed; 0 or an errno. */
static inline int xr_fill(int index, int64_t size) {
    xr_spare *spare = &xr_spares[index];
    if (!xr_is(&spare->room)) return EBADF;
    xl_store(&spare->spent, XR_FILLING);
    if (fallocate(spare->room.fd, 0, 0, size)) return errno;
    xl_swap(&spare->spent, XR_FILLING, 0);  /* unless a store of another thread has needed it meanwhile */
    return 0;
}

#endif
