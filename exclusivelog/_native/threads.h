/* Threads of the core: they run no Python code, and handle no signal but SIGBUS (fault_guard.h). */
#ifndef EXCLUSIVELOG_THREADS_H
#define EXCLUSIVELOG_THREADS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#define XT_STACK (256 * 1024)

/* 0 or an errno. A program with much thread-local memory needs a larger stack than XT_STACK. */
static inline int xt_start(pthread_t *thread, void *(*run)(void *), void *arg, int detached) {
    pthread_attr_t attr;
    sigset_t all, old;
    int failed;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, XT_STACK);
    if (detached) pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    sigdelset(&all, SIGBUS);    /* blocked, it would end the process */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    failed = pthread_create(thread, &attr, run, arg);
    if (failed == EINVAL) {
        pthread_attr_t usual;
        pthread_attr_init(&usual);
        if (detached) pthread_attr_setdetachstate(&usual, PTHREAD_CREATE_DETACHED);
        failed = pthread_create(thread, &usual, run, arg);
        pthread_attr_destroy(&usual);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return failed;
}

#endif
