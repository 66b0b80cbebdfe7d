//! Applies changes of the user's access rights to open sessions.
//!
//! A grant or revoke takes effect with the next statement; a running statement completes first. A
//! session checks its rights only if the catalog's rights generation has changed, so the usual cost
//! is one comparison per message.
//!
//! | change | effect on the session |
//! | --- | --- |
//! | access reduced to read-only | continues; the open transaction can commit, not write (25006) |
//! | write access granted | continues; its next transaction can write |
//! | CONNECT revoked | is terminated (57P01), as by `pg_terminate_backend` |
//! | user dropped, or password changed | is terminated (28000): authentication is outdated |
//!
//! Without authentication (`--insecure`) there are no access rights, and nothing is checked.

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::Access;

use super::outcome::End;
use super::state::Session;
use crate::Result;

impl Session {
    /// Applies changed access rights. Fails if the session must end.
    pub(super) fn apply_privileges(&mut self) -> Result<(), End> {
        let generation = self.context.catalog.privileges_generation();
        if generation == self.privileges_seen {
            return Ok(());
        }
        self.privileges_seen = generation;
        if let Some(access) = self.current_access().map_err(End::Fatal)?
            && access != self.identity.access
        {
            self.identity.access = access;
            let writes = self.identity.writes(self.context.sources.cluster.as_deref());
            self.link.partition.session_mut().set_writes(writes);
            self.settings.set_bounds(&self.identity.limits, access);
            self.apply_settings();
        }
        Ok(())
    }

    /// The user's current access. `None` if the session is not authenticated, an error if the
    /// session must end.
    fn current_access(&self) -> Result<Option<Access>> {
        let Some(account) = &self.identity.account else { return Ok(None) };
        let (name, catalog) = (&account.name, &self.context.catalog);
        let Some(user) = catalog.user(name) else {
            let message = format!("terminating connection because user \"{name}\" was dropped");
            return Err(Error::new(sqlstate::INVALID_AUTHORIZATION, message));
        };
        if user.verifier != account.verifier {
            let message =
                format!("terminating connection because the password of user \"{name}\" was changed");
            return Err(
                Error::new(sqlstate::INVALID_AUTHORIZATION, message).hint("Connect with the new password.")
            );
        }
        let access = catalog.access(&user, &self.identity.tenant).ok_or_else(|| {
            let database = &self.identity.tenant.name;
            let message =
                format!("terminating connection because access to database \"{database}\" was revoked");
            Error::new(sqlstate::ADMIN_SHUTDOWN, message).hint(format!(
                "A superuser can grant access with GRANT CONNECT ON DATABASE \"{database}\" \
                 or GRANT SELECT ON DATABASE \"{database}\"."
            ))
        })?;
        Ok(Some(access))
    }

    /// Keeps the session authenticated after it has changed its own user's password.
    pub(super) fn renew_account(&mut self) {
        if let Some(account) = &mut self.identity.account
            && let Some(user) = self.context.catalog.user(&account.name)
        {
            *account = user;
        }
    }
}
