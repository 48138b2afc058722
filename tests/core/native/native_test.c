/* Runs the C of the compiled core alone. tests/core/test_native.py builds it under AddressSanitizer and
   UndefinedBehaviorSanitizer, under ThreadSanitizer, and without any. Usage: native_test NAME */
#include "_native/futex.h"
#include "_native/liveness.h"
#include "_native/deaths.h"
#include "_native/journal_lock.h"
#include "_native/journal_file.h"
#include "_native/fault_guard.h"
#include "_native/prefetch.h"
#include "_native/crc32c.h"
#include "_native/fraction.h"
#include "_native/blocks.h"
#include "_native/ahead.h"

#include <sched.h>
#include <stdio.h>
#include <sys/wait.h>

#define THREADS 4
#define SECOND 1000000000LL

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
            _exit(1);                                                                 \
        }                                                                             \
    } while (0)

static void *shared_memory(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void in_threads(void *(*run)(void *), void *arg) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, run, arg) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static pid_t in_a_child(void (*run)(void *), void *arg) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        run(arg);
        _exit(0);
    }
    return pid;
}

static void await_death(pid_t pid, int by) {
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (by) CHECK(WIFSIGNALED(status) && WTERMSIG(status) == by);
    else CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

/* ---- futex.h ------------------------------------------------------------------------- */

typedef struct { uint32_t turn, sum, top; uint64_t wide; } game;

static void *take_turns(void *arg) {
    game *g = arg;
    uint32_t me = xl_add(&g->top, 1) - 1;
    for (int round = 0; round < 2000; round++) {
        uint32_t now;
        while ((now = xl_load(&g->turn)) % THREADS != me) xl_wait(&g->turn, now, SECOND);
        g->sum += 1; /* a plain store: only the turn orders it */
        xl_add(&g->turn, 1);
        xl_wake(&g->turn, INT_MAX);
    }
    return NULL;
}

static void test_futex(void) {
    game *g = shared_memory(sizeof *g);
    in_threads(take_turns, g);
    CHECK(g->sum == THREADS * 2000);
    CHECK(xl_wait(&g->turn, g->turn + 1, SECOND) == EAGAIN);
    CHECK(xl_wait(&g->turn, g->turn, 1000000) == ETIMEDOUT);
    CHECK(xl_watch(&g->turn, g->turn + 1, SECOND) == 1);
    CHECK(xl_watch(&g->turn, g->turn, 1000000) == 0);
    CHECK(xl_swap(&g->sum, 1, 2) == 0 && xl_swap(&g->sum, THREADS * 2000, 2) == 1);
    CHECK(xl_or(&g->sum, 5) == 7);
    xl_store64(&g->wide, UINT64_MAX);
    CHECK(xl_load64(&g->wide) == UINT64_MAX);
    xl_waiter both[2] = {
        {xl_load(&g->turn), (uintptr_t)&g->turn, 2 /* FUTEX_32 */, 0},
        {xl_load(&g->sum) + 1, (uintptr_t)&g->sum, 2, 0},
    };
    int waited = xl_wait_any(both, 2, SECOND);
    CHECK(waited == EAGAIN || waited == ENOSYS);
    waited = xl_wait_any(both, 1, 1000000);
    CHECK(waited == ETIMEDOUT || waited == ENOSYS);
}

/* ---- liveness.h ---------------------------------------------------------------------- */

typedef struct {
    uint32_t word, presence, ready;
    struct robust_list node;
} place;

static void hold_and_pause(void *arg) {
    place *p = arg;
    CHECK(xl_take_hold(&p->word, &p->node, &p->presence) != NULL);
    xl_store(&p->ready, 1);
    for (;;) pause();
}

static void test_liveness(void) {
    place *p = shared_memory(sizeof *p);
    xl_holder *first = xl_take_hold(&p->word, &p->node, &p->presence);
    CHECK(first != NULL && (xl_load(&p->word) & FUTEX_TID_MASK) == (uint32_t)first->tid);
    errno = 0;
    CHECK(xl_take_hold(&p->word, &p->node, &p->presence) == NULL && errno == EBUSY);
    xl_let_go(first);
    CHECK(xl_load(&p->word) == 0);

    pid_t pid = in_a_child(hold_and_pause, p);
    while (!xl_load(&p->ready)) sleep_ms(1);
    uint32_t held = xl_load(&p->word);
    CHECK(held != 0 && !(held & FUTEX_OWNER_DIED));
    CHECK(kill(pid, SIGKILL) == 0);
    await_death(pid, SIGKILL);
    CHECK(xl_load(&p->word) & FUTEX_OWNER_DIED);
}

/* ---- journal_lock.h ------------------------------------------------------------------ */

typedef struct { xj_header words; uint64_t count; uint32_t ready; } journal;

/* On a busy machine, who has it may not run for longer than a call waits. */
static void lock_at_last(xj_header *w) {
    int got;
    while ((got = xj_lock(w)) == ETIMEDOUT) {}
    CHECK(got == 0);
}

static void *append_some(void *arg) {
    journal *j = arg;
    for (int i = 0; i < 5000; i++) {
        if (i % 3) lock_at_last(&j->words);
        else
            for (int got = EBUSY; got; got = xj_try_lock(&j->words)) CHECK(got == EBUSY);
        j->count += 1; /* a plain store: only the mutex orders it */
        j->words.tail = j->count;
        xj_unlock(&j->words);
        xj_raise(&j->words.synced, (uint64_t)i);
    }
    return NULL;
}

static void *take_the_other_locks(void *arg) {
    journal *j = arg;
    for (int i = 0; i < 2000; i++) {
        while (xj_take_writer_lock(&j->words, i % 2)) {}
        j->count += 1;
        xj_leave_writer_lock(&j->words);
    }
    return NULL;
}

static void die_with_the_mutex(void *arg) {
    journal *j = arg;
    CHECK(xj_lock(&j->words) == 0);
    raise(SIGKILL);
}

static void die_in_a_transaction(void *arg) {
    journal *j = arg;
    CHECK(xj_take_writer_lock(&j->words, 1) == 0);
    CHECK(xj_lock(&j->words) == 0);
    xl_store(&j->words.changing, 1);                /* as Journal.lock does */
    raise(SIGKILL);
}

static void die_flushing(void *arg) {
    journal *j = arg;
    CHECK(xj_try_flush_lock(&j->words) == 0);
    raise(SIGKILL);
}

static void hold_the_mutex(void *arg) {
    journal *j = arg;
    CHECK(xj_lock(&j->words) == 0);
    xl_store(&j->ready, 1);
    for (;;) pause();
}

static void test_journal_lock(void) {
    journal *j = shared_memory(sizeof *j);
    xj_header *w = &j->words;
    CHECK(xj_start(w) == 0);
    in_threads(append_some, j);
    CHECK(j->count == THREADS * 5000 && w->tail == j->count && w->synced == 4999);
    in_threads(take_the_other_locks, j);
    CHECK(j->count == THREADS * 7000);
    CHECK(xj_appending(w) == 0 && xj_writing(w) == 0);
    CHECK(xj_lock(w) == 0 && xj_appending(w) == (uint32_t)syscall(SYS_gettid));
    CHECK(xj_lock(w) == EDEADLK); /* by the same thread: said, not waited for */
    xj_unlock(w);
}

static void test_journal_deaths(void) {
    journal *j = shared_memory(sizeof *j);
    xj_header *w = &j->words;
    CHECK(xj_start(w) == 0);
    await_death(in_a_child(die_with_the_mutex, j), SIGKILL);
    CHECK(w->version == 0 && xj_lock(w) == 0);
    CHECK(w->version == 1 && w->everything == 1 && w->unsettled == 0);
    xj_unlock(w);

    await_death(in_a_child(die_in_a_transaction, j), SIGKILL);
    CHECK(xj_try_lock(w) == 0);
    CHECK(w->version == 2 && w->everything == 2 && w->unsettled == 1 && w->changing == 0);
    xj_unlock(w);
    CHECK(xj_take_writer_lock(w, 0) == 0);
    xl_store(&w->unsettled, 0);

    await_death(in_a_child(die_with_the_mutex, j), SIGKILL);    /* beside a transaction */
    CHECK(xj_try_lock(w) == 0);
    CHECK(w->version == 3 && w->unsettled == 0);
    xj_unlock(w);
    xj_leave_writer_lock(w);

    await_death(in_a_child(die_flushing, j), SIGKILL);
    CHECK(xj_try_flush_lock(w) == 0);
    xj_flush_unlock(w);

    pid_t pid = in_a_child(hold_the_mutex, j);
    while (!xl_load(&j->ready)) sleep_ms(1);
    CHECK(xj_appending(w) == (uint32_t)pid);
    CHECK(xj_lock(w) == ETIMEDOUT); /* after half a second, so that a caller can say so */
    CHECK(kill(pid, SIGKILL) == 0);
    await_death(pid, SIGKILL);
    CHECK(xj_lock(w) == 0 && w->version == 4);
    xj_unlock(w);
}

/* ---- deaths.h ------------------------------------------------------------------------ */

typedef struct { uint32_t dead, foreign, alive, slots[4]; uint64_t life, elsewhere; } obituary;

static void hold_them(void *arg) {
    obituary *o = arg;
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    xl_store(&o->dead, tid | FUTEX_WAITERS);
    xl_store(&o->foreign, tid);
    xl_store(&o->slots[2], tid);
    raise(SIGKILL);
}

static xd_watch *watch_of(obituary *o, uint64_t *life, uint32_t *first, uint32_t *second) {
    xd_watch *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    w->life = life;
    w->namespace = 1;
    w->locks[0] = (xd_lock){.word = first, .file = &w->file, .repair = 1};
    w->locks[1] = (xd_lock){.word = second, .file = &w->file, .repair = 1};
    w->count = 2;
    w->slots = (char *)o->slots;
    w->step = sizeof o->slots[0];
    w->slot_count = 4;
    return w;
}

static void *await_a_mark(void *arg) {
    obituary *o = arg;
    uint32_t seen;
    while (!((seen = xl_load(&o->dead)) & FUTEX_OWNER_DIED)) xl_wait(&o->dead, seen, -1);
    return NULL;
}

static void watch_nothing(void *arg) {
    xd_watch *w = arg;
    xd_stop(w); /* a forked child: its parent's watch goes on */
    CHECK(xd_all.first == NULL && !xd_all.running);
}

static void test_deaths(void) {
    obituary *o = shared_memory(sizeof *o);
    pthread_t waiter;
    o->life = 1;
    o->elsewhere = 2;
    xl_store(&o->alive, (uint32_t)syscall(SYS_gettid));
    xl_store(&o->slots[1], (uint32_t)syscall(SYS_gettid));
    CHECK(!xd_has_ended(xl_load(&o->alive), 1) && !xd_has_ended(xl_load(&o->alive), 0));
    pid_t pid = in_a_child(hold_them, o);
    while (!xl_load(&o->slots[2])) sleep_ms(1);
    siginfo_t facts;
    CHECK(waitid(P_PID, (id_t)pid, &facts, WEXITED | WNOWAIT) == 0);
    CHECK(xd_has_ended((uint32_t)pid, 1));      /* a zombie: /proc says so */
    CHECK(!xd_has_ended((uint32_t)pid, 0));
    await_death(pid, SIGKILL);
    CHECK(xd_has_ended((uint32_t)pid, 0));

    xd_watch *here = watch_of(o, &o->life, &o->dead, &o->alive);
    xd_watch *there = watch_of(o, &o->elsewhere, &o->foreign, &o->alive);
    CHECK(pthread_create(&waiter, NULL, await_a_mark, o) == 0);
    CHECK(xd_start(there) == 0 && xd_start(here) == 0);
    CHECK(pthread_join(waiter, NULL) == 0);
    while (!(xl_load(&o->slots[2]) & FUTEX_OWNER_DIED)) sleep_ms(1);
    CHECK(xl_load(&o->dead) == (FUTEX_WAITERS | FUTEX_OWNER_DIED));
    CHECK(xl_load(&o->foreign) == (uint32_t)pid);   /* an id of another pid namespace says nothing */
    CHECK(xl_load(&o->alive) == (uint32_t)syscall(SYS_gettid));
    CHECK(xl_load(&o->slots[1]) == xl_load(&o->alive));
    await_death(in_a_child(watch_nothing, here), 0);
    xd_stop(here);
    xd_stop(there);
    for (int running = 1; running; sleep_ms(1)) {
        xd_enter();
        running = xd_all.running;
        xd_leave();
    }
    free(here);
    free(there);
}

/* The lists of robust mutexes are empty for the kernel, as if the memory was freed before. (musl tells
   the kernel of the thread's own list when the thread takes its first robust mutex.) */
static void die_unreported(void *arg) {
    static struct robust_list_head nothing;
    journal *j = arg;
    nothing.list.next = &nothing.list;
    CHECK(xj_try_flush_lock(&j->words) == 0);
    CHECK(syscall(SYS_set_robust_list, &nothing, sizeof nothing) == 0);
    die_in_a_transaction(arg);
}

static void test_unreported_deaths(void) {
    journal *j = shared_memory(sizeof *j);
    uint64_t life = 1;
    uint32_t *words[XJ_LOCKS];
    xd_watch *w = calloc(1, sizeof *w);
    CHECK(xj_start(&j->words) == 0 && w != NULL);
    await_death(in_a_child(die_unreported, j), SIGKILL);
    CHECK(xj_lock(&j->words) == ETIMEDOUT);         /* for ever, if nobody looks */
    xj_words(&j->words, words);
    for (w->count = 0; w->count < XJ_LOCKS; w->count++)
        w->locks[w->count] = (xd_lock){.word = words[w->count], .file = &w->file, .repair = 1};
    w->life = &life;
    w->namespace = 1;
    CHECK(xd_start(w) == 0);
    int got;
    while ((got = xj_lock(&j->words)) != 0) CHECK(got == ETIMEDOUT);
    CHECK(j->words.unsettled && j->words.version == 1);
    while ((got = xj_take_writer_lock(&j->words, 1)) != 0) CHECK(got == ETIMEDOUT);
    while ((got = xj_try_flush_lock(&j->words)) != 0) CHECK(got == EBUSY);
    xj_flush_unlock(&j->words);
    xj_leave_writer_lock(&j->words);
    xj_unlock(&j->words);
    CHECK(xj_try_lock(&j->words) == 0);             /* it is a mutex like any other again */
    xj_unlock(&j->words);
    xd_stop(w);
    free(w);
}

/* ---- journal_file.h ------------------------------------------------------------------ */

static void test_journal_file(void) {
    char path[] = "/tmp/native-XXXXXX", data[3000], back[3000];
    int fd = mkstemp(path);
    xj_frame frame = {.magic = 0x024A4C58, .size = sizeof data, .position = 4096, .count = 7}, seen;
    xj_file file, other;
    CHECK(fd >= 0 && sizeof frame == 64);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (char)(i * 31);
    CHECK(xj_write(fd, 4096, &frame, sizeof frame, data, sizeof data) == 0);
    CHECK(pread(fd, back, sizeof frame, 4096) == sizeof frame);
    xj_copy_header(&seen, back);
    CHECK(memcmp(&seen, &frame, sizeof frame) == 0);
    seen.durable = 7 | (uint64_t)0xC0FFEE << 32;    /* as in a header of version 1 */
    CHECK(xj_renew_header(&seen) == 0xC0FFEE && seen.count == 7 && seen.durable == 0);
    CHECK(pread(fd, back, sizeof data, 4096 + sizeof frame) == sizeof data);
    CHECK(memcmp(back, data, sizeof data) == 0);

    CHECK(xj_identify(fd, &file) == 0 && xj_is(fd, &file));
    int zeros = open("/dev/zero", O_RDONLY), full = open("/dev/full", O_WRONLY);
    CHECK(zeros >= 0 && full >= 0);
    CHECK(xj_identify(zeros, &other) == 0 && !xj_is(zeros, &file) && xj_is(zeros, &other));
    CHECK(xj_write(zeros, 0, &frame, sizeof frame, data, sizeof data) == EBADF);
    CHECK(xj_write(full, 0, &frame, sizeof frame, data, sizeof data) == ENOSPC);
    CHECK(close(zeros) == 0 && close(full) == 0);
    CHECK(xj_identify(zeros, &other) == EBADF && !xj_is(zeros, &file));
    CHECK(xj_wall_ms() > 1700000000000);
    CHECK(unlink(path) == 0 && close(fd) == 0);
}

/* ---- spare_room.h -------------------------------------------------------------------- */

static uint32_t *mapped(int fd, size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static int temporary_file(off_t size) {
    char path[] = "/tmp/native-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0 && ftruncate(fd, size) == 0);
    return fd;
}

static off_t size_of(int fd) {
    struct stat facts;
    CHECK(fstat(fd, &facts) == 0);
    return facts.st_size;
}

static void test_spare_room(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int fd = temporary_file((off_t)(2 * page)), room = temporary_file(0);
    int stranger = temporary_file((off_t)page);
    uint32_t *words = mapped(fd, 2 * page);
    int region = xg_guard(words, 2 * page, 0), spare = xr_keep(room);
    CHECK(spare >= 0 && xr_fill(spare, 1 << 16) == 0 && size_of(room) == 1 << 16);
    xr_add_file(spare, fd);
    xg_set_spare(region, spare);
    CHECK(xr_can_store((uintptr_t)words) && !xr_is_spent(spare));
    words[0] = 7;               /* a store that succeeds needs no room */
    CHECK(size_of(room) == 1 << 16 && words[0] == 7);

    CHECK(ftruncate(fd, 0) == 0);   /* and no room helps where there is no file */
    words[0] = 8;
    CHECK(xr_is_spent(spare) && size_of(room) == 0 && xg_lost(region) && words[0] == 8);

    CHECK(xr_fill(spare, 1 << 16) == 0 && !xr_is_spent(spare));
    CHECK(dup2(stranger, room) == room);    /* another file has the number by now */
    words[page / 4] = 9;
    CHECK(size_of(stranger) == (off_t)page && words[page / 4] == 9 && xr_fill(spare, 1) == EBADF);
    xg_set_spare(region, -1);
    xg_let_go(region);
    xr_forget(spare);
    CHECK(xr_is_spent(-1) == 0);
}

/* ---- fault_guard.h ------------------------------------------------------------------- */

#define PAGES 200
#define STORES 500

typedef struct { uint32_t *words; size_t page; uint32_t arrived; } stores;

static void *store_on(void *arg) {
    stores *s = arg;
    for (uint32_t at = 0; at < PAGES; at++) {
        uint32_t *words = s->words + at * s->page / 4;
        xl_add(&s->arrived, 1);
        while (xl_load(&s->arrived) < THREADS * (at + 1)) sched_yield(); /* all fault at once */
        for (int i = 0; i < STORES; i++) xl_add(&words[i], 1);
    }
    return NULL;
}

static void die_beside_the_region(void *arg) {
    *(volatile char *)arg = 1;
}

static void test_fault_guard(void) {
    char path[] = "/tmp/native-XXXXXX";
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct stat facts;
    int fd = mkstemp(path);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)(PAGES * page)) == 0 && fstat(fd, &facts) == 0);
    uint32_t *by_address = mapped(fd, PAGES * page), *by_inode = mapped(fd, 2 * page);
    int first = xg_guard(by_address, PAGES * page, 0), second = xg_guard((void *)2, 0, facts.st_ino);
    CHECK(first >= 0 && second >= 0 && first != second);
    CHECK(ftruncate(fd, 0) == 0); /* from here on a store has nowhere to go */
    CHECK(xg_lost(first) == 0 && xg_lost(second) == 0);
    stores all = {by_address, page, 0};
    in_threads(store_on, &all);
    CHECK(xg_lost(first) == 1);
    for (size_t i = 0; i < PAGES * page / 4; i++)
        CHECK(by_address[i] == (i % (page / 4) < STORES ? THREADS : 0));
    xg_let_go(first); /* the same file, by its inode now */
    by_inode[page / 4] = 3;
    CHECK(xg_lost(second) == 1 && by_inode[page / 4] == 3);
    xg_let_go(second);

    uint32_t *unguarded = mapped(fd, page);
    await_death(in_a_child(die_beside_the_region, unguarded), SIGBUS);
    int guards[XG_REGIONS + 1];
    for (int i = 0; i <= XG_REGIONS; i++) guards[i] = xg_guard(unguarded, page, 0);
    CHECK(guards[XG_REGIONS - 1] >= 0 && guards[XG_REGIONS] == -1);
    for (int i = 0; i < XG_REGIONS; i++) xg_let_go(guards[i]);
    CHECK(unlink(path) == 0 && close(fd) == 0);
}

/* ---- crc32c.h ------------------------------------------------------------------------ */

#define MOST_SUMMED (7 * XC_LONG)

/* Bit by bit, as the polynomial says. */
static uint32_t fold_slowly(uint32_t c, const unsigned char *p, size_t size) {
    for (; size; p++, size--) {
        c ^= *p;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? XC_POLYNOMIAL : 0);
    }
    return c;
}

/* Every way that there is here gives what the polynomial says, of runs that begin anywhere and of
   registers with anything in them; bytes behind a run that are read next change nothing. */
static void check_sum(const unsigned char *p, size_t size, uint32_t before, int kind) {
    const uint32_t expected = fold_slowly(before, p, size);
    for (xc_kind = XC_TABLES; xc_kind <= XC_AVX512; xc_kind++) {
        if (xc_kind > XC_TABLES && xc_kind != kind
            && !(kind == XC_AVX512 && xc_kind == XC_SSE42)) continue;
        CHECK(xl_crc_fold(before, p, size) == expected);
        CHECK(xl_crc_fold_on(before, p, size, 2 * XC_AHEAD) == expected);
        CHECK(xl_crc_fold(xl_crc_fold(before, p, size / 3), p + size / 3, size - size / 3)
              == expected);
    }
    xc_kind = kind;
}

static void test_crc32c(void) {
    int kind = xl_crc_start();
    CHECK(xl_crc32c("123456789", 9) == 0xE3069283u);
    CHECK(xl_crc32c("", 0) == 0 && xl_crc_fold(77, "", 0) == 77);
    uint32_t dice = 1;
    for (size_t size = 0; size <= MOST_SUMMED; size += size < 1100 ? 1 : 97) {
        unsigned char *data = malloc(size + size % 71);     /* a sanitizer guards its end */
        CHECK(data != NULL || size == 0);
        for (size_t i = 0; i < size + size % 71; i++) {
            dice = dice * 1664525 + 1013904223;
            data[i] = dice >> 24;
        }
        check_sum(data + size % 71, size, size % 2 ? dice : UINT32_MAX, kind);
        free(data);
    }
}

/* ---- fraction.h ---------------------------------------------------------------------- */

static void test_fraction(void) {
    CHECK(xl_fraction(900, 1, 3) == 300 && xl_fraction(900, 0, 3) == 0);
    CHECK(xl_fraction(10, 2, 3) == 6);
    CHECK(xl_fraction(UINT64_MAX, UINT64_MAX, UINT64_MAX) == UINT64_MAX);
    CHECK(xl_fraction(UINT64_MAX, 1, 2) == UINT64_MAX / 2);
}

/* ---- sections.h ---------------------------------------------------------------------- */

enum { MESSAGES = 9 };

static void write_offsets(uint32_t *offsets, size_t bytes) {
    if (offsets == NULL) return;
    for (size_t i = 0; i <= MESSAGES; i++) offsets[i] = (uint32_t)(bytes * i / MESSAGES);
}

/* Reader and writer agree where each section lies. What is cut off, or added, is found. */
static void check_sections(uint16_t flags) {
    const xe_sizes sizes = {70, 13, 30, 5, 0};
    const size_t size = xe_entry_size(flags, MESSAGES, &sizes);
    char *data = calloc(1, size + 8);
    xe_space space;
    CHECK(data != NULL && size % 8 == 0);
    xe_place(data, flags, MESSAGES, &sizes, &space);
    write_offsets(space.value_offsets, sizes.values);
    write_offsets(space.key_offsets, sizes.keys);
    write_offsets(space.property_offsets, sizes.properties);
    for (uint32_t i = 0; space.gaps != NULL && i < MESSAGES; i++) space.gaps[i] = 2 * i;

    xe_laid laid = {.start = data, .size = size, .count = MESSAGES, .flags = flags, .version = 1};
    laid.name_length = (uint16_t)sizes.name;
    CHECK(xe_find(&laid) == XE_WHOLE);
#define SAME(section, type, flag, kind, bytes) CHECK(laid.section == space.section);
    XE_SECTIONS(SAME)
    laid.size = size + 8;
    CHECK(xe_find(&laid) == XE_LEFT_OVER);
    laid.size = size - 8;
    CHECK(xe_find(&laid) == XE_TOO_LONG);
    laid.size = size;
    space.value_offsets[3] = space.value_offsets[4] + 1;
    CHECK(xe_find(&laid) == XE_NOT_RISING);
    laid.count = 0;
    CHECK(xe_find(&laid) == XE_NO_MESSAGES);
    laid.count = UINT32_MAX;
    CHECK(xe_find(&laid) == XE_TOO_LONG);
    laid.flags |= XE_KNOWN_FLAGS + 1;
    CHECK(xe_find(&laid) == XE_UNKNOWN_SECTIONS);
    free(data);
}

static void test_sections(void) {
    for (uint16_t flags = 0; flags <= XE_KNOWN_FLAGS; flags++) check_sections(flags);
}

/* ---- blocks.h ------------------------------------------------------------------------ */

enum { MANY = 2500 };

/* An entry with blocks, of which only the footer's fields and checksum are missing. */
static char *make_blocked(uint16_t flags, xe_laid *laid) {
    const xe_sizes sizes = {70000, 30000, 20000, 5, 0};
    const size_t size = xe_entry_size(flags, MANY, &sizes);
    char *data = calloc(1, size);
    xe_space space;
    CHECK(data != NULL && size % 8 == 0);
    xe_place(data, flags, MANY, &sizes, &space);
    for (uint32_t i = 0; i <= MANY; i++) {
        space.value_offsets[i] = 70000 / MANY * i;
        if (space.key_offsets != NULL) space.key_offsets[i] = 30000 / MANY * i;
        if (space.property_offsets != NULL) space.property_offsets[i] = 20000 / MANY * i;
        if (space.gaps != NULL && i < MANY) space.gaps[i] = 3 * i;
        if (space.times != NULL && i < MANY) space.times[i] = i / 2;
    }
    memset(space.values, 'v', 70000);
    const size_t tail = xb_seal(data, xe_plain_size(flags, MANY, &sizes), flags, MANY, &sizes, &space);
    const uint32_t sum = xl_crc32c(data + tail, size - tail);
    memcpy(data + size - XE_FOOTER + XB_CRC, &sum, sizeof sum);
    *laid = (xe_laid){.start = data, .size = size, .count = MANY, .flags = flags, .name_length = 5,
                      .version = 2};
    return data;
}

static size_t count_sound(const xe_laid *laid) {
    uint8_t *seen = calloc(1, laid->blocks);
    size_t sound = 0;
    CHECK(seen != NULL);
    for (size_t i = 0; i < MANY; i++)
        sound += (size_t)xb_messages_are_sound(laid, seen, i, i + 1, 0);
    CHECK(xb_messages_are_sound(laid, seen, 0, MANY, 0) == (sound == MANY));
    free(seen);
    return sound;
}

static void check_blocks(uint16_t flags) {
    xe_laid laid;
    char *data = make_blocked(flags, &laid);
    CHECK(xe_find(&laid) == XE_WHOLE);
    CHECK(laid.last_time == (flags & XE_TIMES ? (MANY - 1) / 2 : 0));
    if (flags & XE_GAPS) CHECK(laid.last_gap == 3 * (MANY - 1));
    CHECK(xb_tail_is_sound(&laid) && xb_sums_hold(&laid) && count_sound(&laid) == MANY);
    for (size_t at = 0; at < laid.size; at += at < laid.body ? 4999 : 1) {
        data[at] ^= 4;
        if (at >= laid.body) CHECK(xe_find(&laid) != XE_WHOLE || !xb_tail_is_sound(&laid));
        else CHECK(!xb_sums_hold(&laid) && count_sound(&laid) < MANY && xb_tail_is_sound(&laid));
        data[at] ^= 4;
        CHECK(at < laid.body || xe_find(&laid) == XE_WHOLE);
    }
    laid.size += 8;
    CHECK(xe_find(&laid) != XE_WHOLE);
    free(data);
}

static void test_blocks(void) {
    xl_crc_start();
    for (uint16_t flags = 0; flags <= XE_KNOWN_FLAGS; flags += 1 + flags % 3) check_blocks(flags);
}

/* ---- ahead ---------------------------------------------------------------------------- */

#define AHEAD_CHUNKS 40
#define AHEAD_BYTES ((size_t)4096)

/* Each byte stands for 16 of its kind. */
static int widen(const char *from, char *to, int size, int room) {
    if (size * 16 != room) return -1;
    for (int i = 0; i < room; i++) to[i] = from[i / 16];
    return room;
}

static xa_job *ahead_job(size_t damaged) {
    const size_t size = AHEAD_BYTES / 16;
    xa_job *job = calloc(1, sizeof *job);
    xe_place_of_chunk *places = calloc(AHEAD_CHUNKS, sizeof *places);
    char *from = malloc(size * AHEAD_CHUNKS);
    for (size_t i = 0; i < AHEAD_CHUNKS; i++) {
        memset(from + i * size, (int)(i + 1), size);
        places[i] = (xe_place_of_chunk){i * size, AHEAD_BYTES, (uint32_t)size,
                                        xl_crc32c(from + i * size, size) + (i == damaged)};
    }
    job->from = from, job->places = places, job->chunk = AHEAD_BYTES;
    job->to = malloc(AHEAD_BYTES * AHEAD_CHUNKS);
    job->states = calloc(AHEAD_CHUNKS, sizeof *job->states);
    return job;
}

static void end_job(xa_job *job) {
    xa_withdraw(job);
    free((void *)(uintptr_t)job->from);
    free((void *)(uintptr_t)job->places);
    free(job->to);
    free(job->states);
    free(job);
}

static void read_chunk(xa_job *job, size_t number, size_t damaged) {
    uint32_t state = xa_try(job, number);
    if (state == XA_TAKEN) state = xa_await(job, number);
    if (number == damaged) {
        CHECK(state == XA_FAILED);
        return;
    }
    CHECK(state == XA_MADE);
    for (size_t i = 0; i < AHEAD_BYTES; i++)
        CHECK(job->to[number * AHEAD_BYTES + i] == (char)(number + 1));
}

/* Entries are read to their end or left at once, and their memory is gone afterwards. */
static void read_with_a_thread(void *nothing) {
    (void)nothing;
    for (size_t round = 0; round < 300; round++) {
        const size_t damaged = round % 3 ? AHEAD_CHUNKS : round % AHEAD_CHUNKS;
        xa_job *job = ahead_job(damaged), *other = ahead_job(AHEAD_CHUNKS);
        xa_request(job, 1, AHEAD_CHUNKS);
        xa_request(other, 0, AHEAD_CHUNKS);     /* as a rule the thread is at work already */
        for (size_t number = 0; number < round % (AHEAD_CHUNKS + 1); number++) {
            read_chunk(job, number, damaged);
            read_chunk(other, number, AHEAD_CHUNKS);
        }
        end_job(job);
        end_job(other);
    }
}

static uint32_t may_widen;

static int widen_when_it_may(const char *from, char *to, int size, int room) {
    while (!xl_load(&may_widen)) sched_yield();
    return widen(from, to, size, room);
}

static void have_the_thread_read(void *nothing) {
    (void)nothing;
    xa_job *job = ahead_job(AHEAD_CHUNKS);
    xa_decompress = widen;
    xa_request(job, 0, AHEAD_CHUNKS);
    for (int ms = 0; ms < 60000 && xl_load(&job->states[AHEAD_CHUNKS - 1]) != XA_MADE; ms++)
        sleep_ms(1);
    CHECK(xl_load(&job->states[AHEAD_CHUNKS - 1]) == XA_MADE);
    end_job(job);
}

/* What the parent's thread is at work on keeps the child from no thread of its own. */
static void fork_while_the_thread_is_at_work(void) {
    xa_job *job = ahead_job(AHEAD_CHUNKS);
    xa_decompress = widen_when_it_may;
    xa_request(job, 0, AHEAD_CHUNKS);
    if (xa_process == xi_here()) {       /* else there is one processor, and no thread */
        while (xl_load(&job->states[0]) != XA_TAKEN) sched_yield();
        await_death(in_a_child(have_the_thread_read, NULL), 0);
    }
    xl_store(&may_widen, 1);
    end_job(job);
}

static void test_ahead(void) {
    int found = xa_load();
    CHECK(found == (xa_decompress != NULL));
    xl_crc_start();
    xa_decompress = widen;
    read_with_a_thread(NULL);
    await_death(in_a_child(read_with_a_thread, NULL), 0);   /* which has no such thread at first */
    fork_while_the_thread_is_at_work();
}

/* -------------------------------------------------------------------------------------- */

static const struct { const char *name; void (*run)(void); } TESTS[] = {
    {"futex", test_futex},
    {"liveness", test_liveness},
    {"journal_lock", test_journal_lock},
    {"journal_deaths", test_journal_deaths},
    {"deaths", test_deaths},
    {"unreported_deaths", test_unreported_deaths},
    {"journal_file", test_journal_file},
    {"spare_room", test_spare_room},
    {"fault_guard", test_fault_guard},
    {"crc32c", test_crc32c},
    {"fraction", test_fraction},
    {"sections", test_sections},
    {"blocks", test_blocks},
    {"ahead", test_ahead},
};

int main(int count, char **names) {
    for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++) {
        if (count == 1) puts(TESTS[i].name);
        else if (strcmp(names[1], TESTS[i].name) == 0) {
            const char *patience = getenv("EXCLUSIVELOG_TEST_PATIENCE");
            alarm(patience ? (unsigned)atoi(patience) : 120);
            TESTS[i].run();
            return 0;
        }
    }
    return count == 1 ? 0 : 2;
}
