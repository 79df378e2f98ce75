//! Lists of volumes and claims, read in pages. A list sees what its caller may see.

use std::time::Duration;

use csi_proto::cluster::v1::{ClaimPage, ListAsk, VolumePage};
use csi_proto::identity::{Identity, Role};
use csid::Error;
use csid::store::registry::VolumeName;
use csid::volume::rules::{self, check_name};
use csid_etcd::{ClaimsAfter, LeftOut, ListFilter};
use prost::Message;

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::view;

/// Rows that are read together.
const ROWS: usize = 500;
/// The same of volumes, each of which may have many claims.
const VOLUMES: usize = 100;
/// The limit of a page, in bytes. Only a page of one row is larger. A node's row has less than the 128 KiB that csid takes.
const BYTES: usize = 64 * 1024;
/// How long a list waits for the revision that its caller has seen. csid waits 10 s for a page.
const REVISION: Duration = Duration::from_secs(5);

/// A page of a list, to which rows are added.
pub trait Page: Default + Message + 'static {
    /// Returns the next pages. `true`: there are more.
    fn read(
        cluster: &Cluster,
        caller: &Identity,
        list: &mut List,
    ) -> impl Future<Output = Result<(Vec<Self>, bool)>> + Send;

    fn len(&self) -> usize;

    /// Sets the revision, and what the list leaves out.
    fn finish(&mut self, revision: u64, left_out: &LeftOut);
}

macro_rules! page {
    ($page:ty, $rows:ident, $read:ident) => {
        impl Page for $page {
            async fn read(
                cluster: &Cluster,
                caller: &Identity,
                list: &mut List,
            ) -> Result<(Vec<Self>, bool)> {
                cluster.$read(caller, list).await
            }

            fn len(&self) -> usize {
                self.$rows.len()
            }

            fn finish(&mut self, revision: u64, left_out: &LeftOut) {
                self.revision = revision;
                self.left_out = u64::try_from(left_out.count).unwrap_or(u64::MAX);
                self.first_left_out =
                    left_out.first.as_ref().map(|(name, _)| name.to_string()).unwrap_or_default();
            }
        }
    };
}

page!(VolumePage, volumes, volume_pages);
page!(ClaimPage, claims, claim_pages);

/// Puts rows into pages. The last page has what is left out, and is there without rows if anything is left out, or if the list `ends`.
fn pages<R: Message, P: Page>(
    rows: impl IntoIterator<Item = R>,
    rows_of: impl Fn(&mut P) -> &mut Vec<R>,
    (revision, left_out, ends): (u64, &LeftOut, bool),
) -> Vec<P> {
    let mut pages = Vec::new();
    let (mut page, mut size) = (P::default(), 0);
    for row in rows {
        // The tag and the length of a row have 4 bytes at most.
        let bytes = row.encoded_len() + 4;
        if size + bytes > BYTES && page.len() > 0 {
            page.finish(revision, &LeftOut::default());
            pages.push(std::mem::take(&mut page));
            size = 0;
        }
        size += bytes;
        rows_of(&mut page).push(row);
    }
    // How many volumes the caller does not see is none of its business.
    if page.len() > 0 || left_out.count > 0 || ends {
        page.finish(revision, left_out);
        pages.push(page);
    }
    pages
}

/// A list, and the place in it.
pub struct List {
    filter: ListFilter,
    after: Option<ClaimsAfter>,
    /// The least revision of the list.
    at_least: u64,
}

impl Cluster {
    /// Checks what a list asks for. Returns what it is of, and the place to begin at.
    pub fn list_of(&self, caller: &Identity, ask: ListAsk) -> Result<List> {
        if ask.own {
            self.require_node(caller)?;
        }
        match ask.namespace.is_empty() {
            true => {
                let sees = [May::Read, May::Mount].map(|may| self.config.grants.allow_anywhere(caller, may));
                if !sees.contains(&true) {
                    let text = format!("{caller} has no grant for read in any namespace");
                    return Err(ServerError::denied(text));
                }
            }
            false => {
                check_name("namespace", &ask.namespace)?;
                self.require_sight(caller, &ask.namespace)?;
            }
        }
        let after = match (ask.after_namespace.is_empty(), ask.after_volume.is_empty()) {
            (true, true) => None,
            _ => Some(rules::volume_name(&ask.after_namespace, &ask.after_volume)?),
        };
        let claim = match (ask.after_node.is_empty(), ask.after_consumer.is_empty()) {
            (true, true) => None,
            _ => {
                check_name("after-node", &ask.after_node)?;
                check_name("after-consumer", &ask.after_consumer)?;
                Some([ask.after_node, ask.after_consumer])
            }
        };
        let after = match (after, claim) {
            (Some(name), claim) => Some(ClaimsAfter { name, claim }),
            (None, None) => None,
            (None, Some(_)) => return Err(Error::invalid("after-node without after-volume").into()),
        };
        let given = |what: &str, text: String| -> Result<Option<String>> {
            if text.is_empty() {
                return Ok(None);
            }
            check_name(what, &text)?;
            Ok(Some(text))
        };
        let node = given("node", ask.node)?;
        let node = match ask.own {
            true if node.as_ref().is_some_and(|node| *node != caller.name) => {
                return Err(Error::invalid("own and node are given, and node is another one").into());
            }
            true => Some(caller.name.clone()),
            false => node,
        };
        let filter = ListFilter {
            namespace: given("namespace", ask.namespace)?,
            volume: given("volume", ask.volume)?,
            prefix: given("prefix", ask.prefix)?,
            plugin: given("plugin", ask.plugin)?,
            node,
            consumer: given("consumer", ask.consumer)?,
        };
        Ok(List { filter, after, at_least: ask.at_least })
    }

    async fn volume_pages(&self, caller: &Identity, list: &mut List) -> Result<(Vec<VolumePage>, bool)> {
        self.may_list(caller, list).await?;
        let sees = |namespace: &str| self.sees(caller, namespace);
        let after = list.after.as_ref().map(|after| &after.name);
        let part = self.registry.volume_list(&list.filter, after, VOLUMES, sees).await?;
        let ends = part.next.is_none();
        let rows = part.rows.iter().map(|record| view::row(record, caller));
        let pages =
            pages(rows, |page: &mut VolumePage| &mut page.volumes, (part.revision, &part.left_out, ends));
        list.after = part.next.map(|name: VolumeName| ClaimsAfter { name, claim: None });
        Ok((pages, !ends))
    }

    async fn claim_pages(&self, caller: &Identity, list: &mut List) -> Result<(Vec<ClaimPage>, bool)> {
        self.may_list(caller, list).await?;
        let sees = |namespace: &str| self.sees(caller, namespace);
        let part = self.registry.claim_list(&list.filter, list.after.as_ref(), ROWS, sees).await?;
        let ends = part.next.is_none();
        let rows = part.rows.iter().map(|row| view::claim_in_list(row, caller));
        let pages =
            pages(rows, |page: &mut ClaimPage| &mut page.claims, (part.revision, &part.left_out, ends));
        list.after = part.next;
        Ok((pages, !ends))
    }

    /// Refuses a page of a list, if this server has not the list's revision in time or does not follow etcd, or the node is blocked.
    async fn may_list(&self, caller: &Identity, list: &List) -> Result<()> {
        if list.at_least > 0 && !self.registry.comes_to(list.at_least, REVISION).await? {
            let seconds = REVISION.as_secs();
            let text = format!("revision {} has not come to this server within {seconds} s", list.at_least);
            return Err(ServerError::Unavailable(text));
        }
        self.presence.here()?;
        if caller.role == Role::Node {
            self.unblocked(&caller.name).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::ClaimInList;

    use super::*;

    #[test]
    fn page_has_few_bytes_and_says_what_is_left_out() {
        let row = |n: usize| ClaimInList { volume: format!("{n:0>1000}"), ..ClaimInList::default() };
        let name = VolumeName { namespace: "default".into(), volume: "bad".into() };
        let left_out = LeftOut { count: 2, first: Some((name, "key".into())) };
        let made = pages((0..200).map(row), |page: &mut ClaimPage| &mut page.claims, (7, &left_out, true));
        let rows: Vec<_> = made.iter().flat_map(|page| &page.claims).collect();
        assert!(rows.len() == 200 && rows.iter().enumerate().all(|(n, of)| **of == row(n)));
        assert!(made.len() > 2 && made.iter().all(|page| page.encoded_len() <= BYTES + 64));
        let said: Vec<_> = made.iter().map(|page| (page.revision, page.left_out)).collect();
        assert_eq!((said[0], said.last()), ((7, 0), Some(&(7, 2))));
        assert_eq!(made.last().unwrap().first_left_out, "default/bad");
        let large = ClaimInList { volume: "x".repeat(BYTES), ..ClaimInList::default() };
        let made =
            pages([large.clone(), large], |page: &mut ClaimPage| &mut page.claims, (7, &left_out, false));
        assert_eq!(made.len(), 2, "a row that is larger than a page has one of its own");
        let none =
            |ends| pages([], |page: &mut ClaimPage| &mut page.claims, (7, &LeftOut::default(), ends)).len();
        assert_eq!((none(false), none(true)), (0, 1));
    }
}
