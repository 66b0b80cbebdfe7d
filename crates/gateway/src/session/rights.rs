//! What happens to a session whose user's rights change while it lasts.
//!
//! A right counts from the next statement on, whether it was granted or taken away. To know that any right of anybody has
//! changed costs a look at a number; only then the session looks for its own.
//!
//! | what has changed | the session |
//! | --- | --- |
//! | the user may only read now | goes on; what is open can be committed, and takes no more writes (25006) |
//! | the user may write now | goes on; its next transaction can write |
//! | the user may not connect any more | ends (57P01), as if it had been ended by hand |
//! | the user was dropped, or has another password | ends (28000): nobody knows who is at its other end |
//!
//! What a session runs comes to its end before. Where nobody needs a password nobody has rights, and nothing happens.

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::Access;

use super::{End, Session};
use crate::Result;

impl Session {
    /// Does what a change of rights asks for, if there was one.
    pub(super) fn follow_rights(&mut self) -> Result<(), End> {
        let generation = self.shared.catalog.rights_generation();
        if generation == self.rights_seen {
            return Ok(());
        }
        self.rights_seen = generation;
        if let Some(access) = self.access_now().map_err(End::Fatal)?
            && access != self.identity.access
        {
            self.identity.access = access;
            self.link.engine.set_may_write(access == Access::ReadWrite);
            self.settings.set_bounds(&self.identity.limits, access);
            self.apply_settings();
        }
        Ok(())
    }

    /// What its user may do now; an error if that is nothing, and nothing if nobody asks.
    fn access_now(&self) -> Result<Option<Access>> {
        let Some(account) = &self.identity.account else { return Ok(None) };
        let (name, catalog) = (&account.name, &self.shared.catalog);
        let Some(user) = catalog.user(name) else {
            let message = format!("terminating connection: user \"{name}\" was dropped");
            return Err(Error::new(sqlstate::INVALID_AUTHORIZATION, message));
        };
        if user.verifier != account.verifier {
            let message = format!("terminating connection: the password of user \"{name}\" was changed");
            return Err(
                Error::new(sqlstate::INVALID_AUTHORIZATION, message).hint("Connect with the new password.")
            );
        }
        let access = catalog.access(&user, &self.identity.tenant).ok_or_else(|| {
            let database = &self.identity.tenant.name;
            let message = format!(
                "terminating connection: the right to connect to database \"{database}\" was revoked"
            );
            Error::new(sqlstate::ADMIN_SHUTDOWN, message).hint(format!(
                "A superuser can GRANT CONNECT ON DATABASE \"{database}\", or GRANT SELECT, TO the user."
            ))
        })?;
        Ok(Some(access))
    }

    /// Its user's password was changed by itself: it goes on.
    pub(super) fn renew_account(&mut self) {
        if let Some(account) = &mut self.identity.account
            && let Some(user) = self.shared.catalog.user(&account.name)
        {
            *account = user;
        }
    }
}
