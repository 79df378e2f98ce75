/* What a controller does, and claims. */
#include "test.h"

static const char *text_of(csi_op *op, const char *name)
{
    static char text[256];
    snprintf(text, sizeof text, "%s", csi_row_text(done(op), name));
    csi_op_unref(op);
    return text;
}

/* What the plugin has, page by page. */
static size_t pages(csi_client *client, int snapshots, uint32_t max, const char *external)
{
    char token[256] = "";
    size_t found = 0, rows;
    do {
        csi_op *op = NULL;
        if (snapshots)
            OK(csi_list_snapshots(client, "p", NULL, external, token[0] ? token : NULL, max, NULL, &op, &error));
        else
            OK(csi_list_external_volumes(client, "p", token[0] ? token : NULL, max, NULL, &op, &error));
        const csi_row *page = done(op);
        const char *list = snapshots ? "snapshots" : "volumes";
        rows = csi_row_len(page, list);
        for (size_t i = 0; i < rows; i++)
            CHECK(csi_row_text(csi_row_row(page, list, i), "external-id")[0]);
        CHECK(max == 0 || rows <= max);
        found += rows;
        snprintf(token, sizeof token, "%s", csi_row_text(page, "next-token"));
        csi_op_unref(op);
    } while (token[0]);
    return found;
}

static uint64_t capacity(csi_client *client, csi_capabilities capabilities, csi_map parameters, csi_map topology)
{
    csi_op *op = NULL;
    OK(csi_get_capacity(client, "p", capabilities, parameters, topology, NULL, &op, &error));
    uint64_t available = csi_row_number(done(op), "available");
    csi_op_unref(op);
    return available;
}

void volumes(void)
{
    const csi_capability any[] = {{"single-node-multi-writer", "file-system"}};
    const csi_pair parameters[] = {{"tier", "fast"}};
    csi_client *client = open_client();
    csi_op *op = NULL;
    const csi_row *row;

    OK(csi_get_plugin(client, "p", NULL, &op, &error));
    char node[256];
    strcpy(node, text_of(op, "node-id"));
    CHECK(node[0]);

    /* Made for a scheduler that keeps its own rows and claims. */
    csi_volume volume = {.struct_size = sizeof volume, .ns = "default", .id = "own", .plugin = "p", .capabilities = {any, 1}};
    csi_volume_spec spec = {.struct_size = sizeof spec, .flags = CSI_CREATE_ONLY, .parameters = {parameters, 1}, .capacity_min = 1 << 20};
    FAILS(CSI_E_UNSUPPORTED, csi_register_volume(client, &volume, &spec, NULL, &op, &error));
    OK(csi_create_volume(client, &volume, &spec, NULL, &op, &error));
    row = done(op);
    char external[256];
    snprintf(external, sizeof external, "%s", csi_row_text(row, "external-id"));
    CHECK(external[0] && csi_row_number(row, "capacity") >= 1 << 20);
    /* Its context goes with it from here on. */
    csi_map context = csi_row_map(row, "context");
    CHECK(context.items && !csi_row_map(row, "nothing").items);
    volume.external_id = external;
    volume.context = context;

    csi_op *other = NULL;
    csi_usage usage = {.struct_size = sizeof usage, .access_mode = "single-node-multi-writer"};
    OK(csi_validate_volume(client, &volume, &usage, NULL, &other, &error));
    CHECK(csi_row_flag(done(other), "confirmed"));
    csi_op_unref(other);
    OK(csi_attach_volume(client, &volume, node, &usage, NULL, &other, &error));
    csi_map publish = csi_row_map(done(other), "publish-context");
    CHECK(publish.items);
    csi_mount_options options = {.struct_size = sizeof options, .access_mode = "single-node-multi-writer", .publish_context = publish};
    csi_op *mount = NULL;
    OK(csi_mount_volume(client, &volume, "alloc", &options, NULL, &mount, &error));
    finish(mount);
    csi_op_unref(other);

    OK(csi_volume_stats(client, &volume, NULL, &other, &error));
    row = done(other);
    CHECK(csi_row_len(row, "usage") > 0 && csi_row_text(csi_row_row(row, "usage", 0), "unit") && !csi_row_row(row, "usage", 9));
    CHECK(csi_row_number(csi_row_row(row, "usage", 0), "total") > 0);
    csi_op_unref(other);
    OK(csi_expand_volume(client, &volume, 2 << 20, 0, NULL, NULL, &other, &error));
    CHECK(csi_row_number(done(other), "capacity-bytes") >= 2 << 20);
    csi_op_unref(other);
    OK(csi_create_snapshot(client, &volume, "snap", NO_MAP, NULL, &other, &error));
    row = done(other);
    CHECK(csi_row_text(row, "id")[0] && strcmp(csi_row_text(row, "external-id"), external) == 0 && csi_row_flag(row, "ready"));
    char snapshot[256];
    snprintf(snapshot, sizeof snapshot, "%s", csi_row_text(row, "id"));
    csi_op_unref(other);
    OK(csi_begin_snapshot(client, &volume, "another", NO_MAP, NULL, &other, &error));
    CHECK(csi_row_text(done(other), "id")[0]);
    csi_op_unref(other);

    /* What the plugin has. */
    const csi_capabilities no_capabilities = {NULL, 0}, one_capability = {any, 1};
    const csi_map parameter = {parameters, 1};
    CHECK(capacity(client, no_capabilities, NO_MAP, NO_MAP) > 0 && capacity(client, one_capability, parameter, NO_MAP) > 0);
    CHECK(pages(client, 0, 0, NULL) == 1 && pages(client, 0, 1, NULL) == 1);
    CHECK(pages(client, 1, 0, NULL) == 2 && pages(client, 1, 1, NULL) == 2 && pages(client, 1, 1, external) == 2);
    CHECK(pages(client, 1, 0, "no such volume") == 0);
    OK(csi_list_snapshots(client, "p", snapshot, NULL, NULL, 0, NULL, &other, &error));
    row = done(other);
    CHECK(csi_row_len(row, "snapshots") == 1 && strcmp(csi_row_text(csi_row_row(row, "snapshots", 0), "id"), snapshot) == 0);
    csi_op_unref(other);
    for (int i = 0; i < 2; i++) {
        OK(csi_delete_snapshot(client, "p", snapshot, NULL, &other, &error));
        finish(other);
    }
    CHECK(pages(client, 1, 0, NULL) == 1);

    OK(csi_detach_volume(client, &volume, node, NULL, &other, &error));
    FAILS(CSI_E_BUSY, csi_op_wait(other, -1, &error));
    csi_op_unref(other);
    OK(csi_unmount_volume(client, &volume, "alloc", NULL, 0, NULL, &other, &error));
    finish(other);
    OK(csi_detach_volume(client, &volume, node, NULL, &other, &error));
    finish(other);
    OK(csi_delete_volume(client, &volume, NULL, &other, &error));
    finish(other);
    csi_op_unref(op);

    /* Registered, and claimed. */
    volume = (csi_volume){.struct_size = sizeof volume, .ns = "default", .id = "db", .plugin = "p", .capabilities = {any, 1}};
    spec = (csi_volume_spec){.struct_size = sizeof spec, .capacity_min = 1 << 20};
    OK(csi_create_volume(client, &volume, &spec, NULL, &op, &error));
    finish(op);
    volume = named("db");
    OK(csi_get_volume(client, &volume, NULL, &op, &error));
    row = done(op);
    CHECK(strcmp(csi_row_text(csi_row_row(row, "capabilities", 0), "access-mode"), "single-node-multi-writer") == 0);
    csi_op_unref(op);
    csi_claim_options claim = {.struct_size = sizeof claim, .mode = "write"};
    OK(csi_claim(client, &volume, "alloc", &claim, NULL, &op, &error));
    row = done(op);
    CHECK(strcmp(csi_row_text(row, "external-node-id"), node) == 0 && csi_row_map(row, "publish-context").items);
    CHECK(strcmp(csi_row_text(row, "id"), "db") == 0 && csi_row_text(row, "external-id")[0]);
    csi_op_unref(op);
    const csi_pair filter[] = {{"volume", "db"}, {"past", "false"}};
    OK(csi_list(client, "claims", (csi_map){filter, 2}, NULL, &op, &error));
    CHECK(strcmp(csi_row_text(done(op), "consumer"), "alloc") == 0 && csi_op_rows(op) == 1);
    csi_op_unref(op);
    OK(csi_deregister_volume(client, &volume, 0, NULL, &op, &error));
    csi_error *error = NULL;
    CHECK(csi_op_wait(op, -1, &error) == CSI_E_BUSY || csi_error_code(error) == CSI_E_CLAIM_CONFLICT);
    csi_error_free(error);
    csi_op_unref(op);
    OK(csi_explain(client, &volume, NULL, &op, &error));
    CHECK(csi_row_len(done(op), "holders") == 1);
    csi_op_unref(op);
    for (int i = 0; i < 2; i++) {
        OK(csi_release(client, &volume, "alloc", NULL, 0, NULL, &op, &error));
        finish(op);
    }
    OK(csi_list(client, "volumes", NO_MAP, NULL, &op, &error));
    done(op);
    CHECK(csi_op_rows(op) == 1);
    csi_op_unref(op);
    OK(csi_deregister_volume(client, &volume, 0, NULL, &op, &error));
    finish(op);
    csi_client_unref(client);
}
