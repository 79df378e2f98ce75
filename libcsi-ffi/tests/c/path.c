/* The way of a mount: a plugin is registered, a volume mounted, looked for, unmounted. */
#include "test.h"

/* Threads of this process, and whether libcsi's takes no signal. */
static int threads_now(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) {
        char name[300], line[128], comm[32] = "";
        unsigned long long blocked = 0;
        if (task->d_name[0] == '.')
            continue;
        count++;
        snprintf(name, sizeof name, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(name, "r");
        while (status && fgets(line, sizeof line, status)) {
            sscanf(line, "Name: %31s", comm);
            sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (status)
            fclose(status);
        /* SIGTERM for one; 32 and 33 are the C library's own. */
        CHECK(strcmp(comm, "libcsi") != 0 || (blocked & (1ull << 14) && blocked & 1));
    }
    closedir(tasks);
    return count;
}

static csi_op *mount(csi_client *client, const char *tag, uint64_t flags)
{
    const csi_pair context[] = {{"shelf", "4"}}, secrets[] = {{"password", "c4n4ry-s3cr3t-4242"}};
    const char *const mount_flags[] = {"noatime"};
    csi_volume volume = of_plugin("v");
    volume.context = (csi_map){context, 1};
    volume.mount_flags = (csi_strings){mount_flags, 1};
    csi_mount_options options = {.struct_size = sizeof options, .flags = flags, .access_mode = "single-node-multi-writer",
                                 .attachment_mode = "file-system", .tag = tag};
    csi_call call = within(SOON * SECONDS);
    call.secrets = (csi_map){secrets, 1};
    csi_op *op = NULL;
    OK(csi_mount_volume(client, &volume, "alloc", &options, &call, &op, &error));
    return op;
}

static int mounts(csi_client *client)
{
    const csi_pair filter[] = {{"volume", "v"}, {"consumer", "alloc"}};
    csi_op *op = NULL;
    OK(csi_list(client, "mounts", (csi_map){filter, 2}, NULL, &op, &error));
    done(op);
    int found = (int)csi_op_rows(op);
    for (int i = 0; i < found; i++)
        CHECK(strcmp(csi_row_text(csi_op_row(op, i), "state"), "mounted") == 0);
    csi_op_unref(op);
    return found;
}

/* Adopting what csid has at the same paths finds the same mount. */
static void adopt(csi_client *client, const char *tag)
{
    const csi_pair filter[] = {{"volume", "v"}, {"tag", tag}};
    csi_op *listed = NULL, *op = NULL;
    OK(csi_list(client, "mounts", (csi_map){filter, 2}, NULL, &listed, &error));
    const csi_row *row = done(listed);
    const char *staging = csi_row_text(row, "staging"), *source = csi_row_text(row, "source");
    const csi_pair context[] = {{"shelf", "4"}};
    const char *const mount_flags[] = {"noatime"};
    csi_volume volume = of_plugin("v");
    volume.context = (csi_map){context, 1};
    volume.mount_flags = (csi_strings){mount_flags, 1};
    csi_mount_options options = {.struct_size = sizeof options, .access_mode = "single-node-multi-writer",
                                 .attachment_mode = "file-system", .tag = tag};
    OK(csi_adopt_mount(client, &volume, "alloc", &options, staging, source, NULL, &op, &error));
    const csi_row *adopted = done(op);
    CHECK(strcmp(csi_row_text(adopted, "source"), source) == 0 && !csi_row_flag(adopted, "is-device"));
    csi_op_unref(op);
    OK(csi_adopt_mount(client, &volume, "another", &options, staging, source, NULL, &op, &error));
    FAILS(CSI_E_EXISTS, csi_op_wait(op, -1, &error));
    csi_op_unref(op);
    OK(csi_adopt_mount(client, &volume, "another", &options, staging, "/nowhere", NULL, &op, &error));
    FAILS(CSI_E_NOT_FOUND, csi_op_wait(op, -1, &error));
    csi_op_unref(op);
    csi_op_unref(listed);
}

static bool has_mount(csi_client *client, const char *source)
{
    csi_op *op = NULL;
    OK(csi_has_mount(client, source, NULL, &op, &error));
    bool mounted = csi_row_flag(done(op), "mounted");
    csi_op_unref(op);
    return mounted;
}

void path(void)
{
    CHECK(threads_now() == 1);
    csi_client *client = open_client();
    csi_op *op = NULL;

    csi_plugin plugin = {.struct_size = sizeof plugin, .id = "p", .supervision = "external", .socket = getenv("PLUGIN_SOCKET")};
    OK(csi_register_plugin(client, &plugin, NULL, &op, &error));
    finish(op);
    csi_call call = within(SOON * SECONDS);
    OK(csi_wait_for_plugin(client, "p", "node", &call, &op, &error));
    const csi_row *row = done(op);
    CHECK(strcmp(csi_row_text(row, "id"), "p") == 0);
    CHECK(csi_row_text(row, "node-id")[0] != 0);
    CHECK(csi_row_flag(row, "healthy"));
    CHECK(csi_row_contains(row, "node-capabilities", "STAGE_UNSTAGE_VOLUME"));
    CHECK(!csi_row_contains(row, "node-capabilities", "STAGE"));
    csi_op_unref(op);

    /* Awaited by its descriptor. */
    op = mount(client, "rw-file-system-single-node-multi-writer", 0);
    CHECK(strncmp(csi_op_id(op), "libcsi-", 7) == 0);
    CHECK(readable(csi_op_fd(op), SOON * 1000));
    CHECK(csi_op_wait(op, 0, NULL) == CSI_OK && csi_op_wait(op, -1, NULL) == CSI_OK);
    CHECK(csi_op_rows(op) == 1 && csi_op_row(op, 1) == NULL);
    row = csi_op_row(op, 0);
    const char *source = csi_row_text(row, "source");
    CHECK(source && source[0] == '/' && !csi_row_flag(row, "is-device"));
    CHECK(csi_row_size(row) == 2 && strcmp(csi_row_name(row, 0), "is-device") == 0);
    CHECK(access(source, F_OK) == 0);
    CHECK(has_mount(client, source) && !has_mount(client, "/nowhere/at/all"));
    CHECK(mounts(client) == 1);
    /* The same volume in another usage, by the same consumer. */
    csi_op *reading = mount(client, "ro-file-system-single-node-multi-writer", CSI_READ_ONLY);
    CHECK(strcmp(csi_row_text(done(reading), "source"), source) != 0);
    csi_op_unref(reading);
    CHECK(mounts(client) == 2);
    CHECK(threads_now() == 2);
    csi_op_unref(op);
    csi_client_unref(client);
    /* The kernel lists a thread for a moment after it was joined. */
    EVENTUALLY(threads_now() == 1);
}

static csi_op *open_of(csi_client *client, const char *id, const char *subpath, uint64_t flags)
{
    csi_volume volume = named(id);
    csi_op *op = NULL;
    OK(csi_open_mount(client, &volume, "alloc", NULL, subpath, flags, NULL, &op, &error));
    return op;
}

/* A user namespace in which uid 0 is uid 100000 outside. */
static int user_namespace(void)
{
    int ready[2], done[2];
    CHECK(pipe(ready) == 0 && pipe(done) == 0);
    pid_t child = fork();
    if (child == 0) {
        char byte = unshare(CLONE_NEWUSER) == 0 ? 'y' : 'n';
        close(done[1]);
        _exit(write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 0 ? 0 : 1);
    }
    char byte, path[64];
    close(done[0]);
    CHECK(child > 0 && read(ready[0], &byte, 1) == 1 && byte == 'y');
    const char *maps[] = {"uid_map", "gid_map"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)child, maps[i]);
        int map = open(path, O_WRONLY | O_CLOEXEC);
        CHECK(write(map, "0 100000 1000", 13) == 13);
        close(map);
    }
    snprintf(path, sizeof path, "/proc/%d/ns/user", (int)child);
    int userns = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(userns >= 0);
    close(ready[0]), close(ready[1]), close(done[1]);
    CHECK(waitpid(child, NULL, 0) == child);
    return userns;
}

/* A mount as a descriptor, with mapped owners. */
static void mapped(csi_client *client)
{
    csi_volume volume = named("v");
    csi_op *op = NULL;
    int userns = user_namespace();
    OK(csi_open_mount_idmapped(client, &volume, "alloc", NULL, "sub", 0, userns, NULL, &op, &error));
    close(userns);
    CHECK(done(op) == NULL);
    int tree = csi_op_take_fd(op);
    struct stat stat;
    CHECK(fstatat(tree, "file", &stat, 0) == 0 && stat.st_uid == 100000 && stat.st_gid == 100000);
    close(tree);
    csi_op_unref(op);
    int own = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
    OK(csi_open_mount_idmapped(client, &volume, "alloc", NULL, NULL, 0, own, NULL, &op, &error));
    close(own);
    FAILS(CSI_E_INVALID, csi_op_wait(op, -1, &error));
    csi_op_unref(op);
}

/* A mount as a descriptor. */
void opening(void)
{
    csi_client *client = open_client();
    csi_volume volume = of_plugin("v");
    int before = descriptors();
    csi_op *op = open_of(client, "v", NULL, 0);
    FAILS(CSI_E_NOT_FOUND, csi_op_wait(op, -1, &error));
    CHECK(csi_op_take_fd(op) == -1);
    csi_op_unref(op);
    OK(csi_mount_volume(client, &volume, "alloc", NULL, NULL, &op, &error));
    char file[600];
    snprintf(file, sizeof file, "%s/sub", csi_row_text(done(op), "source"));
    CHECK(csi_op_take_fd(op) == -1 && mkdir(file, 0755) == 0);
    csi_op_unref(op);

    op = open_of(client, "v", NULL, 0);
    CHECK(done(op) == NULL);
    int tree = csi_op_take_fd(op);
    CHECK(tree >= 0 && fcntl(tree, F_GETFD) == FD_CLOEXEC && csi_op_take_fd(op) == -1);
    csi_op_unref(op);
    int sub = openat(tree, "sub/file", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(sub >= 0);
    close(sub), close(tree);
    mapped(client);
    op = open_of(client, "v", "sub", CSI_READ_ONLY);
    done(op);
    tree = csi_op_take_fd(op);
    CHECK(faccessat(tree, "file", R_OK, 0) == 0 && openat(tree, "file", O_WRONLY) == -1 && errno == EROFS);
    csi_op_unref(op);
    close(tree);
    /* One that nobody takes. */
    op = open_of(client, "v", NULL, 0);
    finish(op);
    /* The library's thread releases the operation a moment later. */
    EVENTUALLY(descriptors() == before);
    op = open_of(client, "v", "../v", 0);
    FAILS(CSI_E_INVALID, csi_op_wait(op, -1, &error));
    csi_op_unref(op);
    FAILS(CSI_E_UNSUPPORTED, csi_open_mount(client, &volume, "alloc", NULL, NULL, CSI_SUID, NULL, &op, &error));
    OK(csi_unmount_volume(client, &volume, "alloc", NULL, 0, NULL, &op, &error));
    finish(op);
    csi_client_unref(client);
}

/* In another process, which has mounted nothing. */
void again(void)
{
    csi_client *client = open_client();
    csi_op *op = NULL;
    CHECK(mounts(client) == 2);
    op = mount(client, "rw-file-system-single-node-multi-writer", 0);
    char source[512];
    snprintf(source, sizeof source, "%s", csi_row_text(done(op), "source"));
    csi_op_unref(op);
    CHECK(has_mount(client, source));
    adopt(client, "rw-file-system-single-node-multi-writer");
    csi_volume volume = named("v");
    const char *tags[] = {"rw-file-system-single-node-multi-writer", "ro-file-system-single-node-multi-writer", "never", NULL};
    for (int i = 0; i < 4; i++) {
        OK(csi_unmount_volume(client, &volume, "alloc", tags[i], 0, NULL, &op, &error));
        CHECK(done(op) == NULL);
        csi_op_unref(op);
    }
    CHECK(!has_mount(client, source));
    CHECK(mounts(client) == 0);
    OK(csi_unregister_plugin(client, "p", NULL, 0, NULL, &op, &error));
    finish(op);
    OK(csi_get_plugin(client, "p", NULL, &op, &error));
    FAILS(CSI_E_NOT_FOUND, csi_op_wait(op, -1, &error));
    csi_op_unref(op);
    csi_client_unref(client);
}
