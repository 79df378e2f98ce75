/* A caller's mistake is an error, and nothing crashes. */
#include "test.h"

#define INVALID(call) FAILS(CSI_E_INVALID, call)

/* A struct of `size` bytes, with `filler` behind what the library knows. */
static csi_volume *sized(size_t size, char filler)
{
    csi_volume *volume = calloc(1, size > sizeof *volume ? size : sizeof *volume);
    *volume = of_plugin("v");
    volume->struct_size = size;
    if (size > sizeof *volume)
        memset(volume + 1, filler, size - sizeof *volume);
    return volume;
}

static csi_code volume_of(csi_client *client, csi_volume *volume, csi_op **op, csi_error **error)
{
    csi_code code = csi_unmount_volume(client, volume, "job", NULL, 0, NULL, op, error);
    free(volume);
    return code;
}

/* As a program has it that was built when csi_plugin ended before unit. */
static csi_code old_plugin(csi_client *client, size_t size, csi_op **op, csi_error **error)
{
    csi_plugin all = {.struct_size = size, .id = "old", .supervision = "external", .socket = "/run/old.sock", .unit = "a.service"};
    csi_plugin *plugin = malloc(size);
    memcpy(plugin, &all, size);
    csi_code code = csi_register_plugin(client, plugin, NULL, op, error);
    free(plugin);
    return code;
}

void arguments(void)
{
    csi_client *client = open_client();
    csi_op *op = NULL;
    csi_events *reader = NULL;
    csi_event *event = NULL;
    csi_volume volume = of_plugin("v");

    /* NULL. */
    INVALID(csi_client_open(NULL, NULL, &error));
    CHECK(csi_client_open(NULL, NULL, NULL) == CSI_E_INVALID);
    INVALID(csi_mount_volume(NULL, &volume, "job", NULL, NULL, &op, &error));
    INVALID(csi_mount_volume(client, NULL, "job", NULL, NULL, &op, &error));
    INVALID(csi_mount_volume(client, &volume, NULL, NULL, NULL, &op, &error));
    INVALID(csi_mount_volume(client, &volume, "job", NULL, NULL, NULL, &error));
    INVALID(csi_has_mount(client, NULL, NULL, &op, &error));
    INVALID(csi_adopt_mount(client, &volume, "job", NULL, "/s", NULL, NULL, &op, &error));
    INVALID(csi_register_plugin(client, NULL, NULL, &op, &error));
    INVALID(csi_wait_for_plugin(client, "p", NULL, NULL, &op, &error));
    INVALID(csi_list(client, NULL, NO_MAP, NULL, &op, &error));
    INVALID(csi_op_wait(NULL, 0, &error));
    INVALID(csi_events_open(NULL, NULL, 0, &reader, &error));
    INVALID(csi_events_open(client, NULL, 0, NULL, &error));
    INVALID(csi_events_next(NULL, &event, &error));
    volume.id = NULL;
    INVALID(csi_get_volume(client, &volume, NULL, &op, &error));
    volume = of_plugin("v");
    volume.context = (csi_map){NULL, 3};
    INVALID(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
    const csi_pair no_value[] = {{"key", NULL}};
    volume.context = (csi_map){no_value, 1};
    INVALID(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
    CHECK(op == NULL && reader == NULL && event == NULL);

    /* NULL that is nothing. */
    csi_client_unref(NULL), csi_op_unref(NULL), csi_op_cancel(NULL), csi_error_free(NULL), csi_events_unref(NULL), csi_event_free(NULL);
    CHECK(!csi_client_ref(NULL) && !csi_op_ref(NULL) && !csi_events_ref(NULL));
    CHECK(csi_op_fd(NULL) == -1 && csi_events_fd(NULL) == -1 && csi_op_rows(NULL) == 0 && !csi_op_row(NULL, 0) && !csi_op_id(NULL));
    CHECK(csi_op_take_fd(NULL) == -1);
    CHECK(csi_error_code(NULL) == CSI_OK && csi_error_grpc_code(NULL) == -1 && !csi_error_rpc(NULL) && !csi_error_details(NULL));
    CHECK(!csi_row_text(NULL, "a") && !csi_row_number(NULL, "a") && !csi_row_flag(NULL, NULL) && !csi_row_row(NULL, "a", 0));
    CHECK(!csi_row_map(NULL, "a").items && !csi_row_name(NULL, 0) && !csi_event_row(NULL) && !csi_event_cursor(NULL));

    /* UTF-8. */
    INVALID(csi_get_plugin(client, "\xff", NULL, &op, &error));
    const csi_pair bad[] = {{"password", "hunter2\xc3\x28"}};
    csi_call call = within(0);
    call.secrets = (csi_map){bad, 1};
    csi_error *error = NULL;
    volume = of_plugin("v");
    CHECK(csi_mount_volume(client, &volume, "job", NULL, &call, &op, &error) == CSI_E_INVALID);
    CHECK(!strstr(csi_error_message(error), "hunter"));
    csi_error_free(error);

    /* Sizes. */
    size_t size = sizeof(csi_volume);
    INVALID(volume_of(client, sized(0, 0), &op, &error));
    INVALID(volume_of(client, sized(size - 8, 0), &op, &error));
    INVALID(volume_of(client, sized(size + 100000, 0), &op, &error));
    FAILS(CSI_E_UNSUPPORTED, volume_of(client, sized(size + 8, 1), &op, &error));
    FAILS(CSI_E_UNSUPPORTED, volume_of(client, sized(size + 1, 1), &op, &error));
    OK(volume_of(client, sized(size + 8, 0), &op, &error));
    finish(op);

    size = offsetof(csi_plugin, unit);
    INVALID(old_plugin(client, size - sizeof(void *), &op, &error));
    INVALID(old_plugin(client, size + 1, &op, &error));
    OK(old_plugin(client, size, &op, &error));
    finish(op);
    OK(csi_unregister_plugin(client, "old", NULL, 0, NULL, &op, &error));
    finish(op);

    /* Words, flags, maps. */
    csi_mount_options options = {.struct_size = sizeof options, .access_mode = "rw"};
    INVALID(csi_mount_volume(client, &volume, "job", &options, NULL, &op, &error));
    options = (csi_mount_options){.struct_size = sizeof options, .flags = 1ull << 63};
    FAILS(CSI_E_UNSUPPORTED, csi_mount_volume(client, &volume, "job", &options, NULL, &op, &error));
    INVALID(csi_open_mount_idmapped(client, &volume, "job", NULL, NULL, 0, -1, NULL, &op, &error));
    INVALID(csi_open_mount_idmapped(client, &volume, "job", NULL, NULL, 0, 1 << 20, NULL, &op, &error));
    INVALID(csi_wait_for_plugin(client, "p", "nodes", NULL, &op, &error));
    INVALID(csi_list(client, "secrets", NO_MAP, NULL, &op, &error));
    const csi_pair colour[] = {{"colour", "red"}}, uid[] = {{"uid", "root"}}, twice[] = {{"tag", "a"}, {"tag", "b"}};
    INVALID(csi_list(client, "mounts", (csi_map){colour, 1}, NULL, &op, &error));
    INVALID(csi_list(client, "mounts", (csi_map){uid, 1}, NULL, &op, &error));
    INVALID(csi_list(client, "mounts", (csi_map){twice, 2}, NULL, &op, &error));
    csi_client_options nowhere = {.struct_size = sizeof nowhere, .address = "somewhere"};
    csi_client *other = NULL;
    INVALID(csi_client_open(&nowhere, &other, &error));
    nowhere.address = "/nowhere/csid.sock";
    FAILS(CSI_E_DISCONNECTED, csi_client_open(&nowhere, &other, &error));
    INVALID(csi_events_open(client, "yesterday", 0, &reader, &error));

    /* A huge map. */
    size_t many = 100000;
    csi_pair *pairs = malloc(many * sizeof *pairs);
    char *names = malloc(many * 8);
    for (size_t i = 0; i < many; i++) {
        snprintf(names + i * 8, 8, "k%zu", i);
        pairs[i] = (csi_pair){names + i * 8, "v"};
    }
    volume.context = (csi_map){pairs, many};
    INVALID(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
    /* One that only csid refuses. */
    volume.context = (csi_map){pairs, 3000};
    op = NULL;
    OK(csi_mount_volume(client, &volume, "job", NULL, NULL, &op, &error));
    INVALID(csi_op_wait(op, -1, &error));
    csi_op_unref(op);
    free(pairs), free(names);

    /* What csid knows. */
    OK(csi_get_manager(client, NULL, &op, &error));
    const csi_row *manager = done(op);
    CHECK(csi_row_contains(manager, "features", "mount") && csi_row_text(manager, "journal-id")[0]);
    CHECK(csi_row_len(manager, "features") > 3 && csi_row_item(manager, "features", 0) && !csi_row_item(manager, "features", 99));
    CHECK(!csi_row_text(manager, "features") && !csi_row_text(manager, "nothing") && csi_row_number(manager, "state") == 0);
    csi_op_unref(op);
    csi_client_unref(client);
}
