-- Volumes that are registered (or only attached), and who has claimed them. `registration`, `attachments` and `claim`
-- are JSON of the types in registry.rs; `restless`: something is left to be done without being asked. Its rows outgrow
-- what a page of a table without rowid holds of a row, and each change would write overflow pages.
CREATE TABLE registry (
    namespace    TEXT NOT NULL,
    volume       TEXT NOT NULL,
    plugin       TEXT NOT NULL,
    -- NULL: the plugin has not told it yet.
    external_id  TEXT,
    registration TEXT,
    attachments  TEXT NOT NULL,
    restless     INTEGER NOT NULL,
    modify_index INTEGER NOT NULL,
    sum          INTEGER NOT NULL,
    PRIMARY KEY (namespace, volume)
) STRICT;

CREATE UNIQUE INDEX registry_of_external_id ON registry (plugin, external_id);
CREATE INDEX registry_restless ON registry (namespace, volume) WHERE restless;

CREATE TABLE claims (
    namespace    TEXT NOT NULL,
    volume       TEXT NOT NULL,
    consumer     TEXT NOT NULL,
    node         TEXT NOT NULL,
    claim        TEXT NOT NULL,
    modify_index INTEGER NOT NULL,
    sum          INTEGER NOT NULL,
    PRIMARY KEY (namespace, volume, consumer)
) STRICT, WITHOUT ROWID;

-- The last claims of each volume that ended, `number` in the order of their end.
CREATE TABLE past_claims (
    namespace    TEXT NOT NULL,
    volume       TEXT NOT NULL,
    consumer     TEXT NOT NULL,
    node         TEXT NOT NULL,
    claim        TEXT NOT NULL,
    modify_index INTEGER NOT NULL,
    number       INTEGER NOT NULL,
    sum          INTEGER NOT NULL,
    PRIMARY KEY (namespace, volume, number)
) STRICT, WITHOUT ROWID;

-- A plugin may have several instances, `number` in the order of their coming.
CREATE TABLE plugin_instances (
    id       TEXT NOT NULL,
    instance TEXT NOT NULL,
    number   INTEGER NOT NULL,
    uid      INTEGER NOT NULL,
    spec     TEXT NOT NULL,
    sum      INTEGER NOT NULL,
    PRIMARY KEY (id, instance)
) STRICT, WITHOUT ROWID;

INSERT INTO plugin_instances
    SELECT id, instance, 1, uid, spec, checksum(id, instance, 1, uid, spec)
    FROM (SELECT id, coalesce(iif(json_valid(spec), spec ->> '$.instance', NULL), 'default') AS instance, uid, spec
          FROM plugins);
DROP TABLE plugins;
ALTER TABLE plugin_instances RENAME TO plugins;
