/* What a controller does, and claims. */
#include "test.h"

static const char *text_of(csi_op *op, const char *name)
{
    static char text[256];
    snprintf(text, sizeof text, "%s", csi_row_text(done(op), name));
    csi_op_unref(op);
    return text;
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
    csi_op_unref(other);

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
