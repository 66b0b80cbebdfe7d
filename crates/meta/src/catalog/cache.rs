//! The in-memory copy of the catalog, updated by the store in order of revision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::PartitionId;
use parking_lot::{RwLock, RwLockReadGuard};

use super::records::{self, Key};
use super::types::Grant;
use super::{PartitionRecord, SaltKey, Tenant, Token, User};
use crate::{Change, Entry, LiveLimits, MetaError, Observer, Revision};

/// The contents of the catalog.
#[derive(Default)]
pub(super) struct State {
    pub(super) tenants: BTreeMap<String, Arc<Tenant>>,
    /// The same tenants by partition.
    pub(super) by_partition: BTreeMap<PartitionId, Arc<Tenant>>,
    pub(super) users: BTreeMap<String, Arc<User>>,
    /// Privileges granted to users in the tenant of a partition, by user name.
    pub(super) grants: BTreeMap<PartitionId, BTreeMap<String, Grant>>,
    pub(super) tokens: BTreeMap<String, Arc<Token>>,
    pub(super) partitions: BTreeMap<PartitionId, PartitionRecord>,
    /// Limits of the tenant of a partition. Sessions hold references, so each object is kept until
    /// the partition is dropped.
    pub(super) limits: BTreeMap<PartitionId, Arc<LiveLimits>>,
    /// No partition id at or above this one was ever assigned; and the revision of the record.
    pub(super) next_partition: Option<(u64, Revision)>,
    /// Every nonexistent partition with a smaller id was dropped, or its id was never used; and the
    /// revision of the record.
    pub(super) dropped_before: Option<(u64, Revision)>,
    /// Dropped partitions whose id is not below `dropped_before`.
    pub(super) dropped: BTreeSet<PartitionId>,
    pub(super) salt_key: Option<Arc<SaltKey>>,
}

/// The state behind a lock, which is held briefly and never across an await.
#[derive(Default)]
pub(super) struct Cache {
    state: RwLock<State>,
    /// See [`super::Catalog::privileges_generation`].
    privileges_generation: AtomicU64,
}

impl Cache {
    pub(super) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read()
    }

    pub(super) fn privileges_generation(&self) -> u64 {
        self.privileges_generation.load(Ordering::Acquire)
    }

    /// Called while the state is locked: a reader that sees the new number and then locks the state
    /// sees the change.
    fn increment_privileges_generation(&self) {
        self.privileges_generation.fetch_add(1, Ordering::Release);
    }
}

impl Observer for Cache {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        let mut state = State::default();
        for entry in &entries {
            state.put(entry)?;
        }
        state.check()?;
        let mut current = self.state.write();
        state.keep_limits(std::mem::take(&mut current.limits));
        *current = state;
        self.increment_privileges_generation();
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut state = self.state.write();
        for change in changes {
            if let Err(error) = state.apply(change) {
                // Only a newer version of Fulmar on another node can write a record that this one
                // cannot read. The cached record is now outdated. Every change based on it fails
                // the comparison of its revision.
                tracing::error!(%error, remedy = error.remedy(), "ignored an unreadable catalog change");
            }
        }
        if changes
            .iter()
            .any(|change| matches!(Key::parse(&change.key), Ok(Some(Key::User(_) | Key::Grant(..)))))
        {
            self.increment_privileges_generation();
        }
    }
}

impl State {
    fn put(&mut self, entry: &Entry) -> Result<(), MetaError> {
        match Key::parse(&entry.key)? {
            None => {}
            Some(Key::Tenant(name)) => {
                let tenant = records::tenant(name, entry)?;
                match self.limits.get(&tenant.partition) {
                    Some(live) => live.store(&tenant.limits),
                    None => {
                        let live = Arc::new(LiveLimits::new(&tenant.limits));
                        self.limits.insert(tenant.partition, live);
                    }
                }
                let tenant = Arc::new(tenant);
                self.by_partition.insert(tenant.partition, tenant.clone());
                self.tenants.insert(name.to_owned(), tenant);
            }
            Some(Key::User(name)) => {
                self.users.insert(name.to_owned(), Arc::new(records::user(name, entry)?));
            }
            Some(Key::Partition(id)) => {
                self.partitions.insert(id, records::partition(id, entry)?);
            }
            Some(Key::Grant(id, user)) => {
                let grant = records::grant(entry)?;
                self.grants.entry(id).or_default().insert(user.to_owned(), grant);
            }
            Some(Key::Token(name)) => {
                self.tokens.insert(name.to_owned(), Arc::new(records::token(name, entry)?));
            }
            Some(Key::PartitionCounter) => self.next_partition = Some(records::counter(entry)?),
            Some(Key::Dropped(id)) => {
                records::check_dropped(entry)?;
                self.dropped.insert(id);
            }
            Some(Key::DroppedCounter) => self.dropped_before = Some(records::dropped_counter(entry)?),
            Some(Key::Salt) => self.salt_key = Some(Arc::new(records::salt_key(entry)?)),
        }
        Ok(())
    }

    fn apply(&mut self, change: &Change) -> Result<(), MetaError> {
        let Some(value) = &change.value else {
            return self.delete(&change.key);
        };
        let entry = Entry { key: change.key.clone(), value: value.clone(), modified: change.revision };
        self.put(&entry)
    }

    fn delete(&mut self, key: &str) -> Result<(), MetaError> {
        match Key::parse(key)? {
            None => {}
            Some(Key::Tenant(name)) => drop(self.tenants.remove(name)),
            Some(Key::User(name)) => drop(self.users.remove(name)),
            Some(Key::Token(name)) => drop(self.tokens.remove(name)),
            // Not removed with the tenant's record, which is also deleted when the tenant is
            // renamed.
            Some(Key::Partition(id)) => {
                self.partitions.remove(&id);
                self.by_partition.remove(&id);
                self.limits.remove(&id);
            }
            Some(Key::Grant(id, user)) => {
                if let Some(users) = self.grants.get_mut(&id) {
                    users.remove(user);
                    if users.is_empty() {
                        self.grants.remove(&id);
                    }
                }
            }
            Some(Key::PartitionCounter) => self.next_partition = None,
            Some(Key::Dropped(id)) => {
                self.dropped.remove(&id);
            }
            Some(Key::DroppedCounter) => self.dropped_before = None,
            Some(Key::Salt) => self.salt_key = None,
        }
        Ok(())
    }

    /// Called after a new snapshot. Updates the live limits that sessions hold, and keeps these
    /// objects.
    fn keep_limits(&mut self, before: BTreeMap<PartitionId, Arc<LiveLimits>>) {
        for tenant in self.tenants.values() {
            if let Some(live) = before.get(&tenant.partition) {
                live.store(&tenant.limits);
                self.limits.insert(tenant.partition, live.clone());
            }
        }
    }

    /// Checks invariants between records: every tenant has a partition, no two tenants share one,
    /// and no assigned partition id can be assigned again.
    fn check(&self) -> Result<(), MetaError> {
        let mut taken = BTreeSet::new();
        for tenant in self.tenants.values() {
            let key = Key::Tenant(&tenant.name).to_string();
            if !self.partitions.contains_key(&tenant.partition) {
                return Err(records::corrupt(
                    &key,
                    &format!("its partition {} is missing", tenant.partition),
                ));
            }
            if !taken.insert(tenant.partition) {
                return Err(records::corrupt(
                    &key,
                    &format!("another tenant has its partition {}", tenant.partition),
                ));
            }
        }
        let key = Key::PartitionCounter.to_string();
        match (self.partitions.last_key_value(), self.next_partition) {
            (Some((last, _)), Some((next, _))) if last.0 >= next => {
                Err(records::corrupt(&key, &format!("it would assign partition {last} again")))
            }
            (Some(_), None) => Err(records::corrupt(&key, "it is missing, but partitions exist")),
            _ => Ok(()),
        }
    }
}
