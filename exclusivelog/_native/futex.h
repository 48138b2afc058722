/* Atomic access to words that several processes map, and sleeping until one of them changes:
   futex(2). */
#ifndef EXCLUSIVELOG_FUTEX_H
#define EXCLUSIVELOG_FUTEX_H

#ifndef __linux__
#error "exclusivelog needs Linux: it uses futexes and robust lists"
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The word of a pthread_mutex_t that has the id of the thread that holds it. */
#ifdef __GLIBC__
#define XL_WORD 0
#else
#define XL_WORD 4       /* musl */
#endif

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

/* struct futex_waitv of linux/futex.h (5.16), which older build machines lack */
typedef struct { uint64_t val, uaddr; uint32_t flags, reserved; } xl_waiter;

static inline uint32_t xl_load(uint32_t *w) { return __atomic_load_n(w, __ATOMIC_ACQUIRE); }
static inline void xl_store(uint32_t *w, uint32_t v) { __atomic_store_n(w, v, __ATOMIC_RELEASE); }
static inline uint32_t xl_add(uint32_t *w, uint32_t v) {
    return __atomic_add_fetch(w, v, __ATOMIC_SEQ_CST);
}
static inline uint32_t xl_or(uint32_t *w, uint32_t v) {
    return __atomic_or_fetch(w, v, __ATOMIC_SEQ_CST);
}
static inline int xl_swap(uint32_t *w, uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(w, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline uint64_t xl_load64(uint64_t *w) { return __atomic_load_n(w, __ATOMIC_ACQUIRE); }
static inline void xl_store64(uint64_t *w, uint64_t v) { __atomic_store_n(w, v, __ATOMIC_RELEASE); }

/* The kernel's own clock, from its vDSO (a system call where there is none). A library such as
   libfaketime may have replaced `clock_gettime`, so that its process would judge all others, and
   its own waits, by another time than theirs. */
typedef int (*xl_clock_type)(clockid_t, struct timespec *);

__attribute__((unused)) static int xl_ask_kernel(clockid_t id, struct timespec *t) {
    return (int)syscall(SYS_clock_gettime, id, t);
}

__attribute__((unused)) static xl_clock_type xl_find_clock(void) {
    void *vdso = dlopen("linux-vdso.so.1", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    void *found = vdso == NULL ? NULL : dlsym(vdso, "__vdso_clock_gettime");
    xl_clock_type clock = xl_ask_kernel;
    if (vdso != NULL && found == NULL)
        found = dlsym(vdso, "__kernel_clock_gettime");      /* aarch64 */
    if (found != NULL)
        *(void **)&clock = found;
    return clock;
}

static inline void xl_read_clock(clockid_t id, struct timespec *t) {
    static xl_clock_type known;
    xl_clock_type clock = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (clock == NULL) {
        clock = xl_find_clock();
        __atomic_store_n(&known, clock, __ATOMIC_RELAXED);
    }
    clock(id, t);
}

static inline int64_t xl_now(void) {
    struct timespec t;
    xl_read_clock(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Sleep while *w == expected, at most ns (< 0: no limit); 0 or an errno. */
static inline int xl_wait(uint32_t *w, uint32_t expected, int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    long r = syscall(SYS_futex, w, FUTEX_WAIT, expected, ns < 0 ? NULL : &t, NULL, 0);
    return r == 0 ? 0 : errno;
}

static inline long xl_wake(uint32_t *w, int most) {
    return syscall(SYS_futex, w, FUTEX_WAKE, most, NULL, NULL, 0);
}

/* Sleep while every word has its expected value. ENOSYS before Linux 5.16. */
static inline int xl_wait_any(xl_waiter *waiters, unsigned n, int64_t ns) {
    int64_t at = xl_now() + ns;
    struct timespec t = {at / 1000000000, at % 1000000000};
    long r = syscall(SYS_futex_waitv, waiters, n, 0, ns < 0 ? NULL : &t, CLOCK_MONOTONIC);
    return r >= 0 ? 0 : errno;
}

/* Spin until *w changes or ns have passed; 1 if it changed. */
static inline int xl_watch(uint32_t *w, uint32_t expected, int64_t ns) {
    int64_t end = xl_now() + ns;
    do {
        for (int i = 0; i < 64; i++) {
            if (xl_load(w) != expected) return 1;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ __volatile__("yield");
#endif
        }
    } while (xl_now() < end);
    return 0;
}

#endif
