/*
 * libcsi: csid as the volume manager of a scheduler.
 *
 * Generated from libcsi-ffi/src by `RENEW=1 cargo test -p libcsi-ffi --test header`. Do not edit.
 *
 * Calls. A function that takes csi_op ** starts an operation and returns at once. csi_op_fd is readable when the operation has
 * ended, csi_op_wait waits for it, and csi_op_rows and csi_op_row return its result. Only csi_client_open, csi_events_open, csi_op_wait
 * and, for two seconds at most, csi_client_unref block.
 *
 * Threads. Any thread may use any handle at any time, also to cancel an operation. An event, a row and an error belong to one thread at
 * a time. There are no callbacks, no signal handlers and no thread-local state. A client has one thread, "libcsi", with all signals
 * blocked.
 *
 * Ownership. csi_client, csi_op and csi_events are counted: _ref and _unref. csi_error and csi_event are owned by their receiver: _free.
 * The descriptor of csi_op_take_fd is the caller's to close; those of csi_op_fd and csi_events_fd belong to their objects. csi_row and
 * every returned text are borrowed: they live as long as the object they were read from. Arguments are copied before a call returns.
 * *op, *client, *events and *event are written on success only. *error is written on failure only, and not with CSI_E_PENDING;
 * error may be NULL.
 *
 * Arguments. Texts are UTF-8 and end with a NUL. NULL is CSI_E_INVALID unless the function gives it a meaning. A struct that begins
 * with struct_size may grow: set struct_size to sizeof and everything else to zero first. A flag or a non-zero member that the library
 * does not know is CSI_E_UNSUPPORTED.
 *
 * Errors of every operation, from csi_op_wait: CSI_E_INVALID (csid rejects an argument), CSI_E_DENIED, CSI_E_RATE_LIMITED,
 * CSI_E_DEADLINE, CSI_E_CANCELLED (csi_op_cancel, or csid ended it for another call), CSI_E_DISCONNECTED (the client was closed, or csid
 * kept going away), CSI_E_UNAVAILABLE (this host is in a cluster, and no server of the cluster can be asked now), CSI_E_UNSUPPORTED
 * (this csid does not serve the call), CSI_E_INTERNAL, and for calls that change something CSI_E_STATE_CORRUPT.
 *
 * Errors of every plugin call: CSI_E_PLUGIN (gRPC code 12, UNIMPLEMENTED: the plugin does not offer the call), CSI_E_PLUGIN_UNAVAILABLE,
 * CSI_E_PLUGIN_SHUTDOWN, CSI_E_UNCERTAIN and CSI_E_SECRET_REQUIRED.
 *
 * Restarts of csid. A call that csid did not answer is repeated until its deadline; csid does nothing twice.
 *
 * fork(). In the child every handle is unusable: CSI_E_FORKED. The child may open a client of its own.
 *
 * A panic in the library is CSI_E_INTERNAL, with a line on standard error.
 */

#ifndef CSI_H
#define CSI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The major version of this header. It changes only when something is taken away.
 */
#define CSI_VERSION_MAJOR 1

/**
 * The minor version of this header. It grows when functions or struct members are added.
 */
#define CSI_VERSION_MINOR 0

/**
 * The patch version of this header.
 */
#define CSI_VERSION_PATCH 0

/**
 * Mount or attach read-only.
 */
#define CSI_READ_ONLY 1

/**
 * Honour set-user-ID programs on the volume. Root only.
 */
#define CSI_SUID 2

/**
 * Honour device nodes on the volume. Root only.
 */
#define CSI_DEV 4

/**
 * csi_unmount_volume: detach a dead mount lazily. csi_release, csi_deregister_volume and
 * csi_unregister_plugin: go on although something still uses the object.
 */
#define CSI_FORCE 1

/**
 * Last resort, root only: drop csid's row though the plugin never acknowledged.
 */
#define CSI_FORGET 2

/**
 * csi_unmount_volume: a missing mount is CSI_E_NOT_FOUND. The detail `tags` then lists the consumer's existing
 * mounts. If csid was restarted during the call, CSI_E_NOT_FOUND may mean that this call has unmounted it.
 */
#define CSI_MUST_EXIST 16

/**
 * csi_unmount_volume: every mount of the consumer. tag must be NULL.
 */
#define CSI_ALL_TAGS 32

/**
 * csi_unmount_volume: the operation ends after the first try, with its error if it failed. csid goes on, and
 * the event `unmount` reports the end.
 */
#define CSI_NO_WAIT 64

/**
 * csi_unmount_volume: also detach a mount whose server does not answer a probe made now. Root only.
 */
#define CSI_FORCE_HUNG 128

/**
 * csi_create_volume: csid does not register the volume; the caller keeps the result.
 */
#define CSI_CREATE_ONLY 8

/**
 * A connection to csid that outlives csid's restarts. Counted: csi_client_ref, csi_client_unref. Any thread
 * may use it at any time.
 */
typedef struct csi_client csi_client;

/**
 * Why a call failed. Owned: its receiver frees it with csi_error_free. The texts and rows read from it live as
 * long as it does. One thread at a time.
 */
typedef struct csi_error csi_error;

/**
 * One event, or a gap. Owned: its receiver frees it with csi_event_free. One thread at a time.
 */
typedef struct csi_event csi_event;

/**
 * A reader of csid's events, through csid's restarts. Counted: csi_events_ref, csi_events_unref. Any thread
 * may use it at any time.
 */
typedef struct csi_events csi_events;

/**
 * An operation: a running call, and later its result. Counted: csi_op_ref, csi_op_unref. Any thread may use it
 * at any time. Dropping the last reference does not end the operation in csid.
 */
typedef struct csi_op csi_op;

/**
 * A record of names and values: a result, a line of a list, an event. The names are those of org.csid1.xml,
 * and more may come. A name that is absent or has another type reads as NULL, 0 or false. Borrowed: a row
 * lives as long as the object it was read from. One thread at a time.
 */
typedef struct csi_row csi_row;

/**
 * CSI_OK (0), or the reason why a call failed. Not an enum: a newer library may return codes that this header
 * does not know.
 */
typedef int32_t csi_code;

/**
 * A name and a value.
 */
typedef struct csi_pair {
  /**
   * The name. Not NULL.
   */
  const char *key;
  /**
   * The value. Not NULL. It may be empty.
   */
  const char *value;
} csi_pair;

/**
 * A map of texts. items NULL means no map, which differs from an empty map (items not NULL, len 0).
 */
typedef struct csi_map {
  /**
   * The pairs, each key once. NULL: no map; len is then 0.
   */
  const struct csi_pair *items;
  /**
   * The number of pairs.
   */
  size_t len;
} csi_map;

/**
 * A way in which a volume can be used.
 */
typedef struct csi_capability {
  /**
   * "single-node-writer", "single-node-reader-only", "single-node-single-writer",
   * "single-node-multi-writer", "multi-node-reader-only", "multi-node-single-writer" or
   * "multi-node-multi-writer". NULL: "single-node-writer".
   */
  const char *access_mode;
  /**
   * "file-system" or "block-device". NULL: "file-system".
   */
  const char *attachment_mode;
} csi_capability;

/**
 * A list of capabilities.
 */
typedef struct csi_capabilities {
  /**
   * The capabilities. NULL: no list; len is then 0.
   */
  const struct csi_capability *items;
  /**
   * The number of capabilities.
   */
  size_t len;
} csi_capabilities;

/**
 * A list of texts.
 */
typedef struct csi_strings {
  /**
   * The texts, none of them NULL. NULL: no list; len is then 0.
   */
  const char *const *items;
  /**
   * The number of texts.
   */
  size_t len;
} csi_strings;

/**
 * A volume. A registered one is identified by ns and id alone. Any other is given inline: plugin and
 * external_id are then needed too, and csid keeps these members only as long as it uses the volume.
 */
typedef struct csi_volume {
  /**
   * sizeof(csi_volume), in bytes.
   */
  size_t struct_size;
  /**
   * The namespace. Not NULL.
   */
  const char *ns;
  /**
   * The volume's name in the namespace. Not NULL.
   */
  const char *id;
  /**
   * The plugin's ID. NULL: the volume is registered.
   */
  const char *plugin;
  /**
   * The plugin's ID of the volume. NULL: the volume is registered, or is to be created.
   */
  const char *external_id;
  /**
   * The volume context that the plugin returned for the volume. items NULL: none.
   */
  struct csi_map context;
  /**
   * How the volume can be used. items NULL: not given.
   */
  struct csi_capabilities capabilities;
  /**
   * The file system, such as "xfs". NULL: the plugin's default.
   */
  const char *fs_type;
  /**
   * Mount flags for the plugin. items NULL: none.
   */
  struct csi_strings mount_flags;
} csi_volume;

/**
 * How a registered volume is claimed. NULL or all zeroes: on this node, without waiting for other claims, as
 * it is used or registered.
 */
typedef struct csi_claim_options {
  /**
   * sizeof(csi_claim_options), in bytes.
   */
  size_t struct_size;
  /**
   * "read" or "write". NULL: "read" with a reader-only access mode, else "write".
   */
  const char *mode;
  /**
   * An access mode as in csi_capability. NULL: that in which the volume is used, else its first capability
   * that fits.
   */
  const char *access_mode;
  /**
   * "file-system" or "block-device". NULL: as for access_mode.
   */
  const char *attachment_mode;
  /**
   * The node that claims. NULL: csid's own. csid refuses any other with CSI_E_DENIED.
   */
  const char *node;
  /**
   * How long to wait while a claim or an expansion is in the way, or the plugin takes no more volumes on this
   * node, in microseconds. 0: do not wait; the operation fails with CSI_E_CLAIM_CONFLICT.
   */
  uint64_t wait_usec;
  /**
   * "unit:NAME": the claim ends when that systemd unit ends. NULL: it ends with csi_release.
   */
  const char *bind;
  /**
   * How long after the unit's end the claim lasts, in microseconds. 0: ends at once. Needs bind.
   */
  uint64_t grace_usec;
} csi_claim_options;

/**
 * Options of every call. NULL or all zeroes: no deadline, no secrets, an operation ID chosen by the library.
 */
typedef struct csi_call {
  /**
   * sizeof(csi_call), in bytes.
   */
  size_t struct_size;
  /**
   * Time from now until the caller stops waiting, in microseconds. csid then ends the call with
   * CSI_E_DEADLINE and rolls back a mount, a claim or an attachment. 0: none; csid then tries an operation
   * as long as csid.toml says ([deadlines] operation, by default 2 min).
   */
  uint64_t deadline_usec;
  /**
   * The volume's secrets. They are sent in a sealed memfd, and the library's copies are zeroed. items NULL:
   * none.
   */
  struct csi_map secrets;
  /**
   * Used instead of secrets: the name of a systemd credential, which csid can load again after a reboot.
   * NULL: none.
   */
  const char *credential;
  /**
   * A name for the operation, unique among the caller's user ID. Not empty. NULL: the library chooses one;
   * see csi_op_id.
   */
  const char *operation_id;
} csi_call;

/**
 * How csi_client_open finds csid. NULL or all zeroes: as csictl does.
 */
typedef struct csi_client_options {
  /**
   * sizeof(csi_client_options), in bytes.
   */
  size_t struct_size;
  /**
   * Path of csid's private socket (absolute), or "system-bus". NULL: $CSID_SOCKET, else the socket at its
   * usual place, else the system bus. A set-uid program ignores the environment.
   */
  const char *address;
  /**
   * How long to try to connect, in microseconds. 0: 10 s.
   */
  uint64_t timeout_usec;
} csi_client_options;

/**
 * How a volume is mounted. NULL or all zeroes: to read and write; a registered volume as it is used or
 * registered, an inline one as a file system of a single node.
 */
typedef struct csi_mount_options {
  /**
   * sizeof(csi_mount_options), in bytes.
   */
  size_t struct_size;
  /**
   * CSI_READ_ONLY, CSI_SUID and CSI_DEV, or 0. A volume registered with CSI_SUID or CSI_DEV has them without
   * the flag.
   */
  uint64_t flags;
  /**
   * An access mode as in csi_capability. NULL: that in which a registered volume is used, else its first
   * capability that fits; "single-node-writer" for an inline one.
   */
  const char *access_mode;
  /**
   * "file-system" or "block-device". NULL: as for access_mode; "file-system" for an inline volume.
   */
  const char *attachment_mode;
  /**
   * The group that the plugin gives the volume to. NULL: that of the registration, else none.
   */
  const char *mount_group;
  /**
   * Distinguishes several mounts by one consumer. NULL: the empty tag.
   */
  const char *tag;
  /**
   * An absolute path of the consumer, where csid binds the published volume. NULL: none.
   */
  const char *target;
  /**
   * Of the target: "private", "host-to-task" or "bidirectional" (root only). NULL: "private".
   */
  const char *propagation;
  /**
   * After a reboot: "auto" mounts again, "hold" keeps the row as `lost`. NULL: "auto" for a registered
   * volume, "hold" for an inline one.
   */
  const char *restore;
  /**
   * "unit:NAME": the claim of a registered volume, and with it the mount, ends when that systemd unit ends.
   * NULL: it ends with Unmount.
   */
  const char *bind;
  /**
   * How long after the unit's end the claim lasts, in microseconds. 0: ends at once. Needs bind.
   */
  uint64_t grace_usec;
  /**
   * The publish context of an inline volume that was attached. items NULL: none.
   */
  struct csi_map publish_context;
  /**
   * How long to wait while a claim, mount or expansion is in the way, or the plugin takes no more volumes on
   * this node, in microseconds. 0: do not wait; the operation fails with CSI_E_CLAIM_CONFLICT.
   */
  uint64_t wait_usec;
} csi_mount_options;

/**
 * A plugin, by who runs it. "managed": csid does, with argv. "unit": an existing systemd unit, with unit and
 * socket. "external": anything else, with socket.
 */
typedef struct csi_plugin {
  /**
   * sizeof(csi_plugin), in bytes.
   */
  size_t struct_size;
  /**
   * The plugin's ID: 1 to 63 of [A-Za-z0-9._-]. Not NULL.
   */
  const char *id;
  /**
   * "external", "unit" or "managed". Required.
   */
  const char *supervision;
  /**
   * The path where an external plugin or a unit listens. NULL for a managed one.
   */
  const char *socket;
  /**
   * Which of several processes of the plugin. NULL: "default".
   */
  const char *instance;
  /**
   * The directory on the host for the volumes' paths. Root only. NULL: csid's own.
   */
  const char *plugin_root;
  /**
   * The same directory as the plugin sees it. Root only. NULL: as plugin_root.
   */
  const char *plugin_view;
  /**
   * Program (absolute path) and arguments of a managed plugin. Root only. items NULL: none.
   */
  struct csi_strings argv;
  /**
   * Environment of a managed plugin. It is stored and public: no secrets here. Root only. items NULL: none.
   */
  struct csi_map environment;
  /**
   * Systemd credentials of a managed plugin, each as LoadCredential= has it. items NULL: none.
   */
  struct csi_strings credentials;
  /**
   * "journal" or "none". NULL: "journal".
   */
  const char *log;
  /**
   * The service in which the plugin runs, with supervision "unit". Root only. NULL: none.
   */
  const char *unit;
  /**
   * Of a managed plugin: "node-block", "node-fuse", "node-net" or "controller". Root only. NULL: all devices
   * and capabilities.
   */
  const char *profile;
  /**
   * Of a managed plugin's mounts: "private", "host-to-task" or "bidirectional". Root only. NULL:
   * "bidirectional".
   */
  const char *propagation;
  /**
   * Of a managed plugin: "host", "none" or "netns:NAME". Root only. NULL: "host".
   */
  const char *network;
} csi_plugin;

/**
 * A list of topologies, each a map of segments.
 */
typedef struct csi_topologies {
  /**
   * The topologies. NULL: no list; len is then 0.
   */
  const struct csi_map *items;
  /**
   * The number of topologies.
   */
  size_t len;
} csi_topologies;

/**
 * What a volume is to be, beyond csi_volume. NULL or all zeroes: nothing else.
 */
typedef struct csi_volume_spec {
  /**
   * sizeof(csi_volume_spec), in bytes.
   */
  size_t struct_size;
  /**
   * CSI_SUID and CSI_DEV; csi_create_volume also CSI_CREATE_ONLY. 0: none.
   */
  uint64_t flags;
  /**
   * A name for people; csi_create_volume gives it to the plugin as the volume's name. NULL: none; a new
   * volume's name is then csid's.
   */
  const char *name;
  /**
   * The group that the plugin gives the volume to at each mount. NULL: none.
   */
  const char *mount_group;
  /**
   * Parameters for the plugin. items NULL: none.
   */
  struct csi_map parameters;
  /**
   * Where the volume can be used. items NULL: anywhere.
   */
  struct csi_topologies topologies;
  /**
   * After a mount died: "report" only reports it, "remount" mounts the volume again. NULL: "report".
   */
  const char *heal;
  /**
   * csi_create_volume only: the least size in bytes. 0: the plugin's choice.
   */
  uint64_t capacity_min;
  /**
   * csi_create_volume only: the largest size in bytes. 0: no limit.
   */
  uint64_t capacity_max;
  /**
   * csi_create_volume only: the ID of a volume in the same namespace, whose content the new volume has.
   * NULL: none.
   */
  const char *clone;
  /**
   * csi_create_volume only: the plugin's ID of the snapshot whose content the new volume has. NULL: none.
   */
  const char *snapshot;
} csi_volume_spec;

/**
 * How a volume is or would be used. NULL or all zeroes: to read and write, with no mode given.
 */
typedef struct csi_usage {
  /**
   * sizeof(csi_usage), in bytes.
   */
  size_t struct_size;
  /**
   * CSI_READ_ONLY, or 0. csi_validate_volume takes 0 only.
   */
  uint64_t flags;
  /**
   * An access mode as in csi_capability. NULL: not given. csi_attach_volume then takes the mode in which the
   * volume is used, else its first capability that fits.
   */
  const char *access_mode;
  /**
   * "file-system" or "block-device". NULL: not given, as for access_mode.
   */
  const char *attachment_mode;
} csi_usage;

/**
 * Success.
 */
#define CSI_OK 0

/**
 * An argument is wrong; the message names it. Nothing was started.
 */
#define CSI_E_INVALID 1

/**
 * The object does not exist: a plugin, a registered volume, a mount, or a unit to bind to.
 */
#define CSI_E_NOT_FOUND 2

/**
 * The same identity exists with other options, or the name or path belongs to something else.
 */
#define CSI_E_EXISTS 3

/**
 * Something is in use. The detail `holders` lists consumers, units, processes or paths.
 */
#define CSI_E_BUSY 4

/**
 * Another consumer's claim or mount is in the way, the plugin takes no more volumes on this node, or this node
 * cannot reach the volume. The detail `holders` lists who is in the way.
 */
#define CSI_E_CLAIM_CONFLICT 5

/**
 * The plugin did not become ready before the deadline, or it is not connected.
 */
#define CSI_E_PLUGIN_UNAVAILABLE 6

/**
 * The plugin, this csid or this library cannot do this, or a flag or struct member is unknown.
 */
#define CSI_E_UNSUPPORTED 7

/**
 * The caller is not allowed to do this, or the bus refused the call.
 */
#define CSI_E_DENIED 8

/**
 * The operation was cancelled, or another call ended it, as Unmount ends a Mount in progress.
 */
#define CSI_E_CANCELLED 9

/**
 * The deadline passed.
 */
#define CSI_E_DEADLINE 10

/**
 * The effect of an earlier plugin call is not known yet. Repeat the call, or undo it (unmount, release,
 * delete).
 */
#define CSI_E_UNCERTAIN 11

/**
 * csid cannot be reached or is stopping, or the client was closed before the answer.
 */
#define CSI_E_DISCONNECTED 12

/**
 * The caller has as many operations, mounts or claims as one user may have.
 */
#define CSI_E_RATE_LIMITED 13

/**
 * The handle was made before a fork(), and this is the child.
 */
#define CSI_E_FORKED 14

/**
 * The plugin answered with an error. See csi_error_rpc, csi_error_grpc_code and csi_error_plugin_message.
 */
#define CSI_E_PLUGIN 15

/**
 * The plugin stopped during the call, or it is stopping.
 */
#define CSI_E_PLUGIN_SHUTDOWN 16

/**
 * The plugin needs the volume's secrets again. Repeat the call with csi_call.secrets or csi_call.credential.
 */
#define CSI_E_SECRET_REQUIRED 17

/**
 * csid's journal is damaged. csid makes no change until an administrator starts a new journal.
 */
#define CSI_E_STATE_CORRUPT 18

/**
 * csi_op_wait: the operation is still running. csi_events_next: there is no event now. No csi_error comes with
 * it.
 */
#define CSI_E_PENDING 19

/**
 * This host is in a cluster, and no server of the cluster can be asked now. The same call may succeed later.
 */
#define CSI_E_UNAVAILABLE 20

/**
 * A defect or a lack of resources in csid or in this library, such as a panic or no free descriptor; or an error
 * of csid that this library does not know, whose name begins the message.
 */
#define CSI_E_INTERNAL 99

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* ---- The library ---- */

/**
 * Returns the version of the library that runs, which may be newer than this header.
 *
 * @return major << 16 | minor << 8 | patch; 0 if the library panicked.
 *
 * Threads: any thread; never blocks.
 */
uint32_t csi_version(void);

/* ---- Claims ---- */

/**
 * Claims a registered volume for a consumer, and attaches it to this node where its plugin attaches. Result:
 * one row with the volume as in csi_get_volume, publish-context, external-node-id and state. The same call
 * again returns the same claim.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param consumer  Who claims. Not NULL.
 * @param options  How to claim. NULL: the defaults.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_NOT_FOUND: the volume is not registered, or the unit of bind does not run.
 * - CSI_E_EXISTS: the consumer has claimed the volume with other options.
 * - CSI_E_CLAIM_CONFLICT: other claims are in the way, the node has no room for another volume of the plugin,
 *   or cannot reach this one.
 * - CSI_E_BUSY: the volume is being created or deleted; or, in a cluster, this host drains.
 * - CSI_E_UNSUPPORTED: the end of the unit of bind cannot be watched.
 * - CSI_E_DENIED: also for another user's claim, or another node.
 *
 * Threads: any thread; never blocks. Cancelling the operation rolls the claim back. One that
 *   was complete at that moment stays: release it.
 */
csi_code csi_claim(struct csi_client *client,
                   const struct csi_volume *volume,
                   const char *consumer,
                   const struct csi_claim_options *options,
                   const struct csi_call *call,
                   struct csi_op **op,
                   struct csi_error **error);

/**
 * Releases a claim: unmounts what the consumer has mounted here, then detaches the volume. A missing claim is
 * success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param consumer  The consumer of the claim. Not NULL.
 * @param node  The node that the claim has to be on. NULL: any node.
 * @param flags  0, or CSI_FORCE (drop the claim as it is) and CSI_FORGET (root only: drop the claim and the
 *   consumer's mounts without an answer of the plugin).
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_BUSY: processes use a mount of the consumer; nothing was changed. With CSI_FORGET: any mount
 *   namespace shows one.
 * - CSI_E_DENIED: the claim is another user's, or the flag is root's.
 * - CSI_E_SECRET_REQUIRED: the plugin needs the secrets to detach.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_release(struct csi_client *client,
                     const struct csi_volume *volume,
                     const char *consumer,
                     const char *node,
                     uint64_t flags,
                     const struct csi_call *call,
                     struct csi_op **op,
                     struct csi_error **error);

/* ---- Clients ---- */

/**
 * Connects to csid. Fails at once if csid cannot be reached now. Later calls wait for a csid that restarts.
 *
 * @param options  Where csid is and how long to try. NULL: the defaults.
 * @param client  Receives the connection, which the caller frees with csi_client_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK, or an error. CSI_E_INVALID: an argument is wrong. CSI_E_UNSUPPORTED: options has unknown
 *   members. CSI_E_DISCONNECTED: csid cannot be reached. CSI_E_DEADLINE: no connection within timeout_usec.
 *   CSI_E_INTERNAL: no thread could be started.
 *
 * Threads: any thread; blocks up to timeout_usec, up to a second more if it fails, and cannot be cancelled.
 */
csi_code csi_client_open(const struct csi_client_options *options,
                         struct csi_client **client,
                         struct csi_error **error);

/**
 * Adds a reference to a client.
 *
 * @param client  The client. May be NULL.
 * @return The same pointer; NULL for NULL. Each reference is given back with csi_client_unref.
 *
 * Threads: any thread; never blocks.
 */
struct csi_client *csi_client_ref(struct csi_client *client);

/**
 * Drops a reference to a client. The last one closes the connection. Running operations and event readers of
 * the client end here with CSI_E_DISCONNECTED. They go on in csid, and nothing is unmounted.
 *
 * @param client  The client. NULL does nothing. In a forked child nothing happens.
 *
 * Threads: any thread; the last reference may block for two seconds while cancellations are sent.
 */
void csi_client_unref(struct csi_client *client);

/* ---- Errors ---- */

/**
 * Returns the code of an error, which the failed call returned too.
 *
 * @param error  The error. May be NULL.
 * @return The code; CSI_OK for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
csi_code csi_error_code(const struct csi_error *error);

/**
 * Returns a message for people: what failed and, where known, what to do next.
 *
 * @param error  The error. May be NULL.
 * @return A text that lives as long as the error; empty for NULL. Never NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_error_message(const struct csi_error *error);

/**
 * Returns whether the same call may succeed later without any other change.
 *
 * @param error  The error. May be NULL.
 * @return false for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
bool csi_error_retryable(const struct csi_error *error);

/**
 * Returns the gRPC status code that the plugin answered.
 *
 * @param error  The error. May be NULL.
 * @return The code as gRPC numbers it; -1 if no plugin answered, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
int32_t csi_error_grpc_code(const struct csi_error *error);

/**
 * Returns the name of the CSI call that failed, such as "NodeStageVolume".
 *
 * @param error  The error. May be NULL.
 * @return A text that lives as long as the error; NULL if no CSI call failed, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_error_rpc(const struct csi_error *error);

/**
 * Returns the plugin's own error message.
 *
 * @param error  The error. May be NULL.
 * @return A text that lives as long as the error; NULL if there is none or csid withholds it because it may
 *   contain a secret, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_error_plugin_message(const struct csi_error *error);

/**
 * Returns all other facts of an error: the names rpc, grpc-code, plugin-message, retryable, operation,
 * namespace, volume, plugin, step, obstacle, and the lists holders and tags, as far as they apply.
 *
 * @param error  The error. May be NULL.
 * @return A row that lives as long as the error; NULL for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const struct csi_row *csi_error_details(const struct csi_error *error);

/**
 * Frees an error and everything that was read from it.
 *
 * @param error  The error. NULL does nothing.
 *
 * Threads: any thread, one at a time; never blocks.
 */
void csi_error_free(struct csi_error *error);

/* ---- Events ---- */

/**
 * Opens a reader of csid's events in order.
 *
 * @param client  The connection. Not NULL.
 * @param cursor  csi_event_cursor of the last event that was handled, by this process or an earlier one. NULL:
 *   only events from now on. "": from the first event that csid still has.
 * @param timeout_usec  How long to wait for csid's answer, in microseconds. 0: 10 s.
 * @param events  Receives the reader, which the caller frees with csi_events_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK, or an error. CSI_E_INVALID: cursor is not one of csi_event_cursor's, or an argument is NULL.
 *   CSI_E_DEADLINE: csid did not answer within timeout_usec. CSI_E_DENIED: the caller may not read events.
 *   CSI_E_DISCONNECTED: the client was closed. CSI_E_FORKED, CSI_E_INTERNAL.
 *
 * Threads: any thread; blocks up to timeout_usec and cannot be cancelled.
 */
csi_code csi_events_open(struct csi_client *client,
                         const char *cursor,
                         uint64_t timeout_usec,
                         struct csi_events **events,
                         struct csi_error **error);

/**
 * Returns a descriptor for poll(), readable while csi_events_next has an event or an error to return.
 *
 * @param events  The reader. May be NULL.
 * @return The descriptor, which belongs to the reader: do not read, write or close it, and dup() it to keep it
 *   longer. -1 for NULL.
 *
 * Threads: any thread; never blocks.
 */
int32_t csi_events_fd(const struct csi_events *events);

/**
 * Returns the next event.
 *
 * @param events  The reader. Not NULL.
 * @param event  Receives the event, which the caller frees with csi_event_free. Not NULL. Written only with
 *   CSI_OK.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: *event was written. CSI_E_PENDING: there is no event now; *error is not written. Any other
 *   code ends the reader; open another one with the last cursor: CSI_E_DISCONNECTED if the client was closed,
 *   CSI_E_DENIED if csid refuses the caller, CSI_E_INTERNAL. CSI_E_INVALID (NULL) and CSI_E_FORKED do not end
 *   it.
 *
 * Threads: any thread; never blocks.
 */
csi_code csi_events_next(struct csi_events *events, struct csi_event **event, struct csi_error **error);

/**
 * Adds a reference to an event reader.
 *
 * @param events  The reader. May be NULL.
 * @return The same pointer; NULL for NULL. Each reference is given back with csi_events_unref.
 *
 * Threads: any thread; never blocks.
 */
struct csi_events *csi_events_ref(struct csi_events *events);

/**
 * Drops a reference to an event reader. The last one closes it.
 *
 * @param events  The reader. NULL does nothing. In a forked child nothing happens.
 *
 * Threads: any thread; never blocks.
 */
void csi_events_unref(struct csi_events *events);

/**
 * Returns whether events were lost before this point, or csid has a new journal. List the objects again
 * (csi_list). A gap has an empty row.
 *
 * @param event  The event. May be NULL.
 * @return false for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
bool csi_event_gap(const struct csi_event *event);

/**
 * Returns the cursor to continue with after this event was handled. It may be stored and given to
 * csi_events_open of a later process.
 *
 * @param event  The event. May be NULL.
 * @return A text that lives as long as the event; NULL for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_event_cursor(const struct csi_event *event);

/**
 * Returns the content of an event: sequence, realtime-usec (microseconds since 1970), type, subject, and
 * details, a row of its own with success, error, consumer, tag, plugin and others as the type has them.
 *
 * @param event  The event. May be NULL.
 * @return A row that lives as long as the event; NULL for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const struct csi_row *csi_event_row(const struct csi_event *event);

/**
 * Frees an event and everything that was read from it.
 *
 * @param event  The event. NULL does nothing.
 *
 * Threads: any thread, one at a time; never blocks.
 */
void csi_event_free(struct csi_event *event);

/* ---- Plugins: capacity, external volumes and snapshots ---- */

/**
 * Asks a plugin for the capacity available to new volumes with the given capabilities, parameters and
 * topology. Empty arguments match anything. Result: one row with available, in bytes.
 *
 * @param client  The connection. Not NULL.
 * @param plugin  The plugin's ID. Not NULL.
 * @param capabilities  How the volumes would be used. items NULL: any way.
 * @param parameters  Parameters of the volumes. items NULL: none.
 * @param topology  The segments of one place. items NULL: any place. Sent only to a plugin that has
 *   topologies.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_get_capacity(struct csi_client *client,
                          const char *plugin,
                          struct csi_capabilities capabilities,
                          struct csi_map parameters,
                          struct csi_map topology,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

/**
 * Lists a page of the volumes that a plugin has, registered or not. Result: one row with volumes, a list of
 * rows with external-id, capacity (bytes), published-node-ids, abnormal and message; and next-token, empty
 * after the last page. The pages are not one consistent view.
 *
 * @param client  The connection. Not NULL.
 * @param plugin  The plugin's ID. Not NULL.
 * @param token  next-token of the page before. NULL: the first page.
 * @param max  The most volumes of the page. 0: the plugin's choice.
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller. CSI_E_PLUGIN with
 * gRPC code 10 (ABORTED): start again without a token.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_list_external_volumes(struct csi_client *client,
                                   const char *plugin,
                                   const char *token,
                                   uint32_t max,
                                   const struct csi_call *call,
                                   struct csi_op **op,
                                   struct csi_error **error);

/**
 * Lists a page of the snapshots that a plugin has. Result: one row with snapshots, a list of rows as of
 * csi_create_snapshot, and next-token, empty after the last page. The pages are not one consistent view.
 *
 * @param client  The connection. Not NULL.
 * @param plugin  The plugin's ID. Not NULL.
 * @param snapshot  The plugin's ID of a snapshot: only this one. NULL: all.
 * @param external_id  The plugin's ID of a volume: only its snapshots. NULL: all.
 * @param token  next-token of the page before. NULL: the first page.
 * @param max  The most snapshots of the page. 0: the plugin's choice.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller. CSI_E_PLUGIN with
 * gRPC code 10 (ABORTED): start again without a token.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_list_snapshots(struct csi_client *client,
                            const char *plugin,
                            const char *snapshot,
                            const char *external_id,
                            const char *token,
                            uint32_t max,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

/**
 * Has the plugin delete a snapshot. A missing one is success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param plugin  The plugin's ID. Not NULL.
 * @param snapshot  The plugin's ID of the snapshot. Not NULL.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller, CSI_E_DENIED also
 * if the snapshot is of no volume that the caller registered.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_delete_snapshot(struct csi_client *client,
                             const char *plugin,
                             const char *snapshot,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/* ---- Lists, and csid itself ---- */

/**
 * Lists "plugins", "volumes", "claims", "mounts" or "operations". Result: one row per object, with the names
 * of org.csid1.xml.
 *
 * @param client  The connection. Not NULL.
 * @param kind  One of the words above. Not NULL.
 * @param filter  Only objects that match all of these. volumes: namespace, plugin, node, prefix, declared
 *   ("true": also those that files of volumes.d declare and that are not registered yet). claims: namespace,
 *   volume, consumer, node, past ("true": those that ended). mounts: namespace, volume, consumer, tag, plugin,
 *   state, uid, target. plugins and operations take none. items NULL: no filter. volumes, claims and mounts also
 *   come in pages: max is the number of rows, after is the cursor of the last row of the page before, with the
 *   same filter (if the features of csi_get_manager contain "pages").
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID (also for an unknown kind or filter),
 *   CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL: it was not.
 *
 * Errors of the operation: those of every operation; see the top of this file.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_list(struct csi_client *client,
                  const char *kind,
                  struct csi_map filter,
                  const struct csi_call *call,
                  struct csi_op **op,
                  struct csi_error **error);

/**
 * Reads csid's own properties. Result: one row with features (a list of what this csid can do), state,
 * version, journal-id, event-sequence and modify-index.
 *
 * @param client  The connection. Not NULL.
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation: those of every operation; see the top of this file.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_get_manager(struct csi_client *client,
                         const struct csi_call *call,
                         struct csi_op **op,
                         struct csi_error **error);

/* ---- Mounts ---- */

/**
 * Mounts a volume for a consumer. A registered volume is claimed for the consumer too. Result: one row with
 * source (the published path) and is-device. The same call again returns the same mount.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param consumer  Who uses the mount, such as an allocation or a unit. Not NULL.
 * @param options  How to mount. NULL: the defaults.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, the plugin is unknown, or the unit
 *   of bind does not run.
 * - CSI_E_EXISTS: the consumer has the mount with other options, or the inline volume is registered.
 * - CSI_E_CLAIM_CONFLICT: other claims or mounts are in the way, the node has no room for another volume of
 *   the plugin (csid waits for both until wait_usec has passed), or cannot reach this one.
 * - CSI_E_BUSY: the volume is being created or deleted, or something else is mounted in the way; or, in a
 *   cluster, this host drains.
 * - CSI_E_DENIED: also for an option that only root may use, or another user's mount or claim.
 * - CSI_E_CANCELLED: also if csi_unmount_volume ends it.
 *
 * Threads: any thread; never blocks. Cancelling the operation rolls the mount back. One that
 *   was complete at that moment stays: unmount it.
 */
csi_code csi_mount_volume(struct csi_client *client,
                          const struct csi_volume *volume,
                          const char *consumer,
                          const struct csi_mount_options *options,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

/**
 * Unmounts a volume from a consumer, whichever process mounted it. A missing mount is success. The operation
 * ends when the mount is gone. It has no result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param consumer  The consumer of the mount. Not NULL.
 * @param tag  The tag of the mount. NULL: the empty tag.
 * @param flags  0, or CSI_FORCE, CSI_FORCE_HUNG, CSI_FORGET, CSI_MUST_EXIST, CSI_ALL_TAGS and CSI_NO_WAIT.
 *   With CSI_FORGET csid drops its row without an answer of the plugin.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_BUSY: processes use the mount, or another mount namespace still shows it. With CSI_FORGET: any mount
 *   namespace shows it.
 * - CSI_E_NOT_FOUND: with CSI_MUST_EXIST, there is no such mount. The detail `tags` lists the consumer's other mounts,
 *   `holders` has "mount PATH" for each mount of the volume that is not csid's. csid sees those only while it has the
 *   volume staged or published.
 * - CSI_E_DENIED: the mount is another user's, or the flag is root's.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_unmount_volume(struct csi_client *client,
                            const struct csi_volume *volume,
                            const char *consumer,
                            const char *tag,
                            uint64_t flags,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

/**
 * Opens a mount as a descriptor, which move_mount(2) attaches in another mount namespace. Take it with
 * csi_op_take_fd. It is attached nowhere. The kernel keeps the file system until the descriptor and all mounts
 * made from it are gone. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param consumer  The consumer of the mount. Not NULL.
 * @param tag  The tag of the mount. NULL: the empty tag.
 * @param subpath  A directory or file on the volume, relative to its root. NULL: all of it.
 * @param flags  CSI_READ_ONLY, or 0.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file):
 * - CSI_E_NOT_FOUND: there is no such mount.
 * - CSI_E_DENIED: the mount is another user's. For a caller other than root also if the mount has nosuid,
 *   nodev, noexec or read-only, since the receiver could clear them.
 * - CSI_E_INVALID: subpath or CSI_READ_ONLY does not apply to a block device.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_open_mount(struct csi_client *client,
                        const struct csi_volume *volume,
                        const char *consumer,
                        const char *tag,
                        const char *subpath,
                        uint64_t flags,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

/**
 * Opens a mount as csi_open_mount does, with the owners of its files mapped by a user namespace: a file of uid 0
 * has the uid that uid 0 of the namespace has outside. Root only. csid needs the feature open-mount-idmap. No
 * result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param consumer  The consumer of the mount. Not NULL.
 * @param tag  The tag of the mount. NULL: the empty tag.
 * @param subpath  A directory or file on the volume, relative to its root. NULL: all of it.
 * @param flags  CSI_READ_ONLY, or 0.
 * @param userns  A descriptor of the user namespace, as open(2) of /proc/PID/ns/user returns it. The library
 *   duplicates it; the caller may close it after this call.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of csi_open_mount:
 * - CSI_E_INVALID: userns is not of a user namespace, or is csid's own; or the volume is a block device.
 * - CSI_E_DENIED: the caller is not root.
 * - CSI_E_UNSUPPORTED: the file system cannot map owners, the namespace maps no uid or no gid, or the mount has
 *   mapped owners already.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_open_mount_idmapped(struct csi_client *client,
                                 const struct csi_volume *volume,
                                 const char *consumer,
                                 const char *tag,
                                 const char *subpath,
                                 uint64_t flags,
                                 int userns,
                                 const struct csi_call *call,
                                 struct csi_op **op,
                                 struct csi_error **error);

/**
 * Asks the kernel whether a published path is mounted. A missing path is not. Result: one row with the boolean
 * mounted.
 *
 * @param client  The connection. Not NULL.
 * @param source  The published path, from the result of csi_mount_volume. Not NULL.
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation: those of every operation; see the top of this file.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_has_mount(struct csi_client *client,
                       const char *source,
                       const struct csi_call *call,
                       struct csi_op **op,
                       struct csi_error **error);

/**
 * Takes over a mount that another manager made. Root only. No plugin is asked. Result: one row with source
 * (published_path) and is-device. The same call again returns the same mount. csid can do this if the features
 * of csi_get_manager contain "adopt-mount".
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param consumer  Who uses the mount. Not NULL.
 * @param options  How it was mounted. NULL: the defaults.
 * @param staging_path  Where the volume is staged. NULL: its plugin does not stage.
 * @param published_path  Where the volume is published for the consumer. Not NULL.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file); each changes nothing:
 * - CSI_E_NOT_FOUND: nothing is mounted at one of the paths.
 * - CSI_E_INVALID: something else is mounted at one of the paths, or staging_path does not fit the plugin.
 * - CSI_E_EXISTS: a path belongs to another mount, or the consumer has the mount with other options.
 * - CSI_E_CLAIM_CONFLICT: other claims or mounts are in the way.
 * - CSI_E_UNSUPPORTED: the plugin attaches volumes, and csid did not attach this registered one; or this csid
 *   cannot adopt.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_adopt_mount(struct csi_client *client,
                         const struct csi_volume *volume,
                         const char *consumer,
                         const struct csi_mount_options *options,
                         const char *staging_path,
                         const char *published_path,
                         const struct csi_call *call,
                         struct csi_op **op,
                         struct csi_error **error);

/* ---- Operations ---- */

/**
 * Returns a descriptor for poll(), readable from the end of the operation on.
 *
 * @param op  The operation. May be NULL.
 * @return The descriptor, which belongs to the operation: do not read, write or close it, and dup() it to keep
 *   it longer. -1 for NULL.
 *
 * Threads: any thread; never blocks.
 */
int32_t csi_op_fd(const struct csi_op *op);

/**
 * Returns the name of the operation in csid: csi_call.operation_id, or one that the library chose.
 *
 * @param op  The operation. May be NULL.
 * @return A text that lives as long as the handle; NULL for NULL.
 *
 * Threads: any thread; never blocks.
 */
const char *csi_op_id(const struct csi_op *op);

/**
 * Waits for the end of an operation and returns how it ended. It may be called again, and by several threads
 * at once.
 *
 * @param op  The operation. Not NULL.
 * @param timeout_usec  How long to wait, in microseconds. 0: do not wait. Negative: no limit.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation succeeded; csi_op_row has the result. CSI_E_PENDING: it is still running;
 *   *error is not written. CSI_E_INVALID: op is NULL. CSI_E_FORKED: op belongs to the parent process. Any
 *   other code: the operation failed; see the errors of the function that started it.
 *
 * Threads: any thread; blocks up to timeout_usec. csi_op_cancel from another thread ends the wait.
 */
csi_code csi_op_wait(struct csi_op *op, int64_t timeout_usec, struct csi_error **error);

/**
 * Cancels an operation. It ends here with CSI_E_CANCELLED, and csid is asked to end it too. csid rolls back a
 * mount, a claim or an attachment in progress, and goes on with anything else. One that was complete at that
 * moment stays. Does nothing after the end of the operation.
 *
 * @param op  The operation. NULL does nothing. In a forked child nothing happens.
 *
 * Threads: any thread; never blocks.
 */
void csi_op_cancel(struct csi_op *op);

/**
 * Returns the number of rows in the result.
 *
 * @param op  The operation. May be NULL.
 * @return 0 while the operation runs, if it failed, and for NULL.
 *
 * Threads: any thread; never blocks.
 */
size_t csi_op_rows(const struct csi_op *op);

/**
 * Returns a row of the result.
 *
 * @param op  The operation. May be NULL.
 * @param index  Counted from 0.
 * @return A row that lives as long as the handle; NULL beyond the last row, and for NULL.
 *
 * Threads: any thread; never blocks.
 */
const struct csi_row *csi_op_row(const struct csi_op *op, size_t index);

/**
 * Returns the descriptor in the result of csi_open_mount and gives it to the caller, who closes it. It is
 * close-on-exec. If it is never taken, the last csi_op_unref closes it.
 *
 * @param op  The operation. May be NULL.
 * @return The descriptor; -1 if there is none: the operation runs, failed, returns none, or the descriptor was
 *   taken before.
 *
 * Threads: any thread; never blocks.
 */
int32_t csi_op_take_fd(struct csi_op *op);

/**
 * Adds a reference to an operation.
 *
 * @param op  The operation. May be NULL.
 * @return The same pointer; NULL for NULL. Each reference is given back with csi_op_unref.
 *
 * Threads: any thread; never blocks.
 */
struct csi_op *csi_op_ref(struct csi_op *op);

/**
 * Drops a reference to an operation. The last one frees the result. A running operation goes on in csid.
 *
 * @param op  The operation. NULL does nothing.
 *
 * Threads: any thread; never blocks.
 */
void csi_op_unref(struct csi_op *op);

/* ---- Plugins: registration and properties ---- */

/**
 * Registers a plugin with csid, or another instance of one. The same call again changes nothing. No result
 * row.
 *
 * @param client  The connection. Not NULL.
 * @param plugin  The plugin. Not NULL.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file):
 * - CSI_E_EXISTS: the instance is registered with another specification, or the socket belongs to another
 *   plugin.
 * - CSI_E_DENIED: the ID belongs to another user, or a member is root's.
 * - CSI_E_PLUGIN_SHUTDOWN: csid is stopping.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_register_plugin(struct csi_client *client,
                             const struct csi_plugin *plugin,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/**
 * Unregisters a plugin, or one instance of it. A missing one is success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param id  The plugin's ID. Not NULL.
 * @param instance  The instance. NULL: all.
 * @param flags  CSI_FORCE, or 0. CSI_FORCE unregisters also a plugin with mounts.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file):
 * - CSI_E_BUSY: volumes of the plugin are mounted, claimed or attached here, and CSI_FORCE was not given; or
 *   it is being unregistered already.
 * - CSI_E_DENIED: another user registered the plugin.
 * - CSI_E_UNSUPPORTED: a file in plugins.d defines the plugin, or it registered itself.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_unregister_plugin(struct csi_client *client,
                               const char *id,
                               const char *instance,
                               uint64_t flags,
                               const struct csi_call *call,
                               struct csi_op **op,
                               struct csi_error **error);

/**
 * Waits until a service of a plugin is ready, also of a plugin that is not registered yet. Result: the row of
 * csi_get_plugin.
 *
 * @param client  The connection. Not NULL.
 * @param id  The plugin's ID. Not NULL.
 * @param service  "node" or "controller". Not NULL.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file): CSI_E_DEADLINE if it is not
 * ready before the deadline; without one, after csid's own ([deadlines] operation of csid.toml).
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_wait_for_plugin(struct csi_client *client,
                             const char *id,
                             const char *service,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/**
 * Reads the properties of a plugin. Result: one row with node-id (the plugin's name of this node), the lists
 * node-capabilities and controller-capabilities in CSI's names, such as STAGE_UNSTAGE_VOLUME, the list
 * services, state, healthy, and all else of org.csid1.Plugin.
 *
 * @param client  The connection. Not NULL.
 * @param id  The plugin's ID. Not NULL.
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if no such
 * plugin is registered.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_get_plugin(struct csi_client *client,
                        const char *id,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

/**
 * Accepts a changed node ID of a plugin: from now on volumes are attached under it. Existing attachments keep
 * the node ID that they were made with. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param id  The plugin's ID. Not NULL.
 * @param node_id  The plugin's current node ID. Not NULL.
 * @param call  Deadline and operation ID; secrets have no use here. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file): CSI_E_INVALID if node_id is not
 * the current one, CSI_E_PLUGIN_UNAVAILABLE if the current one is not known, CSI_E_NOT_FOUND if no such plugin
 * is registered.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_accept_node_id(struct csi_client *client,
                            const char *id,
                            const char *node_id,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

/* ---- Rows ---- */

/**
 * Returns the number of names in a row.
 *
 * @param row  The row. May be NULL.
 * @return 0 for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
size_t csi_row_size(const struct csi_row *row);

/**
 * Returns a name of a row, in alphabetical order.
 *
 * @param row  The row. May be NULL.
 * @param index  Counted from 0.
 * @return A text that lives as long as the row; NULL beyond the last name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_row_name(const struct csi_row *row, size_t index);

/**
 * Returns the text under a name.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @return A text that lives as long as the row; NULL if there is no text of that name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_row_text(const struct csi_row *row, const char *name);

/**
 * Returns the number under a name.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @return 0 if there is no number of that name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
uint64_t csi_row_number(const struct csi_row *row, const char *name);

/**
 * Returns the boolean under a name.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @return false if there is no boolean of that name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
bool csi_row_flag(const struct csi_row *row, const char *name);

/**
 * Returns a map of texts, such as publish-context.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @return A map that lives as long as the row. Its items are NULL if there is no map of that name, and not
 *   NULL if the map is empty.
 *
 * Threads: any thread, one at a time; never blocks.
 */
struct csi_map csi_row_map(const struct csi_row *row, const char *name);

/**
 * Returns the number of texts or rows in the list under a name.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @return 0 if there is no list of that name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
size_t csi_row_len(const struct csi_row *row, const char *name);

/**
 * Returns a text of a list.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @param index  Counted from 0.
 * @return A text that lives as long as the row; NULL beyond the last one, if there is no list of texts of that
 *   name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const char *csi_row_item(const struct csi_row *row,
                         const char *name,
                         size_t index);

/**
 * Returns whether a list has a text, such as a plugin's capability or a feature of csid.
 *
 * @param row  The row. May be NULL.
 * @param name  The name of the list. May be NULL.
 * @param text  The text to look for. May be NULL.
 * @return false if there is no list of texts of that name, and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
bool csi_row_contains(const struct csi_row *row, const char *name, const char *text);

/**
 * Returns a row inside a row: one of a list of rows, or at index 0 a map, such as an event's details.
 *
 * @param row  The row. May be NULL.
 * @param name  The name. May be NULL.
 * @param index  Counted from 0.
 * @return A row that lives as long as the outer row; NULL beyond the last one, if there are none of that name,
 *   and for NULL.
 *
 * Threads: any thread, one at a time; never blocks.
 */
const struct csi_row *csi_row_row(const struct csi_row *row,
                                  const char *name,
                                  size_t index);

/* ---- Volumes: registration and creation ---- */

/**
 * Registers a volume that its plugin has, or changes the registration. Result: one row as of csi_get_volume.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. plugin, external_id and at least one capability are needed.
 * @param spec  What else csid is to know. NULL: nothing. The members of csi_create_volume only must be 0 or
 *   NULL.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_INVALID: also if the plugin does not confirm that the volume can be used so.
 * - CSI_E_NOT_FOUND: the plugin or the volume is unknown.
 * - CSI_E_EXISTS: the name belongs to another volume, or the volume has another name.
 * - CSI_E_BUSY: the volume is in use, and the change is possible only without that.
 * - CSI_E_DENIED: another user registered it, or a flag is root's.
 * - CSI_E_UNSUPPORTED: a file in volumes.d declares it.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_register_volume(struct csi_client *client,
                             const struct csi_volume *volume,
                             const struct csi_volume_spec *spec,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/**
 * Has the plugin create a volume, and registers it unless CSI_CREATE_ONLY is set. Repeating a call whose
 * answer was lost creates no second volume. Result: one row as of csi_get_volume.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. plugin and at least one capability are needed; external_id and context
 *   must be NULL.
 * @param spec  What the volume is to be. NULL: nothing beyond volume.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_EXISTS: the volume exists with other options.
 * - CSI_E_NOT_FOUND: the plugin, or the volume to clone, is unknown.
 * - CSI_E_UNSUPPORTED: the plugin cannot create volumes, or not from a snapshot or a volume.
 * - CSI_E_DENIED: the snapshot is of no volume that the caller registered, or a flag is root's.
 * - CSI_E_CANCELLED: also if csi_delete_volume ends it.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on if it has asked the plugin.
 */
csi_code csi_create_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const struct csi_volume_spec *spec,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

/* ---- Volumes: attachment, size, snapshots and state ---- */

/**
 * Attaches a volume to a node, for a scheduler that keeps its own claims. Result: one row with
 * publish-context, which csi_mount_options takes on that node.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param node_id  The plugin's name of the node: node-id of csi_get_plugin there. Not NULL.
 * @param usage  How the volume is used there. NULL: read and write, with no mode given. An inline volume needs
 *   a mode here or in its capabilities.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, or the plugin is unknown.
 * - CSI_E_CLAIM_CONFLICT: the volume is claimed.
 * - CSI_E_EXISTS: it is attached to the node with other options.
 * - CSI_E_UNSUPPORTED: the plugin attaches nothing.
 *
 * Threads: any thread; never blocks. Cancelling the operation rolls the attachment back. One that
 *   was complete at that moment stays: detach it.
 */
csi_code csi_attach_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const char *node_id,
                           const struct csi_usage *usage,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

/**
 * Detaches a volume from a node. A volume that is not attached is success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param node_id  The plugin's name of the node. Not NULL.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_BUSY: the volume is staged on this host under that node ID; unmount it first.
 * - CSI_E_CLAIM_CONFLICT: the attachment belongs to a claim.
 * - CSI_E_DENIED: another user attached it.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_detach_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const char *node_id,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

/**
 * Asks the plugin whether a volume can be used in a way. Result: one row with confirmed (boolean) and message
 * (why not).
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param usage  The way; its flags are 0. NULL: all capabilities of volume.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if the volume is not registered and was not given inline, or the plugin is unknown.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_validate_volume(struct csi_client *client,
                             const struct csi_volume *volume,
                             const struct csi_usage *usage,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/**
 * Expands a volume. Result: one row with capacity-bytes and node-expansion-required (boolean: a node still has
 * to expand it).
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param required  The least size, in bytes.
 * @param limit  The largest size, in bytes. 0: no limit.
 * @param part  "all", "controller" or "node". NULL: "all".
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_INVALID: limit is less than required or than the size of the volume.
 * - CSI_E_UNSUPPORTED: the plugin cannot expand that part.
 * - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, or the plugin is unknown.
 * - CSI_E_BUSY: the volume is being created or deleted.
 * - CSI_E_DEADLINE: also if the plugin expands only volumes that are not in use, and this one stayed in use.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_expand_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           uint64_t required,
                           uint64_t limit,
                           const char *part,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

/**
 * Has the plugin delete a volume with its content. A missing volume is success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * - CSI_E_BUSY: the volume is mounted, claimed, attached or being created.
 * - CSI_E_DENIED: another user registered it.
 * - CSI_E_UNSUPPORTED: a file in volumes.d declares the volume.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_delete_volume(struct csi_client *client,
                           const struct csi_volume *volume,
                           const struct csi_call *call,
                           struct csi_op **op,
                           struct csi_error **error);

/**
 * Has the plugin create a snapshot, and waits until it is ready. The same name again is the same snapshot.
 * Result: one row with id, external-id (of the volume), size (bytes), created (microseconds since 1970) and
 * ready.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param name  The name that the plugin gives the snapshot. Not NULL.
 * @param parameters  Parameters for the plugin. items NULL: none.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if the volume is not registered and was not given inline, or the plugin is unknown;
 * CSI_E_DEADLINE also if the snapshot exists but is not ready yet.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_create_snapshot(struct csi_client *client,
                             const struct csi_volume *volume,
                             const char *name,
                             struct csi_map parameters,
                             const struct csi_call *call,
                             struct csi_op **op,
                             struct csi_error **error);

/**
 * Has the plugin create a snapshot, and ends as soon as the plugin has answered. The same call again returns
 * the progress. Result: as of csi_create_snapshot, with ready false if the snapshot cannot be used yet.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
 *   external_id.
 * @param name  The name that the plugin gives the snapshot. Not NULL.
 * @param parameters  Parameters for the plugin. items NULL: none.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation: those of csi_create_snapshot.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_begin_snapshot(struct csi_client *client,
                            const struct csi_volume *volume,
                            const char *name,
                            struct csi_map parameters,
                            const struct csi_call *call,
                            struct csi_op **op,
                            struct csi_error **error);

/**
 * Asks the plugin for the usage of a volume that is mounted here. Result: one row with usage, a list of rows
 * (unit "BYTES" or "INODES", available, total, used), abnormal (boolean) and message (the plugin's).
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation and of every plugin call (top of this file):
 * CSI_E_NOT_FOUND if the volume is not mounted here.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_volume_stats(struct csi_client *client,
                          const struct csi_volume *volume,
                          const struct csi_call *call,
                          struct csi_op **op,
                          struct csi_error **error);

/**
 * Reads a registered volume. Result: one row with context, parameters, capabilities, claims, and all else of
 * GetVolume in org.csid1.xml.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param call  Only its deadline is used. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if the volume
 * is not registered.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_get_volume(struct csi_client *client,
                        const struct csi_volume *volume,
                        const struct csi_call *call,
                        struct csi_op **op,
                        struct csi_error **error);

/**
 * Deregisters a volume, which the plugin keeps. A missing one is success. No result row.
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param flags  0, or CSI_FORCE (although it is claimed) and CSI_FORGET (root only: give up a creation or
 *   deletion that never ends).
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file):
 * - CSI_E_BUSY: the volume is mounted, or claimed and CSI_FORCE was not given, or its creation or deletion has
 *   not ended.
 * - CSI_E_DENIED: another user registered it, or the flag is root's.
 * - CSI_E_UNSUPPORTED: a file in volumes.d declares it.
 *
 * Threads: any thread; never blocks. After a cancellation csid goes on with it.
 */
csi_code csi_deregister_volume(struct csi_client *client,
                               const struct csi_volume *volume,
                               uint64_t flags,
                               const struct csi_call *call,
                               struct csi_op **op,
                               struct csi_error **error);

/**
 * Explains why a volume is not in the wanted state. Result: one row with waiting-for, the lists holders and
 * steps, last-error, and next-try (microseconds since 1970).
 *
 * @param client  The connection. Not NULL.
 * @param volume  The volume. Not NULL. Only ns and id are used.
 * @param call  Deadline, secrets and operation ID. NULL: none.
 * @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
 * @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
 * @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
 *   it was not.
 *
 * Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if csid does
 * not know the volume.
 *
 * Threads: any thread; never blocks. The operation can be cancelled.
 */
csi_code csi_explain(struct csi_client *client,
                     const struct csi_volume *volume,
                     const struct csi_call *call,
                     struct csi_op **op,
                     struct csi_error **error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CSI_H */
