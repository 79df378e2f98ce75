//! Lists that are read in pages, so that neither side holds all rows of a long one in memory.

use crate::{
    client::Client,
    error::{Error, Kind, Result},
    options::{ClaimFilter, MountFilter, VolumeFilter},
    rows::{ClaimRow, MountRow, VolumeRow},
};

/// The rows of a page if the filter has no `max`.
const PAGE: u32 = 1000;

/// A list, page after page. A row that exists from the first page to the last is in one page. A row that comes or goes meanwhile may
/// be in none.
pub struct Pages<F> {
    client: Client,
    /// `None`: there are no more.
    filter: Option<F>,
}

macro_rules! pages {
    ($filter:ident, $row:ident, $list:ident, $pages:ident) => {
        impl Client {
            /// Returns the list in pages of the filter's `max` rows, 1000 if it has none.
            pub fn $pages(&self, filter: $filter) -> Pages<$filter> {
                Pages { client: self.clone(), filter: Some(filter) }
            }
        }

        impl Pages<$filter> {
            /// Returns the next page. `None`: there are no more.
            ///
            /// # Errors
            ///
            /// Those of every call: see the [crate's errors](crate#errors). An error ends the list.
            pub async fn next(&mut self) -> Result<Option<Vec<$row>>> {
                let Some(mut filter) = self.filter.take() else { return Ok(None) };
                let whole = filter.clone();
                filter.max = filter.max.filter(|max| *max > 0).or(Some(PAGE));
                let rows = match self.client.$list(filter.clone()).await {
                    // A csid without pages does not know the option, so ask it for all rows.
                    Err(Error::Csid(error))
                        if error.kind == Kind::InvalidArgument
                            && (&whole.max, &whole.after) == (&None, &None) =>
                    {
                        return self.client.$list(whole).await.map(Some);
                    }
                    rows => rows?,
                };
                let Some(last) = rows.last() else { return Ok(None) };
                if filter.max.is_some_and(|max| rows.len() >= max as usize) && !last.cursor.is_empty() {
                    filter.after = Some(last.cursor.clone());
                    self.filter = Some(filter);
                }
                Ok(Some(rows))
            }

            /// Returns the rows of all remaining pages.
            ///
            /// # Errors
            ///
            /// Those of [`Self::next`].
            pub async fn rest(mut self) -> Result<Vec<$row>> {
                let mut rows = Vec::new();
                while let Some(page) = self.next().await? {
                    rows.extend(page);
                }
                Ok(rows)
            }
        }
    };
}

pages!(VolumeFilter, VolumeRow, list_volumes, volume_pages);
pages!(ClaimFilter, ClaimRow, list_claims, claim_pages);
pages!(MountFilter, MountRow, list_mounts, mount_pages);
