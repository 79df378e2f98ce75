-- Each row with a checksum of its other columns, in their order: `checksum` is csid's own function.
ALTER TABLE meta    ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE plugins ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE volumes ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE mounts  ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE events  ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
UPDATE meta    SET sum = checksum(key, value);
UPDATE plugins SET sum = checksum(id, uid, spec);
UPDATE volumes SET sum = checksum(plugin, external_id, namespace, volume, staging, stage);
UPDATE mounts  SET sum = checksum(namespace, volume, consumer, tag, plugin, external_id, uid, spec, phase, kept,
                                  source, publish, target, device, error, operations, since_usec, modify_index);
UPDATE events  SET sum = checksum(sequence, realtime_usec, kind, subject, details);
