//! The tables: each row's columns, read with their checksum and written with it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::types::{Type, Value};
use rusqlite::{Connection, OptionalExtension, Row, Statement, ToSql, params, params_from_iter};
use serde::Serialize;

use crate::store::error::{StoreError, at};
use crate::store::file::in_memory;
use crate::store::loaded::{Loaded, MountFilter};
use crate::store::rows::{
    Event, JournaledFence, MountKey, MountRow, MountSpec, MountStatus, NewEvent, PluginRow, VolumeKey,
    VolumeRow,
};
use crate::store::schema::{self, TableSchema};
use crate::store::words::{from_bits, from_json, from_text, from_word, json, text, word};

/// A table's columns, but for their checksum.
pub(super) const META: &str = "key, value";
pub(super) const MOUNT: &str = "namespace, volume, consumer, tag, plugin, external_id, uid, spec, phase, kept, \
                                source, published, publish, target, device, error, operations, since_usec, \
                                modify_index";
pub(super) const VOLUME: &str = "plugin, external_id, namespace, volume, staging, stage, backing";
pub(super) const PLUGIN: &str = "id, instance, number, uid, spec";
pub(super) const EVENT: &str = "sequence, realtime_usec, kind, subject, details";

pub(super) fn meta<T: rusqlite::types::FromSql>(db: &Connection, key: &str) -> rusqlite::Result<T> {
    let sql = format!("SELECT {} FROM meta WHERE key = ?1", checked(META));
    db.prepare_cached(&sql)?.query_row([key], |row| {
        whole(row)?;
        row.get(1)
    })
}

pub(super) fn put_meta(db: &Connection, key: &str, value: impl Into<MetaValue>) -> rusqlite::Result<()> {
    let sql = "INSERT INTO meta (key, value, sum) VALUES (?1, ?2, checksum(?1, ?2)) \
               ON CONFLICT (key) DO UPDATE SET value = excluded.value, sum = excluded.sum";
    db.prepare_cached(sql)?.execute(params![key, value.into().0]).map(drop)
}

/// The prefix of the key of a plugin's accepted name of this node; the plugin's id follows.
pub(super) const NODE_ID: &str = "node-id/";

fn node_ids(db: &Connection) -> rusqlite::Result<BTreeMap<String, String>> {
    let sql = format!("SELECT {} FROM meta WHERE substr(key, 1, length(?1)) = ?1", checked(META));
    let mut statement = db.prepare(&sql)?;
    let ids = statement.query_map([NODE_ID], |row| {
        whole(row)?;
        let key: String = row.get(0)?;
        Ok((key[NODE_ID.len()..].to_owned(), row.get(1)?))
    })?;
    ids.collect()
}

/// The key of the fence, whose value is JSON.
pub(super) const FENCE: &str = "fence";

fn fence(db: &Connection) -> rusqlite::Result<Option<JournaledFence>> {
    let sql = format!("SELECT {} FROM meta WHERE key = ?1", checked(META));
    let read = |row: &Row<'_>| whole(row).and_then(|()| from_json(row, 1));
    db.prepare(&sql)?.query_row([FENCE], read).optional()
}

/// Returns whether this csid understands a row of [`META`] that is as it was written.
pub(super) fn is_legible_meta(row: &Row<'_>) -> bool {
    let is_fence = row.get_ref(0).is_ok_and(|key| key.as_str() == Ok(FENCE));
    whole(row).is_ok() && (!is_fence || from_json::<JournaledFence>(row, 1).is_ok())
}

pub(super) fn put_fence(db: &Connection, fence: &JournaledFence) -> rusqlite::Result<()> {
    put_meta(db, FENCE, &json(fence)?)
}

pub(super) fn delete_meta(db: &Connection, key: &str) -> rusqlite::Result<()> {
    db.prepare_cached("DELETE FROM meta WHERE key = ?1")?.execute([key]).map(drop)
}

pub(super) struct MetaValue(Value);

impl From<u64> for MetaValue {
    fn from(number: u64) -> Self {
        MetaValue(Value::Integer(number as i64))
    }
}

impl From<&String> for MetaValue {
    fn from(text: &String) -> Self {
        MetaValue(Value::Text(text.clone()))
    }
}

/// Returns the rows of all plugins.
pub(super) fn plugins(db: &Connection) -> rusqlite::Result<Vec<PluginRow>> {
    let sql = format!("SELECT {} FROM plugins ORDER BY id, instance", checked(PLUGIN));
    db.prepare(&sql)?.query_map([], plugin)?.collect()
}

pub(super) fn load(db: &Connection) -> rusqlite::Result<Loaded> {
    let boot = meta(db, "boot").optional()?;
    let volumes = db
        .prepare(&format!("SELECT {} FROM volumes ORDER BY 1, 2", checked(VOLUME)))?
        .query_map([], volume)?
        .collect::<rusqlite::Result<_>>()?;
    let columns = checked(MOUNT);
    let mut statement: Statement<'_> =
        db.prepare(&format!("SELECT {columns} FROM mounts ORDER BY namespace, volume, consumer, tag"))?;
    let mounts = statement.query_map([], mount)?.collect::<rusqlite::Result<_>>()?;
    Ok(Loaded { boot, plugins: plugins(db)?, node_ids: node_ids(db)?, fence: fence(db)?, volumes, mounts })
}

/// The columns to read, and after them whether the row is what was written.
pub(super) fn checked(columns: &str) -> String {
    format!("{columns}, sum = checksum({columns}) AS whole")
}

/// Refuse a row that is not what was written.
pub(super) fn whole(row: &Row<'_>) -> rusqlite::Result<()> {
    match row.get("whole")? {
        true => Ok(()),
        false => {
            let column = row.as_ref().column_index("whole")?;
            let why = "the row is not what was written: its checksum is wrong";
            Err(rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, why.into()))
        }
    }
}

/// Rows that are not read before the file is changed, or not as what they were written, are what was written.
pub(super) fn as_written(db: &Connection, version: u32, path: &Path) -> Result<(), StoreError> {
    let tables = schema::tables(db)?;
    // The page of the schema has no checksum. SQLite takes a changed name of a column for another column.
    if tables != schema::tables(&in_memory(schema::version(db)?)?)? {
        let why = "its tables have other columns than those that were made".to_owned();
        return Err(StoreError::Corrupt { path: path.into(), why });
    }
    for TableSchema { name, columns, .. } in tables {
        if version == schema::KNOWN && !matches!(name.as_str(), "registry" | "claims") {
            continue;
        }
        let sql = format!("SELECT count(*) FROM {name} WHERE sum <> checksum({})", columns.join(", "));
        let wrong: u64 = db.query_row(&sql, [], |row| from_bits(row, 0)).map_err(at("read its rows"))?;
        if wrong > 0 {
            let why = format!("rows of `{name}` are not what was written, {wrong}: their checksum is wrong");
            return Err(StoreError::Corrupt { path: path.into(), why });
        }
    }
    Ok(())
}

/// A row of the [`checked`] columns in [`PLUGIN`], and so on.
pub(super) fn plugin(row: &Row<'_>) -> rusqlite::Result<PluginRow> {
    whole(row)?;
    Ok(PluginRow {
        id: row.get(0)?,
        instance: row.get(1)?,
        number: from_bits(row, 2)?,
        uid: row.get(3)?,
        spec: row.get(4)?,
    })
}

pub(super) fn volume(row: &Row<'_>) -> rusqlite::Result<VolumeRow> {
    whole(row)?;
    Ok(VolumeRow {
        key: VolumeKey { plugin: row.get(0)?, handle: row.get(1)? },
        namespace: row.get(2)?,
        volume: row.get(3)?,
        staging: from_text(row, 4)?,
        stage: from_word(row, 5)?,
        backing: from_text(row, 6)?,
    })
}

/// The column `spec` of a mount: its spec and its status as one object.
#[derive(Serialize)]
struct SpecColumn<'a> {
    #[serde(flatten)]
    spec: &'a MountSpec,
    #[serde(flatten)]
    status: &'a MountStatus,
}

pub(super) fn mount(row: &Row<'_>) -> rusqlite::Result<MountRow> {
    whole(row)?;
    Ok(MountRow {
        key: MountKey {
            namespace: row.get(0)?,
            volume: row.get(1)?,
            consumer: row.get(2)?,
            tag: row.get(3)?,
        },
        volume: VolumeKey { plugin: row.get(4)?, handle: row.get(5)? },
        uid: row.get(6)?,
        spec: from_json(row, 7)?,
        status: from_json(row, 7)?,
        phase: from_word(row, 8)?,
        kept: row.get(9)?,
        source: row.get(10)?,
        published: from_text(row, 11)?,
        publish: from_word(row, 12)?,
        target: from_word(row, 13)?,
        device: row.get::<_, Option<i64>>(14)?.map(|bits| bits as u64),
        error: from_text(row, 15)?,
        operations: from_json(row, 16)?,
        since_usec: from_bits(row, 17)?,
        modify_index: from_bits(row, 18)?,
    })
}

pub(super) fn event(row: &Row<'_>) -> rusqlite::Result<Event> {
    whole(row)?;
    Ok(Event {
        sequence: from_bits(row, 0)?,
        realtime_usec: from_bits(row, 1)?,
        kind: row.get(2)?,
        subject: row.get(3)?,
        details: from_json::<BTreeMap<_, _>>(row, 4)?,
    })
}

/// Each with its volume's staging path.
pub(super) fn read_mounts(
    db: &Connection,
    filter: &MountFilter,
) -> rusqlite::Result<Vec<(MountRow, String)>> {
    let phase = filter.phase.as_ref().map(word).transpose()?;
    let wanted: [(&str, Option<&dyn ToSql>); 8] = [
        ("namespace", filter.namespace.as_ref().map(|v| v as _)),
        ("volume", filter.volume.as_ref().map(|v| v as _)),
        ("consumer", filter.consumer.as_ref().map(|v| v as _)),
        ("tag", filter.tag.as_ref().map(|v| v as _)),
        ("plugin", filter.plugin.as_ref().map(|v| v as _)),
        ("source", filter.source.as_ref().map(|v| v as _)),
        ("phase", phase.as_ref().map(|v| v as _)),
        ("uid", filter.uid.as_ref().map(|v| v as _)),
    ];
    let wanted: Vec<_> = wanted.into_iter().filter_map(|(column, value)| Some((column, value?))).collect();
    let mut conditions: String = wanted.iter().map(|(column, _)| format!(" AND m.{column} = ?")).collect();
    let staging = filter.staging.as_ref().map(|v| v as &dyn ToSql);
    conditions.push_str(staging.map_or("", |_| " AND v.staging = ?"));
    let after = filter.after.as_ref().map(|key| [&key.namespace, &key.volume, &key.consumer, &key.tag]);
    conditions
        .push_str(after.map_or("", |_| " AND (m.namespace, m.volume, m.consumer, m.tag) > (?, ?, ?, ?)"));
    let after = after.into_iter().flatten().map(|part| part as &dyn ToSql);
    let columns = checked(&format!("m.{MOUNT}").replace(", ", ", m.")).replace(" sum ", " m.sum ");
    let sql = format!(
        "SELECT {columns}, coalesce(v.staging, '') FROM mounts m \
         LEFT JOIN volumes v ON v.plugin = m.plugin AND v.external_id = m.external_id \
         WHERE true{conditions} ORDER BY m.namespace, m.volume, m.consumer, m.tag"
    );
    let mut statement = db.prepare_cached(&sql)?;
    let values = params_from_iter(wanted.into_iter().map(|(_, value)| value).chain(staging).chain(after));
    let rows = statement.query_map(values, |row| Ok((mount(row)?, row.get(20)?)))?;
    let is_there = |row: &MountRow| filter.target.is_none() || row.spec.target == filter.target;
    let rows = rows.filter(|row| !matches!(row, Ok((row, _)) if !is_there(row)));
    // The rows come in the order of the table: what is not asked for is not read.
    rows.take(if filter.most > 0 { filter.most } else { usize::MAX }).collect()
}

pub(super) fn put_volume(db: &Connection, row: &VolumeRow) -> rusqlite::Result<()> {
    let sql = "INSERT INTO volumes (plugin, external_id, namespace, volume, staging, stage, backing, sum) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7)) ON CONFLICT DO UPDATE SET \
               namespace = excluded.namespace, volume = excluded.volume, staging = excluded.staging, \
               stage = excluded.stage, backing = excluded.backing, sum = excluded.sum";
    let VolumeRow { key, namespace, volume, staging, stage, backing } = row;
    let values =
        params![key.plugin, key.handle, namespace, volume, text(staging), word(stage)?, text(backing)];
    db.prepare_cached(sql)?.execute(values).map(drop)
}

/// A row mostly changes in columns that no index holds; an upsert would write the indexes' pages as well.
pub(super) fn put_mount(db: &Connection, row: &MountRow, modify_index: u64) -> rusqlite::Result<()> {
    let update = "UPDATE mounts SET uid = ?7, spec = ?8, phase = ?9, kept = ?10, published = ?12, publish = ?13, \
                  target = ?14, device = ?15, error = ?16, operations = ?17, since_usec = ?18, modify_index = ?19, \
                  sum = checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19) \
                  WHERE namespace = ?1 AND volume = ?2 AND consumer = ?3 AND tag = ?4 \
                  AND plugin = ?5 AND external_id = ?6 AND source = ?11";
    let replace = "REPLACE INTO mounts (namespace, volume, consumer, tag, plugin, external_id, uid, spec, \
                   phase, kept, source, published, publish, target, device, error, operations, since_usec, \
                   modify_index, sum) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, \
                   checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19))";
    let values = params![
        row.key.namespace,
        row.key.volume,
        row.key.consumer,
        row.key.tag,
        row.volume.plugin,
        row.volume.handle,
        row.uid,
        json(&SpecColumn { spec: &row.spec, status: &row.status })?,
        word(&row.phase)?,
        row.kept,
        row.source,
        text(&row.published),
        word(&row.publish)?,
        word(&row.target)?,
        row.device.map(|bits| bits as i64),
        text(&row.error),
        json(&row.operations)?,
        row.since_usec as i64,
        modify_index as i64,
    ];
    if db.prepare_cached(update)?.execute(values)? == 0 {
        db.prepare_cached(replace)?.execute(values)?;
    }
    Ok(())
}

pub(super) fn put_plugin(db: &Connection, row: &PluginRow) -> rusqlite::Result<()> {
    let sql = "INSERT INTO plugins (id, instance, number, uid, spec, sum) \
               VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5)) ON CONFLICT DO UPDATE SET \
               number = excluded.number, uid = excluded.uid, spec = excluded.spec, sum = excluded.sum";
    let values = params![row.id, row.instance, row.number as i64, row.uid, row.spec];
    db.prepare_cached(sql)?.execute(values).map(drop)
}

pub(super) fn put_event(db: &Connection, new: &NewEvent, sequence: u64) -> rusqlite::Result<Event> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let event = Event {
        sequence,
        realtime_usec: since_1970.as_micros() as u64,
        kind: new.kind.name().to_owned(),
        subject: new.subject.clone(),
        details: new.details.iter().map(|(&key, value)| (key.to_owned(), value.clone())).collect(),
    };
    let sql = "INSERT INTO events (sequence, realtime_usec, kind, subject, details, sum) \
               VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5))";
    let values = params![
        sequence as i64,
        event.realtime_usec as i64,
        event.kind,
        event.subject,
        json(&event.details)?
    ];
    db.prepare_cached(sql)?.execute(values)?;
    Ok(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::mount as sample;

    /// An older csid wrote both as one struct, and reads the column of a newer one.
    #[test]
    fn spec_and_status_are_one_object() {
        let MountRow { spec, status, .. } = sample("v", "job");
        let text = |status: &MountStatus| json(&SpecColumn { spec: &spec, status }).unwrap();
        assert_eq!(text(&status), json(&spec).unwrap(), "a status at rest adds nothing");
        let healing = MountStatus {
            secrets_beside: true,
            healing: true,
            counted: true,
            died: vec![7],
            node_id: Some("n".to_owned()),
        };
        let written = text(&healing);
        let status_of = r#","secrets-beside":true,"healing":true,"counted":true,"died":[7],"node-id":"n"}"#;
        assert!(written.starts_with(text(&status).trim_end_matches('}')), "{written}");
        assert!(written.ends_with(status_of), "{written}");
        let (read, kept): (MountSpec, MountStatus) =
            (serde_json::from_str(&written).unwrap(), serde_json::from_str(&written).unwrap());
        assert!(read == spec && kept == healing);
        assert!(serde_json::from_str::<MountStatus>(&text(&status)).unwrap() == status);
    }
}
