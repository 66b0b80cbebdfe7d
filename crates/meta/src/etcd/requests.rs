//! The requests of the store: reads, scans and transactions, each with the head of the cluster.

use etcd_client::{GetOptions, GetResponse, ResponseHeader, Txn, TxnOp, TxnResponse};
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::guard::Guard;
use super::keys::{self, Head, Keys};
use super::members::{Member, Members};
use crate::{Entry, MetaError, Outcome, Transaction};

/// Entries per page of a scan.
const PAGE_ENTRIES: i64 = 2000;
/// Maximum attempts of a scan, if its revision is compacted before its last page each time.
const MAX_SCAN_ATTEMPTS: u32 = 10;
const CLUSTER_FORMAT_VERSION: u32 = 1;

/// All entries with a prefix, as of one revision.
pub(super) struct Scan {
    pub(super) entries: Vec<Entry>,
    /// The revision of etcd that was read. Not older than the head.
    pub(super) revision: i64,
    pub(super) head: Head,
}

/// The value of the key `cluster`.
#[derive(Deserialize, Serialize)]
struct ClusterRecord {
    v: u32,
    id: String,
}

/// Sends requests to etcd. Its functions must run on the store's thread.
pub(super) struct Requests {
    pub(super) keys: Keys,
    pub(super) members: Members,
    pub(super) guard: Guard,
}

impl Requests {
    /// Reads the id of the cluster, or creates the cluster with a random id. Waits until etcd has a
    /// leader, up to the deadline of a request.
    pub(super) async fn open_cluster(&self) -> Result<u128, MetaError> {
        loop {
            if let Some(id) = self.cluster_id().await? {
                return Ok(id);
            }
            let id = format!("{:032x}", rand::random::<u128>());
            let record = ClusterRecord { v: CLUSTER_FORMAT_VERSION, id };
            let value = serde_json::to_string(&record).map_err(|error| MetaError::Corrupt {
                place: self.keys.cluster.clone(),
                cause: error.to_string(),
            })?;
            let create = |member: Member| {
                let transaction = self.keys.creation(value.clone());
                async move { send(&member, transaction).await.map(drop) }
            };
            match self.members.change(&self.guard, create).await {
                // Of concurrent creations one succeeds. The next read shows which.
                Ok(()) | Err(MetaError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn cluster_id(&self) -> Result<Option<u128>, MetaError> {
        let read = |member: Member| async move {
            let floor = self.guard.floor();
            let get = TxnOp::get(self.keys.cluster.as_str(), None);
            let response = send(&member, Txn::new().and_then([get, self.keys.read_head()])).await?;
            let [record, head] = two_reads(&member, &response)?;
            let Some(record) = record.kvs().first() else {
                return if floor == 0 { Ok(None) } else { Err(self.guard.missing(&member.endpoint, floor)) }
                    .map_err(Failure::Rejected);
            };
            self.check(&member, response.header(), &head, floor)?;
            parse_cluster(&self.keys.cluster, record.value()).map(Some).map_err(Failure::Rejected)
        };
        self.members.read(&self.guard, read).await.map_err(into_error)
    }

    pub(super) async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        let read = |member: Member| async move {
            let floor = self.guard.floor();
            let get = TxnOp::get(self.keys.of(key), None);
            let response = send(&member, Txn::new().and_then([get, self.keys.read_head()])).await?;
            let [mut found, head] = two_reads(&member, &response)?;
            self.check(&member, response.header(), &head, floor)?;
            Ok(found.take_kvs().pop().and_then(|kv| self.keys.entry(kv)))
        };
        self.members.read(&self.guard, read).await.map_err(into_error)
    }

    /// Checks a single member: whether it has a leader, and a head that is not outdated.
    pub(super) async fn check_member(&self, member: &Member) -> Result<(), Failure> {
        let floor = self.guard.floor();
        let response = send(member, Txn::new().and_then([self.keys.read_head()])).await?;
        let head = keys::reads(&response).next().ok_or_else(|| incomplete(member))?;
        self.check(member, response.header(), &head, floor).map(drop)
    }

    pub(super) async fn scan(&self, prefix: &str) -> Result<Scan, MetaError> {
        for _ in 0..MAX_SCAN_ATTEMPTS {
            if let Some(scan) = self.scan_pages(&self.keys.of(prefix)).await? {
                return Ok(scan);
            }
        }
        Err(MetaError::Unavailable {
            cause: format!("compacted the scanned revision {MAX_SCAN_ATTEMPTS} times before the scan ended"),
            remedy: "Compact etcd less often: set --auto-compaction-retention to at least five minutes.",
        })
    }

    /// `None` if the revision of the first page was compacted before the last one was read.
    async fn scan_pages(&self, prefix: &str) -> Result<Option<Scan>, MetaError> {
        let end = keys::range_end(prefix);
        let page = GetOptions::new().with_range(end).with_limit(PAGE_ENTRIES);
        let first = |member: Member| {
            let page = page.clone();
            async move {
                let floor = self.guard.floor();
                let get = TxnOp::get(prefix, Some(page));
                let response = send(&member, Txn::new().and_then([get, self.keys.read_head()])).await?;
                let [found, head] = two_reads(&member, &response)?;
                let head = self.check(&member, response.header(), &head, floor)?;
                let header = response.header().ok_or_else(|| incomplete(&member))?;
                Ok((found, header.revision(), head))
            }
        };
        let (mut found, revision, head) = self.members.read(&self.guard, first).await.map_err(into_error)?;
        let mut entries = Vec::new();
        loop {
            let last = found.kvs().last().map(|kv| kv.key().to_vec());
            let is_last_page = !found.more();
            entries.extend(found.take_kvs().into_iter().filter_map(|kv| self.keys.entry(kv)));
            let Some(mut from) = last.filter(|_| !is_last_page) else {
                return Ok(Some(Scan { entries, revision, head }));
            };
            from.push(0);
            let next = |member: Member| {
                let (from, page) = (from.clone(), page.clone().with_revision(revision));
                async move { member.kv().get(from, Some(page)).await.map_err(|error| member.failure(error)) }
            };
            found = match self.members.read(&self.guard, next).await {
                Ok(found) => found,
                Err(Failure::Compacted) => return Ok(None),
                Err(failure) => return Err(into_error(failure)),
            };
        }
    }

    pub(super) async fn transact(&self, transaction: &Transaction) -> Result<Outcome, MetaError> {
        let run = |member: Member| async move {
            let floor = self.guard.floor();
            let response = send(&member, self.keys.transaction(transaction, floor)).await?;
            let header = response.header();
            if response.succeeded() && !transaction.operations.is_empty() {
                // The head was put by this transaction.
                let revision = header.ok_or_else(|| incomplete(&member))?.revision();
                let head = Some(Head { revision, version: 0 });
                self.guard.check(&member.endpoint, header, head, floor).map_err(Failure::Rejected)?;
                return Ok(Outcome::Committed(keys::revision(revision)));
            }
            let head = keys::reads(&response).next().ok_or_else(|| incomplete(&member))?;
            let revision = keys::revision(self.check(&member, header, &head, floor)?.revision);
            Ok(if response.succeeded() { Outcome::Committed(revision) } else { Outcome::Conflict(revision) })
        };
        if transaction.operations.is_empty() {
            self.members.read(&self.guard, run).await.map_err(into_error)
        } else {
            self.members.change(&self.guard, run).await
        }
    }

    fn check(
        &self,
        member: &Member,
        header: Option<&ResponseHeader>,
        head: &GetResponse,
        floor: i64,
    ) -> Result<Head, Failure> {
        let head = head.kvs().first().map(Head::of);
        self.guard.check(&member.endpoint, header, head, floor).map_err(Failure::Rejected)
    }
}

async fn send(member: &Member, transaction: Txn) -> Result<TxnResponse, Failure> {
    member.kv().txn(transaction).await.map_err(|error| member.failure(error))
}

fn two_reads(member: &Member, response: &TxnResponse) -> Result<[GetResponse; 2], Failure> {
    let mut reads = keys::reads(response);
    match (reads.next(), reads.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err(incomplete(member)),
    }
}

fn incomplete(member: &Member) -> Failure {
    Failure::Unknown(format!("{}: incomplete answer", member.endpoint))
}

/// The error of a request that changed nothing.
fn into_error(failure: Failure) -> MetaError {
    match failure {
        Failure::Rejected(error) => error,
        failure => MetaError::Unavailable {
            cause: format!("did not carry out a request: {}", failure.cause()),
            remedy: "Retry the request.",
        },
    }
}

fn parse_cluster(key: &str, value: &[u8]) -> Result<u128, MetaError> {
    let corrupt = |cause: String| MetaError::Corrupt { place: key.to_owned(), cause };
    let record: ClusterRecord = serde_json::from_slice(value).map_err(|error| corrupt(error.to_string()))?;
    if record.v != CLUSTER_FORMAT_VERSION {
        return Err(corrupt(format!("it has format version {}", record.v)));
    }
    u128::from_str_radix(&record.id, 16).map_err(|error| corrupt(format!("its id: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_record_of_another_version_is_rejected() {
        assert_eq!(parse_cluster("k", br#"{"v":1,"id":"00ff"}"#), Ok(255));
        for invalid in [&br#"{"v":2,"id":"00ff"}"#[..], br#"{"v":1,"id":"x"}"#, br#"{"id":"00"}"#, b""] {
            assert!(matches!(parse_cluster("k", invalid), Err(MetaError::Corrupt { .. })));
        }
    }
}
