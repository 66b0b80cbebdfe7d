//! Detects an etcd that must not be used: a version that is too old, members of different etcd
//! clusters, and an etcd that was restored from an old backup.
//!
//! A restored etcd has a lower revision than its clients have seen. Every answer contains the
//! cluster's head. If it is older than the head that this process has seen (or than the floor that
//! the caller passed to `open`), the answer is rejected. Every change compares the head with it
//! too, so an etcd that is known to be outdated is not changed.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use etcd_client::{ResponseHeader, StatusResponse};

use super::keys::Head;
use crate::{MetaError, Revision};

/// The oldest supported version of each minor version. Older ones reject or crash on read-only
/// transactions when etcd is out of space (etcd's pull requests 14254, 14884 and 14899).
const OLDEST: [(u32, u32, u32); 2] = [(3, 4, 23), (3, 5, 7)];

pub(super) struct Guard {
    cluster: String,
    /// The id of the etcd cluster.
    etcd_cluster: OnceLock<u64>,
    /// The newest revision of the head that was seen.
    seen: AtomicI64,
}

impl Guard {
    pub(super) fn new(cluster: &str, floor: Revision) -> Self {
        let floor = i64::try_from(floor.0).unwrap_or(i64::MAX);
        Self { cluster: cluster.to_owned(), etcd_cluster: OnceLock::new(), seen: AtomicI64::new(floor) }
    }

    /// The newest revision of the head that was seen. Read before a request is sent, and passed to
    /// [`Guard::check`] with its answer.
    pub(super) fn floor(&self) -> i64 {
        self.seen.load(Ordering::Acquire)
    }

    /// Checks the answer to a linearizable request.
    pub(super) fn check(
        &self,
        endpoint: &str,
        header: Option<&ResponseHeader>,
        head: Option<Head>,
        floor: i64,
    ) -> Result<Head, MetaError> {
        if let Some(header) = header {
            self.check_cluster(endpoint, header.cluster_id())?;
        }
        let Some(head) = head else {
            return Err(self.outdated(endpoint, "has no head key; it was deleted".to_owned()));
        };
        if head.revision < floor {
            let cause = format!("is at revision {}, but revision {floor} was seen before", head.revision);
            return Err(self.outdated(endpoint, cause));
        }
        self.seen.fetch_max(head.revision, Ordering::AcqRel);
        Ok(head)
    }

    /// Checks a member when it is connected.
    pub(super) fn check_member(&self, endpoint: &str, status: &StatusResponse) -> Result<(), MetaError> {
        if !is_supported(status.version()) {
            return Err(MetaError::Unsupported {
                cause: format!("has an unsupported version: etcd {} at {endpoint}", status.version()),
                remedy: "Upgrade etcd to 3.4.23, 3.5.7 or a later version.",
            });
        }
        match status.header() {
            Some(header) => self.check_cluster(endpoint, header.cluster_id()),
            None => Ok(()),
        }
    }

    fn check_cluster(&self, endpoint: &str, id: u64) -> Result<(), MetaError> {
        let first = *self.etcd_cluster.get_or_init(|| id);
        if id == first {
            return Ok(());
        }
        Err(self.outdated(endpoint, format!("has the id {id:x}, but the etcd used so far has {first:x}")))
    }

    /// A cluster whose records are missing.
    pub(super) fn missing(&self, endpoint: &str, floor: i64) -> MetaError {
        let cause = format!(
            "does not contain the cluster \"{}\", but revision {floor} was seen before",
            self.cluster
        );
        self.outdated(endpoint, cause)
    }

    fn outdated(&self, endpoint: &str, cause: String) -> MetaError {
        MetaError::Damaged {
            place: format!("etcd at {endpoint}"),
            cause,
            remedy: format!(
                "It was restored from an old backup, or it is another etcd. Check the addresses. If a newer \
                 backup or a member with the data of cluster \"{}\" exists, restore that. If etcd was restored \
                 from its newest backup, restart all nodes.",
                self.cluster
            ),
        }
    }
}

fn is_supported(version: &str) -> bool {
    // A suffix as in 3.6.0-rc.1 does not matter.
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let mut numbers = release.split('.').map(str::parse::<u32>);
    let mut number = || numbers.next().and_then(Result::ok);
    let (Some(major), Some(minor), Some(patch)) = (number(), number(), number()) else { return false };
    match OLDEST.iter().find(|oldest| (oldest.0, oldest.1) == (major, minor)) {
        Some(oldest) => patch >= oldest.2,
        None => (major, minor) > (3, 5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_unknown_versions_are_not_supported() {
        for supported in ["3.4.23", "3.4.40", "3.5.7", "3.5.30", "3.6.0", "3.6.0-rc.1", "3.10.0", "4.0.0"] {
            assert!(is_supported(supported), "{supported}");
        }
        for unsupported in ["3.4.22", "3.5.0", "3.5.6", "3.3.27", "2.3.8", "", "3", "3.5", "new"] {
            assert!(!is_supported(unsupported), "{unsupported}");
        }
    }

    #[test]
    fn head_must_not_go_back() {
        let head = |revision| Some(Head { revision, version: 1 });
        let guard = Guard::new("c", Revision(10));
        let floor = guard.floor();
        assert!(matches!(guard.check("e", None, head(9), floor), Err(MetaError::Damaged { .. })));
        assert!(matches!(guard.check("e", None, None, floor), Err(MetaError::Damaged { .. })));
        guard.check("e", None, head(12), floor).unwrap();
        // An answer may be older than one that overtook it.
        guard.check("e", None, head(11), floor).unwrap();
        assert_eq!(guard.floor(), 12);
    }
}
