/* Threads that help with a computation.

   A computation is a function that all threads run, with loops (`LOOP`) that they share: each takes the next items of
   a loop until none is left, then waits until all items are done. No thread waits for another one to arrive, so a thread
   that the system has not scheduled costs speed only; a busy neighbour on one core cannot stop the others for a time
   slice, except inside an item.

   Between computations a helper thread polls for a short time, giving its core to any other thread that wants it, and
   then sleeps. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "vectors.h"

#define MOST_LOOPS 8192
#define POLLS 4000

typedef struct {
    _Alignas(64) _Atomic int64_t next;
    _Atomic int64_t done;
} Loop;

typedef struct Pool Pool;
typedef void Work(Pool *pool, const void *argument, int thread);

struct Pool {
    int threads; /* the caller included */
    Work *work;
    const void *argument;
    _Alignas(64) _Atomic int64_t generation; /* odd while a computation is open for helpers */
    _Alignas(64) _Atomic int inside;         /* helpers that take part */
    _Alignas(64) _Atomic int asleep;
    _Atomic int ends;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pthread_t *helpers;
    Loop loops[MOST_LOOPS];
};

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Waits until a condition holds; after some time other threads of this core go first. */
#define WAIT_UNTIL(condition) \
    for (int polls_ = 0; !(condition); polls_++) { \
        if (polls_ < 2000) pause_briefly(); \
        else sched_yield(); \
    }

/* Runs the following block for items [item, item_end) of `count`, `chunk` at a time, on whichever thread is free. All
   threads of the computation must reach the same loops with the same counts. */
#define LOOP(pool, index, count, chunk, item, item_end, ...) \
    do { \
        Loop *loop_ = &(pool)->loops[index]; \
        int64_t count_ = (count), chunk_ = (chunk), item; \
        while ((item = atomic_load_explicit(&loop_->next, memory_order_relaxed)) < count_ && \
               (item = atomic_fetch_add_explicit(&loop_->next, chunk_, memory_order_relaxed)) < count_) { \
            int64_t item_end = item + chunk_ < count_ ? item + chunk_ : count_; \
            __VA_ARGS__ \
            atomic_fetch_add_explicit(&loop_->done, item_end - item, memory_order_release); \
        } \
        WAIT_UNTIL(atomic_load_explicit(&loop_->done, memory_order_acquire) >= count_); \
    } while (0)

typedef struct { Pool *pool; int thread; } Helper;

static void *help(void *argument) {
    Helper helper = *(Helper *)argument;
    Pool *pool = helper.pool;
    free(argument);
    int64_t seen = 0;
    while (!atomic_load(&pool->ends)) {
        int64_t now = seen;
        for (int polls = 0; polls < POLLS && !atomic_load(&pool->ends); polls++) {
            now = atomic_load_explicit(&pool->generation, memory_order_acquire);
            if (now != seen && now % 2) break;
            if (polls % 16 == 15) sched_yield();
            else pause_briefly();
        }
        if (now == seen || now % 2 == 0) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->asleep, 1);
            while ((now = atomic_load(&pool->generation), now == seen || now % 2 == 0) && !atomic_load(&pool->ends))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->asleep, 1);
            pthread_mutex_unlock(&pool->mutex);
            if (atomic_load(&pool->ends)) break;
        }
        atomic_fetch_add(&pool->inside, 1);
        /* The computation may have been closed before this thread was counted. */
        if (atomic_load(&pool->generation) == now) pool->work(pool, pool->argument, helper.thread);
        atomic_fetch_sub(&pool->inside, 1);
        seen = now;
    }
    return NULL;
}

/* Starts threads - 1 helpers; NULL if memory or threads cannot be had. */
static Pool *pool_start(int threads) {
    Pool *pool = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
    if (pool == NULL) return NULL;
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->helpers = calloc((size_t)threads, sizeof *pool->helpers);
    pool->threads = 1;
    for (int i = 1; i < threads && pool->helpers != NULL; i++) {
        Helper *helper = malloc(sizeof *helper);
        if (helper == NULL) break;
        *helper = (Helper){pool, i};
        if (pthread_create(&pool->helpers[i], NULL, help, helper) != 0) {
            free(helper);
            break;
        }
        pool->threads = i + 1;
    }
    return pool;
}

static void pool_end(Pool *pool) {
    atomic_store(&pool->ends, 1);
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->helpers[i], NULL);
    free(pool->helpers);
    free(pool);
}

/* Runs `work` on the calling thread and the helpers that come in time; `loops` is the number of loops it has. The
   argument must stay valid only during the call. */
static void pool_run(Pool *pool, Work *work, const void *argument, int64_t loops) {
    for (int64_t i = 0; i < loops; i++) {
        atomic_store_explicit(&pool->loops[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->loops[i].done, 0, memory_order_relaxed);
    }
    pool->work = work;
    pool->argument = argument;
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->asleep)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    work(pool, argument, 0);
    atomic_fetch_add(&pool->generation, 1);
    WAIT_UNTIL(atomic_load(&pool->inside) == 0);
}
