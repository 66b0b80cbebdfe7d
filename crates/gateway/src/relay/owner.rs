//! The side of a relay that runs the session.

use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, Tenant, User};
use fulmar_pages::PartitionId;
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::{Stream, Wire};
use fulmar_service::{LocalPartition, PartitionService};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::timeout;

use super::message::{self, Hello, SessionHello};
use crate::Result;
use crate::activity;
use crate::admission::{limit_error, partition_session_limit, reserved_slots};
use crate::identity::Identity;
use crate::metrics::WorkerMetrics;
use crate::registry::RegistryEntry;
use crate::session::{Link, Session};
use crate::settings::{OWNER, Settings};
use crate::startup::{self, fixed_settings};

/// Maximum time until the first message of a stream has arrived.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the catalog's cache to contain what the front's node knows.
const CATALOG_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the first message of a stream. `None` if the stream ends or is malformed.
pub(crate) async fn hello(pipe: &mut DuplexStream) -> Option<Hello> {
    let read = async {
        let mut header = [0; 5];
        pipe.read_exact(&mut header).await.ok()?;
        let length = (&header[1..]).get_u32() as usize;
        if header[0] != message::HELLO || !(4..=message::MAX_HELLO_BYTES).contains(&length) {
            return None;
        }
        let mut body = vec![0; length - 4];
        pipe.read_exact(&mut body).await.ok()?;
        serde_json::from_slice(&body).ok()
    };
    timeout(HELLO_TIMEOUT, read).await.ok()?
}

/// Starts the session of a front. `None` if it is refused: the front gets the error.
pub(crate) async fn start(
    hello: SessionHello,
    mut pipe: DuplexStream,
    context: Arc<startup::Context>,
    metrics: Arc<WorkerMetrics>,
) -> Option<(Box<Session>, RegistryEntry)> {
    let mut output = Vec::new();
    match admit(&hello, &context).await {
        Ok((partition, identity, settings, entry)) => {
            message::put(&mut output, message::ACCEPTED, &[]);
            if pipe.write_all(&output).await.is_err() {
                return None;
            }
            let link = Link::new(
                partition,
                Wire::new(Stream::Pipe(pipe), Vec::new()),
                entry.handle.clone(),
                context.cluster.clone(),
            );
            let session = Session::new(link, context.sessions.clone(), metrics, identity, settings);
            let mut session = Box::new(session);
            session.begin_relayed();
            Some((session, entry))
        }
        Err(error) => {
            backend::error(&mut output, &error, Severity::Fatal);
            message::put(&mut output, message::END, &[]);
            let _ = pipe.write_all(&output).await; // the front may be gone
            let _ = pipe.shutdown().await;
            None
        }
    }
}

type Admitted = (LocalPartition, Identity, Settings, RegistryEntry);

/// Checks the user and its rights in this node's catalog, and registers the session.
async fn admit(hello: &SessionHello, context: &startup::Context) -> Result<Admitted> {
    let identity = identity(hello, context).await?;
    let mut settings = fixed_settings(&identity, context.engine.is_replica());
    settings.set_fixed(OWNER, &hello.owner);
    settings.restore(&hello.defaults, &hello.values);
    let id = PartitionId(hello.partition);
    let mut partition = LocalPartition::new(context.engine.clone(), id);
    partition.session_mut().set_tenant(&identity.tenant.name);
    let partition_limit = partition_session_limit(&identity);
    let who = activity::SessionIdentity {
        user: identity.user.clone(),
        address: hello.address,
        since_ms: activity::now_ms(),
    };
    let key = (hello.pid, hello.secret);
    let canceller = partition.canceller();
    let reserved = reserved_slots(&identity);
    let admitted = context.registry.admit_relayed(key, id, partition_limit, reserved, canceller, who);
    let entry = match admitted {
        Ok(entry) => entry,
        Err(full) => {
            partition.close().await;
            return Err(limit_error(full, &identity, partition_limit));
        }
    };
    partition.session_mut().set_writes(identity.writes(context.cluster.as_deref()));
    entry.handle.activity.set_application(settings.get("application_name").unwrap_or_default());
    settings.take_reports();
    Ok((partition, identity, settings, entry))
}

/// The identity of the session, from this node's catalog.
async fn identity(hello: &SessionHello, context: &startup::Context) -> Result<Identity> {
    if !hello.authenticated && !context.insecure {
        let message = "a session without authentication cannot run on a node with authentication";
        return Err(Error::new(sqlstate::INVALID_AUTHORIZATION, message)
            .hint("Start all nodes of the cluster with --insecure, or none."));
    }
    let partition = PartitionId(hello.partition);
    let known = || {
        let tenant = context.catalog.tenant_of(partition)?;
        match hello.authenticated {
            true => Some((tenant, Some(context.catalog.user(&hello.user)?))),
            false => Some((tenant, None)),
        }
    };
    let has_password = |account: &User| message::fingerprint(account) == hello.password;
    let is_current = |(_, account): &(_, Option<Arc<User>>)| account.as_deref().is_none_or(has_password);
    let found = match known().filter(is_current) {
        Some(found) => Some(found),
        // The cache may be behind that of the front's node.
        None => {
            timeout(CATALOG_TIMEOUT, context.catalog.catch_up())
                .await
                .ok()
                .and_then(Result::ok)
                .ok_or_else(outdated)?;
            known()
        }
    };
    let (tenant, account) = found.ok_or_else(|| {
        Error::new(sqlstate::INVALID_AUTHORIZATION, "the database or the user of the session was dropped")
    })?;
    if account.as_deref().is_some_and(|account| !has_password(account)) {
        return Err(password_changed(&hello.user));
    }
    let access = match &account {
        None => Access::ReadWrite,
        Some(account) => {
            context.catalog.access(account, &tenant).ok_or_else(|| no_access(&tenant, &hello.user))?
        }
    };
    let superuser = account.as_ref().is_none_or(|account| account.superuser);
    let limits = context.catalog.live_limits(&tenant);
    let (user, address) = (hello.user.clone(), hello.address);
    Ok(Identity { user, address, account, superuser, access, tenant, limits })
}

pub(super) fn password_changed(user: &str) -> Error {
    let message = format!("terminating connection because the password of user \"{user}\" was changed");
    Error::new(sqlstate::INVALID_AUTHORIZATION, message).hint("Connect with the new password.")
}

fn outdated() -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, "the node cannot read the metadata store")
        .hint("Check the metadata store, and connect again.")
}

fn no_access(tenant: &Tenant, user: &str) -> Error {
    let message = format!("permission denied for database \"{}\"", tenant.name);
    Error::new(sqlstate::INSUFFICIENT_PRIVILEGE, message)
        .detail("The user does not have the CONNECT privilege.")
        .hint(format!("A superuser can run GRANT CONNECT ON DATABASE \"{}\" TO \"{user}\".", tenant.name))
}
