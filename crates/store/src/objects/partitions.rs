//! Finds partitions that have objects in the store. A start compares them with the catalog.
//!
//! In a directory, only the names of the partitions' subdirectories are read. Other stores are
//! listed page by page. After each page, the listing skips to the next partition, so that there is
//! at most one request per partition.

use fulmar_pages::PartitionId;

use super::{MANIFESTS, PageStore, PartitionObjects, StoreError, directory};
use crate::store::{Failure, FailureKind, Listing, Store};

impl PageStore {
    /// Finds the first partition, from this id on, that has objects below `manifests/` and for
    /// which `candidate` and `wanted` return true. Both are called in the order of ids, `wanted`
    /// only for candidates with objects. `candidate` should be cheap: in a directory it is called
    /// before the partition's objects are listed.
    pub async fn find_partition(
        &self,
        from: PartitionId,
        candidate: &(dyn Fn(PartitionId) -> bool + Sync),
        wanted: &(dyn Fn(PartitionId) -> bool + Sync),
    ) -> Result<Option<PartitionId>, StoreError> {
        let found = match self.store.directory().map(|root| root.join(MANIFESTS)) {
            Some(manifests) => {
                let read = tokio::task::spawn_blocking(move || partition_directories(&manifests, from));
                let read = read.await.unwrap_or_else(|panic| Err(std::io::Error::other(panic)));
                let failed = |cause| {
                    StoreError::failed(
                        "list",
                        MANIFESTS,
                        &self.store,
                        Failure::new(FailureKind::Other, cause),
                    )
                };
                for id in read.map_err(failed)? {
                    // Deleting the last object of a partition leaves an empty directory.
                    if candidate(id) && !self.list(&directory(id)).await?.is_empty() && wanted(id) {
                        return Ok(Some(id));
                    }
                }
                return Ok(None);
            }
            None => self.find_listed(from, &|id| candidate(id) && wanted(id)).await,
        };
        found.map_err(|failure| StoreError::failed("list", MANIFESTS, &self.store, failure))
    }

    /// Lists all objects except segments of the next partitions with ids above `after`, as many as
    /// a page of the listing contains, but at least one, unless there are none. The objects of each
    /// listed partition are complete. Also returns whether there may be more.
    pub async fn list_partitions_after(
        &self,
        after: Option<PartitionId>,
    ) -> Result<(PartitionObjects, bool), StoreError> {
        let failed = |failure| StoreError::failed("list", MANIFESTS, &self.store, failure);
        let (mut listed, mut last) = (PartitionObjects::default(), after.map(last_name));
        loop {
            let Listing { mut names, more } =
                self.store.list(MANIFESTS, last.as_deref()).await.map_err(failed)?;
            let advances = names.last() > last.as_ref();
            last = names.last().cloned().or(last);
            if more && !advances {
                let cause = "the listing does not advance after an incomplete page";
                return Err(failed(Failure::new(FailureKind::Unavailable, cause)));
            }
            if more {
                // The rest of the last partition may be on the next page.
                let incomplete = names.last().and_then(|name| partition_of(name));
                let begin = names.partition_point(|name| partition_of(name) < incomplete);
                let rest = names.split_off(begin);
                listed.add(&names);
                if begin > 0 && listed.last_partition().is_some() {
                    listed.sort();
                    return Ok((listed, true));
                }
                names = rest;
            }
            listed.add(&names);
            if !more {
                listed.sort();
                return Ok((listed, false));
            }
        }
    }

    async fn find_listed(
        &self,
        from: PartitionId,
        wanted: &(dyn Fn(PartitionId) -> bool + Sync),
    ) -> Result<Option<PartitionId>, Failure> {
        let mut last = from.0.checked_sub(1).map(PartitionId);
        loop {
            let after = last.map(last_name);
            let page = self.store.list(MANIFESTS, after.as_deref()).await?;
            for id in page.names.iter().filter_map(|name| partition_of(name)) {
                if last < Some(id) {
                    last = Some(id);
                    if wanted(id) {
                        return Ok(Some(id));
                    }
                }
            }
            if !page.more {
                return Ok(None);
            }
            if last.map(last_name) == after {
                let cause = "the listing does not advance after an incomplete page";
                return Err(Failure::new(FailureKind::Unavailable, cause));
            }
        }
    }
}

/// A name that sorts after all objects of a partition.
fn last_name(id: PartitionId) -> String {
    format!("{}/z", directory(id))
}

fn partition_of(object: &str) -> Option<PartitionId> {
    parse(object.strip_prefix(MANIFESTS)?.strip_prefix('/')?.split('/').next()?)
}

fn parse(digits: &str) -> Option<PartitionId> {
    let id = PartitionId(u64::from_str_radix(digits, 16).ok()?);
    (id.to_string() == digits).then_some(id)
}

fn partition_directories(
    manifests: &std::path::Path,
    from: PartitionId,
) -> std::io::Result<Vec<PartitionId>> {
    let entries = match std::fs::read_dir(manifests) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        ids.extend(name.to_str().and_then(parse).filter(|id| *id >= from));
    }
    ids.sort_unstable();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use parking_lot::Mutex;

    use super::*;
    use crate::store::{Backend, FaultyStore, StoreFault, StoreOperation};

    /// Each partition is listed once, with all of its objects, whatever the pages are.
    #[tokio::test]
    async fn partitions_are_listed_completely() {
        for page in 1..=12 {
            let backend = Backend::memory();
            for (id, objects) in [(1, 1), (2, 5), (5, 3), (6, 1), (0x12, 2)] {
                for number in 1..=objects {
                    let name = format!("manifests/{}/00000001/{number:016x}", PartitionId(id));
                    backend.put(&name, Bytes::from_static(b"x")).await.unwrap();
                }
                let anchor = format!("manifests/{}/anchor-00000001-{objects:016x}", PartitionId(id));
                backend.put(&anchor, Bytes::from_static(b"x")).await.unwrap();
            }
            let pages = FaultyStore::new(Arc::new(backend));
            pages.always(StoreOperation::List, Some(StoreFault::ShortPage(page)));
            let store = PageStore::open(Arc::new(pages));
            let (mut after, mut found) = (None, Vec::new());
            loop {
                let (mut listed, more) = store.list_partitions_after(after).await.unwrap();
                while let Some(first) = listed.manifests.first().map(|name| name.partition) {
                    let of_first = listed.take_up_to(first);
                    found.push((first.0, of_first.manifests.len(), of_first.anchors.len()));
                    after = Some(first);
                }
                if !more {
                    break;
                }
            }
            assert_eq!(found, [(1, 1, 1), (2, 5, 1), (5, 3, 1), (6, 1, 1), (0x12, 2, 1)], "pages of {page}");
        }
    }

    #[tokio::test]
    async fn partitions_are_found_in_order_from_an_id_on() {
        const NO_CANDIDATE: u64 = 2;
        let directory = tempfile::tempdir().unwrap();
        let backends =
            [Backend::memory(), crate::StoreUrl::Directory(directory.path().to_owned()).open().unwrap()];
        for backend in backends {
            let store = PageStore::open(Arc::new(backend.clone()));
            let asked = Mutex::new(Vec::new());
            let find = async |from: u64, wanted: u64| {
                asked.lock().clear();
                let test = |id: PartitionId| {
                    asked.lock().push(id.0);
                    id.0 == wanted
                };
                let candidate = |id: PartitionId| id.0 != NO_CANDIDATE;
                store.find_partition(PartitionId(from), &candidate, &test).await.unwrap().map(|id| id.0)
            };
            assert_eq!(find(0, 1).await, None);
            for (id, object) in [
                (1, "00000001/000000000000000a"),
                (2, "fate-x"),
                (3, "hot-00000001-00"),
                (3, "fate-x"),
                (18, "anchor-y"),
            ] {
                let name = format!("manifests/{}/{object}", PartitionId(id));
                backend.put(&name, Bytes::from_static(b"x")).await.unwrap();
            }
            assert_eq!(find(0, 3).await, Some(3));
            assert_eq!(*asked.lock(), [1, 3]);
            assert_eq!(find(2, 1).await, None);
            assert_eq!(*asked.lock(), [3, 18]);
            assert_eq!(find(19, 19).await, None);
            backend.delete(&format!("manifests/{}/anchor-y", PartitionId(18))).await.unwrap();
            assert_eq!(find(4, 18).await, None);
            assert!(asked.lock().is_empty(), "a partition without objects must be skipped");
        }
    }
}
