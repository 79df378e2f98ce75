/* Errors of the plugin, cancellation, deadlines, csid's restart, many threads, fork, panics, a client that is closed. */
#include "test.h"

static csi_op *mount_of(csi_client *client, const char *id, const char *consumer, uint64_t deadline_usec)
{
    csi_volume volume = of_plugin(id);
    csi_call call = within(deadline_usec);
    csi_op *op = NULL;
    OK(csi_mount_volume(client, &volume, consumer, NULL, &call, &op, &error));
    return op;
}

static void unmount_of(csi_client *client, const char *id, const char *consumer)
{
    csi_volume volume = named(id);
    csi_op *op = NULL;
    OK(csi_unmount_volume(client, &volume, consumer, NULL, 0, NULL, &op, &error));
    finish(op);
}

static size_t listed(csi_client *client, const char *kind)
{
    csi_op *op = NULL;
    OK(csi_list(client, kind, NO_MAP, NULL, &op, &error));
    done(op);
    size_t found = csi_op_rows(op);
    csi_op_unref(op);
    return found;
}

/* NodeStageVolume of `refused` says FAILED_PRECONDITION. */
void errors(void)
{
    csi_client *client = open_client();
    csi_op *op = mount_of(client, "refused", "job", 0);
    csi_error *error = NULL;
    CHECK(csi_op_wait(op, -1, &error) == CSI_E_PLUGIN);
    CHECK(csi_error_grpc_code(error) == 9 && strcmp(csi_error_rpc(error), "NodeStageVolume") == 0);
    CHECK(strcmp(csi_error_plugin_message(error), "the shelf is empty") == 0);
    CHECK(strcmp(csi_row_text(csi_error_details(error), "volume"), "refused") == 0);
    CHECK(!csi_error_retryable(error));
    CHECK(csi_op_rows(op) == 0 && csi_op_row(op, 0) == NULL);
    csi_error_free(error);
    /* As often as anybody asks. */
    FAILS(CSI_E_PLUGIN, csi_op_wait(op, 0, &error));
    CHECK(csi_op_wait(op, 0, NULL) == CSI_E_PLUGIN);
    csi_op_unref(op);
    csi_client_unref(client);
}

static void *cancel_soon(void *op)
{
    csi_client *client = open_client();
    EVENTUALLY(listed(client, "operations") > 0);
    csi_client_unref(client);
    csi_op_cancel(op);
    csi_op_cancel(op);
    return NULL;
}

/* NodeStageVolume of `slow` takes an hour. */
void cancel(void)
{
    csi_client *client = open_client();
    csi_op *op = mount_of(client, "slow", "job", 0);
    double begun = now();
    CHECK(csi_op_wait(op, 10000, NULL) == CSI_E_PENDING && csi_op_rows(op) == 0);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, cancel_soon, op) == 0);
    FAILS(CSI_E_CANCELLED, csi_op_wait(op, -1, &error));
    CHECK(now() - begun < AT_ONCE);
    pthread_join(other, NULL);
    csi_op_unref(op);
    /* csid cancels it as well, and rolls it back. */
    EVENTUALLY(listed(client, "operations") + listed(client, "mounts") == 0);
    /* One cancelled before csid can have heard of it, by a client that is closed at once. */
    op = mount_of(client, "slow", "job", 0);
    csi_op_cancel(op);
    csi_client_unref(client);
    FAILS(CSI_E_CANCELLED, csi_op_wait(op, 0, &error));
    csi_op_unref(op);
    client = open_client();
    EVENTUALLY(listed(client, "operations") + listed(client, "mounts") == 0);
    csi_client_unref(client);
}

/* Also of a csid that does not answer at all. */
void deadline(void)
{
    csi_client *client = open_client();
    double begun = now();
    csi_op *op = mount_of(client, "slow", "job", SECONDS / 2);
    FAILS(CSI_E_DEADLINE, csi_op_wait(op, -1, &error));
    CHECK(now() - begun > 0.4 && now() - begun < AT_ONCE);
    csi_op_unref(op);
    tell("stop csid");
    begun = now();
    op = mount_of(client, "v", "job", SECONDS / 2);
    FAILS(CSI_E_DEADLINE, csi_op_wait(op, -1, &error));
    CHECK(now() - begun > 1.4 && now() - begun < AT_ONCE);
    csi_op_unref(op);
    csi_client *other = NULL;
    csi_client_options options = {.struct_size = sizeof options, .timeout_usec = SECONDS / 2};
    FAILS(CSI_E_DEADLINE, csi_client_open(&options, &other, &error));
    tell("go on");
    /* csid reads the call from its socket now. To stage `v` takes less time than the call has from here on. */
    usleep(SECONDS);
    EVENTUALLY(listed(client, "operations") + listed(client, "mounts") == 0);
    csi_client_unref(client);
}

/* csid is killed once it knows of a call, once it has answered one, and once it has answered all of them; each ends with its answer,
 * from this csid or the next. */
void restart(void)
{
    enum { MOUNTS = 8 };
    csi_client *client = open_client();
    csi_op *ops[MOUNTS], *late;
    char id[16];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < MOUNTS; i++) {
            snprintf(id, sizeof id, "r%d-%d", round, i);
            ops[i] = mount_of(client, id, "job", 5 * SOON * SECONDS);
        }
        EVENTUALLY(listed(client, "mounts") > 0);
        for (int i = 0; i < (round == 2 ? MOUNTS : round); i++)
            done(ops[i]);
        tell("kill csid");
        /* Asked while it is away. */
        late = mount_of(client, "late", "job", SECONDS / 2);
        FAILS(CSI_E_DEADLINE, csi_op_wait(late, -1, &error));
        csi_op_unref(late);
        late = mount_of(client, "late", "job", 0);
        tell("start csid");
        CHECK(access(csi_row_text(done(late), "source"), F_OK) == 0);
        csi_op_unref(late);
        for (int i = 0; i < MOUNTS; i++) {
            CHECK(access(csi_row_text(done(ops[i]), "source"), F_OK) == 0);
            csi_op_unref(ops[i]);
            snprintf(id, sizeof id, "r%d-%d", round, i);
            unmount_of(client, id, "job");
        }
        unmount_of(client, "late", "job");
    }
    CHECK(listed(client, "mounts") == 0);
    /* And with no csid at all a call ends when it is cancelled. */
    tell("kill csid");
    late = mount_of(client, "late", "job", 0);
    CHECK(csi_op_wait(late, SECONDS / 2, NULL) == CSI_E_PENDING);
    csi_op_cancel(late);
    FAILS(CSI_E_CANCELLED, csi_op_wait(late, SOON * SECONDS, &error));
    csi_op_unref(late);
    csi_client_unref(client);
}

static void *mount_some(void *argument)
{
    csi_client *client = csi_client_ref(argument);
    char id[32];
    for (int i = 0; i < 5; i++) {
        snprintf(id, sizeof id, "t%lx-%d", (unsigned long)pthread_self(), i);
        csi_op *op = mount_of(client, id, "job", 0);
        CHECK(csi_row_text(done(op), "source"));
        csi_op_unref(op);
        unmount_of(client, id, "job");
    }
    csi_client_unref(client);
    return NULL;
}

static void *wait_for(void *op)
{
    for (int i = 0; i < 100; i++) {
        csi_op *mine = csi_op_ref(op);
        CHECK(csi_row_text(done(mine), "source")[0] == '/');
        csi_op_unref(mine);
    }
    return NULL;
}

void threads(void)
{
    enum { THREADS = 16 };
    pthread_t all[THREADS];
    csi_client *client = open_client();
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&all[i], NULL, mount_some, client) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(all[i], NULL);
    csi_op *op = mount_of(client, "one", "job", 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&all[i], NULL, wait_for, op) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(all[i], NULL);
    csi_op_unref(op);
    unmount_of(client, "one", "job");
    CHECK(listed(client, "mounts") == 0);
    csi_client_unref(client);
}

void forked(void)
{
    csi_client *client = open_client();
    csi_op *op = mount_of(client, "v", "job", 0), *other = NULL;
    csi_events *events = NULL;
    csi_event *event = NULL;
    done(op);
    OK(csi_events_open(client, NULL, 0, &events, &error));
    pid_t child = fork();
    if (child == 0) {
        csi_volume volume = of_plugin("v");
        FAILS(CSI_E_FORKED, csi_mount_volume(client, &volume, "job", NULL, NULL, &other, &error));
        FAILS(CSI_E_FORKED, csi_list(client, "mounts", NO_MAP, NULL, &other, &error));
        FAILS(CSI_E_FORKED, csi_op_wait(op, -1, &error));
        FAILS(CSI_E_FORKED, csi_events_next(events, &event, &error));
        FAILS(CSI_E_FORKED, csi_events_open(client, NULL, 0, &events, &error));
        csi_op_cancel(op);
        csi_events_unref(events), csi_op_unref(op), csi_client_unref(client);
        client = open_client();
        CHECK(listed(client, "mounts") == 1);
        csi_client_unref(client);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    /* The parent has lost nothing. */
    CHECK(listed(client, "mounts") == 1);
    csi_op_unref(op);
    csi_events_unref(events);
    unmount_of(client, "v", "job");
    csi_client_unref(client);
}

static void open_nothing(void)
{
    csi_client *client = NULL;
    csi_client_options options = {.struct_size = sizeof options, .address = "/nonexistent/csid"};
    FAILS(CSI_E_DISCONNECTED, csi_client_open(&options, &client, &error));
    CHECK(client == NULL);
}

/* A client that could not be opened leaves no thread: the thread's runtime has descriptors. */
static void unopened(void)
{
    /* The first client opens what all of the process share. */
    open_nothing();
    int before = descriptors();
    for (int i = 0; i < 50; i++) {
        open_nothing();
        CHECK(descriptors() == before);
    }
}

/* A client that is closed ends what waits for it; csid goes on. */
void closing(void)
{
    unopened();
    csi_client *client = open_client(), *other = open_client();
    csi_events *events = NULL;
    csi_event *event = NULL;
    OK(csi_events_open(client, NULL, 0, &events, &error));
    csi_op *op = mount_of(client, "slow", "job", 0);
    EVENTUALLY(listed(other, "operations") == 1);
    CHECK(csi_op_wait(op, 0, NULL) == CSI_E_PENDING);
    double begun = now();
    csi_client_unref(client);
    CHECK(now() - begun < AT_ONCE);
    FAILS(CSI_E_DISCONNECTED, csi_op_wait(op, -1, &error));
    CHECK(readable(csi_events_fd(events), SOON * 1000));
    csi_code code;
    while ((code = csi_events_next(events, &event, NULL)) == CSI_OK)
        csi_event_free(event);
    CHECK(code == CSI_E_DISCONNECTED);
    csi_events_unref(events);
    csi_op_cancel(op);
    csi_op_unref(op);
    CHECK(listed(other, "operations") == 1);
    unmount_of(other, "slow", "job");
    csi_client_unref(other);
}

#define PANICS(entry, call) \
    do { \
        setenv("LIBCSI_PANIC", #entry, 1); \
        FAILS(CSI_E_INTERNAL, call); \
        setenv("LIBCSI_PANIC", "", 1); \
        tried++; \
    } while (0)
#define QUIET(entry, sane) \
    do { \
        setenv("LIBCSI_PANIC", #entry, 1); \
        CHECK(sane); \
        setenv("LIBCSI_PANIC", "", 1); \
        tried++; \
    } while (0)

void panics(void)
{
    int tried = 0;
    csi_client *client = open_client(), *other = NULL;
    csi_volume v = of_plugin("v");
    csi_op *op = NULL, *kept = NULL;
    csi_events *events = NULL;
    csi_event *event = NULL;
    csi_plugin plugin = {.struct_size = sizeof plugin, .id = "p"};
    OK(csi_get_manager(client, NULL, &kept, &error));
    const csi_row *row = done(kept);
    csi_error *failure = NULL;
    CHECK(csi_get_manager(NULL, NULL, &op, &failure) == CSI_E_INVALID);

    PANICS(csi_client_open, csi_client_open(NULL, &other, &error));
    PANICS(csi_register_plugin, csi_register_plugin(client, &plugin, NULL, &op, &error));
    PANICS(csi_unregister_plugin, csi_unregister_plugin(client, "p", NULL, 0, NULL, &op, &error));
    PANICS(csi_wait_for_plugin, csi_wait_for_plugin(client, "p", "node", NULL, &op, &error));
    PANICS(csi_accept_node_id, csi_accept_node_id(client, "p", "node-1", NULL, &op, &error));
    PANICS(csi_get_plugin, csi_get_plugin(client, "p", NULL, &op, &error));
    PANICS(csi_mount_volume, csi_mount_volume(client, &v, "job", NULL, NULL, &op, &error));
    PANICS(csi_unmount_volume, csi_unmount_volume(client, &v, "job", NULL, 0, NULL, &op, &error));
    PANICS(csi_has_mount, csi_has_mount(client, "/", NULL, &op, &error));
    PANICS(csi_claim, csi_claim(client, &v, "job", NULL, NULL, &op, &error));
    PANICS(csi_release, csi_release(client, &v, "job", NULL, 0, NULL, &op, &error));
    PANICS(csi_attach_volume, csi_attach_volume(client, &v, "node", NULL, NULL, &op, &error));
    PANICS(csi_detach_volume, csi_detach_volume(client, &v, "node", NULL, &op, &error));
    PANICS(csi_validate_volume, csi_validate_volume(client, &v, NULL, NULL, &op, &error));
    PANICS(csi_expand_volume, csi_expand_volume(client, &v, 1, 0, NULL, NULL, &op, &error));
    PANICS(csi_create_volume, csi_create_volume(client, &v, NULL, NULL, &op, &error));
    PANICS(csi_register_volume, csi_register_volume(client, &v, NULL, NULL, &op, &error));
    PANICS(csi_deregister_volume, csi_deregister_volume(client, &v, 0, NULL, &op, &error));
    PANICS(csi_delete_volume, csi_delete_volume(client, &v, NULL, &op, &error));
    PANICS(csi_open_mount, csi_open_mount(client, &v, "job", NULL, NULL, 0, NULL, &op, &error));
    PANICS(csi_open_mount_idmapped, csi_open_mount_idmapped(client, &v, "job", NULL, NULL, 0, 0, NULL, &op, &error));
    PANICS(csi_get_capacity, csi_get_capacity(client, "p", (csi_capabilities){NULL, 0}, NO_MAP, NO_MAP, NULL, &op, &error));
    PANICS(csi_list_external_volumes, csi_list_external_volumes(client, "p", NULL, 0, NULL, &op, &error));
    PANICS(csi_list_snapshots, csi_list_snapshots(client, "p", NULL, NULL, NULL, 0, NULL, &op, &error));
    PANICS(csi_delete_snapshot, csi_delete_snapshot(client, "p", "s", NULL, &op, &error));
    PANICS(csi_create_snapshot, csi_create_snapshot(client, &v, "s", NO_MAP, NULL, &op, &error));
    PANICS(csi_begin_snapshot, csi_begin_snapshot(client, &v, "s", NO_MAP, NULL, &op, &error));
    PANICS(csi_volume_stats, csi_volume_stats(client, &v, NULL, &op, &error));
    PANICS(csi_get_volume, csi_get_volume(client, &v, NULL, &op, &error));
    PANICS(csi_explain, csi_explain(client, &v, NULL, &op, &error));
    PANICS(csi_list, csi_list(client, "mounts", NO_MAP, NULL, &op, &error));
    PANICS(csi_get_manager, csi_get_manager(client, NULL, &op, &error));
    PANICS(csi_adopt_mount, csi_adopt_mount(client, &v, "job", NULL, NULL, "/", NULL, &op, &error));
    PANICS(csi_op_wait, csi_op_wait(kept, -1, &error));
    PANICS(csi_events_open, csi_events_open(client, NULL, 0, &events, &error));
    CHECK(!other && !op && !events);
    OK(csi_events_open(client, "", 0, &events, &error));
    PANICS(csi_events_next, csi_events_next(events, &event, &error));

    QUIET(csi_version, csi_version() == 0);
    QUIET(csi_client_ref, csi_client_ref(client) == NULL);
    QUIET(csi_client_unref, (csi_client_unref(client), 1));
    QUIET(csi_op_ref, csi_op_ref(kept) == NULL);
    QUIET(csi_op_unref, (csi_op_unref(kept), 1));
    QUIET(csi_op_fd, csi_op_fd(kept) == -1);
    QUIET(csi_op_id, csi_op_id(kept) == NULL);
    QUIET(csi_op_cancel, (csi_op_cancel(kept), 1));
    QUIET(csi_op_rows, csi_op_rows(kept) == 0);
    QUIET(csi_op_take_fd, csi_op_take_fd(kept) == -1);
    QUIET(csi_op_row, csi_op_row(kept, 0) == NULL);
    QUIET(csi_events_ref, csi_events_ref(events) == NULL);
    QUIET(csi_events_unref, (csi_events_unref(events), 1));
    QUIET(csi_events_fd, csi_events_fd(events) == -1);
    CHECK(readable(csi_events_fd(events), SOON * 1000));
    OK(csi_events_next(events, &event, &error));
    QUIET(csi_event_gap, !csi_event_gap(event));
    QUIET(csi_event_cursor, !csi_event_cursor(event));
    QUIET(csi_event_row, !csi_event_row(event));
    QUIET(csi_event_free, (csi_event_free(event), 1));
    QUIET(csi_row_size, csi_row_size(row) == 0);
    QUIET(csi_row_name, !csi_row_name(row, 0));
    QUIET(csi_row_text, !csi_row_text(row, "state"));
    QUIET(csi_row_number, csi_row_number(row, "event-sequence") == 0);
    QUIET(csi_row_flag, !csi_row_flag(row, "state"));
    QUIET(csi_row_map, !csi_row_map(row, "state").items);
    QUIET(csi_row_len, csi_row_len(row, "features") == 0);
    QUIET(csi_row_item, !csi_row_item(row, "features", 0));
    QUIET(csi_row_contains, !csi_row_contains(row, "features", "mount"));
    QUIET(csi_row_row, !csi_row_row(row, "state", 0));
    QUIET(csi_error_code, csi_error_code(failure) == CSI_E_INTERNAL);
    QUIET(csi_error_message, csi_error_message(failure)[0] == 0);
    QUIET(csi_error_retryable, !csi_error_retryable(failure));
    QUIET(csi_error_grpc_code, csi_error_grpc_code(failure) == -1);
    QUIET(csi_error_rpc, !csi_error_rpc(failure));
    QUIET(csi_error_plugin_message, !csi_error_plugin_message(failure));
    QUIET(csi_error_details, !csi_error_details(failure));
    QUIET(csi_error_free, (csi_error_free(failure), 1));

    /* The client is none the worse. */
    CHECK(listed(client, "plugins") == 1);
    csi_error_free(failure), csi_event_free(event), csi_events_unref(events), csi_op_unref(kept), csi_client_unref(client);
    printf("%d entries\n", tried);
}
