//! The registry in the journal: one row for each record, one for each of its claims, and a few for the last ones that
//! ended. A swap looks first and writes then: one that is refused has changed nothing.

use std::collections::BTreeMap;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use crate::store::change::Durability;
use crate::store::claim::Claim;
use crate::store::claim_set::ClaimSet;
use crate::store::error::{StoreError, at};
use crate::store::known_claims::{self, KnownClaims};
use crate::store::record::{Record, Registration, VolumeName};
use crate::store::registry::{
    ClaimFilter, ClaimPlace, Conflict, ListedClaim, OfVolume, RecordFilter, RegistryError, Swap,
};
use crate::store::rows::VolumeKey;
use crate::store::tables::{checked, whole};
use crate::store::volume_handle::VolumeHandle;
use crate::store::words::{from_bits, from_json, json};

const REGISTRY: &str =
    "namespace, volume, plugin, external_id, registration, attachments, restless, modify_index";
const CLAIM: &str = "namespace, volume, consumer, node, claim, modify_index";
const PAST_CLAIM: &str = "namespace, volume, consumer, node, claim, modify_index, number";

/// Past claims kept of each volume; they go with its record.
const PAST: i64 = 16;

#[cfg(test)]
thread_local! {
    /// Rows of claims that this thread has read and taken apart.
    pub(super) static CLAIMS_READ: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A row of the [`checked`] columns of the registry; the claims are rows of their own.
pub(super) fn record(row: &Row<'_>) -> rusqlite::Result<Record> {
    whole(row)?;
    let registration: Option<Registration> = match row.get_ref(4)? {
        ValueRef::Null => None,
        _ => Some(from_json(row, 4)?),
    };
    let creating = || {
        let name = registration.as_ref().map(|registration| registration.spec.name.clone());
        VolumeHandle::Creating { name: name.unwrap_or_default() }
    };
    Ok(Record {
        name: VolumeName { namespace: row.get(0)?, volume: row.get(1)? },
        volume: VolumeKey {
            plugin: row.get(2)?,
            handle: row.get::<_, Option<VolumeHandle>>(3)?.unwrap_or_else(creating),
        },
        registration,
        claims: ClaimSet::default(),
        attachments: from_json(row, 5)?,
        driver: None,
        queue: Vec::new(),
        serial: 0,
        ended_attaches: Default::default(),
        revision: from_bits(row, 7)?,
    })
}

/// A row of the [`checked`] columns of a table of claims.
pub(super) fn claim(row: &Row<'_>) -> rusqlite::Result<(VolumeName, Claim)> {
    #[cfg(test)]
    CLAIMS_READ.set(CLAIMS_READ.get() + 1);
    whole(row)?;
    let name = VolumeName { namespace: row.get(0)?, volume: row.get(1)? };
    Ok((name, Claim { modify_index: from_bits(row, 5)?, ..from_json(row, 4)? }))
}

pub(super) fn any(db: &Connection) -> rusqlite::Result<bool> {
    db.query_row("SELECT EXISTS (SELECT 1 FROM registry)", [], |row| row.get(0))
}

/// One that does not go on is parked, whatever its state.
pub(super) fn claim_states(db: &Connection) -> rusqlite::Result<BTreeMap<String, u64>> {
    let state = "CASE WHEN claim ->> 'parked' = '' THEN claim ->> 'state' ELSE 'parked' END";
    let mut statement = db.prepare_cached(&format!("SELECT {state}, count(*) FROM claims GROUP BY 1"))?;
    statement.query_map([], |row| Ok((row.get(0)?, from_bits(row, 1)?)))?.collect()
}

/// The volume's row, and its claims unless those are known. `known`: none of a damaged journal.
pub(super) fn read_record(
    db: &Connection,
    name: &VolumeName,
    mut known: Option<&mut KnownClaims>,
) -> rusqlite::Result<Record> {
    let key = [&name.namespace, &name.volume];
    let sql = format!("SELECT {} FROM registry WHERE namespace = ?1 AND volume = ?2", checked(REGISTRY));
    let found = db.prepare_cached(&sql)?.query_row(key, record).optional()?;
    let found = found.unwrap_or_else(|| Record::none(name.clone()));
    if let Some(claims) = known.as_mut().and_then(|known| known.at(name, found.revision)) {
        return Ok(Record { claims, ..found });
    }
    let sql = format!(
        "SELECT {} FROM claims WHERE namespace = ?1 AND volume = ?2 ORDER BY consumer",
        checked(CLAIM)
    );
    let mut statement = db.prepare_cached(&sql)?;
    let claims = statement.query_map(key, |row| claim(row).map(|(_, claim)| claim))?;
    let claims = claims.collect::<rusqlite::Result<ClaimSet>>()?;
    if let Some(known) = known
        && found.revision != 0
    {
        known.keep(name, found.revision, &claims);
    }
    Ok(Record { claims, ..found })
}

pub(super) fn read_records(db: &Connection, filter: &RecordFilter) -> rusqlite::Result<Vec<Record>> {
    let ([records, claims], values) = records_sql(filter);
    let mut records: Vec<Record> = db
        .prepare(&records)?
        .query_map(params_from_iter(&values), record)?
        .collect::<rusqlite::Result<_>>()?;
    let mut statement = db.prepare(&claims)?;
    let mut claims = statement.query_map(params_from_iter(&values), claim)?;
    let mut next = claims.next().transpose()?;
    for record in &mut records {
        let mut of_record = Vec::new();
        while let Some((_, claim)) = next.take_if(|(name, _)| *name == record.name) {
            of_record.push(claim);
            next = claims.next().transpose()?;
        }
        record.claims = of_record.into_iter().collect();
    }
    Ok(records)
}

/// Of the records and of all their claims, both by name, with the values of the marks in both.
pub(super) fn records_sql(filter: &RecordFilter) -> ([String; 2], Vec<String>) {
    let of_node = "? IN (SELECT c.node FROM claims c WHERE c.namespace = r.namespace AND c.volume = r.volume \
                   UNION ALL SELECT a.value ->> 'node' FROM json_each(r.attachments) a)";
    // A part is read in the order of the names, and not sorted: the `+` keeps SQLite from another index.
    let in_parts = filter.after.is_some() || filter.most > 0;
    let (mut conditions, mut values) = joined([
        ("r.namespace = ?", filter.namespace.clone()),
        ("r.volume = ?", filter.volume.clone()),
        (if in_parts { "+r.plugin = ?" } else { "r.plugin = ?" }, filter.plugin.clone()),
        (if in_parts { "+r.external_id = ?" } else { "r.external_id = ?" }, filter.external_id.clone()),
        (of_node, filter.node.clone()),
        ("r.volume GLOB ?", filter.prefix.as_deref().map(begins_with)),
    ]);
    if filter.restless {
        conditions += " AND r.restless";
    }
    if filter.registered {
        conditions += " AND r.registration IS NOT NULL";
    }
    if let Some(VolumeName { namespace, volume }) = &filter.after {
        conditions += " AND (r.namespace, r.volume) > (?, ?)";
        values.extend([namespace.clone(), volume.clone()]);
    }
    let part = if filter.most > 0 { format!(" LIMIT {}", filter.most) } else { String::new() };
    let rows = format!("registry r WHERE true{conditions} ORDER BY r.namespace, r.volume{part}");
    let records = format!("SELECT {} FROM {rows}", checked(REGISTRY));
    let claims = format!(
        "SELECT {} FROM claims WHERE (namespace, volume) IN (SELECT r.namespace, r.volume FROM {rows}) \
         ORDER BY namespace, volume, consumer",
        checked(CLAIM)
    );
    ([records, claims], values)
}

pub(super) fn read_claims(db: &Connection, filter: &ClaimFilter) -> rusqlite::Result<Vec<ListedClaim>> {
    let (sql, values) = claims_sql(filter);
    let listed = |row: &Row<'_>| {
        let (name, claim) = claim(row)?;
        let of_volume = match filter.past {
            true => OfVolume::Number(from_bits(row, 6)?),
            false => OfVolume::Consumer(claim.consumer.clone()),
        };
        Ok(ListedClaim { name, claim, of_volume })
    };
    db.prepare(&sql)?.query_map(params_from_iter(values), listed)?.collect()
}

pub(super) fn claims_sql(filter: &ClaimFilter) -> (String, Vec<String>) {
    let (mut conditions, mut values) = joined([
        ("namespace = ?", filter.namespace.clone()),
        ("volume = ?", filter.volume.clone()),
        ("consumer = ?", filter.consumer.clone()),
        ("node = ?", filter.node.clone()),
    ]);
    if let Some([first, last]) = &filter.between {
        conditions += " AND (namespace, volume) >= (?, ?) AND (namespace, volume) <= (?, ?)";
        values
            .extend([first, last].into_iter().flat_map(|name| [name.namespace.clone(), name.volume.clone()]));
    }
    let in_parts = filter.after.is_some() || filter.most > 0;
    if let Some(ClaimPlace { name, of_volume }) = &filter.after {
        let (place, value) = match of_volume {
            OfVolume::Consumer(consumer) => ("(namespace, volume, consumer) > (?, ?, ?)", consumer.clone()),
            OfVolume::Number(number) => {
                ("(namespace, volume, number) > (?, ?, CAST(? AS INTEGER))", number.to_string())
            }
        };
        conditions += &format!(" AND {place}");
        values.extend([name.namespace.clone(), name.volume.clone(), value]);
    }
    let (columns, table, order) = match (filter.past, in_parts) {
        (true, true) => (PAST_CLAIM, "past_claims", "namespace, volume, number"),
        (true, false) => (PAST_CLAIM, "past_claims", "modify_index, namespace, volume, number"),
        (false, _) => (CLAIM, "claims", "namespace, volume, consumer"),
    };
    let columns = checked(columns);
    let part = if filter.most > 0 { format!(" LIMIT {}", filter.most) } else { String::new() };
    (format!("SELECT {columns} FROM {table} WHERE true{conditions} ORDER BY {order}{part}"), values)
}

/// The conditions that have a value, and the values of their marks.
fn joined<const N: usize>(wanted: [(&str, Option<String>); N]) -> (String, Vec<String>) {
    let given = wanted.into_iter().filter_map(|(condition, value)| Some((condition, value?)));
    let (conditions, values): (Vec<_>, Vec<_>) = given.unzip();
    (conditions.iter().map(|condition| format!(" AND {condition}")).collect(), values)
}

/// The pattern of GLOB for what begins with this.
fn begins_with(prefix: &str) -> String {
    let letter = |letter| match letter {
        '*' | '?' | '[' => format!("[{letter}]"),
        plain => plain.to_string(),
    };
    prefix.chars().map(letter).chain(["*".to_owned()]).collect()
}

impl From<StoreError> for RegistryError {
    fn from(error: StoreError) -> Self {
        let variant = match error {
            StoreError::Full => RegistryError::Full,
            StoreError::Corrupt { .. } => RegistryError::Damaged,
            StoreError::Gone => RegistryError::Ended,
            _ => RegistryError::Failed,
        };
        variant(error.into())
    }
}

/// Does what is asked, if the record is still the one that it was asked of. After a conflict nothing is written.
pub(super) fn swap(
    db: &Connection,
    swap: &Swap,
    modify_index: u64,
) -> Result<Result<(), Conflict>, StoreError> {
    let Swap { before, after, past, .. } = swap;
    debug_assert_eq!(before.name, after.name);
    let found = revision(db, &before.name).map_err(at("read a volume's record"))?;
    if found != before.revision {
        return Ok(Err(Conflict::Stale));
    }
    if after.is_empty() {
        return forget(db, &before.name).map(Ok).map_err(at("delete a volume's record"));
    }
    if (found == 0 || after.volume != before.volume)
        && let Some(name) = other_name(db, after).map_err(at("look for a volume's other name"))?
    {
        return Ok(Err(Conflict::Taken(name)));
    }
    put_record(db, after, modify_index)
        .and_then(|()| put_claims(db, before, after, modify_index))
        .and_then(|()| put_past(db, &after.name, past, modify_index))
        .map(Ok)
        .map_err(at("keep a volume's record"))
}

/// 0: it is not there.
fn revision(db: &Connection, name: &VolumeName) -> rusqlite::Result<u64> {
    let sql = format!("SELECT {} FROM registry WHERE namespace = ?1 AND volume = ?2", checked(REGISTRY));
    let found = db.prepare_cached(&sql)?.query_row([&name.namespace, &name.volume], |row| {
        whole(row)?;
        from_bits(row, 7)
    });
    Ok(found.optional()?.unwrap_or(0))
}

/// Another name that the plugin's volume has.
fn other_name(db: &Connection, record: &Record) -> rusqlite::Result<Option<VolumeName>> {
    let sql = "SELECT namespace, volume FROM registry WHERE plugin = ?1 AND external_id = ?2 \
               AND (namespace, volume) <> (?3, ?4)";
    let Record { name: VolumeName { namespace, volume }, volume: VolumeKey { plugin, handle }, .. } = record;
    let values = params![plugin, handle, namespace, volume];
    let name = |row: &Row<'_>| Ok(VolumeName { namespace: row.get(0)?, volume: row.get(1)? });
    db.prepare_cached(sql)?.query_row(values, name).optional()
}

fn forget(db: &Connection, name: &VolumeName) -> rusqlite::Result<()> {
    for sql in [
        "DELETE FROM registry WHERE namespace = ?1 AND volume = ?2",
        "DELETE FROM claims WHERE namespace = ?1 AND volume = ?2",
        "DELETE FROM past_claims WHERE namespace = ?1 AND volume = ?2",
    ] {
        db.prepare_cached(sql)?.execute([&name.namespace, &name.volume])?;
    }
    Ok(())
}

/// A record mostly changes in columns that no index of names holds; an upsert would write the indexes' pages as well.
fn put_record(db: &Connection, record: &Record, modify_index: u64) -> rusqlite::Result<()> {
    let update = "UPDATE registry SET registration = ?5, attachments = ?6, restless = ?7, modify_index = ?8, \
                  sum = checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) \
                  WHERE namespace = ?1 AND volume = ?2 AND plugin = ?3 AND external_id IS ?4";
    let insert = "INSERT INTO registry (namespace, volume, plugin, external_id, registration, attachments, \
                  restless, modify_index, sum) \
                  VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)) \
                  ON CONFLICT (namespace, volume) DO UPDATE SET \
                  plugin = excluded.plugin, external_id = excluded.external_id, \
                  registration = excluded.registration, attachments = excluded.attachments, \
                  restless = excluded.restless, modify_index = excluded.modify_index, sum = excluded.sum";
    let values = params![
        record.name.namespace,
        record.name.volume,
        record.volume.plugin,
        record.volume.handle,
        record.registration.as_ref().map(json).transpose()?,
        json(&record.attachments)?,
        record.is_restless(),
        modify_index as i64,
    ];
    if db.prepare_cached(update)?.execute(values)? == 0 {
        db.prepare_cached(insert)?.execute(values)?;
    }
    Ok(())
}

/// Only those that are others than before.
fn put_claims(db: &Connection, before: &Record, after: &Record, modify_index: u64) -> rusqlite::Result<()> {
    let name = &after.name;
    for (had, has) in known_claims::changes(before, after) {
        let Some(claim) = has else {
            let sql =
                "DELETE FROM claims WHERE namespace = ?1 AND volume = ?2 AND consumer = ?3 AND node = ?4";
            let (consumer, node) = had.map(|claim| (&claim.consumer, &claim.node)).unzip();
            db.prepare_cached(sql)?.execute(params![name.namespace, name.volume, consumer, node])?;
            continue;
        };
        let sql = "INSERT INTO claims (namespace, volume, consumer, node, claim, modify_index, sum) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, checksum(?1, ?2, ?3, ?4, ?5, ?6)) ON CONFLICT DO UPDATE SET \
                   node = excluded.node, claim = excluded.claim, modify_index = excluded.modify_index, \
                   sum = excluded.sum";
        let values = params![
            name.namespace,
            name.volume,
            claim.consumer,
            claim.node,
            json(claim)?,
            modify_index as i64
        ];
        db.prepare_cached(sql)?.execute(values)?;
    }
    Ok(())
}

fn put_past(db: &Connection, name: &VolumeName, past: &[Claim], modify_index: u64) -> rusqlite::Result<()> {
    if past.is_empty() {
        return Ok(());
    }
    let sql = "SELECT coalesce(max(number), 0) FROM past_claims WHERE namespace = ?1 AND volume = ?2";
    let mut number: i64 =
        db.prepare_cached(sql)?.query_row([&name.namespace, &name.volume], |row| row.get(0))?;
    for claim in past {
        number += 1;
        let sql = "INSERT INTO past_claims (namespace, volume, consumer, node, claim, modify_index, number, sum) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7))";
        let values = params![
            name.namespace,
            name.volume,
            claim.consumer,
            claim.node,
            json(claim)?,
            modify_index as i64,
            number
        ];
        db.prepare_cached(sql)?.execute(values)?;
    }
    let sql = "DELETE FROM past_claims WHERE namespace = ?1 AND volume = ?2 AND number <= ?3";
    db.prepare_cached(sql)?.execute(params![name.namespace, name.volume, number - PAST]).map(drop)
}

/// Returns swaps that make the same records in an empty journal. A claim whose volume's row is lost gets its own record:
/// a volume that is registered again is claimed.
pub(super) fn copied(db: &Connection) -> rusqlite::Result<Vec<Swap>> {
    let mut swaps: BTreeMap<VolumeName, Swap> = BTreeMap::new();
    let new = |after: Record| Swap {
        before: Record::none(after.name.clone()),
        after,
        past: Vec::new(),
        durability: Durability::Disk,
    };
    for record in read_records(db, &RecordFilter::default())? {
        swaps.insert(record.name.clone(), new(record));
    }
    for ListedClaim { name, claim, .. } in read_claims(db, &ClaimFilter::default())? {
        let swap = swaps.entry(name.clone()).or_insert_with(|| new(Record::none(name)));
        swap.after.claims.insert(claim);
    }
    for ListedClaim { name, claim, .. } in
        read_claims(db, &ClaimFilter { past: true, ..ClaimFilter::default() })?
    {
        if let Some(swap) = swaps.get_mut(&name) {
            swap.past.push(claim);
        }
    }
    Ok(swaps.into_values().collect())
}
