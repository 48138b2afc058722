/* The least that taking over from a killed process costs: what the rows of P8 are held against.

   death FILE BALLAST ROUNDS: a process that has touched BALLAST bytes of memory holds a robust
   mutex and is killed; another waits for the mutex, then writes 192 bytes to FILE and flushes them.
   What remains is the kernel's: ending a process, waking another, one flush. Prints a line for
   each round: seconds from just before SIGKILL until the mutex was taken, and until the flush was
   done. */
#include "_native/futex.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define FRAME 192
#define SETTLE_US 50000         /* until everybody sleeps */
#define PATIENCE_S 30

typedef struct {
    pthread_mutex_t mutex;
    uint32_t held, waits;
    int64_t taken, durable;
} shared;

static shared *all;

static void must(int holds, const char *what) {
    if (holds) return;
    perror(what);
    exit(1);
}

static void hold(size_t ballast) {
    char *memory = malloc(ballast + 1);
    must(memory != NULL, "malloc");
    memset(memory, 'x', ballast + 1);
    must(pthread_mutex_lock(&all->mutex) == 0, "pthread_mutex_lock");
    xl_store(&all->held, 1);
    xl_wake(&all->held, 1);
    sleep(PATIENCE_S);
    _exit(memory[ballast] != 'x');
}

static void take_over(int fd) {
    char frame[FRAME];
    memset(frame, 'y', sizeof frame);
    xl_store(&all->waits, 1);
    xl_wake(&all->waits, 1);
    must(pthread_mutex_lock(&all->mutex) == EOWNERDEAD, "the mutex of a dead process");
    all->taken = xl_now();
    must(pwrite(fd, frame, FRAME, 0) == FRAME && fdatasync(fd) == 0, "fdatasync");
    all->durable = xl_now();
    _exit(0);
}

static pid_t start(void) {
    pid_t child = fork();
    must(child >= 0, "fork");
    return child;
}

static void until(uint32_t *word) {
    while (!xl_load(word)) xl_wait(word, 0, 1000000);
}

static void share(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    memset(all, 0, sizeof *all);
    must(pthread_mutex_init(&all->mutex, &attributes) == 0, "pthread_mutex_init");
}

static void run(int fd, size_t ballast) {
    pid_t owner, successor;
    int status;
    int64_t at;
    share();
    if ((owner = start()) == 0) hold(ballast);
    until(&all->held);
    if ((successor = start()) == 0) take_over(fd);
    until(&all->waits);
    usleep(SETTLE_US);
    at = xl_now();
    kill(owner, SIGKILL);
    must(waitpid(successor, &status, 0) == successor && status == 0, "the successor");
    must(waitpid(owner, &status, 0) == owner, "the owner");
    printf("%.9f %.9f\n", (double)(all->taken - at) * 1e-9, (double)(all->durable - at) * 1e-9);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: death FILE BALLAST ROUNDS\n");
        return 2;
    }
    char zeros[1 << 12] = {0};
    int fd = open(argv[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    must(fd >= 0, argv[1]);
    must(pwrite(fd, zeros, sizeof zeros, 0) == (ssize_t)sizeof zeros && fsync(fd) == 0, "fsync");
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(all != MAP_FAILED, "mmap");
    for (int i = 0; i < atoi(argv[3]); i++) run(fd, (size_t)atoll(argv[2]));
    return 0;
}
