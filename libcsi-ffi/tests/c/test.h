/* What the C tests share. Each ends the program with 1, and says where, when something is not as it must be. */
#ifndef TEST_H
#define TEST_H
#define _GNU_SOURCE
#include <csi.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECONDS ((uint64_t)1000000)
/* Within so many seconds something comes that waits for nothing, also on a busy machine and under valgrind. */
#define SOON 60
/* Seconds in which something ends that waits for nothing: less than the 30 for which libcsi repeats a cancellation. */
#define AT_ONCE 20
#define CHECK(what) \
    do { if (!(what)) { fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); exit(1); } } while (0)
/* A call that takes &error. */
#define OK(call) \
    do { \
        csi_error *error = NULL; \
        csi_code code_ = (call); \
        if (code_ != CSI_OK) { \
            fprintf(stderr, "%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, code_, csi_error_message(error)); \
            exit(1); \
        } \
        CHECK(error == NULL); \
    } while (0)
#define FAILS(code, call) \
    do { \
        csi_error *error = NULL; \
        csi_code code_ = (call); \
        if (code_ != (code)) { \
            fprintf(stderr, "%s:%d: %s: %d, not %d: %s\n", __FILE__, __LINE__, #call, code_, code, csi_error_message(error)); \
            exit(1); \
        } \
        CHECK(csi_error_code(error) == (code)); \
        CHECK(csi_error_message(error)[0] != 0); \
        csi_error_free(error); \
    } while (0)

static const csi_map NO_MAP = {NULL, 0};

static inline csi_client *open_client(void)
{
    csi_client *client = NULL;
    OK(csi_client_open(NULL, &client, &error));
    return client;
}

/* A volume given inline, whose name is its external id. */
static inline csi_volume of_plugin(const char *id)
{
    csi_volume volume = {.struct_size = sizeof volume, .ns = "default", .id = id, .plugin = "p", .external_id = id};
    return volume;
}

/* A registered one. */
static inline csi_volume named(const char *id)
{
    csi_volume volume = {.struct_size = sizeof volume, .ns = "default", .id = id};
    return volume;
}

static inline csi_call within(uint64_t usec)
{
    csi_call call = {.struct_size = sizeof call, .deadline_usec = usec};
    return call;
}

/* The end of an operation that has to succeed; its only row lives as long as it. */
static inline const csi_row *done(csi_op *op)
{
    OK(csi_op_wait(op, SOON * SECONDS, &error));
    return csi_op_row(op, 0);
}

static inline void finish(csi_op *op)
{
    done(op);
    csi_op_unref(op);
}

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Waits until `what` holds. */
#define EVENTUALLY(what) \
    do { \
        double begun_ = now(); \
        while (!(what)) { \
            if (now() - begun_ > SOON) { \
                fprintf(stderr, "%s:%d: not so in %d s: %s\n", __FILE__, __LINE__, SOON, #what); \
                exit(1); \
            } \
            usleep(10000); \
        } \
    } while (0)

static inline int readable(int fd, int milliseconds)
{
    struct pollfd wait = {fd, POLLIN, 0};
    return poll(&wait, 1, milliseconds) == 1;
}

/* Tell the test that runs this program, and wait for its answer. */
static inline void tell(const char *what)
{
    char answer[64];
    printf("%s\n", what);
    fflush(stdout);
    CHECK(fgets(answer, sizeof answer, stdin) != NULL);
}

static inline int descriptors(void)
{
    int count = 0;
    DIR *all = opendir("/proc/self/fd");
    while (readdir(all))
        count++;
    closedir(all);
    return count;
}

void path(void), opening(void), again(void), arguments(void), errors(void), cancel(void), deadline(void), restart(void), events(void), journal(void),
    volumes(void), threads(void), forked(void), panics(void), closing(void), fuzz(void);
#endif
