//! Creates, renames, alters and drops tenants. The crate documentation shows the two steps of
//! create and drop.

use std::sync::Arc;

use fulmar_pages::{Durability, PartitionId};

use super::cache::State;
use super::records::{self, Key};
use super::{Catalog, PartitionRecord, SYSTEM_TENANT, Tenant, TenantState, names};
use crate::{Limit, Limits, LiveLimits, MAX_TRANSACTION_STEPS, MetaError, ObjectKind, Revision, Transaction};

impl Catalog {
    /// The tenant of that name, if it is ready.
    pub fn tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        self.cache.state().tenants.get(name).filter(|tenant| tenant.state == TenantState::Ready).cloned()
    }

    /// All ready tenants, sorted by name.
    pub fn tenants(&self) -> Vec<Arc<Tenant>> {
        self.tenants_where(|state| state == TenantState::Ready)
    }

    /// Tenants whose creation or drop has not completed. At start these were left by a crash: the
    /// caller must drop the partition of each, if it exists, and then call
    /// [`Catalog::finish_drop`].
    pub fn unfinished(&self) -> Vec<Arc<Tenant>> {
        self.tenants_where(|state| state != TenantState::Ready)
    }

    /// All tenants, including those that are being created or dropped.
    pub fn all_tenants(&self) -> Vec<Arc<Tenant>> {
        self.tenants_where(|_| true)
    }

    fn tenants_where(&self, wanted: impl Fn(TenantState) -> bool) -> Vec<Arc<Tenant>> {
        self.cache.state().tenants.values().filter(|tenant| wanted(tenant.state)).cloned().collect()
    }

    /// First step of a creation: reserves the name and assigns a new partition id. Clients cannot
    /// connect until [`Catalog::finish_create`]. To abort the creation, drop the partition and call
    /// [`Catalog::finish_drop`].
    ///
    /// Errors: `InvalidName`, `Exists`, `InUse` (a tenant of that name is being created or
    /// dropped), `Missing` (no user `owner`; [`super::SYSTEM_USER`] always exists), and those of
    /// the store.
    pub async fn create_tenant(&self, name: &str, owner: &str) -> Result<Arc<Tenant>, MetaError> {
        names::check(ObjectKind::Tenant, name)?;
        // Checked before an id is used up, and again in the plan.
        check_name_is_free(&self.cache.state(), name)?;
        let partition = self.new_partition_id().await?;
        let created_unix_ms = (self.now_unix_ms)();
        let (tenant, revision) = self
            .change(|state| {
                check_name_is_free(state, name)?;
                let owner = state.user(owner)?;
                let tenant = Tenant {
                    name: name.to_owned(),
                    partition,
                    owner: owner.name.clone(),
                    created_unix_ms,
                    state: TenantState::Creating,
                    limits: Limits::default(),
                    durability: Durability::default(),
                    revision: Revision::default(),
                };
                let (key, partition_key) =
                    (Key::Tenant(name).to_string(), Key::Partition(partition).to_string());
                let transaction = Transaction::new()
                    .absent(key.as_str())
                    .absent(partition_key.as_str())
                    .unchanged(Key::User(&owner.name).to_string(), owner.revision)
                    .put(key, records::tenant_value(&tenant))
                    .put(partition_key, records::partition_value(&PartitionRecord::first(partition)));
                Ok((transaction, tenant))
            })
            .await?;
        Ok(Arc::new(Tenant { revision, ..tenant }))
    }

    /// Second step of a creation, after the partition was created. Clients can connect afterwards.
    pub async fn finish_create(&self, tenant: &Tenant) -> Result<Arc<Tenant>, MetaError> {
        self.alter_tenant(
            |state| match state.same_tenant(tenant)? {
                dropping if dropping.state == TenantState::Dropping => Err(unfinished_error(dropping)),
                current => Ok(current),
            },
            |tenant| tenant.state = TenantState::Ready,
        )
        .await
    }

    /// First step of a drop: clients can no longer connect. Succeeds again for a tenant whose drop
    /// has begun, so a failed drop can be repeated.
    ///
    /// Errors: `Missing`, `InUse` (the system tenant), and those of the store.
    pub async fn begin_drop(&self, name: &str) -> Result<Arc<Tenant>, MetaError> {
        if name == SYSTEM_TENANT {
            return Err(system_tenant("dropped"));
        }
        self.alter_tenant(
            |state| match state.tenants.get(name) {
                Some(tenant) if tenant.state != TenantState::Creating => Ok(tenant),
                _ => Err(MetaError::missing(ObjectKind::Tenant, name)),
            },
            |tenant| tenant.state = TenantState::Dropping,
        )
        .await
    }

    /// Second step of a drop or of an aborted creation, after the partition was dropped. Deletes
    /// the tenant, its partition, grants and tokens, and writes the partition's tombstone. The name
    /// can be reused, the partition id cannot.
    pub async fn finish_drop(&self, tenant: &Tenant) -> Result<(), MetaError> {
        self.cache.state().unfinished_tenant(tenant)?;
        // Grants and tokens are created only for ready tenants, so none can be added here.
        self.delete_records(|state| {
            let users = state.grants.get(&tenant.partition).into_iter().flat_map(|users| users.keys());
            let grants = users.map(|user| Key::Grant(tenant.partition, user).to_string());
            let tokens = state.tokens.values().filter(|token| token.partition == Some(tenant.partition));
            grants.chain(tokens.map(|token| Key::Token(&token.name).to_string())).collect()
        })
        .await?;
        self.change(|state| {
            let current = state.unfinished_tenant(tenant)?;
            let key = Key::Tenant(&current.name).to_string();
            let transaction = Transaction::new()
                .unchanged(key.as_str(), current.revision)
                .delete(key)
                .delete(Key::Partition(current.partition).to_string())
                .put(Key::Dropped(current.partition).to_string(), records::dropped_value());
            Ok((transaction, ()))
        })
        .await?;
        Ok(())
    }

    /// Renames a tenant. Its privileges and data are kept.
    ///
    /// Errors: `InvalidName`, `Missing`, `Exists`, `InUse` (the system tenant), and those of the
    /// store.
    pub async fn rename_tenant(&self, from: &str, to: &str) -> Result<Arc<Tenant>, MetaError> {
        names::check(ObjectKind::Tenant, to)?;
        if from == SYSTEM_TENANT {
            return Err(system_tenant("renamed"));
        }
        let (tenant, revision) = self
            .change(|state| {
                let current = state.ready_tenant(from)?;
                check_name_is_free(state, to)?;
                let tenant = Tenant { name: to.to_owned(), ..Tenant::clone(current) };
                let (old, new) = (Key::Tenant(from).to_string(), Key::Tenant(to).to_string());
                let transaction = Transaction::new()
                    .unchanged(old.as_str(), current.revision)
                    .absent(new.as_str())
                    .delete(old)
                    .put(new, records::tenant_value(&tenant));
                Ok((transaction, tenant))
            })
            .await?;
        Ok(Arc::new(Tenant { revision, ..tenant }))
    }

    /// Changes a tenant's limits and returns the tenant. Its sessions see the new limits
    /// immediately, through [`Catalog::live_limits`].
    ///
    /// Errors: `Missing`, and those of the store.
    pub async fn alter_limits(
        &self,
        name: &str,
        alter: impl Fn(&mut Limits),
    ) -> Result<Arc<Tenant>, MetaError> {
        self.alter_tenant(|state| state.ready_tenant(name), |tenant| alter(&mut tenant.limits)).await
    }

    /// Changes where a tenant's commits are made durable, and returns the current tenant. Finds it
    /// by its partition, even if it was renamed, and also while it is being created. The engine
    /// must first ensure that nothing depends on the old log.
    ///
    /// Errors: `Missing`, and those of the store.
    pub async fn set_durability(
        &self,
        tenant: &Tenant,
        durability: Durability,
    ) -> Result<Arc<Tenant>, MetaError> {
        // The engine changes the partition. Another tenant may have its old name by now.
        let has_partition = |current: &&Arc<Tenant>| {
            current.partition == tenant.partition && current.state != TenantState::Dropping
        };
        let missing = || MetaError::missing(ObjectKind::Tenant, &tenant.name);
        self.alter_tenant(
            |state| state.tenants.values().find(has_partition).ok_or_else(missing),
            |tenant| tenant.durability = durability,
        )
        .await
    }

    /// Adds [`Catalog::set_durability`] of the tenant of a partition to a transaction that also
    /// changes other records. The caller runs it, and plans it again after a conflict. Errors:
    /// `Missing`.
    pub fn plan_durability(
        &self,
        transaction: Transaction,
        partition: PartitionId,
        durability: Durability,
    ) -> Result<Transaction, MetaError> {
        let state = self.cache.state();
        let has_partition =
            |current: &&Arc<Tenant>| current.partition == partition && current.state != TenantState::Dropping;
        let missing = || MetaError::missing(ObjectKind::Tenant, &partition.to_string());
        let current = state.tenants.values().find(has_partition).ok_or_else(missing)?;
        let (key, tenant) =
            (Key::Tenant(&current.name).to_string(), Tenant { durability, ..Tenant::clone(current) });
        let value = records::tenant_value(&tenant);
        Ok(transaction.unchanged(key.as_str(), current.revision).put(key, value))
    }

    /// The live limits of a tenant. They remain valid if it is renamed.
    pub fn live_limits(&self, tenant: &Tenant) -> Arc<LiveLimits> {
        let live = self.cache.state().limits.get(&tenant.partition).cloned();
        // A tenant that was dropped meanwhile does not change any more.
        live.unwrap_or_else(|| Arc::new(LiveLimits::new(&tenant.limits)))
    }

    /// The current limit of the tenant of a partition. `None`: unlimited, or no such tenant.
    pub fn limit_of(&self, partition: PartitionId, limit: Limit) -> Option<u64> {
        self.cache.state().limits.get(&partition)?.get(limit)
    }

    /// Changes the tenant returned by `find`, except for its name, and returns it. Writes nothing
    /// if nothing changes.
    async fn alter_tenant(
        &self,
        find: impl Fn(&State) -> Result<&Arc<Tenant>, MetaError>,
        alter: impl Fn(&mut Tenant),
    ) -> Result<Arc<Tenant>, MetaError> {
        let (tenant, revision) = self
            .change(|state| {
                let current = find(state)?;
                let mut tenant = Tenant::clone(current);
                alter(&mut tenant);
                let value = records::tenant_value(&tenant);
                if value == records::tenant_value(current) {
                    return Ok((Transaction::new(), tenant));
                }
                let key = Key::Tenant(&tenant.name).to_string();
                let transaction =
                    Transaction::new().unchanged(key.as_str(), current.revision).put(key, value);
                Ok((transaction, tenant))
            })
            .await?;
        let revision = revision.max(tenant.revision);
        Ok(Arc::new(Tenant { revision, ..tenant }))
    }

    /// Deletes records until `find` returns none, in batches of [`MAX_TRANSACTION_STEPS`].
    pub(super) async fn delete_records(&self, find: impl Fn(&State) -> Vec<String>) -> Result<(), MetaError> {
        loop {
            let (deleted, _) = self
                .change(|state| {
                    let keys = find(state).into_iter().take(MAX_TRANSACTION_STEPS);
                    let transaction = keys.fold(Transaction::new(), Transaction::delete);
                    let deleted = transaction.operations.len();
                    Ok((transaction, deleted))
                })
                .await?;
            if deleted < MAX_TRANSACTION_STEPS {
                return Ok(());
            }
        }
    }
}

impl State {
    /// The tenant of that name, if it is ready.
    pub(super) fn ready_tenant(&self, name: &str) -> Result<&Arc<Tenant>, MetaError> {
        let tenant = self.tenants.get(name).filter(|tenant| tenant.state == TenantState::Ready);
        tenant.ok_or_else(|| MetaError::missing(ObjectKind::Tenant, name))
    }

    /// The current record of the same tenant. Fails if its name now belongs to another one.
    fn same_tenant(&self, tenant: &Tenant) -> Result<&Arc<Tenant>, MetaError> {
        let current = self.tenants.get(&tenant.name).filter(|current| current.partition == tenant.partition);
        current.ok_or_else(|| MetaError::missing(ObjectKind::Tenant, &tenant.name))
    }

    /// The current record of the same tenant, if its creation or drop has not completed.
    fn unfinished_tenant(&self, tenant: &Tenant) -> Result<&Arc<Tenant>, MetaError> {
        let current = self.same_tenant(tenant)?;
        if current.state != TenantState::Ready {
            return Ok(current);
        }
        Err(MetaError::InUse {
            what: ObjectKind::Tenant,
            name: current.name.clone(),
            reason: "is ready, so its drop cannot be finished".to_owned(),
            remedy: "Begin its drop first.",
        })
    }
}

fn check_name_is_free(state: &State, name: &str) -> Result<(), MetaError> {
    match state.tenants.get(name) {
        None => Ok(()),
        Some(tenant) if tenant.state == TenantState::Ready => {
            Err(MetaError::exists(ObjectKind::Tenant, name))
        }
        Some(tenant) => Err(unfinished_error(tenant)),
    }
}

fn unfinished_error(tenant: &Tenant) -> MetaError {
    let (reason, remedy) = match tenant.state {
        TenantState::Creating => ("is being created", "Wait until the creation completes."),
        TenantState::Dropping => ("is being dropped", "Wait until the drop completes, or drop it again."),
        TenantState::Ready => ("is in use", "Choose another name."),
    };
    MetaError::InUse {
        what: ObjectKind::Tenant,
        name: tenant.name.clone(),
        reason: reason.to_owned(),
        remedy,
    }
}

fn system_tenant(action: &str) -> MetaError {
    MetaError::InUse {
        what: ObjectKind::Tenant,
        name: SYSTEM_TENANT.to_owned(),
        reason: format!("is the system tenant and cannot be {action}"),
        remedy: "Keep it: it contains no user data.",
    }
}
