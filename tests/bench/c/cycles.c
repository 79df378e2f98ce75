/* csid-bench-c SOCKET CALLERS MILLISECONDS: callers mount and unmount through libcsi, each a volume of its own, in one event loop.
 * Prints p50 and p99 of a mount in microseconds, and cycles a second; a tenth of the time before does not count. */
#define _GNU_SOURCE
#include <csi.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST = 1024, SEEN = 1 << 20 };

struct caller {
    char volume[32];
    csi_op *op;
    bool mounts;
    double begun, mounted;
};

static csi_client *client;
static double seen[SEEN];
static size_t count;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void check(csi_code code, csi_error *error)
{
    if (code != CSI_OK) {
        fprintf(stderr, "csi %d: %s\n", code, csi_error_message(error));
        exit(1);
    }
}

static void begin(struct caller *caller, bool mounts)
{
    csi_error *error = NULL;
    csi_volume volume = {.struct_size = sizeof volume, .ns = "bench", .id = caller->volume};
    caller->mounts = mounts;
    if (mounts) {
        csi_mount_options options = {.struct_size = sizeof options, .restore = "auto"};
        volume.plugin = "bench";
        volume.external_id = caller->volume;
        caller->begun = now();
        check(csi_mount_volume(client, &volume, "consumer", &options, NULL, &caller->op, &error), error);
    } else {
        check(csi_unmount_volume(client, &volume, "consumer", NULL, 0, NULL, &caller->op, &error), error);
    }
}

/* What is under way has ended: begin the next, unless the time is over. */
static bool step(struct caller *caller, double from, double to)
{
    csi_error *error = NULL;
    check(csi_op_wait(caller->op, 0, &error), error);
    csi_op_unref(caller->op);
    caller->op = NULL;
    double at = now();
    if (caller->mounts) {
        caller->mounted = at - caller->begun;
        begin(caller, false);
        return true;
    }
    if (at >= from && at < to && count < SEEN)
        seen[count++] = caller->mounted;
    if (at >= to)
        return false;
    begin(caller, true);
    return true;
}

static int larger(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int argc, char **argv)
{
    static struct caller callers[MOST];
    struct pollfd wait[MOST];
    int n = argc == 4 ? atoi(argv[2]) : 0;
    if (n < 1 || n > MOST)
        return 2;
    csi_error *error = NULL;
    csi_client_options options = {.struct_size = sizeof options, .address = argv[1]};
    check(csi_client_open(&options, &client, &error), error);
    double time = atof(argv[3]) * 1e3, from = now() + time / 10, to = from + time;
    for (int i = 0; i < n; i++) {
        snprintf(callers[i].volume, sizeof callers[i].volume, "volume-%d", i);
        begin(&callers[i], true);
    }
    for (int left = n; left > 0;) {
        for (int i = 0; i < n; i++)
            wait[i] = (struct pollfd){callers[i].op ? csi_op_fd(callers[i].op) : -1, POLLIN, 0};
        if (poll(wait, (nfds_t)n, -1) < 0)
            continue;
        for (int i = 0; i < n; i++)
            if (wait[i].revents)
                left -= !step(&callers[i], from, to);
    }
    csi_client_unref(client);
    if (count == 0)
        return 1;
    qsort(seen, count, sizeof *seen, larger);
    printf("%.1f %.1f %.1f\n", seen[count / 2], seen[(count - 1) * 99 / 100], (double)count / (time / 1e6));
    return 0;
}
