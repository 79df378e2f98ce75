-- Words (phases, legs) are those of rows.rs; `spec`, `operations` and `details` are JSON; u64 is kept as the
-- i64 of the same bits.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY NOT NULL,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE plugins (
    id   TEXT PRIMARY KEY NOT NULL,
    uid  INTEGER NOT NULL,
    spec TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE volumes (
    plugin      TEXT NOT NULL,
    external_id TEXT NOT NULL,
    namespace   TEXT NOT NULL,
    volume      TEXT NOT NULL,
    staging     TEXT NOT NULL,
    stage       TEXT NOT NULL,
    PRIMARY KEY (plugin, external_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE mounts (
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
    publish      TEXT NOT NULL,
    target       TEXT NOT NULL,
    device         INTEGER,
    error        TEXT NOT NULL,
    operations   TEXT NOT NULL,
    since_usec   INTEGER NOT NULL,
    modify_index INTEGER NOT NULL,
    PRIMARY KEY (namespace, volume, consumer, tag)
) STRICT, WITHOUT ROWID;

CREATE INDEX mounts_of_volume ON mounts (plugin, external_id);
CREATE INDEX mounts_of_source ON mounts (source);

CREATE TABLE events (
    sequence      INTEGER PRIMARY KEY NOT NULL,
    realtime_usec INTEGER NOT NULL,
    kind          TEXT NOT NULL,
    subject       TEXT NOT NULL,
    details       TEXT NOT NULL
) STRICT;

INSERT INTO meta VALUES
    ('journal_id', lower(hex(randomblob(16)))),
    ('modify_index', 0),
    -- The highest event sequence that a synced commit has set aside, the boot of the kernel that did so, and
    -- the highest sequence whose event is gone.
    ('events_reserved', 0),
    ('events_boot', ''),
    ('events_dropped', 0);
