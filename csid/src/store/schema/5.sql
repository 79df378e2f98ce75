-- A mount's `published` is where its plugin publishes it; '': a row of an older csid, whose plugin publishes at `source`.
-- A volume's `backing` is JSON of what kept its mounts when the last ones were to go; '': not known.
CREATE TABLE mounts_5 (
    namespace    TEXT NOT NULL,
    volume       TEXT NOT NULL,
    consumer     TEXT NOT NULL,
    tag          TEXT NOT NULL,
    plugin       TEXT NOT NULL,
    external_id  TEXT NOT NULL,
    uid          INTEGER NOT NULL,
    spec         TEXT NOT NULL,
    phase        TEXT NOT NULL,
    kept         INTEGER NOT NULL,
    source       TEXT NOT NULL,
    published    TEXT NOT NULL,
    publish      TEXT NOT NULL,
    target       TEXT NOT NULL,
    device       INTEGER,
    error        TEXT NOT NULL,
    operations   TEXT NOT NULL,
    since_usec   INTEGER NOT NULL,
    modify_index INTEGER NOT NULL,
    sum          INTEGER NOT NULL,
    PRIMARY KEY (namespace, volume, consumer, tag)
) STRICT, WITHOUT ROWID;

INSERT INTO mounts_5
    SELECT namespace, volume, consumer, tag, plugin, external_id, uid, spec, phase, kept, source, '', publish, target,
           device, error, operations, since_usec, modify_index,
           checksum(namespace, volume, consumer, tag, plugin, external_id, uid, spec, phase, kept, source, '', publish,
                    target, device, error, operations, since_usec, modify_index)
    FROM mounts;
DROP TABLE mounts;
ALTER TABLE mounts_5 RENAME TO mounts;
CREATE INDEX mounts_of_source ON mounts (source);

CREATE TABLE volumes_5 (
    plugin      TEXT NOT NULL,
    external_id TEXT NOT NULL,
    namespace   TEXT NOT NULL,
    volume      TEXT NOT NULL,
    staging     TEXT NOT NULL,
    stage       TEXT NOT NULL,
    backing     TEXT NOT NULL,
    sum         INTEGER NOT NULL,
    PRIMARY KEY (plugin, external_id)
) STRICT, WITHOUT ROWID;

INSERT INTO volumes_5
    SELECT plugin, external_id, namespace, volume, staging, stage, '',
           checksum(plugin, external_id, namespace, volume, staging, stage, '')
    FROM volumes;
DROP TABLE volumes;
ALTER TABLE volumes_5 RENAME TO volumes;
