/* The least that sharing a flush costs: what the rows of P5 are held against.

   shared_flush FILE PROCESSES THREADS SECONDS appends frames to FILE from THREADS threads in each
   of PROCESSES processes. Each append takes a mutex, writes at the tail and then waits until its
   bytes are durable. A thread that finds no flush in progress flushes for all that wait; the others
   sleep on a futex. There is no epoch, no check, no message and no recovery: only what durability
   itself needs. Prints how many appends a second were durable, of all together. */ #include
   "_native/futex.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define FRAME 192               /* what a message of 100 B is in the journal, with its frame */
#define ROOM (8u << 20)         /* the file is written before, then over and over again */
#define GATHER_NS 80000         /* the leader waits this long for those it has just served */
#define HEAD_START_NS 100000000

typedef struct {
    pthread_mutex_t write;
    uint64_t tail, synced, done;
    int64_t start, end;
    uint32_t leading, flushes, sleepers, arrivals, batch_start, batch_size;
} shared;

static shared *all;
static int fd;

static void must(int holds, const char *what) {
    if (holds) return;
    perror(what);
    exit(1);
}

/* One flush for all threads that the last one served, rather than two. */
static void gather(void) {
    uint32_t before = all->batch_start;
    int64_t deadline = xl_now() + GATHER_NS;
    while (xl_load(&all->arrivals) - before < all->batch_size && xl_now() < deadline) sched_yield();
    all->batch_start = xl_load(&all->arrivals);
}

static void lead(void) {
    gather();
    uint32_t before = all->batch_start;
    uint64_t target = xl_load64(&all->tail);
    must(fdatasync(fd) == 0, "fdatasync");
    xl_store64(&all->synced, target);
    all->batch_size = xl_load(&all->arrivals) - before;
}

static void wait_for(uint64_t end) {
    xl_add(&all->arrivals, 1);
    while (xl_load64(&all->synced) < end) {
        uint32_t seen = xl_load(&all->flushes);
        if (xl_swap(&all->leading, 0, 1)) {
            if (xl_load64(&all->synced) < end) lead();
            xl_store(&all->leading, 0);
            xl_add(&all->flushes, 1);
            if (xl_load(&all->sleepers)) xl_wake(&all->flushes, INT_MAX);
        } else {
            xl_add(&all->sleepers, 1);
            if (xl_load64(&all->synced) < end) xl_wait(&all->flushes, seen, -1);
            xl_add(&all->sleepers, (uint32_t)-1);
        }
    }
}

static void append(const char *frame) {
    uint64_t end;
    pthread_mutex_lock(&all->write);
    must(pwrite(fd, frame, FRAME, (off_t)(all->tail % (ROOM - FRAME))) == FRAME, "pwrite");
    end = all->tail + FRAME;
    xl_store64(&all->tail, end);
    pthread_mutex_unlock(&all->write);
    wait_for(end);
}

static void *work(void *unused) {
    char frame[FRAME];
    uint64_t count = 0;
    int64_t now = xl_now();
    memset(frame, 'x', sizeof frame);
    if (all->start > now) usleep((useconds_t)((all->start - now) / 1000));
    append(frame);
    while (xl_now() < all->end) {
        count++;
        append(frame);
    }
    __atomic_add_fetch(&all->done, count, __ATOMIC_SEQ_CST);
    return unused;
}

static void run_threads(int count) {
    pthread_t threads[256];
    for (int i = 0; i < count; i++)
        must(pthread_create(&threads[i], NULL, work, NULL) == 0, "pthread_create");
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void open_file(const char *path) {
    char zeros[1 << 14] = {0};     /* a larger piece would be one folio: peers.py */
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    must(fd >= 0, path);
    if (lseek(fd, 0, SEEK_END) == ROOM) return;
    for (size_t at = 0; at < ROOM; at += sizeof zeros)
        must(pwrite(fd, zeros, sizeof zeros, (off_t)at) == (ssize_t)sizeof zeros, "pwrite");
    must(fsync(fd) == 0, "fsync");
}

static void share(double seconds) {
    pthread_mutexattr_t attributes;
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(all != MAP_FAILED, "mmap");
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&all->write, &attributes);
    all->start = xl_now() + HEAD_START_NS;
    all->end = all->start + (int64_t)(seconds * 1e9);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: shared_flush FILE PROCESSES THREADS SECONDS\n");
        return 2;
    }
    int processes = atoi(argv[2]), threads = atoi(argv[3]), status, failed = 0;
    double seconds = atof(argv[4]);
    must(threads > 0 && threads <= 256, "1 to 256 threads");
    open_file(argv[1]);
    share(seconds);
    for (int i = 0; i < processes; i++) {
        pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            run_threads(threads);
            _exit(0);
        }
    }
    while (wait(&status) > 0) failed |= status;
    printf("%.1f\n", (double)all->done / seconds);
    return failed != 0;
}
