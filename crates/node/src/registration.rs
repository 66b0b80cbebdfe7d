//! The records of the cluster and of its members in the metadata store, and joining a cluster.
//!
//! | key | value |
//! | --- | --- |
//! | `cluster` | [`ClusterRecord`]: the cluster's id, and the next ids of nodes and terms |
//! | `member/NAME` | [`MemberRecord`]: the id of the node NAME and its addresses |
//! | `term/TERM` | [`TermRecord`]: the incarnation that uses the term, or some until it |
//!
//! The first node that finds no `cluster` creates it. A name belongs to one node permanently:
//! another process with the same name is the same node, and is refused if its data directory is another one
//! ([`fulmar_cluster::directory`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fulmar_cluster::{Incarnation, NodeId};
use fulmar_meta::{Entry, MetaError, MetadataStore, Outcome, Transaction};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The key of the cluster's record.
pub const CLUSTER_KEY: &str = "cluster";
/// The prefix of members' keys.
pub const MEMBER_PREFIX: &str = "member/";
/// The prefix of terms' keys.
const TERM_PREFIX: &str = "term/";
/// The first term. Terms are part of the names of segments; a single node counts from 1 as well.
const FIRST_TERM: u32 = 1;
/// Terms are smaller than this.
const MAX_TERM: u32 = 1 << 23;
/// Maximum length of a node's name.
const MAX_NAME_BYTES: usize = 63;
/// Maximum number of attempts of a change. Each conflict requires that another node has just joined
/// or started.
const MAX_ATTEMPTS: u32 = 64;
/// Delay before a request of unknown outcome is settled by another one.
const RETRY_DELAY: Duration = Duration::from_millis(50);

const VERSION: u32 = 1;

/// The cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    v: u32,
    /// The id, 32 hexadecimal digits. The store has the same one.
    id: String,
    /// The id of the next new node.
    next_node: u32,
    /// The term of the next incarnation of any node.
    next_term: u32,
    /// Each node has a store of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    private_stores: bool,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    v: u32,
    /// Its id.
    pub id: u32,
    /// Where it listens for other nodes.
    pub rpc: String,
    /// Where it listens for clients.
    pub sql: String,
    /// Where it is.
    #[serde(default, skip_serializing_if = "Place::is_unknown")]
    pub place: Place,
}

/// Where a node is. Empty texts: unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its site, such as a data centre. Connections between sites are slow.
    #[serde(default)]
    pub site: String,
    /// Its rack within the site.
    #[serde(default)]
    pub rack: String,
}

impl Place {
    fn is_unknown(&self) -> bool {
        self.site.is_empty() && self.rack.is_empty()
    }
}

/// The user of a term. The record exists before any object with the term in its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermRecord {
    v: u32,
    /// The node's id.
    pub node: u32,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// The first of several terms, up to that of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since: Option<u32>,
}

/// The incarnations of all terms.
#[derive(Clone, Debug, Default)]
pub struct Terms(BTreeMap<u32, TermRecord>);

impl Terms {
    /// The incarnation of a term, if it is known.
    pub fn get(&self, term: u32) -> Option<(NodeId, Incarnation)> {
        let (last, record) = self.0.range(term..).next()?;
        (record.since.unwrap_or(*last) <= term).then_some((NodeId(record.node), record.incarnation))
    }
}

impl MemberRecord {
    /// Decodes a record.
    pub fn decode(entry: &Entry) -> Result<Self, Error> {
        decode(entry)
    }
}

/// A node's place in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The id of the cluster.
    pub cluster: u128,
    /// The id of the node.
    pub node: NodeId,
    /// Whether the node has just created the cluster.
    pub is_founder: bool,
    /// Whether each node of the cluster has a store of its own.
    pub is_private: bool,
}

/// The key of a member's record.
pub fn member_key(name: &str) -> String {
    format!("{MEMBER_PREFIX}{name}")
}

/// Checks a node's name.
pub fn check_name(name: &str) -> Result<(), Error> {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    match !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.bytes().all(is_allowed) {
        true => Ok(()),
        false => Err(Error::InvalidName { name: name.escape_debug().to_string() }),
    }
}

/// The id of the cluster in this metadata store, if there is one.
pub async fn find_cluster(metadata: &dyn MetadataStore) -> Result<Option<u128>, Error> {
    match metadata.get(CLUSTER_KEY).await? {
        Some(entry) => cluster_id(&decode(&entry)?).map(Some),
        None => Ok(None),
    }
}

/// Finds the node in the cluster, or adds it. Creates the cluster with the id `new_cluster` if
/// there is none. Fails if the cluster has a common store and the node would have its own, or the
/// other way round.
pub async fn register(
    metadata: &dyn MetadataStore,
    name: &str,
    new_cluster: u128,
    is_private: bool,
) -> Result<Registration, Error> {
    check_name(name)?;
    let mut has_founded = false;
    for _ in 0..MAX_ATTEMPTS {
        let (cluster, member) =
            futures::future::try_join(metadata.get(CLUSTER_KEY), metadata.get(&member_key(name))).await?;
        let Some(cluster_entry) = cluster else {
            let founded = ClusterRecord {
                v: VERSION,
                id: format!("{new_cluster:032x}"),
                next_node: 2,
                next_term: FIRST_TERM,
                private_stores: is_private,
            };
            let found = Transaction::new()
                .absent(CLUSTER_KEY)
                .absent(member_key(name))
                .put(CLUSTER_KEY, encode(&founded))
                .put(member_key(name), encode(&new_member(NodeId(1))));
            has_founded |= changed(metadata, found).await?;
            continue;
        };
        let cluster: ClusterRecord = decode(&cluster_entry)?;
        let id = cluster_id(&cluster)?;
        if cluster.private_stores != is_private {
            return Err(Error::OtherStores { is_private: cluster.private_stores });
        }
        if let Some(entry) = member {
            let node = NodeId(MemberRecord::decode(&entry)?.id);
            return Ok(Registration {
                cluster: id,
                node,
                is_founder: has_founded && id == new_cluster,
                is_private,
            });
        }
        let next = ClusterRecord { next_node: cluster.next_node + 1, ..cluster.clone() };
        let join = Transaction::new()
            .unchanged(CLUSTER_KEY, cluster_entry.modified)
            .absent(member_key(name))
            .put(CLUSTER_KEY, encode(&next))
            .put(member_key(name), encode(&new_member(NodeId(cluster.next_node))));
        changed(metadata, join).await?;
    }
    Err(Error::Contended)
}

/// The records of a new cluster with one member: `cluster` and that of the member.
pub(crate) fn founding_records(cluster: &str, node: NodeId, first_term: u32) -> (Vec<u8>, Vec<u8>) {
    let founded = ClusterRecord {
        v: VERSION,
        id: cluster.to_owned(),
        next_node: node.0 + 1,
        next_term: first_term,
        private_stores: false,
    };
    (encode(&founded), encode(&new_member(node)))
}

/// A member that has not started yet.
fn new_member(node: NodeId) -> MemberRecord {
    MemberRecord { v: VERSION, id: node.0, rpc: String::new(), sql: String::new(), place: Place::default() }
}

/// Takes the next term.
pub async fn next_term(metadata: &dyn MetadataStore) -> Result<u32, Error> {
    for _ in 0..MAX_ATTEMPTS {
        let entry = metadata.get(CLUSTER_KEY).await?.ok_or(Error::MissingRecord(CLUSTER_KEY))?;
        let cluster: ClusterRecord = decode(&entry)?;
        let term = cluster.next_term;
        if term >= MAX_TERM {
            return Err(Error::OutOfTerms);
        }
        let next = ClusterRecord { next_term: term + 1, ..cluster };
        let take = Transaction::new().unchanged(CLUSTER_KEY, entry.modified).put(CLUSTER_KEY, encode(&next));
        // A term whose transaction was applied, but not confirmed, is not used.
        if changed(metadata, take).await? {
            return Ok(term);
        }
    }
    Err(Error::Contended)
}

/// Records the incarnation that uses a term.
pub async fn record_term(
    metadata: &dyn MetadataStore,
    term: u32,
    node: NodeId,
    incarnation: Incarnation,
) -> Result<(), Error> {
    let record = TermRecord { v: VERSION, node: node.0, incarnation, since: None };
    for _ in 0..MAX_ATTEMPTS {
        if changed(metadata, Transaction::new().put(term_key(term), encode(&record))).await? {
            return Ok(());
        }
    }
    Err(Error::Contended)
}

fn term_key(term: u32) -> String {
    format!("{TERM_PREFIX}{term:08x}")
}

/// The record of the terms that a single node has used before it became a cluster: key and value.
pub(crate) fn converted_terms(node: NodeId, incarnation: Incarnation, last: u32) -> (String, Vec<u8>) {
    let record = TermRecord { v: VERSION, node: node.0, incarnation, since: Some(0) };
    (term_key(last), encode(&record))
}

/// The incarnations of all terms.
pub async fn terms(metadata: &dyn MetadataStore) -> Result<Terms, Error> {
    let mut terms = BTreeMap::new();
    for entry in metadata.scan(TERM_PREFIX).await? {
        let term = entry.key.strip_prefix(TERM_PREFIX).and_then(|term| u32::from_str_radix(term, 16).ok());
        let record = decode(&entry)?;
        terms.extend(term.map(|term| (term, record)));
    }
    Ok(Terms(terms))
}

/// Publishes the addresses of a node, and where it is.
pub async fn publish_addresses(
    metadata: &dyn MetadataStore,
    name: &str,
    (rpc, sql): (&str, &str),
    place: &Place,
) -> Result<(), Error> {
    let key = member_key(name);
    for _ in 0..MAX_ATTEMPTS {
        let entry = metadata.get(&key).await?.ok_or(Error::MissingRecord(MEMBER_PREFIX))?;
        let member = MemberRecord::decode(&entry)?;
        let (rpc, sql, place) = (rpc.to_owned(), sql.to_owned(), place.clone());
        let next = MemberRecord { rpc, sql, place, ..member.clone() };
        if next == member {
            return Ok(());
        }
        let publish =
            Transaction::new().unchanged(key.as_str(), entry.modified).put(key.as_str(), encode(&next));
        changed(metadata, publish).await?;
    }
    Err(Error::Contended)
}

/// The names of all members.
pub async fn member_names(metadata: &dyn MetadataStore) -> Result<BTreeSet<String>, Error> {
    let entries = metadata.scan(MEMBER_PREFIX).await?;
    Ok(entries.iter().filter_map(|entry| entry.key.strip_prefix(MEMBER_PREFIX)).map(str::to_owned).collect())
}

/// Runs a transaction that the caller repeats until it finds its effect. Returns true if it is
/// known to be applied.
async fn changed(metadata: &dyn MetadataStore, transaction: Transaction) -> Result<bool, Error> {
    match metadata.transact(transaction).await {
        Ok(outcome) => Ok(matches!(outcome, Outcome::Committed(_))),
        Err(MetaError::OutcomeUnknown { .. }) => {
            tokio::time::sleep(RETRY_DELAY).await;
            Ok(false)
        }
        Err(error) => match error.outcome() {
            Some(outcome) => Ok(matches!(outcome, Outcome::Committed(_))),
            None => Err(error.into()),
        },
    }
}

fn cluster_id(cluster: &ClusterRecord) -> Result<u128, Error> {
    u128::from_str_radix(&cluster.id, 16)
        .map_err(|_| Error::Damaged { key: CLUSTER_KEY.to_owned(), cause: "invalid id".to_owned() })
}

fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}

fn decode<T: for<'a> Deserialize<'a>>(entry: &Entry) -> Result<T, Error> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    let damaged = |cause: String| Error::Damaged { key: entry.key.clone(), cause };
    let version =
        serde_json::from_slice::<Versioned>(&entry.value).map_err(|error| damaged(error.to_string()))?;
    if version.v != VERSION {
        return Err(damaged(format!("format version {}, expected {VERSION}", version.v)));
    }
    serde_json::from_slice(&entry.value).map_err(|error| damaged(error.to_string()))
}
