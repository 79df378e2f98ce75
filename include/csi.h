/*
 * libcsi: csid as the volume manager of a scheduler.
 *
 * Made from libcsi-ffi/src; `RENEW=1 cargo test -p libcsi-ffi --test header` makes it anew.
 *
 * Calls. Each starts an operation and returns at once: csi_op_fd is readable when it has ended, csi_op_wait makes it blocking,
 * csi_op_rows and csi_op_row are its answer. csi_client_open and csi_events_open wait, and csi_client_unref may for a second.
 *
 * Threads. Every handle may be used by any thread at any time, a cancellation too; an event, a row and an error by one at a time. No
 * callbacks, no signal handlers, no thread-local state; a client has one thread, "libcsi", with all signals blocked.
 *
 * Ownership. Counted: csi_client, csi_op, csi_events, with _ref and _unref. Owned by whoever got it: csi_error, csi_event, with _free;
 * the descriptor of csi_op_take_fd, with close. csi_op_fd and csi_events_fd are their objects'.
 * Borrowed: csi_row and every text; it lives as long as what it was read from. What is given is copied before a call returns.
 * *op, *client, *events and *event are written on success only; *error, which may be NULL, on failure only, and not on
 * CSI_E_PENDING.
 *
 * Arguments. Texts are UTF-8 and end with a NUL. NULL where it has no meaning is CSI_E_INVALID. A struct that begins with struct_size
 * may grow: set it to sizeof and all else to zero first. Members that a library does not know are CSI_E_UNSUPPORTED, unless they
 * are zero.
 *
 * csid's restart. A call that was not answered is asked again, until its deadline; to ask again is safe.
 *
 * fork(). In the child a handle is good for nothing: CSI_E_FORKED. The child may open a client of its own.
 *
 * A panic in the library is CSI_E_INTERNAL, and a line on the standard error output.
 */

#ifndef CSI_H
#define CSI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version of this header. Minor versions add; what begins with struct_size may grow at its end.
#define CSI_VERSION_MAJOR 1

#define CSI_VERSION_MINOR 0

#define CSI_VERSION_PATCH 0

#define CSI_READ_ONLY 1

// Set-user-ID programs on the volume are honoured: root's alone.
#define CSI_SUID 2

// So are device nodes: root's alone.
#define CSI_DEV 4

// Detach a dead mount lazily.
#define CSI_FORCE 1

// csi_create_volume: the caller keeps what there is to know of the volume, csid does not.
#define CSI_CREATE_ONLY 8

// csid, through all its restarts. Counted: csi_client_ref, csi_client_unref.
typedef struct csi_client csi_client;

// Why a call failed. Owned by whoever got it: csi_error_free.
typedef struct csi_error csi_error;

// One event, or a gap. Owned by whoever got it: csi_event_free.
typedef struct csi_event csi_event;

// A reader of csid's events. It goes on through csid's restarts. Counted: csi_events_ref, csi_events_unref.
typedef struct csi_events csi_events;

// An operation under way, then its end. Counted: csi_op_ref, csi_op_unref. Not waited for, or given back, it goes on.
typedef struct csi_op csi_op;

// A record of names and values: an operation's result, a line of a list, an event. The names are the contract's
// (org.csid1.xml), with new ones to come. Whatever is asked by a name that is not there, or has another type, is NULL, 0 or
// false. Not owned by whoever reads it: it lives as long as what it was read from.
typedef struct csi_row csi_row;

// 0, or why a call failed. Not an enum: a newer library may answer codes that this header does not know.
typedef int32_t csi_code;

typedef struct csi_pair {
  const char *key;
  const char *value;
} csi_pair;

// items NULL is no map, which is something else than a map with nothing in it.
typedef struct csi_map {
  const struct csi_pair *items;
  size_t len;
} csi_map;

// One of the ways in which a volume can be used: NULL is "single-node-writer", and "file-system".
typedef struct csi_capability {
  const char *access_mode;
  const char *attachment_mode;
} csi_capability;

typedef struct csi_capabilities {
  const struct csi_capability *items;
  size_t len;
} csi_capabilities;

// A list of texts; items NULL is no list.
typedef struct csi_strings {
  const char *const *items;
  size_t len;
} csi_strings;

// Which volume. One that is registered has ns and id alone; all else gives it inline: then plugin and external_id are
// needed too, and nothing of it is kept by csid beyond what it is used for.
typedef struct csi_volume {
  size_t struct_size;
  const char *ns;
  const char *id;
  const char *plugin;
  const char *external_id;
  struct csi_map context;
  struct csi_capabilities capabilities;
  const char *fs_type;
  struct csi_strings mount_flags;
} csi_volume;

// How a registered volume is claimed; NULL, or all zeroes: to write, on this node, without waiting for other claims.
typedef struct csi_claim_options {
  size_t struct_size;
  // "read", "write"
  const char *mode;
  const char *access_mode;
  const char *attachment_mode;
  const char *node;
  // How long to wait for the claims that are in the way.
  uint64_t wait_usec;
  // "unit:NAME": what ends the claim in place of csi_release.
  const char *bind;
  // How long after that.
  uint64_t grace_usec;
} csi_claim_options;

// What every call takes. NULL, or all zeroes: no deadline, no secrets, a name of the library's own for the operation.
typedef struct csi_call {
  size_t struct_size;
  // From now, in microseconds; 0: none. csid ends what it does for this call then.
  uint64_t deadline_usec;
  // Sent in a sealed memfd, and zeroed here.
  struct csi_map secrets;
  // Instead of secrets: a systemd credential that csid can load again after a reboot.
  const char *credential;
  // Unique for this user; csi_op_id says which the library took.
  const char *operation_id;
} csi_call;

// How csi_client_open finds csid; NULL, or all zeroes: as csictl does.
typedef struct csi_client_options {
  size_t struct_size;
  // The path of csid's private socket, or "system-bus". NULL: $CSID_SOCKET, else the socket at its usual place, else the
  // system bus.
  const char *address;
  // How long to try; 0: 10 s.
  uint64_t timeout_usec;
} csi_client_options;

// How a volume is mounted; NULL, or all zeroes: to write, as a file system, by a single node.
typedef struct csi_mount_options {
  size_t struct_size;
  // CSI_READ_ONLY, CSI_SUID, CSI_DEV
  uint64_t flags;
  const char *access_mode;
  const char *attachment_mode;
  const char *mount_group;
  // Tells several mounts of one consumer apart.
  const char *tag;
  // A path of the consumer's own, where the published volume is bound too.
  const char *target;
  // "private", "host-to-task", "bidirectional": of the target.
  const char *propagation;
  // "auto", "hold": whether it comes back after a reboot.
  const char *restore;
  // "unit:NAME": of a registered volume, what ends its claim and with it the mount.
  const char *bind;
  // How long after that.
  uint64_t grace_usec;
  // Of an inline volume that was attached.
  struct csi_map publish_context;
} csi_mount_options;

// A plugin. A managed one, which csid runs, has argv; one in a unit that somebody else has defined has unit and socket; an external
// one, which somebody else runs, has a socket.
typedef struct csi_plugin {
  size_t struct_size;
  const char *id;
  // "external", "unit", "managed"
  const char *supervision;
  const char *socket;
  // Which of several processes of the plugin; NULL: its only one.
  const char *instance;
  // The directory on the host, and the same as the plugin sees it.
  const char *plugin_root;
  const char *plugin_view;
  struct csi_strings argv;
  // Stored and public: no secrets here.
  struct csi_map environment;
  struct csi_strings credentials;
  // "journal", "none"
  const char *log;
  // The service that it runs in.
  const char *unit;
  // Of a managed one, from here on. "node-block", "node-fuse", "node-net", "controller"
  const char *profile;
  // "private", "host-to-task", "bidirectional": of its mounts.
  const char *propagation;
  // "host", "none", "netns:NAME"
  const char *network;
} csi_plugin;

typedef struct csi_topologies {
  const struct csi_map *items;
  size_t len;
} csi_topologies;

// What a volume shall be, beyond what csi_volume says; NULL, or all zeroes: nothing else.
typedef struct csi_volume_spec {
  size_t struct_size;
  // CSI_SUID, CSI_DEV; csi_create_volume: CSI_CREATE_ONLY
  uint64_t flags;
  // For people; csi_create_volume: what the plugin is told to call it.
  const char *name;
  const char *mount_group;
  struct csi_map parameters;
  struct csi_topologies topologies;
  // "report", "remount": what is done about a mount that died.
  const char *heal;
  // csi_create_volume alone, from here on. Bytes; 0: the plugin's choice.
  uint64_t capacity_min;
  uint64_t capacity_max;
  // The id of the volume whose clone it shall be.
  const char *clone;
  // The plugin's id of the snapshot that it begins with.
  const char *snapshot;
} csi_volume_spec;

// How a volume is, or would be, used; NULL, or all zeroes: to write, as a file system, by a single node.
typedef struct csi_usage {
  size_t struct_size;
  // CSI_READ_ONLY
  uint64_t flags;
  const char *access_mode;
  const char *attachment_mode;
} csi_usage;

#define CSI_OK 0

// An argument is wrong: the message says which. Nothing was begun.
#define CSI_E_INVALID 1

#define CSI_E_NOT_FOUND 2

// The same identity with other options.
#define CSI_E_EXISTS 3

// Something uses it; the detail `holders` says who.
#define CSI_E_BUSY 4

// Another user is in the way; the detail `holders` says who.
#define CSI_E_CLAIM_CONFLICT 5

#define CSI_E_PLUGIN_UNAVAILABLE 6

// Neither this csid nor this library, or not this plugin.
#define CSI_E_UNSUPPORTED 7

#define CSI_E_DENIED 8

#define CSI_E_CANCELLED 9

// The deadline is over.
#define CSI_E_DEADLINE 10

// What an earlier call of the plugin's did could not be settled: mount again, or unmount.
#define CSI_E_UNCERTAIN 11

// csid cannot be reached, or the client was closed before the answer.
#define CSI_E_DISCONNECTED 12

#define CSI_E_RATE_LIMITED 13

// The handle was made before a fork(), and this is the child.
#define CSI_E_FORKED 14

// The plugin said no: csi_error_rpc, csi_error_grpc_code and csi_error_plugin_message tell how.
#define CSI_E_PLUGIN 15

// The plugin left while it was asked.
#define CSI_E_PLUGIN_SHUTDOWN 16

// The volume was used with secrets; give them again.
#define CSI_E_SECRET_REQUIRED 17

// csid's journal is damaged: it changes nothing until an administrator has it begin anew.
#define CSI_E_STATE_CORRUPT 18

// csi_op_wait: the operation goes on. csi_events_next: there is none now.
#define CSI_E_PENDING 19

#define CSI_E_INTERNAL 99

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that runs: major << 16 | minor << 8 | patch.
uint32_t csi_version(void);

// Claim a registered volume, of which ns and id are looked at alone, for a consumer. One row: the volume, publish-context, external-node-id, state.
csi_code csi_claim(struct csi_client *client,
                   const struct csi_volume *volume,
                   const char *consumer,
                   const struct csi_claim_options *options,
                   const struct csi_call *call,
                   struct csi_op **op,
                   struct csi_error **error);

// Let a claim go: unmounted and detached first. One that is not there is free already. node NULL: this one. flags: CSI_FORCE, the
// claim is dropped as it is. No row.
csi_code csi_release(struct csi_client *client,
                     const struct csi_volume *volume,
                     const char *consumer,
                     const char *node,
                     uint64_t flags,
                     const struct csi_call *call,
                     struct csi_op **op,
                     struct csi_error **error);

// Connect to csid. Waits, as long as timeout_usec says; fails at once where csid is not. Later a csid that is away is waited
// for, as long as a call may take.
csi_code csi_client_open(const struct csi_client_options *options,
                         struct csi_client **client,
                         struct csi_error **error);

// The same client; NULL of NULL.
struct csi_client *csi_client_ref(struct csi_client *client);

// The last one closes the client: operations that go on end here with CSI_E_DISCONNECTED, and go on in csid; nothing is
// unmounted. It may wait for a second, while cancellations are on their way. NULL is nothing.
void csi_client_unref(struct csi_client *client);

// The code, which the call returned too; CSI_OK of NULL.
csi_code csi_error_code(const struct csi_error *error);

// For people: what failed, and what to do next. Never NULL.
const char *csi_error_message(const struct csi_error *error);

// Whether the same call may succeed later without anything else being changed.
bool csi_error_retryable(const struct csi_error *error);

// What the plugin answered, as gRPC numbers it; -1: no plugin did.
int32_t csi_error_grpc_code(const struct csi_error *error);

// The CSI call that failed, "NodeStageVolume"; NULL: none did.
const char *csi_error_rpc(const struct csi_error *error);

// The plugin's own words; NULL: there are none, or they may tell of a secret.
const char *csi_error_plugin_message(const struct csi_error *error);

// Whatever else csid says of it: operation, namespace, volume, plugin, step, and holders, a list. NULL of NULL.
const struct csi_row *csi_error_details(const struct csi_error *error);

// NULL is nothing.
void csi_error_free(struct csi_error *error);

// Read csid's events, in order. cursor: csi_event_cursor of the last one that was dealt with, by this process or an earlier one; NULL:
// from now on; "": from the first that csid has. Waits until csid has answered, up to timeout_usec; 0: 10 s.
csi_code csi_events_open(struct csi_client *client,
                         const char *cursor,
                         uint64_t timeout_usec,
                         struct csi_events **events,
                         struct csi_error **error);

// A descriptor for poll(): readable while csi_events_next has something to tell. It is the reader's. -1 of NULL.
int32_t csi_events_fd(const struct csi_events *events);

// The next event; CSI_E_PENDING, without an error, when there is none now. Another code ends the reader: open it anew, with the last
// cursor.
csi_code csi_events_next(struct csi_events *events,
                         struct csi_event **event,
                         struct csi_error **error);

// The same reader; NULL of NULL.
struct csi_events *csi_events_ref(struct csi_events *events);

// NULL is nothing.
void csi_events_unref(struct csi_events *events);

// Whether events are lost between the last one told and the next: look at everything anew. A gap has no row.
bool csi_event_gap(const struct csi_event *event);

// What to go on with, once this event was dealt with. It lives as long as the event.
const char *csi_event_cursor(const struct csi_event *event);

// The event: sequence, realtime-usec, type, subject, and details, a row of its own: success, error, consumer, tag, plugin and
// others, as its type has them. It lives as long as the event.
const struct csi_row *csi_event_row(const struct csi_event *event);

// NULL is nothing.
void csi_event_free(struct csi_event *event);

// How much a plugin could still make: volumes that can be used so, made with these parameters, there; without all of these, any. One
// row: available, in bytes.
csi_code csi_get_capacity(struct csi_client *client,
                          const char *plugin,
                          struct csi_capabilities capabilities,
                          struct csi_map parameters,
                          struct csi_map topology,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

// A page of the volumes that a plugin has, registered here or not. token: next-token of the page before; NULL: from the beginning.
// max: of the page; 0: the plugin's choice. One row: volumes, a row each of external-id, capacity, published-node-ids, abnormal,
// message; and next-token, empty after the last page. Pages are no consistent view.
csi_code csi_list_external_volumes(struct csi_client *client,
                                   const char *plugin,
                                   const char *token,
                                   uint32_t max,
                                   const struct csi_call *call,
                                   struct csi_op **op,
                                   struct csi_error **error);

// A page of the snapshots that a plugin has; snapshot and external_id, the plugin's for a snapshot and for a volume: only those; NULL:
// all. token and max as csi_list_external_volumes has them. One row: snapshots, a row each as csi_create_snapshot's, and next-token.
csi_code csi_list_snapshots(struct csi_client *client,
                            const char *plugin,
                            const char *snapshot,
                            const char *external_id,
                            const char *token,
                            uint32_t max,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

// Have the plugin delete a snapshot of its. What is not there is gone already. No row.
csi_code csi_delete_snapshot(struct csi_client *client,
                             const char *plugin,
                             const char *snapshot,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// List "plugins", "volumes", "claims", "mounts" or "operations": a row each, as org.csid1.xml says. filter: the rows that have all of
// these (namespace, volume, consumer, tag, plugin, state, uid; of claims also node and past, "true"; of volumes node and prefix).
csi_code csi_list(struct csi_client *client,
                  const char *kind,
                  struct csi_map filter,
                  const struct csi_call *call,
                  struct csi_op **op,
                  struct csi_error **error);

// csid itself. One row: features, a list of what this csid can do; state, version, journal-id, event-sequence, modify-index.
csi_code csi_get_manager(struct csi_client *client,
                         const struct csi_call *call,
                         struct csi_op **op,
                         struct csi_error **error);

// Mount a volume for a consumer. One row: source, the published path, and is-device. Asking again what was answered finds the
// same mount.
csi_code csi_mount_volume(struct csi_client *client,
                          const struct csi_volume *volume,
                          const char *consumer,
                          const struct csi_mount_options *options,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

// Unmount. Of the volume ns and id are looked at alone, of the mount its tag; nothing of how it was mounted is needed, nor that it
// was by this process. What is not there is gone already. No row. flags: CSI_FORCE.
csi_code csi_unmount_volume(struct csi_client *client,
                            const struct csi_volume *volume,
                            const char *consumer,
                            const char *tag,
                            uint64_t flags,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

// A mount of a consumer's as a descriptor (csi_op_take_fd), to attach it with move_mount(2) in another mount namespace: it is attached
// nowhere, and the kernel keeps the file system until it, and what was mounted of it, is gone. subpath: a directory or file on the
// volume; NULL: all of it. flags: CSI_READ_ONLY. A caller other than root is refused what may be written, or used, only because
// he could not take a flag off: CSI_E_DENIED. What is not mounted: CSI_E_NOT_FOUND. No row.
csi_code csi_open_mount(struct csi_client *client,
                        const struct csi_volume *volume,
                        const char *consumer,
                        const char *tag,
                        const char *subpath,
                        uint64_t flags,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

// Whether a published path is mounted. One row: mounted. A path that is missing is not.
csi_code csi_has_mount(struct csi_client *client,
                       const char *source,
                       const struct csi_call *call,
                       struct csi_op **op,
                       struct csi_error **error);

// A descriptor for poll(): readable when the operation has ended, and from then on. It is the operation's: dup() it to keep it.
// -1 of NULL.
int32_t csi_op_fd(const struct csi_op *op);

// What csid calls the operation.
const char *csi_op_id(const struct csi_op *op);

// How the operation ended, waiting for it up to timeout_usec; 0 does not wait, -1 waits for ever. CSI_E_PENDING, without an error,
// when it goes on. May be asked again, and by many.
csi_code csi_op_wait(struct csi_op *op,
                     int64_t timeout_usec,
                     struct csi_error **error);

// End the operation: here at once, with CSI_E_CANCELLED, and in csid, which undoes a mount, a claim or an attachment that is
// under way. After its end it does nothing. NULL is nothing.
void csi_op_cancel(struct csi_op *op);

// How many rows the operation answered; 0 while it goes on, and when it failed.
size_t csi_op_rows(const struct csi_op *op);

// A row of the answer; NULL beyond the last. It lives as long as the operation's handle.
const struct csi_row *csi_op_row(const struct csi_op *op, size_t index);

// The descriptor that the operation answered, close-on-exec: the caller's from now on, to close it. -1: it answered none, failed, goes
// on, or somebody took it. One that nobody takes is closed with the last handle of the operation.
int32_t csi_op_take_fd(struct csi_op *op);

// The same operation; NULL of NULL.
struct csi_op *csi_op_ref(struct csi_op *op);

// Give the handle back; the operation goes on. NULL is nothing.
void csi_op_unref(struct csi_op *op);

// Tell csid of a plugin, or of another instance of one. No row.
csi_code csi_register_plugin(struct csi_client *client,
                             const struct csi_plugin *plugin,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// Let csid forget a plugin, or one instance of it; NULL: all. Refused with CSI_E_BUSY while it has mounts, unless CSI_FORCE is in
// flags. What is not there is gone already. No row.
csi_code csi_unregister_plugin(struct csi_client *client,
                               const char *id,
                               const char *instance,
                               uint64_t flags,
                               const struct csi_call *call,
                               struct csi_op **op,
                               struct csi_error **error);

// Wait until a plugin's service, "node" or "controller", is ready; without a deadline for ever. The row of csi_get_plugin.
csi_code csi_wait_for_plugin(struct csi_client *client,
                             const char *id,
                             const char *service,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// A plugin: node-id, the name that its storage has for this node; node-capabilities and controller-capabilities (CSI's own names:
// STAGE_UNSTAGE_VOLUME, PUBLISH_UNPUBLISH_VOLUME); services, state, healthy, and all else of org.csid1.Plugin.
csi_code csi_get_plugin(struct csi_client *client,
                        const char *id,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

// Have volumes attached under the name that the plugin has for this node now, which node_id says: what was attached under another
// one keeps that. CSI_E_INVALID where it is not the name that it has now. No row.
csi_code csi_accept_node_id(struct csi_client *client,
                            const char *id,
                            const char *node_id,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

// How many names the row has.
size_t csi_row_size(const struct csi_row *row);

// The name at `index`, in the order of the alphabet; NULL beyond the last.
const char *csi_row_name(const struct csi_row *row, size_t index);

const char *csi_row_text(const struct csi_row *row, const char *name);

uint64_t csi_row_number(const struct csi_row *row, const char *name);

bool csi_row_flag(const struct csi_row *row, const char *name);

// A map of texts, a publish context for one. Its items are NULL where there is none, and not NULL where it is empty.
struct csi_map csi_row_map(const struct csi_row *row,
                           const char *name);

// How many texts, or rows, the list of that name has.
size_t csi_row_len(const struct csi_row *row, const char *name);

// A text of a list; NULL beyond the last.
const char *csi_row_item(const struct csi_row *row, const char *name, size_t index);

// Whether a list has that text: a plugin's capabilities, csid's features.
bool csi_row_contains(const struct csi_row *row, const char *name, const char *text);

// A row in a row: of a list the one at `index`, of a map (an event's details) the one at 0. NULL beyond the last.
const struct csi_row *csi_row_row(const struct csi_row *row,
                                  const char *name,
                                  size_t index);

// Let csid know a volume that its plugin has: plugin, external_id and at least one capability are needed. One row, as csi_get_volume's.
csi_code csi_register_volume(struct csi_client *client,
                             const struct csi_volume *volume,
                             const struct csi_volume_spec *spec,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// Have the plugin make a volume: plugin and at least one capability are needed, external_id and context are the plugin's to give.
// Asking again what was not answered makes no second one. One row, as csi_get_volume's.
csi_code csi_create_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const struct csi_volume_spec *spec,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

// Attach a volume to a node, for a scheduler that keeps its own claims; node_id is csi_get_plugin's node-id there. One row:
// publish-context.
csi_code csi_attach_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const char *node_id,
                           const struct csi_usage *usage,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

// Detach a volume from a node: CSI_E_BUSY while it is staged here under that node's id. What is not attached is detached already.
// No row.
csi_code csi_detach_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const char *node_id,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

// Ask the plugin whether a volume can be used so. One row: confirmed, and message, why not.
csi_code csi_validate_volume(struct csi_client *client,
                             const struct csi_volume *volume,
                             const struct csi_usage *usage,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// Make a volume larger: to required bytes at least and, unless that is 0, limit at most. part: "all" (NULL), "controller", "node".
// One row: capacity-bytes, node-expansion-required.
csi_code csi_expand_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           uint64_t required,
                           uint64_t limit,
                           const char *part,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

// Have the plugin delete a volume, and what is on it. What is not there is gone already. No row.
csi_code csi_delete_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

// Have the plugin make a snapshot. One row: id, external-id (the volume's), size, created (microseconds since 1970), ready.
csi_code csi_create_snapshot(struct csi_client *client,
                             const struct csi_volume *volume,
                             const char *name,
                             struct csi_map parameters,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

// What a volume that is mounted here has used. One row: usage, a row each of BYTES and INODES with unit, available, total, used;
// abnormal, and message, the plugin's words for it.
csi_code csi_volume_stats(struct csi_client *client,
                          const struct csi_volume *volume,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

// A registered volume: its context, parameters, capabilities, claims, and all else of GetVolume. One row.
csi_code csi_get_volume(struct csi_client *client,
                        const struct csi_volume *volume,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

// Forget a registered volume, which the plugin keeps. flags: CSI_FORCE, whatever claims it. No row.
csi_code csi_deregister_volume(struct csi_client *client,
                               const struct csi_volume *volume,
                               uint64_t flags,
                               const struct csi_call *call,
                               struct csi_op **op,
                               struct csi_error **error);

// Why a volume is not where it is wanted. One row: waiting-for, holders, last-error, next-try, steps.
csi_code csi_explain(struct csi_client *client,
                     const struct csi_volume *volume,
                     const struct csi_call *call,
                     struct csi_op **op,
                     struct csi_error **error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CSI_H */
