/* Deaths that the kernel's robust list does not report.

   The kernel reads a thread's robust list when the thread ends, in the memory of its process. The list
   is lost if that memory was freed before: by process_mrelease(2), as earlyoom does it, or by the
   kernel's own OOM reaper. It is read late if the process dumps core first, and never by systems
   without robust lists. Then the words that the thread holds are never marked, and all wait for ever.

   So one thread of each process looks at the words of its ledgers, every XD_LOOK_NS. A word that a
   thread holds that has ended gets FUTEX_OWNER_DIED in place of its id, as the kernel would have done,
   and whoever takes it next repairs what it protects. If the kernel comes later, it finds another id,
   and does nothing. */
#ifndef EXCLUSIVELOG_DEATHS_H
#define EXCLUSIVELOG_DEATHS_H

#include "futex.h"
#include "identity.h"
#include "threads.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define XD_LOOK_NS 400000000
#define XD_TOO_LATE_NS 100000000
#define XD_PAUSE_NS (4LL * XD_LOOK_NS)
#define XD_THOROUGH 8       /* every so many looks, engines' threads are compared with their processes */
#define XD_LOCKS 8
#define XD_SLOTS_PER_LOOK 8

/* ---- has a thread ended? -------------------------------------------------------------- */

/* Flags of a task (field 9 of its stat): it exits; it waits for, or writes, a core dump; a signal has
   ended it. It runs no user code any more, and no system call that it made before is under way. */
#define XD_ENDING (0x4 | 0x8 | 0x200 | 0x400)

/* Does /proc show this pid namespace? It may be of another one, or not be mounted. */
static inline int xd_proc_is_ours(void) {
    char wanted[64], found[64];
    ssize_t n = readlink("/proc/thread-self", found, sizeof found - 1);
    if (n <= 0) return 0;
    found[n] = 0;
    snprintf(wanted, sizeof wanted, "%d/task/%d", (int)getpid(), (int)syscall(SYS_gettid));
    return strcmp(wanted, found) == 0;
}

static inline ssize_t xd_read(const char *path, char *text, size_t room) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;
    if (fd < 0) return -1;
    n = read(fd, text, room - 1);
    close(fd);
    if (n >= 0) text[n] = 0;
    return n;
}

/* What /proc says: 1 it has ended, 0 it lives, or is hidden. */
static inline int xd_is_ending(uint32_t tid) {
    char path[64], text[512], state;
    const char *after;
    unsigned flags;
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", tid, tid);
    if (xd_read(path, text, sizeof text) <= 0) return 0;
    after = strrchr(text, ')');
    if (after == NULL || sscanf(after + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
        return 0;
    return state == 'Z' || state == 'X' || state == 'x' || (flags & XD_ENDING) != 0;
}

/* When a thread began, in ticks of the kernel's clock, which no other thread with its id has; 0 if that
   is unknown. Another user's is shown, too. */
static inline uint64_t xd_began(uint32_t tid) {
    char path[64], text[1024];
    const char *after;
    unsigned long long ticks;
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", tid, tid);
    if (xd_read(path, text, sizeof text) <= 0) return 0;
    after = strrchr(text, ')');
    if (after == NULL
        || sscanf(after + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s"
                             " %llu", &ticks) != 1) return 0;
    return ticks;
}

/* 1: this thread will never run again; 0: it lives, or that is unknown. `proc`: may /proc be asked?
   A thread that a fatal signal has reached, but that is still in a system call (the disk is stalled,
   say) lives: its write may still reach the file. */
static inline int xd_has_ended(uint32_t tid, int proc) {
    if (kill((pid_t)tid, 0) != 0 && errno == ESRCH) return 1;
    return proc && xd_is_ending(tid);
}

/* The process of a thread; 0 if that is unknown. */
static inline uint32_t xd_process_of(uint32_t tid) {
    char path[64], text[512];
    const char *found;
    unsigned pid = 0;
    snprintf(path, sizeof path, "/proc/%u/status", tid);
    if (xd_read(path, text, sizeof text) <= 0) return 0;
    found = strstr(text, "\nTgid:");
    return found != NULL && sscanf(found, "\nTgid: %u", &pid) == 1 ? pid : 0;
}

/* 1: the process of this thread has mapped no file with this name or inode number, which all holders
   map: the id of the holder was given anew. 0: it has. -1: unknown, as it belongs to another user. */
static inline int xd_is_stranger(uint32_t tid, const char *name, uint64_t inode) {
    char path[64], text[8192 + 256], number[32];
    size_t kept = 0;
    ssize_t n;
    int fd, ours = 0, any = 0;
    snprintf(path, sizeof path, "/proc/%u/maps", tid);
    snprintf(number, sizeof number, " %llu ", (unsigned long long)inode);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    while (!ours && (n = read(fd, text + kept, 8192)) > 0) {
        size_t size = kept + (size_t)n;
        any = 1;
        ours = memmem(text, size, name, strlen(name)) || memmem(text, size, number, strlen(number));
        kept = size < 256 ? size : 256;     /* a name may be cut in two */
        memmove(text, text + size - kept, kept);
    }
    close(fd);
    return ours ? 0 : any && n == 0 ? 1 : -1;
}

/* ---- words ---------------------------------------------------------------------------- */

static inline int xd_mark_dead(uint32_t *word, uint32_t seen) {
    if (!xl_swap(word, seen, (seen & FUTEX_WAITERS) | FUTEX_OWNER_DIED)) return 0;
    xl_wake(word, INT_MAX);
    return 1;
}

/* A lock file, which all that take its locks have mapped. Those of lock.mdb hold a shared lock on a byte
   of it before, whose place names their pid namespace, until they have unmapped it. */
typedef struct {
    char name[32];
    int fd;             /* or -1 */
    uint64_t inode;
} xd_file;

#define XD_NAMESPACES ((int64_t)1 << 41)    /* where the bytes of namespaces begin */
#define XD_LAST_NAMESPACE ((int64_t)UINT32_MAX)

static inline int xd_is_there(const xd_file *file) {
    struct stat facts;
    return file->fd >= 0 && fstat(file->fd, &facts) == 0 && (uint64_t)facts.st_ino == file->inode;
}

/* 1: no other open file has a lock in this part; 0: one has, or that is unknown. A program may have
   closed the descriptor, and opened another file under its number. */
static inline int xd_is_unlocked(const xd_file *file, int64_t start, int64_t size) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    lock.l_start = start;
    lock.l_len = size;
    return size == 0 || (xd_is_there(file) && fcntl(file->fd, F_OFD_GETLK, &lock) == 0
                         && lock.l_type == F_UNLCK && xd_is_there(file));
}

/* A lock that is looked at. `repair`: whether to mark it, or only to tell of it. */
typedef struct {
    uint32_t *word;
    const xd_file *file;
    uint32_t last;      /* the thread that held it at the last look, */
    uint64_t began;     /* when that thread began, at the first look at which it held it, */
    unsigned others;    /* and at how many looks since, another thread had its id */
    int64_t looked;     /* when that look was */
    int repair;
} xd_lock;

/* In the slot of an engine (see slots.py), from its liveness word. */
#define XD_SLOT_PID 4
#define XD_SLOT_ENGINE 16
#define XD_SLOT_PIDS 48

typedef struct xd_watch {
    struct xd_watch *next;
    uint64_t *life;         /* the pid namespace in which the ids in the words are valid */
    uint64_t namespace;     /* of this process */
    xd_file file;           /* owners.lock */
    xd_lock locks[XD_LOCKS];
    unsigned count;
    char *slots;            /* the first of the words of the engines */
    size_t step, slot_count;
    uint32_t *lmdb;         /* the first page of LMDB's lock file, */
    xd_file lmdb_file;      /* and that file, lock.mdb */
    xd_lock lmdb_locks[2];  /* readers, writers */
    uint32_t marked;        /* how many words were marked */
    uint32_t looks;
} xd_watch;

/* The namespace is compared after the word was read: an engine that begins the next life of the ledger
   stores its own there before it takes a lock. */
static inline int xd_knows(xd_watch *w) {
    return w->namespace != 0 && xl_load64(w->life) == w->namespace;
}

/* 1: no process of another pid namespace has this file open. A reader of one may: its ids in LMDB's lock
   of readers say nothing here. */
static inline int xd_is_of_one_namespace(const xd_watch *w, const xd_file *file) {
    const int64_t own = (int64_t)(uint32_t)w->namespace;
    return xd_is_unlocked(file, XD_NAMESPACES, own)
        && xd_is_unlocked(file, XD_NAMESPACES + own + 1, XD_LAST_NAMESPACE - own);
}

/* Mark the word for this thread, if it is dead. `began`: when that was asked. */
static inline void xd_mark_in_time(xd_watch *w, uint32_t *word, uint32_t seen, int64_t began) {
    /* This process may have been stopped meanwhile, and the id have been given anew. */
    if (xl_now() - began < XD_TOO_LATE_NS) w->marked += (uint32_t)xd_mark_dead(word, seen);
}

/* 1: the id of the thread that held it was given anew, to one that has nothing of the ledger. Where
   nobody may see what that has mapped, because it began later: at two looks in a row, so that one which
   takes the lock itself has time to release it. `tid`: has the lock since the last look, or longer. */
static inline int xd_was_given_anew(xd_lock *lock, uint32_t tid) {
    const int stranger = xd_is_stranger(tid, lock->file->name, lock->file->inode);
    const uint64_t began = stranger < 0 ? xd_began(tid) : lock->began;
    if (stranger >= 0 || began == 0 || lock->began == 0) return stranger > 0;
    lock->others = began == lock->began ? 0 : lock->others + 1;
    return lock->others > 1;
}

static inline void xd_look(xd_watch *w, xd_lock *lock, int proc) {
    int64_t began = xl_now();
    uint32_t seen = xl_load(lock->word), tid = seen & FUTEX_TID_MASK;
    /* After a pause of this process, one that has the same id may be a later holder. */
    uint32_t last = began - lock->looked < XD_PAUSE_NS ? lock->last : 0;
    lock->last = tid;
    lock->looked = began;
    if (tid == 0 || !lock->repair || !xd_knows(w)) return;
    if (tid != last) {
        lock->began = proc ? xd_began(tid) : 0;
        lock->others = 0;
    }
    if (!xd_has_ended(tid, proc) && !(tid == last && proc && xd_was_given_anew(lock, tid))) return;
    if (lock != &w->lmdb_locks[0] || xd_is_of_one_namespace(w, lock->file))
        xd_mark_in_time(w, lock->word, seen, began);
}

/* 1: the thread that holds an engine's word is one of another process than the engine's: its id was
   given anew. The engine's id is 0 while a slot is taken or left. */
static inline int xd_slot_is_strange(xd_watch *w, const char *slot, uint32_t tid) {
    uint64_t *engine = (uint64_t *)(slot + XD_SLOT_ENGINE), before = xl_load64(engine);
    uint32_t pid = xl_load((uint32_t *)(slot + XD_SLOT_PID)), found = xd_process_of(tid);
    return before != 0 && xl_load64((uint64_t *)(slot + XD_SLOT_PIDS)) == w->namespace
        && found != 0 && found != pid && xl_load64(engine) == before;
}

static inline void xd_look_at_slots(xd_watch *w, int proc) {
    uint32_t start = (uint32_t)xl_now() * 2654435761u >> 16, found = 0;
    const int thorough = proc && w->looks++ % XD_THOROUGH == 0;
    for (size_t i = 0; i < w->slot_count && found < XD_SLOTS_PER_LOOK; i++) {
        char *slot = w->slots + (start + i) % w->slot_count * w->step;
        int64_t began = xl_now();
        uint32_t seen = xl_load((uint32_t *)slot), tid = seen & FUTEX_TID_MASK;
        if (tid == 0) continue;
        found++;
        if (xd_knows(w) && (xd_has_ended(tid, proc) || (thorough && xd_slot_is_strange(w, slot, tid))))
            xd_mark_in_time(w, (uint32_t *)slot, seen, began);
    }
}

/* ---- LMDB's own mutexes --------------------------------------------------------------- */

/* lock.mdb of LMDB 0.9: magic, format, mutex of the table of readers, transaction, readers; then, at
   the next cache line, the mutex of writers. */
#define XD_LMDB_PAGE 4096
#define XD_LMDB_MAGIC 0xBEEFC0DEu
#define XD_LMDB_FORMAT 0x10001u
#define XD_LMDB_READERS 8
#define XD_LMDB_WRITER ((XD_LMDB_READERS + sizeof(pthread_mutex_t) + 16 + 63) / 64 * 64)

static inline int xd_is_lmdb(xd_watch *w) {
    return w->lmdb != NULL && xl_load(w->lmdb) == XD_LMDB_MAGIC
        && xl_load(w->lmdb + 1) == XD_LMDB_FORMAT;
}

static inline void xd_look_at_lmdb(xd_watch *w, int proc) {
    if (!xd_is_lmdb(w)) return;
    for (int i = 0; i < 2; i++) {
        xd_lock *lock = &w->lmdb_locks[i];
        xd_look(w, lock, proc);
        /* Whoever was woken when it was released may have died before it took it. LMDB's waiters sleep
           without a time limit. */
        if (lock->repair && !(xl_load(lock->word) & FUTEX_TID_MASK)) xl_wake(lock->word, 1);
    }
}

/* ---- the thread ----------------------------------------------------------------------- */

/* `holder`: the stamp of the process in which a thread uses the list; 0: none does. `owner`: of the
   process whose watches and thread these are. */
static struct {
    uint32_t holder, owner;
    xd_watch *first;
    int running;
} xd_all = {0, 0, NULL, 0};

/* No mutex of the C library: that would stay locked in a child that C code forks while the thread
   looks (rule C8). A stamp of another process is of one that waits for nothing here. */
static inline void xd_enter(void) {
    const struct timespec pause = {0, 100000};
    const uint32_t here = xi_here();
    for (;;) {
        uint32_t seen = __atomic_load_n(&xd_all.holder, __ATOMIC_RELAXED);
        if (seen != here && __atomic_compare_exchange_n(&xd_all.holder, &seen, here, 0,
                                                        __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            break;
        nanosleep(&pause, NULL);
    }
    if (xd_all.owner == here) return;
    xd_all.owner = here;        /* a forked child has no thread, and its watches are its parent's */
    xd_all.first = NULL;
    xd_all.running = 0;
}

static inline void xd_leave(void) { __atomic_store_n(&xd_all.holder, 0, __ATOMIC_RELEASE); }

static inline void *xd_run(void *arg) {
    uint32_t never = 0;
    (void)arg;
    for (;;) {
        struct timespec t = {0, XD_LOOK_NS};
        int proc;
        syscall(SYS_futex, &never, FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0);
        proc = xd_proc_is_ours();
        xd_enter();
        if (xd_all.first == NULL) {
            xd_all.running = 0;
            xd_leave();
            return NULL;
        }
        for (xd_watch *w = xd_all.first; w != NULL; w = w->next) {
            for (unsigned i = 0; i < w->count; i++) xd_look(w, &w->locks[i], proc);
            xd_look_at_lmdb(w, proc);
            xd_look_at_slots(w, proc);
        }
        xd_leave();
    }
}

/* Look at these words from now on; 0 or an errno. */
static inline int xd_start(xd_watch *w) {
    pthread_t thread;
    int failed = 0;
    xd_enter();
    if (!xd_all.running) failed = xt_start(&thread, xd_run, NULL, 1);
    if (!failed) {
        xd_all.running = 1;
        w->next = xd_all.first;
        xd_all.first = w;
    }
    xd_leave();
    return failed;
}

/* Once this returns, the words may be unmapped. No effect in a forked child. */
static inline void xd_stop(xd_watch *w) {
    xd_enter();
    for (xd_watch **at = &xd_all.first; *at != NULL; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    xd_leave();
}

/* Look at LMDB's mutexes, too; 0 or an errno. `fd` is lock.mdb's. */
static inline int xd_add_lmdb(xd_watch *w, int fd, int repair_writer) {
    struct stat facts;
    char *page;
    int copy;
    if (fstat(fd, &facts) != 0) return errno;
    page = mmap(NULL, XD_LMDB_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) return errno;
    copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);   /* the caller may close its own earlier */
    if (copy < 0) {
        const int failed = errno;
        munmap(page, XD_LMDB_PAGE);
        return failed;
    }
    xd_enter();
    w->lmdb_locks[0].word = (uint32_t *)(page + XD_LMDB_READERS + XL_WORD);
    w->lmdb_locks[0].repair = 1;
    w->lmdb_locks[1].word = (uint32_t *)(page + XD_LMDB_WRITER + XL_WORD);
    w->lmdb_locks[1].repair = repair_writer;
    w->lmdb_locks[0].file = w->lmdb_locks[1].file = &w->lmdb_file;
    memcpy(w->lmdb_file.name, "/lock.mdb", sizeof "/lock.mdb");
    w->lmdb_file.fd = copy;
    w->lmdb_file.inode = (uint64_t)facts.st_ino;
    w->lmdb = (uint32_t *)page;
    xd_leave();
    return 0;
}

/* Once the words are not looked at any more. */
static inline void xd_remove_lmdb(xd_watch *w) {
    if (w->lmdb == NULL) return;
    munmap(w->lmdb, XD_LMDB_PAGE);
    if (xd_is_there(&w->lmdb_file)) close(w->lmdb_file.fd);
    w->lmdb = NULL;
    w->lmdb_file.fd = -1;
}

#endif
