//! Users and their privileges in tenants.
//!
//! A tenant names its owner, a grant names its user, and both are separate records. The rule "a
//! user that owns tenants cannot be dropped" therefore spans records. A drop works in these steps:
//!
//! 1. Mark the user as leaving. The creation of a tenant or grant compares the user's record, so
//!    none can be added after the mark.
//! 2. When the mark is durable, the cache contains everything that was added before it. Check again
//!    whether the user owns tenants. If so, remove the mark and fail.
//! 3. Delete the user's grants, then the user.

use std::sync::Arc;

use super::cache::State;
use super::records::{self, Key};
use super::types::Grant;
use super::{Access, Catalog, SYSTEM_USER, ScramVerifier, Tenant, User, names};
use crate::{MetaError, ObjectKind, Revision, Transaction};

impl Catalog {
    /// The user of that name.
    pub fn user(&self, name: &str) -> Option<Arc<User>> {
        self.cache.state().user(name).ok().cloned()
    }

    /// All users, sorted by name.
    pub fn users(&self) -> Vec<Arc<User>> {
        self.cache.state().users.values().filter(|user| !user.leaving).cloned().collect()
    }

    /// Returns true if `user` may connect to `tenant`: as owner, as superuser, or by a grant.
    pub fn may_connect(&self, user: &User, tenant: &Tenant) -> bool {
        self.access(user, tenant).is_some()
    }

    /// The privileges of `user` in `tenant`. `None` if it may not connect.
    pub fn access(&self, user: &User, tenant: &Tenant) -> Option<Access> {
        if user.superuser || tenant.owner == user.name {
            return Some(Access::ReadWrite);
        }
        self.cache.state().granted(tenant, user).map(|grant| grant.access)
    }

    /// Changes with each change of users and privileges. A session that caches its privileges
    /// compares this number first, which takes no lock.
    pub fn privileges_generation(&self) -> u64 {
        self.cache.privileges_generation()
    }

    /// Creates a user. Without a verifier it cannot log in by password.
    ///
    /// Errors: `InvalidName`, `Exists`, `InUse` (it is being dropped), and those of the store.
    pub async fn create_user(
        &self,
        name: &str,
        superuser: bool,
        verifier: Option<ScramVerifier>,
    ) -> Result<Arc<User>, MetaError> {
        names::check(ObjectKind::User, name)?;
        let (user, revision) = self
            .change(|state| {
                match state.users.get(name) {
                    Some(user) if user.leaving => return Err(leaving(name)),
                    Some(_) => return Err(MetaError::exists(ObjectKind::User, name)),
                    None => {}
                }
                let verifier = verifier.clone();
                let revision = Revision::default();
                let user = User { name: name.to_owned(), superuser, verifier, leaving: false, revision };
                let key = Key::User(name).to_string();
                Ok((Transaction::new().absent(key.as_str()).put(key, records::user_value(&user)), user))
            })
            .await?;
        Ok(Arc::new(User { revision, ..user }))
    }

    /// Changes or removes a user's password.
    ///
    /// Errors: `Missing`, and those of the store.
    pub async fn alter_user_password(
        &self,
        name: &str,
        verifier: Option<ScramVerifier>,
    ) -> Result<Arc<User>, MetaError> {
        let (user, revision) = self
            .change(|state| {
                let current = state.user(name)?;
                Ok(replaced(current, User { verifier: verifier.clone(), ..User::clone(current) }))
            })
            .await?;
        Ok(Arc::new(User { revision, ..user }))
    }

    /// Sets a user's password if it has none. Returns false if it has one.
    ///
    /// Errors: `Missing`, and those of the store.
    pub async fn set_first_password(&self, name: &str, verifier: ScramVerifier) -> Result<bool, MetaError> {
        let (is_set, _) = self
            .change(|state| {
                let current = state.user(name)?;
                if current.verifier.is_some() {
                    return Ok((Transaction::new(), false));
                }
                let user = User { verifier: Some(verifier.clone()), ..User::clone(current) };
                Ok((replaced(current, user).0, true))
            })
            .await?;
        Ok(is_set)
    }

    /// Drops a user and its privileges.
    ///
    /// Errors: `Missing`, `InUse` (it owns tenants, or is the system user), and those of the store.
    pub async fn drop_user(&self, name: &str) -> Result<(), MetaError> {
        if name == SYSTEM_USER {
            return Err(MetaError::InUse {
                what: ObjectKind::User,
                name: name.to_owned(),
                reason: "is the system user and cannot be dropped".to_owned(),
                remedy: "Remove its password to prevent logins.",
            });
        }
        self.change(|state| {
            let current = state.users.get(name).ok_or_else(|| MetaError::missing(ObjectKind::User, name))?;
            state.owns_nothing(name)?;
            Ok((mark_leaving(current, true), ()))
        })
        .await?;
        let owns_nothing = self.cache.state().owns_nothing(name);
        if let Err(owns) = owns_nothing {
            self.unmark_leaving(name).await?;
            return Err(owns);
        }
        self.delete_records(|state| {
            let granted = state.grants.iter().filter(|(_, users)| users.contains_key(name));
            granted.map(|(partition, _)| Key::Grant(*partition, name).to_string()).collect()
        })
        .await?;
        self.change(|state| {
            let current = state
                .users
                .get(name)
                .filter(|user| user.leaving)
                .ok_or_else(|| MetaError::missing(ObjectKind::User, name))?;
            let key = Key::User(name).to_string();
            Ok((Transaction::new().unchanged(key.as_str(), current.revision).delete(key), ()))
        })
        .await?;
        Ok(())
    }

    /// Grants a user access to a tenant. Replaces an earlier grant.
    ///
    /// Errors: `Missing` (tenant or user), and those of the store.
    pub async fn grant(&self, tenant: &str, user: &str, access: Access) -> Result<(), MetaError> {
        self.change(|state| {
            let (tenant, user) = (state.ready_tenant(tenant)?, state.user(user)?);
            let key = Key::Grant(tenant.partition, &user.name).to_string();
            let transaction = match state.granted(tenant, user) {
                Some(grant) if grant.access == access => return Ok((Transaction::new(), ())),
                Some(grant) => Transaction::new().unchanged(key.as_str(), grant.revision),
                None => Transaction::new().absent(key.as_str()),
            };
            let transaction = transaction
                .unchanged(Key::Tenant(&tenant.name).to_string(), tenant.revision)
                .unchanged(Key::User(&user.name).to_string(), user.revision)
                .put(key, records::grant_value(access));
            Ok((transaction, ()))
        })
        .await?;
        Ok(())
    }

    /// Revokes a grant. Revoking `ReadWrite` removes any grant; revoking `ReadOnly` removes only a
    /// read-only grant. Does nothing if there is no such grant. The owner keeps its privileges.
    ///
    /// Errors: `Missing` (tenant or user), and those of the store.
    pub async fn revoke(&self, tenant: &str, user: &str, access: Access) -> Result<(), MetaError> {
        self.change(|state| {
            let (tenant, user) = (state.ready_tenant(tenant)?, state.user(user)?);
            let granted = state.granted(tenant, user);
            let Some(grant) = granted.filter(|grant| access == Access::ReadWrite || grant.access == access)
            else {
                return Ok((Transaction::new(), ()));
            };
            let key = Key::Grant(tenant.partition, &user.name).to_string();
            Ok((Transaction::new().unchanged(key.as_str(), grant.revision).delete(key), ()))
        })
        .await?;
        Ok(())
    }

    async fn unmark_leaving(&self, name: &str) -> Result<(), MetaError> {
        self.change(|state| {
            let unmark = state.users.get(name).map(|user| mark_leaving(user, false));
            Ok((unmark.unwrap_or_default(), ()))
        })
        .await?;
        Ok(())
    }

    /// Undoes drops that were interrupted by a crash: they were not acknowledged.
    pub(super) async fn undo_interrupted_drops(&self) -> Result<(), MetaError> {
        let names: Vec<String> = {
            let state = self.cache.state();
            state.users.values().filter(|user| user.leaving).map(|user| user.name.clone()).collect()
        };
        for name in names {
            self.unmark_leaving(&name).await?;
        }
        Ok(())
    }
}

impl State {
    /// The user of that name, unless it is being dropped.
    pub(super) fn user(&self, name: &str) -> Result<&Arc<User>, MetaError> {
        let user = self.users.get(name).filter(|user| !user.leaving);
        user.ok_or_else(|| MetaError::missing(ObjectKind::User, name))
    }

    fn granted(&self, tenant: &Tenant, user: &User) -> Option<Grant> {
        self.grants.get(&tenant.partition)?.get(&user.name).copied()
    }

    fn owns_nothing(&self, name: &str) -> Result<(), MetaError> {
        let mut owned = self.tenants.values().filter(|tenant| tenant.owner == name);
        let Some(first) = owned.next() else { return Ok(()) };
        let others = owned.count();
        let more = if others == 0 { String::new() } else { format!(" and {others} more") };
        Err(MetaError::InUse {
            what: ObjectKind::User,
            name: name.to_owned(),
            reason: format!("owns tenant \"{}\"{more}", first.name),
            remedy: "Drop its tenants first.",
        })
    }
}

/// The transaction that replaces `current` by `user`, and the user.
fn replaced(current: &User, user: User) -> (Transaction, User) {
    let key = Key::User(&current.name).to_string();
    let transaction =
        Transaction::new().unchanged(key.as_str(), current.revision).put(key, records::user_value(&user));
    (transaction, user)
}

/// The transaction that sets or removes the mark. Empty if nothing changes.
fn mark_leaving(current: &User, leaving: bool) -> Transaction {
    if current.leaving == leaving {
        return Transaction::new();
    }
    replaced(current, User { leaving, ..current.clone() }).0
}

fn leaving(name: &str) -> MetaError {
    MetaError::InUse {
        what: ObjectKind::User,
        name: name.to_owned(),
        reason: "is being dropped".to_owned(),
        remedy: "Wait until the drop completes, or drop it again.",
    }
}
