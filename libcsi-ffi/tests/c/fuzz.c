/* Every entry with arguments at random: nothing crashes, nothing hangs, nothing is read that was not given. What a caller has to
 * keep to is kept to: a text ends with a NUL, a struct has as many bytes as it says, and no more, so that AddressSanitizer sees a
 * look beyond. */
#include "test.h"

enum { OPS = 16, STEPS = 66, BYTES = 400 };

/* What an input is read from; beyond its end there are zeroes. */
static const uint8_t *data, *data_end;
/* What was made for one call. */
static void *made[4096];
static size_t makes;
/* What lives from call to call. */
static csi_client *client;
static csi_op *ops[OPS];
static csi_events *reader;
static csi_event *event;
static csi_error *failure;
static unsigned long calls[STEPS];

static uint8_t byte(void)
{
    return data < data_end ? *data++ : 0;
}

static bool rarely(void)
{
    return byte() % 16 == 1;
}

static void *make(size_t size)
{
    void *memory = malloc(size);
    CHECK(memory && makes < sizeof made / sizeof *made);
    made[makes++] = memory;
    return memory;
}

static const char *copy(const char *bytes, size_t length)
{
    char *text = make(length + 1);
    memcpy(text, bytes, length);
    text[length] = 0;
    return text;
}

static const char *text(void)
{
    static const char *const words[] = {
        "v", "w", "p", "default", "alloc", "single-node-writer", "single-node-multi-writer", "file-system", "block-device", "node", "controller",
        "mounts", "volumes", "claims", "plugins", "operations", "read", "write", "private", "auto", "hold", "external", "managed", "report",
        "all", "unit:a.service", "a.service", "unit", "netns:a", "node-block", "node-1", "caller", "system-bus", "../v", "true", "4294967296", "", "\xff\xfe", "a\xc3\x28", "\xed\xa0\x80", "\n", "\xe2\x80\xae",
    };
    size_t length = 0;
    char bytes[256];
    switch (byte() % 16) {
    case 0:
        return NULL;
    case 1: {
        size_t size = rarely() ? 70000 : 4200;
        char *whole = make(size + 1);
        memset(whole, 'x', size);
        whole[size] = 0;
        return whole;
    }
    case 2: case 3:
        for (size_t i = byte() % 32; i > 0; i--)
            bytes[length++] = (char)(1 + byte() % 255);
        return copy(bytes, length);
    default: {
        const char *word = words[byte() % (sizeof words / sizeof *words)];
        return copy(word, strlen(word));
    }
    }
}

/* How many items a list has, and whether it has any memory for them. */
static size_t length(bool *none)
{
    *none = false;
    switch (byte() % 12) {
    case 0: *none = true; return byte() % 2 ? 3 : SIZE_MAX;
    case 1: case 2: case 3: *none = true; return 0;
    case 4: return 0;
    case 5: return rarely() ? 1000 : 20;
    default: return 1 + byte() % 3;
    }
}

/* A length that fits in no memory. */
static size_t absurd(size_t len)
{
    return rarely() ? SIZE_MAX / 2 : len;
}

#define LIST(name, type, item, fill) \
    static type name(void) \
    { \
        bool none; \
        size_t len = length(&none); \
        type list = {NULL, len}; \
        if (!none) { \
            item *items = make(len * sizeof *items); \
            for (size_t i = 0; i < len; i++) \
                items[i] = fill; \
            list = (type){items, absurd(len)}; \
        } \
        return list; \
    }
LIST(map, csi_map, csi_pair, ((csi_pair){text(), text()}))
LIST(strings, csi_strings, const char *, text())
LIST(capabilities, csi_capabilities, csi_capability, ((csi_capability){text(), text()}))
LIST(topologies, csi_topologies, csi_map, map())

/* The struct with the size that it says, which need not be that of its type. */
static void *sized(const void *whole, size_t size)
{
    static const int off[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 8, 64, 4096, 5000, -1, -8};
    size_t wanted = size + (size_t)off[byte() % (sizeof off / sizeof *off)];
    if (rarely())
        return NULL;
    if (rarely())
        wanted = byte() % 9;
    if (rarely())
        wanted = SIZE_MAX - byte();
    /* One that is refused for its size is looked at no further than that. */
    size_t there = wanted < sizeof wanted ? sizeof wanted : wanted > size + 6000 ? size : wanted;
    uint8_t *bytes = make(there);
    memset(bytes, 0, there);
    memcpy(bytes, whole, there < size ? there : size);
    memcpy(bytes, &wanted, sizeof wanted);
    if (there > size && byte() % 2)
        bytes[there - 1] = byte();
    return bytes;
}

static uint64_t number(void)
{
    switch (byte() % 6) {
    case 0: return UINT64_MAX - byte();
    case 1: return (uint64_t)1 << byte() % 64;
    case 2: return 1000;
    default: return byte() % 8;
    }
}

static csi_volume *volume(void)
{
    csi_volume all = {0, text(), text(), text(), text(), map(), capabilities(), text(), strings()};
    if (byte() % 2)
        all = (csi_volume){0, "default", "v", byte() % 2 ? "p" : NULL, byte() % 2 ? "v" : NULL, map(), {NULL, 0}, NULL, {NULL, 0}};
    return sized(&all, sizeof all);
}

static csi_call *call(void)
{
    csi_call all = {0, 1 + number() % 200000, map(), text(), text()};
    if (byte() % 4)
        all.secrets = NO_MAP, all.credential = NULL, all.operation_id = NULL;
    if (rarely())
        all.deadline_usec = number();
    return sized(&all, sizeof all);
}

static csi_mount_options *mount_options(void)
{
    csi_mount_options all = {0, number(), text(), text(), text(), text(), NULL, text(), text(), text(), number(), map(), number()};
    if (byte() % 2)
        all = (csi_mount_options){.flags = byte() % 2};
    return sized(&all, sizeof all);
}

static csi_claim_options *claim_options(void)
{
    csi_claim_options all = {0, text(), text(), text(), text(), number(), text(), number()};
    return sized(&all, sizeof all);
}

static csi_plugin *plugin(void)
{
    csi_plugin all = {0, text(), text(), text(), text(), text(), text(), strings(), map(), strings(), text(), text(), text(), text(), text()};
    return sized(&all, sizeof all);
}

static csi_volume_spec *spec(void)
{
    csi_volume_spec all = {0, number(), text(), text(), map(), topologies(), text(), number(), number(), text(), text()};
    return sized(&all, sizeof all);
}

static csi_usage *usage(void)
{
    csi_usage all = {0, number(), text(), text()};
    return sized(&all, sizeof all);
}

static csi_client *of(void)
{
    return rarely() ? NULL : client;
}

static csi_op *any_op(void)
{
    return rarely() ? NULL : ops[byte() % OPS];
}

/* A row, or one in a row, or none. */
static const csi_row *row(void)
{
    const csi_row *found = csi_op_row(any_op(), byte() % 3);
    if (byte() % 4 == 0)
        found = csi_error_details(failure);
    if (byte() % 4 == 0)
        found = csi_event_row(event);
    if (byte() % 4 == 0)
        found = csi_row_row(found, csi_row_name(found, byte() % 20), byte() % 2);
    return found;
}

static const char *name_in(const csi_row *from)
{
    return byte() % 4 ? csi_row_name(from, byte() % 24) : text();
}

/* The code and the error agree, and what was not written is as it was. */
static void look(csi_code code, csi_error *error, bool wanted, const void *out)
{
    CHECK(code == CSI_OK || out == NULL || code == CSI_E_PENDING);
    CHECK(error == NULL || code != CSI_OK);
    CHECK(!wanted || code == CSI_OK || code == CSI_E_PENDING || error != NULL);
    CHECK(code != CSI_E_INTERNAL || strstr(csi_error_message(error), "panic") == NULL);
    if (error != NULL) {
        CHECK(csi_error_code(error) == code && csi_error_message(error)[0]);
        csi_error_free(failure);
        failure = error;
    }
}

static void keep(csi_op *op)
{
    csi_op **place = &ops[byte() % OPS];
    if (op == NULL)
        return;
    if (byte() % 2)
        csi_op_cancel(*place);
    csi_op_unref(*place);
    *place = op;
}

#define BEGINS(entry, ...) \
    do { \
        csi_op *op_ = NULL; \
        csi_error *error_ = NULL; \
        bool told_ = !rarely(), out_ = !rarely(); \
        csi_code code_ = entry(__VA_ARGS__, out_ ? &op_ : NULL, told_ ? &error_ : NULL); \
        look(code_, error_, told_, op_); \
        CHECK(out_ || code_ != CSI_OK); \
        CHECK(op_ != NULL || code_ != CSI_OK || !out_); \
        keep(op_); \
    } while (0)

static void reopen(void)
{
    csi_client_unref(client);
    client = open_client();
}

static void touch(const char *said)
{
    static volatile size_t sum;
    sum += said ? strlen(said) : 0;
}

/* One entry. False: there is none of that number. */
static bool step(unsigned which)
{
    const csi_row *at = row();
    csi_error *error = NULL;
    switch (which) {
    case 0: BEGINS(csi_claim, of(), volume(), text(), claim_options(), call()); break;
    case 1: BEGINS(csi_release, of(), volume(), text(), text(), number(), call()); break;
    case 2: BEGINS(csi_register_plugin, of(), plugin(), call()); break;
    case 3: BEGINS(csi_unregister_plugin, of(), text(), text(), number(), call()); break;
    case 4: BEGINS(csi_wait_for_plugin, of(), text(), text(), call()); break;
    case 5: BEGINS(csi_get_plugin, of(), text(), call()); break;
    case 6: BEGINS(csi_mount_volume, of(), volume(), text(), mount_options(), call()); break;
    case 7: BEGINS(csi_unmount_volume, of(), volume(), text(), text(), number(), call()); break;
    case 8:
        if (number() & 1) BEGINS(csi_open_mount_idmapped, of(), volume(), text(), text(), text(), number(), (int)(number() % 64) - 1, call());
        else BEGINS(csi_open_mount, of(), volume(), text(), text(), text(), number(), call());
        break;
    case 9: BEGINS(csi_has_mount, of(), text(), call()); break;
    case 10: BEGINS(csi_attach_volume, of(), volume(), text(), usage(), call()); break;
    case 11: BEGINS(csi_detach_volume, of(), volume(), text(), call()); break;
    case 12: BEGINS(csi_validate_volume, of(), volume(), usage(), call()); break;
    case 13: BEGINS(csi_expand_volume, of(), volume(), number(), number(), text(), call()); break;
    case 14: BEGINS(csi_create_volume, of(), volume(), spec(), call()); break;
    case 15: BEGINS(csi_register_volume, of(), volume(), spec(), call()); break;
    case 16: BEGINS(csi_deregister_volume, of(), volume(), number(), call()); break;
    case 17: BEGINS(csi_delete_volume, of(), volume(), call()); break;
    case 18:
        if (number() & 1) BEGINS(csi_begin_snapshot, of(), volume(), text(), map(), call());
        else BEGINS(csi_create_snapshot, of(), volume(), text(), map(), call());
        break;
    case 19: BEGINS(csi_volume_stats, of(), volume(), call()); break;
    case 20: BEGINS(csi_get_volume, of(), volume(), call()); break;
    case 21: BEGINS(csi_explain, of(), volume(), call()); break;
    case 22: BEGINS(csi_list, of(), text(), map(), call()); break;
    case 23: BEGINS(csi_get_manager, of(), call()); break;
    case 24: BEGINS(csi_get_capacity, of(), text(), capabilities(), map(), map(), call()); break;
    case 25: BEGINS(csi_list_external_volumes, of(), text(), text(), (uint32_t)number(), call()); break;
    case 26: BEGINS(csi_list_snapshots, of(), text(), text(), text(), text(), (uint32_t)number(), call()); break;
    case 27: BEGINS(csi_delete_snapshot, of(), text(), text(), call()); break;
    case 28: {
        csi_client_options options = {0, text(), 1 + number() % 50000};
        csi_client *other = NULL;
        bool out = !rarely();
        csi_code code = csi_client_open(sized(&options, sizeof options), out ? &other : NULL, &error);
        look(code, error, true, other);
        csi_client_unref(other);
        break;
    }
    case 29: CHECK(csi_client_ref(client) == client); csi_client_unref(client); break;
    case 30: rarely() && rarely() ? reopen() : csi_client_unref(NULL); break;
    case 31: {
        csi_code code = csi_op_wait(any_op(), byte() % 4 ? 0 : byte() * 40, &error);
        look(code, error, code != CSI_E_PENDING, NULL);
        break;
    }
    case 32: csi_op_cancel(any_op()); break;
    case 33: CHECK(csi_op_fd(any_op()) >= -1); break;
    case 34: touch(csi_op_id(any_op())); break;
    case 35: CHECK(csi_op_rows(any_op()) < 100000); break;
    case 36: touch(csi_row_name(csi_op_row(any_op(), number()), 0)); break;
    case 37: csi_op_unref(csi_op_ref(any_op())); break;
    case 38: keep(csi_op_ref(any_op())); break;
    case 39: { csi_op **op = &ops[byte() % OPS]; csi_op_unref(*op); *op = NULL; break; }
    case 40: { int fd = csi_op_take_fd(any_op()); CHECK(fd == -1 || close(fd) == 0); break; }
    case 41: {
        csi_events *other = NULL;
        csi_code code = csi_events_open(of(), text(), 1 + number() % 50000, rarely() ? NULL : &other, &error);
        look(code, error, true, other);
        if (other != NULL) {
            csi_events_unref(reader);
            reader = other;
        }
        break;
    }
    case 42: CHECK(csi_events_fd(reader) >= -1); break;
    case 43: {
        csi_event *next = NULL;
        csi_code code = csi_events_next(rarely() ? NULL : reader, rarely() ? NULL : &next, &error);
        look(code, error, code != CSI_E_PENDING, next);
        if (next != NULL) {
            csi_event_free(event);
            event = next;
        }
        break;
    }
    case 44: csi_events_unref(csi_events_ref(reader)); break;
    case 45: {
        csi_events *old = rarely() ? reader : NULL;
        reader = old ? NULL : reader;
        csi_events_unref(old);
        break;
    }
    case 46: (void)csi_event_gap(event); break;
    case 47: touch(csi_event_cursor(event)); break;
    case 48: (void)csi_row_size(csi_event_row(event)); break;
    case 49: csi_event_free(event); event = NULL; break;
    case 50: CHECK(csi_row_size(at) < 1000); break;
    case 51: touch(csi_row_name(at, number())); break;
    case 52: touch(csi_row_text(at, name_in(at))); break;
    case 53: (void)csi_row_number(at, name_in(at)); (void)csi_row_flag(at, name_in(at)); break;
    case 54: {
        csi_map found = csi_row_map(at, name_in(at));
        for (size_t i = 0; i < found.len; i++)
            touch(found.items[i].key), touch(found.items[i].value);
        break;
    }
    case 55: (void)csi_row_len(at, name_in(at)); break;
    case 56: touch(csi_row_item(at, name_in(at), number())); break;
    case 57: (void)csi_row_contains(at, name_in(at), text()); break;
    case 58: (void)csi_row_row(at, name_in(at), number()); break;
    case 59: (void)csi_error_code(failure); (void)csi_error_grpc_code(failure); (void)csi_error_retryable(failure); break;
    case 60: touch(csi_error_message(failure)); touch(csi_error_rpc(failure)); touch(csi_error_plugin_message(failure)); break;
    case 61: (void)csi_row_size(csi_error_details(failure)); break;
    case 62: csi_error_free(failure); failure = NULL; break;
    case 63: CHECK(csi_version() >> 16 == CSI_VERSION_MAJOR); break;
    case 64: BEGINS(csi_accept_node_id, of(), text(), text(), call()); break;
    case 65: BEGINS(csi_adopt_mount, of(), volume(), text(), mount_options(), text(), text(), call()); break;
    default: return false;
    }
    return true;
}

/* These two are also libFuzzer's way in (libcsi-ffi/fuzz). */
void fuzz_begin(void);
void fuzz_one(const uint8_t *bytes, size_t size);

void fuzz_begin(void)
{
    client = open_client();
}

void fuzz_one(const uint8_t *bytes, size_t size)
{
    data = bytes, data_end = bytes + size;
    while (data < data_end) {
        unsigned which = byte() % STEPS;
        CHECK(step(which));
        calls[which]++;
        while (makes > 0)
            free(made[--makes]);
    }
}

static uint64_t random_of(uint64_t *state)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* A slow machine goes on until every entry was called. */
static bool all_called(void)
{
    for (int i = 0; i < STEPS; i++) {
        if (calls[i] == 0)
            return false;
    }
    return true;
}

void fuzz(void)
{
    uint64_t state = strtoull(getenv("FUZZ_SEED"), NULL, 10) | 1;
    double end = now() + atof(getenv("FUZZ_SECONDS"));
    unsigned long inputs = 0;
    fuzz_begin();
    for (; now() < end || !all_called(); inputs++) {
        uint8_t bytes[BYTES];
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)(random_of(&state) >> 24);
        fuzz_one(bytes, sizeof bytes);
    }
    /* Whatever was cancelled or is late ends. */
    for (int i = 0; i < OPS; i++) {
        csi_op_cancel(ops[i]);
        csi_op_unref(ops[i]);
    }
    csi_event_free(event), csi_events_unref(reader), csi_error_free(failure);
    csi_op *op = NULL;
    OK(csi_get_manager(client, NULL, &op, &error));
    CHECK(csi_row_contains(done(op), "features", "mount"));
    csi_op_unref(op);
    csi_client_unref(client);
    printf("%lu\n", inputs);
}
