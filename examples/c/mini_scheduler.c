/* A scheduler's volume manager in one event loop: three volumes are mounted at once, csid may be restarted meanwhile, and
 * when standard input ends they are unmounted.
 *
 *     cc -std=c99 mini_scheduler.c $(pkg-config --cflags --libs csi) -o mini_scheduler
 *     for v in a b c; do csi-local create $v --size 16M; done    # for PLUGIN local
 *     mini_scheduler PLUGIN VOLUME VOLUME VOLUME
 *
 * It keeps no state. Started again after a kill it finds its mounts: mounting again finds the existing mount. */
#include <csi.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { VOLUMES = 3 };

/* Every failure has a code for programs and words for people. */
static void check(csi_code code, csi_error *error)
{
    if (code == CSI_OK)
        return;
    fprintf(stderr, "csi %d: %s\n", code, csi_error_message(error));
    csi_error_free(error);
    exit(1);
}

/* The volume is inline: csid need not know it before. A registered volume needs only ns and id. */
static csi_volume volume_of(const char *plugin, const char *id)
{
    csi_volume volume = {.struct_size = sizeof volume, .ns = "mini", .id = id, .plugin = plugin, .external_id = id};
    return volume;
}

/* Wait for all operations, and for csid's events meanwhile, with one poll. */
static void await(csi_op *ops[VOLUMES], csi_events *events)
{
    csi_error *error = NULL;
    for (int left = VOLUMES; left > 0;) {
        struct pollfd wait[VOLUMES + 1];
        for (int i = 0; i < VOLUMES; i++)
            /* poll ignores a negative descriptor. */
            wait[i] = (struct pollfd){ops[i] ? csi_op_fd(ops[i]) : -1, POLLIN, 0};
        wait[VOLUMES] = (struct pollfd){csi_events_fd(events), POLLIN, 0};
        if (poll(wait, VOLUMES + 1, -1) < 0)
            continue;
        for (int i = 0; i < VOLUMES; i++)
            if (wait[i].revents) {
                /* It has ended: this does not wait. The library repeated a call that csid's death interrupted. */
                csi_code code = csi_op_wait(ops[i], 0, &error);
                check(code, error);
                const char *source = csi_row_text(csi_op_row(ops[i], 0), "source");
                printf("%s\n", source ? source : "unmounted");
                csi_op_unref(ops[i]);
                ops[i] = NULL;
                left--;
            }
        csi_event *event = NULL;
        csi_code code;
        while ((code = csi_events_next(events, &event, &error)) == CSI_OK) {
            /* After a gap a scheduler would read all lists again, with csi_list. */
            const char *type = csi_event_gap(event) ? "gap" : csi_row_text(csi_event_row(event), "type");
            fprintf(stderr, "event: %s\n", type);
            csi_event_free(event);
        }
        if (code != CSI_E_PENDING)
            check(code, error);
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    csi_error *error = NULL;
    csi_client *client = NULL;
    csi_events *events = NULL;
    csi_op *ops[VOLUMES];
    if (argc != VOLUMES + 2) {
        fprintf(stderr, "mini_scheduler PLUGIN VOLUME VOLUME VOLUME\n");
        return 2;
    }
    /* $CSID_SOCKET, else csid's socket, else the system bus. */
    csi_code code = csi_client_open(NULL, &client, &error);
    check(code, error);
    code = csi_events_open(client, NULL, 0, &events, &error);
    check(code, error);

    /* The plugin may start after us: wait for a minute. */
    csi_call minute = {.struct_size = sizeof minute, .deadline_usec = 60 * 1000000};
    code = csi_wait_for_plugin(client, argv[1], "node", &minute, &ops[0], &error);
    check(code, error);
    code = csi_op_wait(ops[0], -1, &error);
    check(code, error);
    csi_op_unref(ops[0]);

    /* Start all mounts at once; none holds a thread. */
    for (int i = 0; i < VOLUMES; i++) {
        csi_volume volume = volume_of(argv[1], argv[i + 2]);
        code = csi_mount_volume(client, &volume, "mini", NULL, &minute, &ops[i], &error);
        check(code, error);
    }
    await(ops, events);

    /* The jobs run. */
    while (getchar() != EOF)
        ;

    for (int i = 0; i < VOLUMES; i++) {
        /* The name is enough; the mount's options are not needed. */
        csi_volume volume = volume_of(argv[1], argv[i + 2]);
        code = csi_unmount_volume(client, &volume, "mini", NULL, 0, &minute, &ops[i], &error);
        check(code, error);
    }
    await(ops, events);
    csi_events_unref(events);
    csi_client_unref(client);
    return 0;
}
