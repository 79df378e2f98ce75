/* Events: in order, from a cursor on, through csid's restart, with a gap reported. */
#include "test.h"

/* The next event of that type, or a gap, which is NULL; its cursor is kept. */
static char cursor[128];

static csi_event *next(csi_events *events, const char *type)
{
    for (;;) {
        csi_event *event = NULL;
        csi_error *error = NULL;
        CHECK(readable(csi_events_fd(events), SOON * 1000));
        csi_code code = csi_events_next(events, &event, &error);
        if (code == CSI_E_PENDING)
            continue;
        CHECK(code == CSI_OK);
        const csi_row *row = csi_event_row(event);
        snprintf(cursor, sizeof cursor, "%s", csi_event_cursor(event));
        if (csi_event_gap(event) ? !type : type && strcmp(csi_row_text(row, "type"), type) == 0)
            return event;
        CHECK(!csi_event_gap(event));
        csi_event_free(event);
    }
}

static void mounted(csi_client *client, csi_events *events, const char *id)
{
    csi_op *op = NULL;
    csi_volume volume = of_plugin(id);
    OK(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
    finish(op);
    csi_event *event = next(events, "mount");
    const csi_row *row = csi_event_row(event), *details = csi_row_row(row, "details", 0);
    char subject[64];
    snprintf(subject, sizeof subject, "default/%s", id);
    CHECK(strcmp(csi_row_text(row, "subject"), subject) == 0 && csi_row_number(row, "realtime-usec") > 0);
    CHECK(strcmp(csi_row_text(details, "consumer"), "job") == 0 && csi_row_flag(details, "success"));
    CHECK(csi_row_map(row, "details").len > 0);
    csi_event_free(event);
}

void events(void)
{
    csi_client *client = open_client();
    csi_events *events = NULL, *again = NULL;
    csi_event *event = NULL;
    uint64_t last = 0;
    OK(csi_events_open(client, NULL, 0, &events, &error));
    CHECK(csi_events_next(events, &event, NULL) == CSI_E_PENDING && !readable(csi_events_fd(events), 0));
    mounted(client, events, "a");
    char after_a[128];
    strcpy(after_a, cursor);
    mounted(client, events, "b");
    CHECK(!readable(csi_events_fd(events), 200) || csi_events_next(events, &event, NULL) == CSI_OK);
    csi_event_free(event);

    /* More than the library keeps, read late and in order. */
    csi_op *op = NULL;
    csi_volume volume = of_plugin("many");
    for (int i = 0; i < 300; i++) {
        OK(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
        finish(op);
        OK(csi_unmount_volume(client, &volume, "job", NULL, 0, NULL, &op, &error));
        finish(op);
    }
    for (int i = 0; i < 300; i++) {
        event = next(events, "mount");
        CHECK(csi_row_number(csi_event_row(event), "sequence") > last);
        last = csi_row_number(csi_event_row(event), "sequence");
        csi_event_free(event);
    }

    /* csid is killed: no event is lost, none comes twice. */
    tell("kill csid");
    tell("start csid");
    mounted(client, events, "c");
    csi_events_unref(events);

    /* Another reader, from a cursor of before. */
    OK(csi_events_open(client, after_a, 0, &again, &error));
    event = next(again, "mount");
    CHECK(strcmp(csi_row_text(csi_event_row(event), "subject"), "default/b") == 0);
    csi_event_free(event);
    csi_events_unref(again);

    /* A cursor of another journal: a gap, then everything there is. */
    OK(csi_events_open(client, "another:7", 0, &again, &error));
    event = next(again, NULL);
    CHECK(csi_row_size(csi_event_row(event)) == 0);
    csi_event_free(event);
    event = next(again, "mount");
    CHECK(strcmp(csi_row_text(csi_event_row(event), "subject"), "default/a") == 0);
    csi_event_free(event);
    csi_events_unref(again);
    csi_client_unref(client);
}

/* csid begins a new journal, and the connection to the bus stays: a gap, then the events of the new journal. */
void journal(void)
{
    csi_client_options options = {.struct_size = sizeof options, .address = "system-bus"};
    csi_client *client = NULL;
    csi_events *events = NULL;
    OK(csi_client_open(&options, &client, &error));
    OK(csi_events_open(client, NULL, 0, &events, &error));
    csi_op *op = NULL;
    csi_volume volume = of_plugin("a");
    for (int i = 0; i < 10; i++) {
        mounted(client, events, "a");
        OK(csi_unmount_volume(client, &volume, "job", NULL, 0, NULL, &op, &error));
        finish(op);
        csi_event_free(next(events, "unmount"));
    }
    /* All is read, and the reader waits for a signal. */
    csi_event *event = NULL;
    while (readable(csi_events_fd(events), 1000))
        if (csi_events_next(events, &event, NULL) == CSI_OK)
            csi_event_free(event);
    char old[128];
    strcpy(old, cursor);
    tell("new journal");
    csi_event_free(next(events, NULL));
    size_t journal = (size_t)(strchr(cursor, ':') - cursor) + 1;
    CHECK(strncmp(cursor, old, journal) != 0 && strcmp(cursor + journal, "0") == 0);
    strcpy(old, cursor);
    mounted(client, events, "b");
    CHECK(strncmp(cursor, old, journal) == 0 && strcmp(cursor + journal, "0") != 0);
    csi_events_unref(events);
    csi_client_unref(client);
}
